"""Engines of runtime "llvm": one weight file per model, its matrices in the blocked layout of the CPU's kernels.

Nothing is compiled here: numba compiles the layers on the machine that serves. The file is safetensors under the names
of the graphs: matrices as bytes in the layout of plugins/row_layouts.py, norms and biases as float32. Every tensor
begins at a multiple of ALIGNMENT bytes, for the file is mapped and read in place. Numbers that are quantised as a
format has them are taken over as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from engines.arrays import CheckpointError
from engines.gguf_blocks import groups_of
from engines.torch_build import segment_tensors
from engines.weight_formats import INT4, INT8, format_of, is_held
from engines.weights import ModelWeights
from faser_backend.core.model import ModelSpec, WeightFormat
from faser_backend.manifest import FileSpec, ModelEngine, SegmentSpec, TensorSpec
from plugins.row_layouts import COLUMNS_AT_ONCE, store_groups, store_matrix, stored_bytes

ALIGNMENT = 64
ITEM_TYPES = {"U8": np.uint8, "F32": np.float32, "I64": np.int64}
TRANSPOSED = ("embedding", "lm_head")  # [vocab_size, hidden_size] in checkpoints


def check_llvm(specs: dict[str, ModelSpec]) -> None:
    """Raises CheckpointError for what this runtime has no kernels for."""
    for name, spec in specs.items():
        if spec.head_dim % 2:
            raise CheckpointError(f"runtime = 'llvm': head_dim of {name} = {spec.head_dim}: must be even")


def write_llvm_model(  # noqa: PLR0917
    name: str,
    spec: ModelSpec,
    weights: ModelWeights,
    cuts: tuple[int, ...],
    directory: Path,
    weight_format: WeightFormat,
) -> ModelEngine:
    """Writes NAME.safetensors and describes the segments that end at layers `cuts`, the last of them the model's.

    Raises CheckpointError for a matrix that its format cannot hold.
    """
    path = directory / f"{name}.safetensors"
    write_weights(path, weights, weight_format)
    file = FileSpec.of(path)
    segments = []
    for first, last in zip((0, *cuts[:-1]), cuts, strict=True):
        inputs, outputs = segment_tensors(spec, first, last, "float32")
        read = (layer for layer in spec.feature_layers if first <= layer < last)
        outputs += tuple(TensorSpec(f"aux_hidden.{layer}", "float32", ("T", spec.hidden_size)) for layer in read)
        segments.append(SegmentSpec(file, first, last, inputs, outputs))
    return ModelEngine(spec, file, tuple(segments), weight_format)


def write_weights(
    path: Path, weights: ModelWeights, weight_format: WeightFormat, token_ids: np.ndarray | None = None
) -> None:
    """One tensor after the other: no more of a model is held than one of its matrices.

    token_ids: int64 [num_logits] of a head that knows not all ids, written under that name.
    """
    weights = weights.with_queries_keys_and_values_apart()
    header: dict[str, dict] = {}
    end = 0
    for name, dtype, shape in _entries(weights, weight_format, token_ids):
        size = math.prod(shape) * np.dtype(ITEM_TYPES[dtype]).itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
        if end % ALIGNMENT:  # safetensors allows no gap between tensors
            gap = ALIGNMENT - end % ALIGNMENT
            header[f"{name}.gap"] = {"dtype": "U8", "shape": [gap], "data_offsets": [end, end + gap]}
            end += gap
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, dtype, _ in _entries(weights, weight_format, token_ids):
            size = 0
            if dtype == "U8":
                pieces = _matrix(weights, name, weight_format)
            else:
                pieces = _numbers(weights[name] if dtype == "F32" else token_ids, ITEM_TYPES[dtype])
            for piece in pieces:
                file.write(piece.data)
                size += piece.nbytes
            file.write(bytes(-size % ALIGNMENT))


def _entries(
    weights: ModelWeights, weight_format: WeightFormat, token_ids: np.ndarray | None
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of everything that is written; matrices are bytes."""
    for name in weights:
        shape = weights.shape(name)
        if len(shape) == 1:
            yield name, "F32", shape
        else:
            num_inputs, num_outputs = shape[::-1] if name in TRANSPOSED else shape
            yield name, "U8", (stored_bytes(num_inputs, num_outputs, format_of(name, weight_format)),)
    if token_ids is not None:
        yield "token_ids", "I64", token_ids.shape


def _numbers(array: np.ndarray | None, dtype: type[np.generic]) -> Iterator[np.ndarray]:
    assert array is not None
    yield np.ascontiguousarray(array, dtype).view(np.uint8)


def _matrix(weights: ModelWeights, name: str, weight_format: WeightFormat) -> Iterator[np.ndarray]:
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
