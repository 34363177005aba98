"""Rewrites graphs so that the ONNX parser of full TensorRT finds the attention plugin, with attributes.

A segment's graph has `faser::PrunedChunkAttention` nodes without attributes. Each becomes two nodes, because TensorRT
launches one kernel per plugin. The rewritten graph is written beside the first one and refers to the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx
from onnx import helper

from faser_backend.core.model import ModelSpec
from faser_backend.manifest import BucketSpec
from faser_backend.plugins.tensorrt_contract import (
    ATTEND_OP,
    ATTEND_OUTPUTS,
    ATTENTION_INPUTS,
    ATTENTION_OP,
    ATTENTION_OUTPUTS,
    COMBINE_INPUTS,
    COMBINE_OP,
    NAMESPACE,
    VERSION,
    Geometry,
)
from faser_backend.plugins.tensorrt_import import TensorRt, TensorRtError

# Rows of a sequence per program: a verification of some draft tokens. Prompts' chunks use the same.
TILE_ROWS = 8
SUFFIX = ".plugins.onnx"


def write_plugin_network(tensorrt: TensorRt, onnx_path: Path, geometry: Geometry) -> Path:
    """Registers the plugin with a TensorRT that has_plugins; returns the path of the rewritten graph."""
    from faser_backend.plugins.tensorrt_aot import register_aot_plugins

    register_aot_plugins(tensorrt.module.__name__)
    model = onnx.load(onnx_path, load_external_data=False)
    path = onnx_path.with_suffix(SUFFIX)
    path.write_bytes(plugin_network(model, geometry).SerializeToString())
    return path


def plugin_network(model: onnx.ModelProto, geometry: Geometry) -> onnx.ModelProto:
    """Returns the model with two nodes of the plugin, with attributes, in place of every attention node."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    del changed.graph.node[:]
    for node in model.graph.node:
        is_attention = node.domain == NAMESPACE and node.op_type == ATTENTION_OP
        changed.graph.node.extend(_plugin_nodes(node, geometry) if is_attention else [node])
    return changed


def _plugin_nodes(node: onnx.NodeProto, geometry: Geometry) -> Iterator[onnx.NodeProto]:
    attributes = {**geometry.as_fields(), "plugin_namespace": NAMESPACE, "plugin_version": VERSION}
    values = {**dict(zip(ATTENTION_INPUTS, node.input, strict=True)), **_parts(node)}
    values |= dict(zip(ATTENTION_OUTPUTS, node.output, strict=True))
    outputs = [values[name] for name in ATTEND_OUTPUTS]
    yield helper.make_node(ATTEND_OP, node.input, outputs, name=f"{node.name}.attend", domain=NAMESPACE, **attributes)
    inputs = [values[name] for name in COMBINE_INPUTS]
    yield helper.make_node(
        COMBINE_OP, inputs, [values["attended"]], name=f"{node.name}.combine", domain=NAMESPACE, **attributes
    )


def _parts(node: onnx.NodeProto) -> dict[str, str]:
    return {name: f"{name}.{node.output[0]}" for name in ("mixed_parts", "stat_parts")}


def plugin_geometry(spec: ModelSpec, kv_block_size: int, buckets: Sequence[BucketSpec]) -> Geometry:
    """Returns the plugin's attributes for this machine's GPU. buckets: the engine's, with "Q", rows per sequence.

    Raises TensorRtError if there is no GPU.
    """
    num_sms, capability = _device()
    return Geometry(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        kv_block_size=kv_block_size,
        max_rows=max(bucket.ranges["Q"][2] for bucket in buckets),
        tile_rows=TILE_ROWS,
        num_sms=num_sms,
        capability=capability,
    )


def _device() -> tuple[int, int]:
    """Returns SMs and compute capability of the GPU, the only one that full TensorRT compiles for."""
    import torch

    if not torch.cuda.is_available():
        raise TensorRtError(f"TensorRT compiles for this machine's GPU, but torch {torch.__version__} finds none")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return properties.multi_processor_count, 10 * properties.major + properties.minor
