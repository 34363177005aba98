"""Reads `quantization_config`: AWQ, GPTQ, compressed-tensors and fp8. Methods that would need more are refused by name.

A scheme says which tensors make the weight of a module: (number - zero point) * scale. Activations, which some schemes
round to 8 bits, are not rounded here, so fields that only describe them are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from faser_backend.core.model import MAX_WIDTH
from faser_backend.engines.checkpoint import QUANTISED_BLOCK, ConfigFields

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


def read_scheme(config: ConfigFields) -> Scheme:
    """Returns the scheme of a config. Raises CheckpointError naming a field that would make another model."""
    values = config.section(SECTION).values
    method = values.get("quant_method", "unknown")
    if not isinstance(method, str) or method not in METHODS:
        raise config.error(f"{SECTION}.quant_method", method, f"must be one of {', '.join(METHODS)}")
    return METHODS[method](ConfigFields(values, config.where, {name: f"{SECTION}.{name}" for name in values}))


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
    return Scheme("GPTQ", ".qweight", "I32", bits, block, ".scales", ".qzeros", ".g_idx", True, zero_offset=is_first)


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
    if strategy == "block":
        block = _block(weights, "block_structure")
    else:
        block = _group(weights) if strategy == "group" else (int(strategy == "channel"), 0)
    return Scheme("compressed-tensors", numbers, dtype, weights.count("num_bits", 8), block)


def _fp8(fields: ConfigFields) -> Scheme:
    fields.must_be("fmt", "e4m3")
    fields.must_be("activation_scheme", "dynamic", "static")
    has_blocks = fields.values.get("weight_block_size") is not None
    block = _block(fields, "weight_block_size") if has_blocks else (0, 0)
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
