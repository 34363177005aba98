"""Engines of runtime "torch": one weight file per model, and segments that merely name their tensors.

Nothing is compiled: the serving side runs the layers with kernels of its own. Weights lie in one safetensors
file under the names of the graphs, in the engine's dtype; norms and biases stay float32.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np

from engines.arrays import BFLOAT16
from engines.eagle3 import Eagle3Head
from engines.safetensors_file import write_safetensors
from engines.weights import ModelWeights
from faser_backend.manifest import FileSpec, ModelEngine, ModelSpec, SegmentSpec, TensorSpec

NUMPY_DTYPES = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16), "bf16": BFLOAT16}


def write_torch_model(  # noqa: PLR0917
    name: str, spec: ModelSpec, weights: ModelWeights, cuts: tuple[int, ...], directory: Path, dtype: str
) -> ModelEngine:
    """Writes NAME.safetensors and describes the segments that end at layers `cuts`, the last of them the model's.

    dtype: of the manifest, for matrices, hidden states, keys and values.
    """
    path = directory / f"{name}.safetensors"
    formats = weight_formats(weights, NUMPY_DTYPES[dtype])
    write_safetensors(path, formats, ((weight, weights[weight]) for weight in formats))
    return ModelEngine(spec, FileSpec.of(path), torch_segments(spec, FileSpec.of(path), cuts, dtype))


def write_torch_head(
    head: Eagle3Head, weights: ModelWeights, target: ModelEngine, directory: Path, dtype: str
) -> ModelEngine:
    """Writes draft.safetensors, with `token_ids` int64 [num_logits] beside the matrices. A head without an embedding
    has none there either: its target's is read. dtype: as of write_torch_model."""
    path, token_ids = directory / "draft.safetensors", head.token_ids
    formats = weight_formats(weights, NUMPY_DTYPES[dtype])
    arrays = chain(((name, weights[name]) for name in formats), [("token_ids", token_ids)])
    write_safetensors(path, {**formats, "token_ids": (np.dtype(np.int64), token_ids.shape)}, arrays)
    return ModelEngine(head.spec, FileSpec.of(path), head_segments(head.spec, target.spec, FileSpec.of(path), dtype))


def torch_segments(spec: ModelSpec, file: FileSpec, cuts: tuple[int, ...], dtype: str) -> tuple[SegmentSpec, ...]:
    """Segments that end at layers `cuts`. One with layers whose inputs a head reads has the pool that keeps them."""
    name = NUMPY_DTYPES[dtype].name
    segments = []
    for first, last in zip((0, *cuts[:-1]), cuts, strict=True):
        inputs, outputs = segment_tensors(spec, first, last, name)
        if any(first <= layer < last for layer in spec.feature_layers):
            inputs += (_features(spec, name),)
        segments.append(SegmentSpec(file, first, last, inputs, outputs))
    return tuple(segments)


def head_segments(spec: ModelSpec, target: ModelSpec, file: FileSpec, dtype: str) -> tuple[SegmentSpec, ...]:
    """Of a head: what joins the target's hidden states, and the layer, which takes such a row or one of its own."""
    name = NUMPY_DTYPES[dtype].name
    joined, hidden, made = (
        TensorSpec(tensor, name, (rows, spec.hidden_size))
        for tensor, rows in (("hidden_out", "T"), ("hidden", "T"), ("hidden_out", "R"))
    )
    slots = TensorSpec("slot_mapping", "int32", ("T",))
    inputs, outputs = segment_tensors(spec, 0, 1, name)
    return (
        SegmentSpec(file, 0, 0, (slots, _features(target, name)), (joined,)),
        SegmentSpec(file, 0, 1, (*inputs, hidden), (*outputs, made)),
    )


def _features(target: ModelSpec, dtype: str) -> TensorSpec:
    """The pool of what goes into the feature layers, by block and offset like keys and values."""
    shape = ("NB", "kv_block_size", len(target.feature_layers), target.hidden_size)
    return TensorSpec("features", dtype, shape)


def weight_formats(weights: ModelWeights, dtype: np.dtype) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Format and shape by name: matrices in `dtype`, vectors (norms, biases) float32."""
    shapes = {name: weights.shape(name) for name in weights}
    return {name: (dtype if len(shape) > 1 else np.dtype(np.float32), shape) for name, shape in shapes.items()}


def segment_tensors(
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
