"""Engines of the runtimes whose kernels run the layers, "llvm" and "torch": one weight file per model.

Nothing is compiled here, and segments merely say which layers they are. The file is safetensors under the names of the
graphs; norms and biases are float32. Of "torch" matrices have the engine's dtype. Of "llvm" they are bytes in the
blocked layout of cpu/kernels/layouts.py, numbers that are quantised as a format has them taken over as they are, and
every tensor begins at a multiple of ALIGNMENT bytes, for the file is mapped and read in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from faser_backend.core.model import ModelSpec, WeightFormat
from faser_backend.cpu.kernels.layouts import COLUMNS_AT_ONCE, store_groups, store_matrix, stored_bytes
from faser_backend.engines.arrays import FLOAT_TYPES, converted_blocks
from faser_backend.engines.checkpoint_base import CheckpointError
from faser_backend.engines.eagle3 import Eagle3Head
from faser_backend.engines.gguf_file import groups_of
from faser_backend.engines.safetensors_file import NewTensor, write_safetensors
from faser_backend.engines.weight_formats import INT4, INT8, format_of, is_held
from faser_backend.engines.weights import ModelWeights
from faser_backend.manifest import FileSpec, ModelEngine, SegmentSpec, TensorSpec

ALIGNMENT = 64
TRANSPOSED = ("embedding", "lm_head")  # [vocab_size, hidden_size] in checkpoints
STORED_NAMES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}


class WeightsBuilder:
    """Writes models as weights. formats: of matrices by the models' names, for runtime "llvm"."""

    def __init__(
        self, runtime: str, dtype: str, formats: Mapping[str, WeightFormat], begin: Callable[[str], None]
    ) -> None:
        """dtype: of the manifest, for hidden states, keys and values. begin: called before each step of `num_steps`."""
        self._is_llvm, self._dtype, self._formats, self._begin = runtime == "llvm", dtype, formats, begin

    def num_steps(self, num_segments: int, num_models: int, *, has_head: bool) -> int:
        return num_models

    def write_model(
        self, name: str, spec: ModelSpec, weights: ModelWeights, cuts: tuple[int, ...], directory: Path
    ) -> ModelEngine:
        """Writes NAME.safetensors and describes the segments that end at layers `cuts`, the last being the model's.

        Raises CheckpointError for a matrix that its format cannot hold.
        """
        title = f", weights {self._formats[name].title}" if self._is_llvm else ""
        self._begin(f"{name}: layers 0 to {spec.num_layers}{title}")
        file = self._write(name, weights, directory)
        return ModelEngine(spec, file, weight_segments(spec, file, cuts, self._dtype), self._formats[name])

    def write_head(
        self, head: Eagle3Head, weights: Mapping[str, ModelWeights], target: ModelEngine, directory: Path
    ) -> ModelEngine:
        """Writes draft.safetensors, with `token_ids` int64 [num_logits] beside the matrices. A head without embedding
        has none there either: its target's is read."""
        self._begin("draft: EAGLE-3 head")
        ids = NewTensor("token_ids", "I64", head.token_ids.shape, lambda: [head.token_ids])
        file = self._write("draft", weights["draft"], directory, ids)
        segments = _head_segments(head.spec, target.spec, file, FLOAT_TYPES[self._dtype])
        return ModelEngine(head.spec, file, segments, self._formats["draft"])

    def _write(self, name: str, weights: ModelWeights, directory: Path, *more: NewTensor) -> FileSpec:
        """One tensor after the other: no more of a model is held than one of its matrices."""
        path = directory / f"{name}.safetensors"
        if self._is_llvm:
            write_safetensors(path, [*_llvm_tensors(weights, self._formats[name]), *more], ALIGNMENT)
        else:
            write_safetensors(path, [*_torch_tensors(weights, self._dtype), *more])
        return FileSpec.of(path)


def weight_segments(spec: ModelSpec, file: FileSpec, cuts: tuple[int, ...], dtype: str) -> tuple[SegmentSpec, ...]:
    """Segments that end at layers `cuts`. One with layers whose inputs a head reads has the pool that keeps them."""
    segments = []
    for first, last in pairwise((0, *cuts)):
        inputs, outputs = _segment_tensors(spec, first, last, FLOAT_TYPES[dtype])
        if any(first <= layer < last for layer in spec.feature_layers):
            inputs += (_features(spec, FLOAT_TYPES[dtype]),)
        segments.append(SegmentSpec(file, first, last, inputs, outputs))
    return tuple(segments)


def _head_segments(spec: ModelSpec, target: ModelSpec, file: FileSpec, dtype: str) -> tuple[SegmentSpec, ...]:
    """A head's two: one joins the target's hidden states, one is the layer, which takes such a row or its own."""
    joined, hidden, made = (
        TensorSpec(tensor, dtype, (rows, spec.hidden_size))
        for tensor, rows in (("hidden_out", "T"), ("hidden", "T"), ("hidden_out", "R"))
    )
    slots = TensorSpec("slot_mapping", "int32", ("T",))
    inputs, outputs = _segment_tensors(spec, 0, 1, dtype)
    return (
        SegmentSpec(file, 0, 0, (slots, _features(target, dtype)), (joined,)),
        SegmentSpec(file, 0, 1, (*inputs, hidden), (*outputs, made)),
    )


def _features(target: ModelSpec, dtype: str) -> TensorSpec:
    """The pool of what goes into the feature layers, by block and offset like keys and values."""
    shape = ("NB", "kv_block_size", len(target.feature_layers), target.hidden_size)
    return TensorSpec("features", dtype, shape)


def _segment_tensors(
    spec: ModelSpec, first: int, last: int, dtype: str
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs of layers [first, last); dtype is that of tensors, e.g. "bfloat16"."""
    is_first, is_last = first == 0, last == spec.num_layers
    pool_shape = (spec.num_kv_heads, "NB", "kv_block_size", spec.head_dim)
    hidden_shape = ("T", spec.hidden_size)
    inputs = [
        TensorSpec("token_ids", "int64", ("T",)) if is_first else TensorSpec("hidden", dtype, hidden_shape),
        TensorSpec("positions", "int64", ("T",)),
        TensorSpec("slot_mapping", "int32", ("T",)),
        TensorSpec("cu_rows", "int32", ("B + 1",)),
        TensorSpec("context_lens", "int32", ("B",)),
        TensorSpec("block_table", "int32", ("B", "MB")),
    ]
    if is_last:
        inputs.append(TensorSpec("logit_rows", "int64", ("R",)))
        outputs = [TensorSpec("logits", "float32", ("R", spec.vocab_size))]
    else:
        inputs.append(TensorSpec("exit_candidates", "int64", ("T", "K")))
        outputs = [TensorSpec("hidden_out", dtype, hidden_shape), TensorSpec("exit_scores", "float32", ("T", "K"))]
    inputs += [
        TensorSpec(f"{pool}.{layer}", dtype, pool_shape)
        for layer in range(first, last)
        for pool in ("k_pool", "v_pool")
    ]
    return tuple(inputs), tuple(outputs)


def _torch_tensors(weights: ModelWeights, dtype: str) -> Iterator[NewTensor]:
    for name in weights:
        stored = dtype if len(weights.shape(name)) > 1 else "fp32"
        pieces = partial(_converted, weights, name, FLOAT_TYPES[stored])
        yield NewTensor(name, STORED_NAMES[stored], weights.shape(name), pieces)


def _llvm_tensors(weights: ModelWeights, weight_format: WeightFormat) -> Iterator[NewTensor]:
    weights = weights.with_queries_keys_and_values_apart()
    for name in weights:
        shape = weights.shape(name)
        if len(shape) == 1:
            yield NewTensor(name, "F32", shape, partial(_converted, weights, name, "float32"))
        else:
            num_inputs, num_outputs = shape[::-1] if name in TRANSPOSED else shape
            num_bytes = stored_bytes(num_inputs, num_outputs, format_of(name, weight_format))
            yield NewTensor(name, "U8", (num_bytes,), partial(_llvm_matrix, weights, name, weight_format))


def _converted(weights: ModelWeights, name: str, dtype: str) -> Iterator[np.ndarray]:
    return converted_blocks(name, weights[name], np.dtype(dtype))


def _llvm_matrix(weights: ModelWeights, name: str, weight_format: WeightFormat) -> Iterator[np.ndarray]:
    """The bytes of a matrix, some of its columns after the other."""
    own_format, types = format_of(name, weight_format), weights.stored_types(name)
    try:
        if own_format in (INT4, INT8) and is_held(types, own_format):
            (stored_type,) = types
            blocks = weights.read_blocks(name)
            for first in range(0, len(blocks), COLUMNS_AT_ONCE):
                part = blocks[first : first + COLUMNS_AT_ONCE]
                yield store_groups(*groups_of(part, stored_type, own_format), own_format)
        else:
            weight = weights[name].T if name in TRANSPOSED else weights[name]
            for first in range(0, weight.shape[1], COLUMNS_AT_ONCE):
                yield store_matrix(weight[:, first : first + COLUMNS_AT_ONCE], own_format)
    except ValueError as error:
        raise CheckpointError(f"{weights.origin}: {name}: {error}") from None
