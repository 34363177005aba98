"""Builds engines of the runtimes "llvm" and "torch", whose kernels run the layers: one weight file per model.

Nothing is compiled, and segments only say which layers they hold. The file is safetensors, under the names of the
graphs. Norms, biases and routers are float32. For "torch", matrices have the engine's dtype. For "llvm", they are
bytes in the blocked layout of cpu/kernels/layouts.py. Their format is given, or chosen by the checkpoint: numbers that
are quantised there as a format stores them are taken over exactly. The file is mapped and read in place, so every
tensor begins at a multiple of ALIGNMENT bytes.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from faser_backend.core.model import DFLASH, EAGLE3, ModelSpec, WeightFormat
from faser_backend.cpu.kernels.layouts import COLUMNS_AT_ONCE, store_groups, store_matrix, stored_bytes
from faser_backend.engines.checkpoint import (
    FLOAT_TYPES,
    QUANTISED_BLOCK,
    ZERO_POINTS,
    CheckpointError,
    converted_blocks,
)
from faser_backend.engines.eagle3 import DraftHead
from faser_backend.engines.weights import ENDS, ModelWeights
from faser_backend.manifest import CPU_KV_CACHE_DTYPES, FileSpec, ModelEngine, SegmentSpec, TensorSpec
from faser_backend.runtime_spec import RUNTIMES

FLOAT32, FLOAT16, INT8, INT4 = "fp32", "fp16", "int8", "int4"
STORED_NAMES = {FLOAT32: "F32", FLOAT16: "F16", "bf16": "BF16"}  # the names of formats in safetensors files
HALF_CHECKPOINTS = ("F16", "BF16")
# The stored types that a format represents exactly, except minimums made of zero points, the smallest format first.
HELD = {INT4: ("Q4_0", "Q4_1", ZERO_POINTS), INT8: ("Q8_0", "Q4_0", ZERO_POINTS), FLOAT16: ("F16",), "bf16": ("BF16",)}
HELD_TYPES = {"F32"}.union(*HELD.values())
PLAIN = ("markov_w1", "confidence_weight")  # of a block drafter: tables that no product reads, kept in 16 bits
ROUTER = ".router"  # the end of its names
NUM_NAMED = 3  # matrices of one kind that a report names
ALIGNMENT = 64
Q4_ZERO = 8  # the number of Q4_0 that represents 0
HALF_BYTES = 2
_NUM_BYTES = {"U8": 1, "F16": 2, "BF16": 2, "F32": 4, "I64": 8}


def choose_weights(runtime: str, side: str, requested: str | None, weights: ModelWeights) -> WeightFormat:
    """Returns the format of the matrices of a side, target or draft; requested: None leaves the choice.

    Runtime "llvm" then keeps what the checkpoint holds, with formats of their own for embedding and head. On a GPU,
    matrices have the engine's dtype.
    """
    if not RUNTIMES[runtime].is_cpu:
        return WeightFormat(FLOAT32)
    weights = weights.with_separate_qkv()
    matrices = {
        name: weights.stored_types(name)
        for name in weights
        if len(weights.shape(name)) > 1 and not name.endswith(ROUTER) and name not in PLAIN
    }
    of_layers = frozenset[str]().union(*(types for name, types in matrices.items() if name not in ENDS))
    smallest = partial(smallest_format, is_draft=side == "draft")
    layers = requested or smallest(of_layers)
    embedding, head = (requested or smallest(matrices[name]) if name in matrices else layers for name in ENDS)
    if ENDS[1] not in matrices:
        head = embedding
    chosen = WeightFormat(layers, embedding=embedding, head=head)
    return replace(chosen, rounded=_rounded(chosen, matrices))


def format_of(name: str, weight_format: WeightFormat) -> str:
    """Returns the format of a matrix by its graph name. Routers are float32: rounding could change the experts."""
    if name.endswith(ROUTER):
        return FLOAT32
    return dict(zip(ENDS, weight_format.formats[1:], strict=True)).get(name, weight_format.name)


def is_held(stored_types: Iterable[str], weight_format: str) -> bool:
    """Returns whether the format represents numbers of all these types exactly."""
    return weight_format == FLOAT32 or all(kind in HELD[weight_format] for kind in stored_types)


def smallest_format(stored_types: Iterable[str], *, is_draft: bool = False) -> str:
    """Returns the smallest format that represents all of these types exactly.

    Types that no format represents count as halves. Halves also serve for mixtures of quantised types that only float32
    would represent: they round by 1 in 2,048 at most. A draft's halves become int8, which costs few accepted tokens.
    """
    kinds = {kind if kind in HELD_TYPES else "F16" for kind in stored_types}
    if is_draft and "F32" not in kinds and not is_held(kinds, INT4):
        return INT8
    for weight_format in HELD:
        if is_held(kinds, weight_format):
            return weight_format
    return FLOAT32 if kinds & {"F32", "BF16"} else FLOAT16


def _rounded(chosen: WeightFormat, matrices: Mapping[str, frozenset[str]]) -> str:
    """Counts and names, by type, the quantised matrices of the checkpoint that the chosen formats round."""
    found = defaultdict[str, list[str]](list)
    for name, types in matrices.items():
        quantised, own_format = types - set(STORED_NAMES.values()), format_of(name, chosen)
        if quantised and (not is_held(types, own_format) or (ZERO_POINTS in types and own_format == INT4)):
            found["/".join(sorted(quantised))].append(name)
    return ", ".join(
        f"{len(names)} of {kind} ({', '.join(names[:NUM_NAMED])}{', ...' * (len(names) > NUM_NAMED)})"
        for kind, names in found.items()
    )


def choose_kv_cache_dtype(runtime: str, dtype: str, requested: str | None, specs: Mapping[str, ModelSpec]) -> str:
    """Returns the dtype of keys and values; requested: None leaves the choice.

    The default on a CPU is fp16, as precise as the weights are, if both checkpoints hold 16 bits a number and this CPU
    has instructions for halves; else fp32. On a GPU, it is the engine's dtype. Raises CheckpointError.
    """
    choices = CPU_KV_CACHE_DTYPES if RUNTIMES[runtime].is_cpu else (dtype,)
    if requested is not None and requested not in choices:
        raise CheckpointError(f"kv_cache_dtype = {requested!r}: on {runtime!r} must be one of {', '.join(choices)}")
    if requested is not None or len(choices) == 1:
        return requested or dtype
    from faser_backend.cpu.kernels.attention import has_halves  # imports numba, which other runtimes do not need

    is_half = all(spec.checkpoint_dtype in HALF_CHECKPOINTS for spec in specs.values())
    return FLOAT16 if is_half and has_halves() else FLOAT32


class WeightsBuilder:
    """A builder of models as weight files. formats: of matrices, by "target" and "draft", for runtime "llvm"."""

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
        """Writes NAME.safetensors and describes the segments that end at layers `cuts`, the last of which is the end.

        Raises CheckpointError for a matrix that its format cannot hold.
        """
        title = f", weights {self._formats[name].title}" if self._is_llvm else ""
        self._begin(f"{name}: layers 0 to {spec.num_layers}{title}")
        file = self._write(name, weights, directory)
        return ModelEngine(spec, file, weight_segments(spec, file, cuts, self._dtype), self._formats[name])

    def write_head(
        self, head: DraftHead, weights: Mapping[str, ModelWeights], target: ModelEngine, directory: Path
    ) -> ModelEngine:
        """Writes draft.safetensors, with a head's `token_ids` [num_logits] int64. The target has the ends it lacks."""
        self._begin(f"draft: {head.spec.family}")
        ids = head.token_ids
        more = [] if ids is None else [NewTensor("token_ids", "I64", ids.shape, lambda: [ids])]
        file = self._write("draft", weights["draft"], directory, *more)
        segments = _draft_segments(head.spec, target.spec, file, FLOAT_TYPES[self._dtype])
        return ModelEngine(head.spec, file, segments, self._formats["draft"])

    def _write(self, name: str, weights: ModelWeights, directory: Path, *more: NewTensor) -> FileSpec:
        """Writes one tensor after the other, so that only one matrix is in memory."""
        path = directory / f"{name}.safetensors"
        if self._is_llvm:
            write_safetensors(path, [*_llvm_tensors(weights, self._formats[name]), *more], ALIGNMENT)
        else:
            write_safetensors(path, [*_torch_tensors(weights, self._dtype), *more])
        return FileSpec.of(path)


def _torch_tensors(weights: ModelWeights, dtype: str) -> Iterator[NewTensor]:
    for name in weights:
        stored = dtype if len(weights.shape(name)) > 1 else FLOAT32
        pieces = partial(_converted, weights, name, FLOAT_TYPES[stored])
        yield NewTensor(name, STORED_NAMES[stored], weights.shape(name), pieces)


def _llvm_tensors(weights: ModelWeights, weight_format: WeightFormat) -> Iterator[NewTensor]:
    weights = weights.with_separate_qkv()
    for name in weights:
        shape = weights.shape(name)
        if len(shape) == 1 or name in PLAIN:
            types = weights.stored_types(name) if name in PLAIN else ()
            stored = next((each for each, kind in STORED_NAMES.items() if types == {kind}), FLOAT32)
            pieces = partial(_converted, weights, name, FLOAT_TYPES[stored])
            yield NewTensor(name, STORED_NAMES[stored], shape, pieces)
        else:
            num_inputs, num_outputs = shape[::-1] if name in ENDS else shape
            num_bytes = stored_bytes(num_inputs, num_outputs, format_of(name, weight_format))
            yield NewTensor(name, "U8", (num_bytes,), partial(_llvm_matrix, weights, name, weight_format))


def _converted(weights: ModelWeights, name: str, dtype: str) -> Iterator[np.ndarray]:
    return converted_blocks(name, weights[name], np.dtype(dtype))


def _llvm_matrix(weights: ModelWeights, name: str, weight_format: WeightFormat) -> Iterator[np.ndarray]:
    """Yields the bytes of a matrix, COLUMNS_AT_ONCE columns at a time."""
    own_format, types = format_of(name, weight_format), weights.stored_types(name)
    try:
        if own_format in (INT4, INT8) and is_held(types, own_format):
            (stored_type,) = types
            blocks = weights.read_blocks(name)
            for first in range(0, len(blocks), COLUMNS_AT_ONCE):
                part = blocks[first : first + COLUMNS_AT_ONCE]
                yield store_groups(*groups_of(part, stored_type, own_format), own_format)
        else:
            weight = weights[name].T if name in ENDS else weights[name]
            for first in range(0, weight.shape[1], COLUMNS_AT_ONCE):
                yield store_matrix(weight[:, first : first + COLUMNS_AT_ONCE], own_format)
    except ValueError as error:
        raise CheckpointError(f"{weights.origin}: {name}: {error}") from None


def groups_of(
    blocks: np.ndarray, stored_type: str, weight_format: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Converts blocks to the integers, scales and minimums of a format, without rounding the numbers.

    blocks: bytes [num_outputs, row_bytes]. Returns the arguments of layouts.store_groups: [num_inputs, num_outputs],
    [num_inputs / 32, num_outputs], and minimums of the same shape for int4 (None for int8).

    int8 takes Q8_0, Q4_0 and Q4_ZP, int4 takes Q4_0, Q4_1 and Q4_ZP. Scales are not checked: they may not be finite.
    """
    num_scales = 2 if stored_type in ("Q4_1", ZERO_POINTS) else 1
    num_bytes = QUANTISED_BLOCK if stored_type == "Q8_0" else QUANTISED_BLOCK // 2
    grouped = blocks.reshape(len(blocks), -1, num_scales * HALF_BYTES + num_bytes)  # [out, groups, block bytes]
    halves = np.ascontiguousarray(grouped[..., : num_scales * HALF_BYTES]).view(np.float16)
    stored, scales = grouped[..., num_scales * HALF_BYTES :], halves[..., 0]
    if (stored_type, weight_format) == ("Q8_0", INT8):
        return stored.view(np.int8).reshape(len(blocks), -1).T, scales.T, None
    assert stored_type.startswith("Q4_"), f"{weight_format} does not hold {stored_type}"
    numbers = np.concatenate([stored & 15, stored >> 4], axis=-1).reshape(len(blocks), -1).T  # [in, out]
    if stored_type == "Q4_1":
        assert weight_format == INT4, f"{weight_format} does not hold {stored_type}"
        return numbers, scales.T, halves[..., 1].T
    zeros = halves[..., 1].T if stored_type == ZERO_POINTS else np.full(scales.T.shape, Q4_ZERO)
    if weight_format == INT8:
        return numbers.astype(np.int8) - np.repeat(zeros.astype(np.int8), QUANTISED_BLOCK, axis=0), scales.T, None
    return numbers, scales.T, -zeros * scales.T.astype(np.float32)  # as a half: exact for 8, infinite above 65504


class NewTensor(NamedTuple):
    """A tensor to be written. Its pieces, contiguous and in order, are made when it is written."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[np.ndarray]]


def write_safetensors(path: Path, tensors: Sequence[NewTensor], alignment: int = 1) -> None:
    """Writes tensors one after the other, each at a multiple of `alignment` bytes of the file."""
    header: dict[str, dict] = {}
    end = 0

    def announce(name: str, dtype: str, shape: tuple[int, ...]) -> None:
        nonlocal end
        first, end = end, end + math.prod(shape) * _NUM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [first, end]}

    for tensor in tensors:
        announce(tensor.name, tensor.dtype, tensor.shape)
        if end % alignment:  # safetensors allows no gap between tensors
            announce(f"{tensor.name}.gap", "U8", (-end % alignment,))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % max(alignment, 8))
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for piece in tensor.pieces():
                file.write(np.ascontiguousarray(piece).view(np.uint8).data)
            file.write(bytes(-file.tell() % alignment))


def weight_segments(spec: ModelSpec, file: FileSpec, cuts: tuple[int, ...], dtype: str) -> tuple[SegmentSpec, ...]:
    """Returns the segments that end at layers `cuts`. Those with feature layers get the pool of their inputs."""
    segments = []
    for first, last in pairwise((0, *cuts)):
        inputs, outputs = _segment_tensors(spec, first, last, FLOAT_TYPES[dtype])
        if any(first <= layer < last for layer in spec.feature_layers):
            inputs += (_features(spec, FLOAT_TYPES[dtype]),)
        segments.append(SegmentSpec(file, first, last, inputs, outputs))
    return tuple(segments)


def _draft_segments(spec: ModelSpec, target: ModelSpec, file: FileSpec, dtype: str) -> tuple[SegmentSpec, ...]:
    """Returns the two segments of a draft that reads its target: one reads hidden states, one runs the layers.

    A head's first joins them; a block drafter's makes keys and values of them.
    """
    inputs, outputs = _segment_tensors(spec, 0, spec.num_layers, dtype)
    joined, hidden, made = (
        TensorSpec(tensor, dtype, (rows, spec.hidden_size))
        for tensor, rows in (("hidden_out", "T"), ("hidden", "T"), ("hidden_out", "R"))
    )
    if spec.family != DFLASH:
        outputs += (made,)
    if spec.family == EAGLE3:
        slots = TensorSpec("slot_mapping", "int32", ("T",))
        first, inputs = SegmentSpec(file, 0, 0, (slots, _features(target, dtype)), (joined,)), (*inputs, hidden)
    else:
        places = (each for each in inputs if each.name in ("positions", "slot_mapping") or "_pool." in each.name)
        first = SegmentSpec(file, 0, 0, (*places, _features(target, dtype)), ())
    return first, SegmentSpec(file, 0, spec.num_layers, inputs, outputs)


def _features(target: ModelSpec, dtype: str) -> TensorSpec:
    """Returns the pool of the inputs of feature layers, indexed by block and offset like keys and values."""
    shape = ("NB", "kv_block_size", len(target.feature_layers), target.hidden_size)
    return TensorSpec("features", dtype, shape)


def _segment_tensors(
    spec: ModelSpec, first: int, last: int, dtype: str
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Returns inputs and outputs of layers [first, last). dtype: of tensors, e.g. "bfloat16"."""
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
