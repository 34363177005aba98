"""Quantised checkpoints in Hugging Face's layout: the tensors of a quantised module appear as one matrix, its `weight`.

`quantization_config` gives the scheme: AWQ, GPTQ, compressed-tensors or fp8. It says which tensors make the weight of a
module: (number - zero point) * scale. Activations, which some schemes round to 8 bits, are not rounded here, so fields
that only describe them are not read. Methods that would need more are refused by name.

A weight is read in float32. Where 32 inputs that follow each other share a scale, and it is a half, it is also offered
as blocks, which runtime "llvm" stores as they are. The shapes of a module's tensors are checked before they are read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from faser_backend.core.model import MAX_WIDTH
from faser_backend.engines.checkpoint import (
    QUANTISED_BLOCK,
    ZERO_POINTS,
    CheckpointError,
    ConfigFields,
    checked_finite,
    row_blocks,
)
from faser_backend.engines.safetensors_checkpoint import HuggingFaceCheckpoint

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where each of 8 outputs is in their word
SHAPE = ".weight_shape"
UNUSED = (".input_scale", ".input_zero_point", ".activation_scale")  # of activations
SECTION = "quantization_config"
WORD_BITS = 32
WEIGHT_FORMATS = {  # of compressed-tensors: bits, type of the numbers, their tensor and its dtype
    "pack-quantized": ((4, 8), "int", ".weight_packed", "I32"),
    "int-quantized": ((8,), "int", ".weight", "I8"),
    "float-quantized": ((8,), "float", ".weight", "F8_E4M3"),
}


@dataclass(frozen=True, slots=True)
class Scheme:
    """The tensors of a quantised module, by the ends of their names, and what they hold."""

    method: str
    numbers: str  # [outputs, inputs]
    dtype: str  # of the tensor of numbers; "I32": words in which they are packed, the first in the lowest bits
    bits: int
    block: tuple[int, int]  # outputs and inputs that share a scale; 0: all
    scales: str = ".weight_scale"  # [groups of outputs, groups of inputs]
    zeros: str = ".weight_zero_point"  # of the shape of scales; words hold several outputs
    group_index: str = ".weight_g_idx"  # the group of each input
    is_transposed: bool = False  # the matrices of the file are [inputs, outputs]
    packed_axis: int = 1  # of numbers: a word holds several outputs (0) or inputs (1)
    zero_offset: int = 0  # what is missing from zero points
    needed: tuple[str, ...] = ()  # tensors without which the config would mean other numbers

    @property
    def per_word(self) -> int:
        return WORD_BITS // self.bits

    @property
    def center(self) -> int:
        """The zero point of symmetric numbers."""
        return 1 << (self.bits - 1) if self.dtype == "I32" else 0

    def steps(self, shape: Sequence[int]) -> list[int]:
        """Returns how many outputs and inputs of a matrix share a scale."""
        return [max(step or size, 1) for step, size in zip(self.block, shape, strict=True)]


def _awq(fields: ConfigFields) -> Scheme:
    fields.must_be("bits", 4)
    fields.must_be("zero_point", True)
    fields.must_be("backend", "autoawq", "auto")
    for name in ("version", "format", "checkpoint_format"):
        fields.must_be(name, "gemm", "GEMM")
    return Scheme("AWQ", ".qweight", "I32", 4, _group(fields, 128), ".scales", ".qzeros", ".g_idx", True, packed_axis=0)


def _gptq(fields: ConfigFields) -> Scheme:
    fields.must_be("bits", 4, 8)
    for name in ("dynamic", "adapter", "rotation"):
        fields.must_be(name, {}, "")
    for name in ("checkpoint_format", "format"):
        fields.must_be(name, "gptq", "gptq_v2")
    bits, block = fields.count("bits", 8), _group(fields, 128)
    is_first = "gptq_v2" not in (fields.values.get("checkpoint_format"), fields.values.get("format"))
    needed = (".g_idx",) * fields.flag("desc_act", False)
    return Scheme("GPTQ", ".qweight", "I32", bits, block, ".scales", ".qzeros", ".g_idx", True, 1, is_first, needed)


def _compressed_tensors(fields: ConfigFields) -> Scheme:
    for name in ("kv_cache_scheme", "transform_config"):
        fields.must_be(name, {})
    fields.section("sparsity_config").must_be("format", "dense")
    groups = fields.section("config_groups")
    schemes = {_group_scheme(groups.section(name), fields.values.get("format")) for name in groups.values}
    if len(schemes) != 1:
        raise fields.error("config_groups", groups.values, f"hold {len(schemes)} schemes: must be one")
    return schemes.pop()


def _group_scheme(modules: ConfigFields, common_format: Any) -> Scheme:
    """Returns the scheme of a group of modules. common_format: of groups that name none."""
    modules.must_be("output_activations")
    modules.section("input_activations").must_be("num_bits", 8)
    weight_format = modules.values.get("format") or common_format
    if not isinstance(weight_format, str) or weight_format not in WEIGHT_FORMATS:
        raise modules.error("format", weight_format, f"must be one of {', '.join(WEIGHT_FORMATS)}")
    bits, kind, numbers, dtype = WEIGHT_FORMATS[weight_format]
    weights = modules.section("weights")
    weights.must_be("num_bits", *bits)
    weights.must_be("type", kind)
    weights.must_be("dynamic", False)
    weights.must_be("strategy", "tensor", "channel", "group", "block")
    strategy = weights.values.get("strategy")
    block = _group(weights) if strategy == "group" else (int(strategy == "channel"), 0)
    if strategy == "block":
        block = _block(weights, "block_structure")
    is_ordered = weights.values.get("actorder") not in (None, False, "weight", "static")
    needed = (".weight_zero_point",) * (not weights.flag("symmetric", True)) + (".weight_g_idx",) * is_ordered
    return Scheme("compressed-tensors", numbers, dtype, weights.count("num_bits", 8), block, needed=needed)


def _fp8(fields: ConfigFields) -> Scheme:
    fields.must_be("fmt", "e4m3")
    fields.must_be("activation_scheme", "dynamic", "static")
    block = (0, 0) if fields.values.get("weight_block_size") is None else _block(fields, "weight_block_size")
    scales = ".weight_scale_inv" if "weight_block_size" in fields.values else ".weight_scale"  # AutoFP8 has no field
    return Scheme("fp8", ".weight", "F8_E4M3", 8, block, scales)


METHODS = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed_tensors, "fp8": _fp8}


def _group(fields: ConfigFields, default: int | None = None) -> tuple[int, int]:
    """Returns the outputs and inputs that share a scale: one, and group_size."""
    if fields.values.get("group_size") == -1:
        return 1, 0
    size = fields.count("group_size", MAX_WIDTH, default)
    if size % QUANTISED_BLOCK:
        raise fields.error("group_size", size, f"must be -1 or a multiple of {QUANTISED_BLOCK}")
    return 1, size


def _block(fields: ConfigFields, name: str) -> tuple[int, int]:
    sizes = fields.values.get(name)
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and 0 < n <= MAX_WIDTH for n in sizes):
        raise fields.error(name, sizes, f"must be two integers in [1, {MAX_WIDTH}]")
    return sizes[0], sizes[1]


class Grid(NamedTuple):
    """The scales and zero points of a matrix, and which of them each output and each input has."""

    scales: np.ndarray  # float32 [groups of outputs, groups of inputs]
    zeros: np.ndarray  # int16, the same shape
    rows: np.ndarray  # [outputs]
    columns: np.ndarray  # [inputs]


class QuantisedCheckpoint(HuggingFaceCheckpoint):
    """A directory whose config has a `quantization_config`. Modules without quantised tensors stay as they are."""

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        super().__init__(directory, config)
        fields = self.fields.section(SECTION)  # its errors name a field that would make another model
        scheme = METHODS[fields.choice("quant_method", METHODS)](fields)
        found = [name for name, file in self._file_of.items() if file.stored_dtype(name) == scheme.dtype]
        modules = [name.removesuffix(scheme.numbers) for name in found if name.endswith(scheme.numbers)]
        if not modules:
            method, tensor = config[SECTION]["quant_method"], f"*{scheme.numbers} of {scheme.dtype}"
            raise self.fields.error(f"{SECTION}.quant_method", method, f"no file has a tensor {tensor}")
        self._scheme, self._modules = scheme, {f"{module}.weight": module for module in modules}
        ends = (scheme.numbers, scheme.scales, scheme.zeros, scheme.group_index, SHAPE, *UNUSED)
        hidden = {module + end for module in modules for end in ends}
        self._names = dict.fromkeys([*(name for name in self._file_of if name not in hidden), *self._modules])

    @property
    def names(self) -> Collection[str]:
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape. Raises CheckpointError if a tensor of the module is missing, or its shape does not fit."""
        if name not in self._modules:
            return super().shape(name)
        scheme, module = self._scheme, self._modules[name]
        shape = list(super().shape(module + scheme.numbers))
        if len(shape) != 2:
            raise self._error(module + scheme.numbers, f"has shape {shape}: must be a matrix")
        if scheme.is_transposed:
            shape.reverse()
            shape[scheme.packed_axis] *= scheme.per_word
        elif scheme.dtype == "I32":
            self._check_shape(module + SHAPE, 2)
            shape = self.read_integers(module + SHAPE).tolist()
            self._check_shape(module + scheme.numbers, shape[0], -(-shape[1] // scheme.per_word))
        rows, columns = (-(-size // step) for size, step in zip(shape, scheme.steps(shape), strict=True))
        zeros, index = module + scheme.zeros, module + scheme.group_index
        if lacking := [module + end for end in scheme.needed if module + end not in self._file_of]:
            raise self._error(lacking[0], f"is missing, but {SECTION} says that numbers depend on it")
        self._check_shape(module + scheme.scales, rows, columns)
        if scheme.is_transposed or zeros in self._file_of:
            is_packed = scheme.is_transposed or self._file_of[zeros].stored_dtype(zeros) == "I32"
            self._check_shape(zeros, -(-rows // scheme.per_word) if is_packed else rows, columns)
        if index in self._file_of:
            self._check_shape(index, shape[1])
        return tuple(shape)

    def dtype(self, name: str) -> str:
        return super().dtype(self._modules[name] + self._scheme.scales if name in self._modules else name)

    def read(self, name: str) -> np.ndarray:
        if name not in self._modules:
            return super().read(name)
        grid, numbers = self._grid(name), np.ascontiguousarray(self._numbers(name), np.float32)
        with np.errstate(all="ignore"):  # checked below
            for first, part in row_blocks(numbers):
                own = np.ix_(grid.rows[first : first + len(part)], grid.columns)
                np.subtract(part, grid.zeros[own], out=part)
                np.multiply(part, grid.scales[own], out=part)
        return checked_finite(numbers, f"{self.origin}: {name}")

    def stored_type(self, name: str) -> str:
        """Returns a type of blocks, BF16 for FP8 numbers that it holds, or words for what a build has to round."""
        if name not in self._modules:
            return super().stored_type(name)
        scheme, grid = self._scheme, self._grid(name)
        num_inputs, firsts = len(grid.columns), grid.columns[::QUANTISED_BLOCK]
        if scheme.dtype == "F8_E4M3":
            digits, exponents = np.frexp(grid.scales)
            is_exact = (abs(digits) == 0.5).all() and (abs(exponents) < 100).all()  # powers of two
            return "BF16" if is_exact else "FP8"
        if num_inputs % QUANTISED_BLOCK:
            return f"{scheme.method} of {num_inputs} inputs"
        if (grid.columns != np.repeat(firsts, QUANTISED_BLOCK)).any():
            return f"{scheme.method} in act-order"
        with np.errstate(over="ignore"):
            if (grid.scales.astype(np.float16) != grid.scales).any():
                return f"{scheme.method} with scales that are no halves"
        has_zeros = bool((grid.zeros != scheme.center).any())
        kinds = ("Q4_0", ZERO_POINTS) if scheme.bits == 4 else ("Q8_0", f"{scheme.method} of 8 bits with zero points")
        return kinds[has_zeros]

    def read_stored(self, name: str) -> np.ndarray:
        kind = self.stored_type(name)
        if kind not in ("Q4_0", ZERO_POINTS, "Q8_0"):
            return self.read(name)
        grid, numbers = self._grid(name), self._numbers(name)
        own = np.ix_(grid.rows, grid.columns[::QUANTISED_BLOCK])
        halves = [grid.scales[own], grid.zeros[own]] if kind == ZERO_POINTS else [grid.scales[own]]
        head = np.stack(halves, axis=-1).astype(np.float16).view(np.uint8)  # [out, blocks, bytes]
        blocks = numbers.reshape(*head.shape[:2], QUANTISED_BLOCK)
        if kind == "Q8_0":
            blocks = (blocks.astype(np.int16) - self._scheme.center).astype(np.int8).view(np.uint8)
        else:
            low, high = np.split(blocks, 2, axis=-1)
            blocks = low | high << 4
        return np.concatenate([head, blocks], axis=-1).reshape(len(numbers), -1)

    def _grid(self, name: str) -> Grid:
        scheme, module, shape = self._scheme, self._modules[name], self.shape(name)
        rows, columns = (np.arange(size) // step for size, step in zip(shape, scheme.steps(shape), strict=True))
        groups = (int(rows[-1]) + 1, int(columns[-1]) + 1)
        scales, index = self._as_rows(super().read(module + scheme.scales)), module + scheme.group_index
        if index in self._file_of:
            columns = self.read_integers(index)
            outside = np.flatnonzero((columns < 0) | (columns >= groups[1]))
            if outside.size:
                value = f"= {columns[outside[0]]}: must lie in [0, {groups[1] - 1}]"
                raise self._error(f"{index}[{outside[0]}]", value)
        scales = scales.astype(np.float32).reshape(groups)
        return Grid(scales, self._zeros(module + scheme.zeros, groups), rows, columns)

    def _zeros(self, tensor: str, groups: tuple[int, int]) -> np.ndarray:
        scheme = self._scheme
        if tensor not in self._file_of:
            return np.full(groups, scheme.center, np.int16)
        stored = self._as_rows(self._file_of[tensor].map(tensor, "I32", *["I8"] * (not scheme.is_transposed)))
        if stored.dtype == np.int8:
            return stored.reshape(groups) + np.int16(scheme.center)
        # The first version of GPTQ's format subtracts one from each number of a word at once, borrows included.
        offset = np.uint32(sum(scheme.zero_offset << bit for bit in range(0, WORD_BITS, scheme.bits)))
        return self._unpacked(stored.view(np.uint32) + offset, 0)[: groups[0]].astype(np.int16)

    def _numbers(self, name: str) -> np.ndarray:
        """Returns a module's numbers [out, in]: integers from 0 if they are packed, else as they are stored."""
        scheme, tensor = self._scheme, self._modules[name] + self._scheme.numbers
        stored = self._as_rows(self._file_of[tensor].map(tensor, scheme.dtype))
        return stored if scheme.dtype != "I32" else self._unpacked(stored, scheme.packed_axis)[:, : self.shape(name)[1]]

    def _unpacked(self, words: np.ndarray, axis: int) -> np.ndarray:
        """Returns the unsigned numbers of a matrix of words that hold several of them along an axis."""
        parts = np.ascontiguousarray(words.T if axis == 0 else words).view(np.uint8)
        if self._scheme.bits == 4:
            parts = np.stack([parts & 15, parts >> 4], axis=-1).reshape(len(parts), -1)
        if self._scheme.method == "AWQ":
            parts = parts.reshape(len(parts), -1, len(AWQ_ORDER))[..., AWQ_ORDER].reshape(len(parts), -1)
        return parts.T if axis == 0 else parts

    def _as_rows(self, matrix: np.ndarray) -> np.ndarray:
        """Returns a matrix of the file as [outputs, inputs]."""
        return matrix.T if self._scheme.is_transposed else matrix

    def _check_shape(self, name: str, *wanted: int) -> None:
        """Raises CheckpointError unless a tensor has this shape. Dimensions of 1 may be left out."""
        if name not in self._file_of:
            raise CheckpointError(f"{self.origin}: tensor {name} is missing")
        shape, short = super().shape(name), tuple(size for size in wanted if size != 1)
        if (shape[::-1] if self._scheme.is_transposed else shape) not in (wanted, short, short or (1,)):
            raise self._error(name, f"has shape {list(shape)}, its module and config want {list(wanted)}")

    def _error(self, name: str, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.origin}: {name} {reason}")
