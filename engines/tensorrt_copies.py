"""Checks that a built engine does not copy KV pools. The plugin writes them in place, which TensorRT may not support.

An engine's layer information lists its layers, and the tensors that they read and write. Any other layer than the
plugin's that touches a pool copies the whole pool in every call.
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
    """Raises TensorRtError naming layers if the engine `engine` copies pools, or if it cannot be known.

    information: JSON of an engine inspector, with details or only layer names.
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
            f"every call, as {named}{'; ...' * (len(copies) > MOST_NAMED)}; this TensorRT "
            "does not support a plugin that writes them in place: use runtime torch"
        )


def _moved_pools(layer: Any) -> tuple[str, list[str]]:
    """Returns a layer's name and the pools that it copies. In a build without details, a layer is a name."""
    name, kind, tensors = layer, "", [layer]
    if isinstance(layer, dict):
        name, kind = str(layer.get("Name", "")), str(layer.get("LayerType", ""))
        tensors = [str(tensor.get("Name", "")) for side in ("Inputs", "Outputs") for tensor in layer.get(side) or ()]
    is_reformat = REFORMAT.match(name) or REFORMAT.match(kind)  # a reformat around a plugin has its name
    if not is_reformat and (PLUGIN.search(kind) or PLUGIN.search(name)):
        return name, []
    return f"{name} ({kind})" if kind else name, list(
        dict.fromkeys(pool for tensor in tensors for pool in POOL.findall(tensor))
    )


def layer_information(module: Any, logger: Any, engine: Any) -> str:
    """Returns the inspector's information on a serialised engine. module: tensorrt."""
    opened = module.Runtime(logger).deserialize_cuda_engine(engine)
    return opened.create_engine_inspector().get_engine_information(module.LayerInformationFormat.JSON)
