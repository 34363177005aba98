"""Every tensor of a segment's call by its name in the manifest: inputs, pools, hidden states, results.

Knows names and shapes; nothing of what programs do with them.
"""

from __future__ import annotations

import torch

from faser_backend.core.errors import ConfigError
from faser_backend.device.cuda.buffers import TENSOR_DTYPES, WIDTH, InputBlock, TensorStore
from faser_backend.device.cuda.pool import CudaKvPool
from faser_backend.device.cuda.segment import CallBounds
from faser_backend.manifest import ModelSpec, SegmentSpec, TensorSpec

SLOT_MAPPING = TensorSpec("slot_mapping", "int32", ("T",))
TABLE_WIDTH = TensorSpec(WIDTH, "int32", (1,))
FEATURES = "features"  # what a draft head reads, in the target's pool
FEATURE_ROWS = "aux_hidden"  # of one layer of these: what enters or leaves a compiled engine
COLUMNS = "columns"  # an integer input that is the same in every call


def filled_inputs(segment: SegmentSpec, *, packs_tables: bool) -> list[TensorSpec]:
    """The integer inputs that a batch is written into; slot_mapping is among them in any case. packs_tables: of the
    segment's program."""
    filled = [tensor for tensor in segment.inputs if tensor.dtype.startswith("int") and tensor.name != COLUMNS]
    if SLOT_MAPPING.name not in {tensor.name for tensor in filled}:
        filled.append(SLOT_MAPPING)
    return [*filled, TABLE_WIDTH] if packs_tables else filled


def call_tensors(
    spec: ModelSpec,
    segment: SegmentSpec,
    bounds: CallBounds,
    *,
    inputs: InputBlock,
    store: TensorStore,
    pool: CudaKvPool,
) -> dict[str, torch.Tensor]:
    """What a program of the segment is prepared with. Everything in `store` is shared by calls of the same shape.

    A pool that is an output too is the input's own memory, and what a segment passes on the next one finds where
    it is.
    """
    tensors = dict(inputs.tensors)
    for tensor in (*segment.inputs, *segment.outputs):
        name, _, layer = tensor.name.partition(".")
        dtype = TENSOR_DTYPES[tensor.dtype]
        if name in {"k_pool", "k_pool_out"}:
            tensors[tensor.name] = pool.keys(int(layer))
        elif name in {"v_pool", "v_pool_out"}:
            tensors[tensor.name] = pool.values(int(layer))
        elif name == FEATURES:
            tensors[name] = pool.features
        elif name == FEATURE_ROWS:
            tensors[FEATURES] = pool.features
            tensors[tensor.name] = store.get(tensor.name, (bounds.num_rows, int(tensor.shape[1])), dtype)
        elif name == COLUMNS:
            tensors[name] = store.arange(bounds.num_blocks * pool.kv_block_size, dtype)
        elif name == "logits":
            tensors[name] = pool.logits.rows(bounds.num_logit_rows, spec.vocab_size)
        elif name not in inputs.tensors:
            shape = _result_shape(tensor, spec, bounds)
            tensors[tensor.name] = store.get(_shared_name(tensor.name, segment), shape, dtype)
    return tensors


def _shared_name(name: str, segment: SegmentSpec) -> str:
    """hidden_out of a segment and hidden of the next one are the same, named for the layer between them."""
    if name == "hidden":
        return f"hidden {segment.first_layer}"
    return f"hidden {segment.last_layer}" if name == "hidden_out" else name


def _result_shape(tensor: TensorSpec, spec: ModelSpec, bounds: CallBounds) -> tuple[int, ...]:
    kind = tensor.name.partition(".")[0]
    num_made = bounds.num_logit_rows if tensor.shape[0] == "R" else bounds.num_rows  # a draft head goes on from few
    shapes = {
        "hidden": (bounds.num_rows, spec.hidden_size),
        "hidden_out": (num_made, spec.hidden_size),
        "exit_scores": (bounds.num_rows, bounds.num_candidates),
        "k_new": (bounds.num_rows, spec.num_kv_heads, spec.head_dim),
        "v_new": (bounds.num_rows, spec.num_kv_heads, spec.head_dim),
    }
    if kind not in shapes:
        raise ConfigError(
            f"segment tensor {tensor.name}: not one that a GPU runner holds; must be one of {', '.join(shapes)}"
        )
    return shapes[kind]
