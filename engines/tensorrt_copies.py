"""Does a built engine copy KV pools? The plugin writes them in place, which TensorRT may or may not take as meant.

An engine's layer information tells which layers it has and which tensors they read and write. A layer that is not the
plugin's and touches a pool moves it as a whole, in every call. Knows nothing of how engines are built.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from plugins.tensorrt_import import TensorRtError

POOL = re.compile(r"\b[kv]_pool(_out)?\.\d+\b")
REFORMAT = re.compile(r"reformat", re.IGNORECASE)
PLUGIN = re.compile(r"plugin", re.IGNORECASE)
MOST_NAMED = 3


class PoolCopy(NamedTuple):
    """A layer that moves a pool."""

    layer: str
    pools: tuple[str, ...]
    shape: tuple[int, ...]  # of the largest, -1 where the engine leaves it open; () where it is not told


def pool_copies(information: str) -> list[PoolCopy]:
    """The layers of an engine that are none of the plugin's and read or write a pool, in order.

    information: what an engine inspector tells in JSON, in detail or layer names alone. Raises ValueError where it is
    neither: silence would be taken for an engine without copies.
    """
    try:
        layers: Any = json.loads(information)["Layers"]
    except (ValueError, KeyError, TypeError):
        raise ValueError("the layer information is no JSON object with Layers") from None
    if not isinstance(layers, list) or not layers:
        raise ValueError("the layer information names no layer")
    return [copy for copy in map(_copy_of, layers) if copy is not None]


def _copy_of(layer: Any) -> PoolCopy | None:
    if isinstance(layer, str):  # a build without details: names say what a layer copies
        pools = _pools_in(layer)
        return PoolCopy(layer, pools, ()) if pools and not _is_plugin(layer, "") else None
    name, kind = str(layer.get("Name", "")), str(layer.get("LayerType", ""))
    if _is_plugin(name, kind):
        return None
    tensors = [tensor for side in ("Inputs", "Outputs") for tensor in layer.get(side) or ()]
    touched = [tensor for tensor in tensors if _pools_in(str(tensor.get("Name", "")))]
    if not touched:
        return None
    pools = tuple(dict.fromkeys(pool for tensor in touched for pool in _pools_in(str(tensor["Name"]))))
    shapes = [tuple(tensor.get("Dimensions") or ()) for tensor in touched]
    return PoolCopy(f"{name} ({kind})", pools, max(shapes, key=lambda shape: abs(math.prod(shape))))


def _is_plugin(name: str, kind: str) -> bool:
    """Copies around a plugin are named for it."""
    if REFORMAT.match(name) or REFORMAT.match(kind):
        return False
    return bool(PLUGIN.search(kind) or PLUGIN.search(name))


def _pools_in(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(match[0] for match in POOL.finditer(text)))


def check_no_copies(information: str, engine: str) -> None:
    """Raises TensorRtError with the numbers where the engine `engine` copies pools."""
    try:
        copies = pool_copies(information)
    except ValueError as error:
        raise TensorRtError(f"{engine}: inspect: {error}; whether it copies KV pools is unknown") from None
    if copies:
        pools = {pool for copy in copies for pool in copy.pools}
        raise TensorRtError(
            f"{engine}: {len(copies)} layers copy {len(pools)} KV pools in every call, as {_named(copies)}; "
            "the plugin writes pools in place, and this TensorRT does not take it so: use runtime torch"
        )


def _named(copies: Sequence[PoolCopy]) -> str:
    words = [f"{copy.layer} of {', '.join(copy.pools)} {list(copy.shape)}" for copy in copies[:MOST_NAMED]]
    return "; ".join(words) + ("; ..." if len(copies) > MOST_NAMED else "")


def layer_information(module: Any, logger: Any, engine: Any) -> str:
    """What an inspector of the serialised engine tells. module: tensorrt."""
    opened = module.Runtime(logger).deserialize_cuda_engine(engine)
    return opened.create_engine_inspector().get_engine_information(module.LayerInformationFormat.JSON)
