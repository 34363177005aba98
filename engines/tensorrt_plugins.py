"""The attention plugins in full TensorRT's builds: their attributes, and a check that engines do not copy KV pools.

The plugins write pools in place, which TensorRT may not support. An engine's layer information lists its layers, and
the tensors that they read and write. Any other layer than a plugin's that touches a pool copies it in every call.
"""

from __future__ import annotations

import json
import re
from typing import Any

from faser_backend.core.model import ModelSpec
from faser_backend.plugins.tensorrt_contract import ATTEND_OP, NAMESPACE, Geometry
from faser_backend.plugins.tensorrt_import import TensorRtError

POOL = re.compile(r"\b[kv]_pool(?:_out)?\.\d+\b")
REFORMAT = re.compile(r"reformat", re.IGNORECASE)
# In a layer's type, name, tactic, origin or metadata: which of them a version fills is not documented.
PLUGIN = re.compile(rf"plugin|{NAMESPACE}\b|{ATTEND_OP}|attend_splits", re.IGNORECASE)
MOST_NAMED = 3
# Rows of a sequence per program of a plugin: a verification of some draft tokens. Prompts' chunks use the same.
TILE_ROWS = 8


def plugin_geometry(spec: ModelSpec, kv_block_size: int) -> Geometry:
    """Returns the plugins' attributes for this machine's GPU."""
    num_sms, capability = _device()
    return Geometry(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        kv_block_size=kv_block_size,
        tile_rows=TILE_ROWS,
        num_sms=num_sms,
        capability=capability,
    )


def _device() -> tuple[int, int]:
    """Returns SMs and compute capability of the GPU, the only one that full TensorRT compiles for."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return properties.multi_processor_count, 10 * properties.major + properties.minor


def check_no_copies(module: Any, engine: Any, name: str) -> None:
    """Raises TensorRtError naming layers if `engine` copies pools, or may.

    module: tensorrt. engine: deserialised, with details or only names of layers.
    """
    information = engine.create_engine_inspector().get_engine_information(module.LayerInformationFormat.JSON)
    try:
        layers: Any = json.loads(information)["Layers"]
    except (ValueError, KeyError, TypeError):
        layers = None
    advice = "use runtime torch, or --pool-copies allow, if the copies are none or bearable"
    if not isinstance(layers, list) or not layers:
        raise TensorRtError(
            f"{name}: inspect: the layer information names no layer; whether it copies KV pools is unknown; {advice}"
        )
    copies = [(layer, pools) for layer, pools in map(_moved_pools, layers) if pools]
    if copies:
        named = "; ".join(f"{layer} of {', '.join(pools)}" for layer, pools in copies[:MOST_NAMED])
        raise TensorRtError(
            f"{name}: {len(copies)} layers copy {len({pool for _, pools in copies for pool in pools})} KV pools in "
            f"every call, as {named}{'; ...' * (len(copies) > MOST_NAMED)}; {advice}"
        )


def _moved_pools(layer: Any) -> tuple[str, list[str]]:
    """Returns a layer's name and the pools that it copies. In a build without details, a layer is a name."""
    name, kind, tensors, texts = layer, "", [layer], [layer]
    if isinstance(layer, dict):
        name, kind = str(layer.get("Name", "")), str(layer.get("LayerType", ""))
        tensors = [str(tensor.get("Name", "")) for side in ("Inputs", "Outputs") for tensor in layer.get(side) or ()]
        texts = [value for value in layer.values() if isinstance(value, str)]
    is_reformat = REFORMAT.match(name) or REFORMAT.match(kind)  # a reformat around a plugin has its name
    if not is_reformat and any(map(PLUGIN.search, texts)):
        return name, []
    return f"{name} ({kind})" if kind else name, list(
        dict.fromkeys(pool for tensor in tensors for pool in POOL.findall(tensor))
    )
