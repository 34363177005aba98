"""Engines of runtime "torch": one weight file per model, and segments that merely name their tensors.

Nothing is compiled: the serving side runs the layers with kernels of its own. Weights lie in one safetensors
file under the names of the graphs, in the engine's dtype; norms and biases stay float32.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engines.arrays import BFLOAT16
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
    file = FileSpec.of(path)
    starts = (0, *cuts[:-1])
    segments = tuple(
        SegmentSpec(file, first, last, *segment_tensors(spec, first, last, NUMPY_DTYPES[dtype].name))
        for first, last in zip(starts, cuts, strict=True)
    )
    return ModelEngine(spec, file, segments)


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
