"""Does a built engine copy KV pools? The plugin writes them in place, which TensorRT may or may not take as meant.

An engine's layer information says which layers it has and which tensors they read and write. A layer that is not the
plugin's and touches a pool moves it as a whole, in every call. Knows nothing of how engines are built.
"""

from __future__ import annotations

import json
import re
from typing import Any

from faser_backend.plugins.tensorrt_import import TensorRtError

POOL = re.compile(r"\b[kv]_pool(?:_out)?\.\d+\b")
REFORMAT = re.compile(r"reformat", re.IGNORECASE)
PLUGIN = re.compile(r"plugin", re.IGNORECASE)
MOST_NAMED = 3


def check_no_copies(information: str, engine: str) -> None:
    """Raises TensorRtError where the engine `engine` copies pools, naming layers, or where nothing is known of it.

    information: what an engine inspector tells in JSON, in detail or layer names alone.
    """
    try:
        layers: Any = json.loads(information)["Layers"]
    except (ValueError, KeyError, TypeError):
        layers = None
    if not isinstance(layers, list) or not layers:
        raise TensorRtError(
            f"{engine}: inspect: the layer information names no layer; whether it copies KV pools is unknown"
        )
    copies = [(name, pools) for name, pools in map(_moved_pools, layers) if pools]
    if copies:
        named = "; ".join(f"{name} of {', '.join(pools)}" for name, pools in copies[:MOST_NAMED])
        raise TensorRtError(
            f"{engine}: {len(copies)} layers copy {len({pool for _, pools in copies for pool in pools})} KV pools in "
            f"every call, as {named}{'; ...' * (len(copies) > MOST_NAMED)}; the plugin writes pools in place, and this "
            "TensorRT does not take it so: use runtime torch"
        )


def _moved_pools(layer: Any) -> tuple[str, list[str]]:
    """A layer and the pools that it moves, none of the plugin's; layers of a build without details are names alone."""
    name, kind, tensors = layer, "", [layer]
    if isinstance(layer, dict):
        name, kind = str(layer.get("Name", "")), str(layer.get("LayerType", ""))
        tensors = [str(tensor.get("Name", "")) for side in ("Inputs", "Outputs") for tensor in layer.get(side) or ()]
    is_reformat = REFORMAT.match(name) or REFORMAT.match(kind)  # around a plugin, for which it is named
    if not is_reformat and (PLUGIN.search(kind) or PLUGIN.search(name)):
        return name, []
    return f"{name} ({kind})" if kind else name, list(
        dict.fromkeys(pool for tensor in tensors for pool in POOL.findall(tensor))
    )


def layer_information(module: Any, logger: Any, engine: Any) -> str:
    """An inspector's words on the serialised engine. module: tensorrt."""
    opened = module.Runtime(logger).deserialize_cuda_engine(engine)
    return opened.create_engine_inspector().get_engine_information(module.LayerInformationFormat.JSON)
