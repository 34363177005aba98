"""Blocks of GGUF's simple types as the integers that products of runtime "llvm" read, without a rounding.

A block of Q8_0, Q4_0 or Q4_1 holds 32 inputs of an output, which is a group of formats int8 and int4. Of a byte of the
last two, the low four bits belong to the first half of the block, the high four to the second. Knows no files.
"""

from __future__ import annotations

import numpy as np

BLOCK = 32  # inputs
Q4_ZERO = 8  # the number of Q4_0 that stands for 0
HALF_BYTES = 2


def groups_of(
    blocks: np.ndarray, stored_type: str, weight_format: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Bytes of blocks [num_outputs, row_bytes] -> numbers, scales and minimums as plugins.row_layouts.store_groups has
    them: [num_inputs, num_outputs], [num_inputs / 32, num_outputs], and likewise for int4 (None for int8).

    int8 takes Q8_0 and Q4_0, int4 takes Q4_0 and Q4_1. Nothing is checked but that: a scale may not be finite.
    """
    num_scales = 2 if stored_type == "Q4_1" else 1
    num_bytes = BLOCK if stored_type == "Q8_0" else BLOCK // 2
    grouped = blocks.reshape(len(blocks), -1, num_scales * HALF_BYTES + num_bytes)  # [out, groups, block bytes]
    halves = np.ascontiguousarray(grouped[..., : num_scales * HALF_BYTES]).view(np.float16)
    stored, scales = grouped[..., num_scales * HALF_BYTES :], halves[..., 0]
    if (stored_type, weight_format) == ("Q8_0", "int8"):
        return _by_inputs(stored.view(np.int8)), scales.T, None
    assert stored_type.startswith("Q4_"), f"{weight_format} does not hold {stored_type}"
    numbers = _by_inputs(np.concatenate([stored & 15, stored >> 4], axis=-1))
    if (stored_type, weight_format) == ("Q4_0", "int8"):
        return numbers.astype(np.int8) - np.int8(Q4_ZERO), scales.T, None
    assert weight_format == "int4", f"{weight_format} does not hold {stored_type}"
    if stored_type == "Q4_1":
        return numbers, scales.T, halves[..., 1].T
    with np.errstate(over="ignore"):  # infinite above 8188, as a power of two changes no half but so
        return numbers, scales.T, (scales * np.float16(-Q4_ZERO)).T


def _by_inputs(numbers: np.ndarray) -> np.ndarray:
    """[num_outputs, groups, BLOCK] -> [num_inputs, num_outputs]."""
    return numbers.reshape(len(numbers), -1).T
