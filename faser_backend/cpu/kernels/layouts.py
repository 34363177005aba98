"""Layouts of the weights that `products` reads, and numpy functions that store matrices in them.

A matrix [num_inputs, num_outputs] is stored in blocks of LANES columns, one after another. A block holds its rows in
order, LANES numbers each, so a product reads memory forward. Columns are padded with zeros, and rows to whole groups of
GROUP_SIZE (except fp32). Integer formats store a group's rows, then one scale per column and, for int4, one minimum per
column, all halves: a weight is number * scale (+ minimum). Pairs of rows of int4 and bf16 are interleaved by column,
the even row in the low bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

LANES = 16  # columns of a block, and floats of a vector; a narrower CPU splits it, with the same result
GROUP_SIZE = 32  # inputs that share a scale, and that a matrix unit takes at a time
COLUMNS_AT_ONCE = 1024  # whole blocks; a large matrix is stored in such parts, so that copies stay small


@dataclass(frozen=True)
class Layout:
    """A storage format of weights; num_scales counts a group's halves per column: a scale, for int4 also a minimum."""

    name: str
    number_bits: int
    dtype: Any  # of numbers; those of int4 are half as long when they are stored
    num_scales: int = 0
    is_paired: bool = False  # pairs of rows are interleaved
    num_parts: int = 2  # bfloat16 numbers that an input is split into where products need bfloat16; 0: inputs stay
    is_widened: bool = False  # a copy with the numbers as float32

    @property
    def title(self) -> str:
        """Returns a name that compiled functions carry."""
        return f"{self.name}_x{self.num_parts}{'_wide' * self.is_widened}"

    @property
    def row_bytes(self) -> int:
        """Returns the bytes of a block's row."""
        return LANES * self.number_bits // 8

    @property
    def unit_rows(self) -> int:
        """Returns the rows of a unit; a block is a sequence of units, each some rows and their scales."""
        return 1 if self.name == "fp32" or not self.num_parts else GROUP_SIZE

    @property
    def unit_bytes(self) -> int:
        return self.unit_rows * self.row_bytes + self.num_scales * LANES * 2


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("fp32", 32, np.float32),
        Layout("fp16", 16, np.float16),
        Layout("bf16", 16, ml_dtypes.bfloat16, is_paired=True),
        Layout("int8", 8, np.int8, num_scales=1),
        Layout("int4", 4, np.uint8, num_scales=2, is_paired=True),
    )
}
FORMATS: tuple[str, ...] = tuple(LAYOUTS)
HALVES = Layout("fp16", 16, np.float16, num_parts=0)  # of adapters: a few rows of any length, which are not packed


def num_blocks(num_outputs: int) -> int:
    return -(-num_outputs // LANES)


def num_groups(num_inputs: int) -> int:
    return -(-num_inputs // GROUP_SIZE)


def stored_bytes(num_inputs: int, num_outputs: int, weight_format: str) -> int:
    layout = LAYOUTS[weight_format]
    return num_blocks(num_outputs) * -(-num_inputs // layout.unit_rows) * layout.unit_bytes


def store_matrix(weight: np.ndarray, weight_format: str) -> np.ndarray:
    """Stores weight [num_inputs, num_outputs] of any float type; returns uint8 [stored_bytes].

    Floats are rounded to nearest, ties to even. Integers are quantised by GROUP_SIZE inputs of a column: int8 from
    -127 to 127 by the largest magnitude, int4 from the least to the largest value. Raises ValueError if a weight or a
    scale is not finite in the format.
    """
    layout = LAYOUTS[weight_format]
    if layout.num_scales:
        return store_groups(*_quantised(weight.astype(np.float32), layout), weight_format)
    return _packed(_finite(weight, layout.dtype, weight_format), (), layout)


def store_groups(
    numbers: np.ndarray,  # [num_inputs, num_outputs] int8 for int8, uint8 of 0 to 15 for int4
    scales: np.ndarray,  # [num_groups, num_outputs] float16
    minimums: np.ndarray | None,  # the same shape; None for int8
    weight_format: str,
) -> np.ndarray:
    """Stores integers that are quantised already; returns uint8 [stored_bytes]."""
    halves = [scales] if minimums is None else [scales, minimums]
    checked = [_finite(each, np.float16, weight_format) for each in halves]
    return _packed(numbers, checked, LAYOUTS[weight_format])


def store_halves(matrix: np.ndarray) -> np.ndarray:
    """Stores matrix [num_inputs, num_outputs] float16 as HALVES."""
    return _packed(matrix, (), HALVES)


def _packed(numbers: np.ndarray, halves: Any, layout: Layout) -> np.ndarray:
    """Packs numbers [num_inputs, num_outputs] and scales [num_groups, num_outputs] each."""
    rows = _in_blocks(numbers, layout.unit_rows)
    if layout.is_paired:
        even, odd = rows[:, 0::2], rows[:, 1::2]
        rows = even | odd << 4 if layout.name == "int4" else np.stack([even, odd], axis=3)
    number_bytes = layout.unit_rows * layout.row_bytes
    stored_rows = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1, number_bytes)
    parts = [stored_rows, *(_in_blocks(each, 1).view(np.uint8) for each in halves)]
    return np.concatenate(parts, axis=2).reshape(-1)


def _in_blocks(numbers: np.ndarray, unit_rows: int) -> np.ndarray:
    """Reorders [num_rows, num_columns] to [num_blocks, whole units of rows, LANES], contiguous, padded with zeros."""
    num_rows, num_columns = numbers.shape
    whole_rows = -(-num_rows // unit_rows) * unit_rows
    filled = np.zeros((whole_rows, num_blocks(num_columns) * LANES), numbers.dtype)
    filled[:num_rows, :num_columns] = numbers
    return np.ascontiguousarray(filled.reshape(whole_rows, -1, LANES).transpose(1, 0, 2))


def _quantised(weight: np.ndarray, layout: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Quantises weight [num_inputs, num_columns] float32; returns the arguments of store_groups."""
    num_inputs, num_columns = weight.shape
    last = np.repeat(weight[-1:], -num_inputs % GROUP_SIZE, axis=0)  # changes no group's bounds
    groups = np.concatenate([weight, last]).reshape(-1, GROUP_SIZE, num_columns)
    if layout.num_scales == 1:
        minimums, bounds = None, (-127, 127)
        scales = _finite(np.abs(groups).max(axis=1) / 127, np.float16, layout.name)
    else:
        minimums, bounds = _finite(groups.min(axis=1), np.float16, layout.name), (0, 15)
        scales = _finite((groups.max(axis=1) - minimums) / 15, np.float16, layout.name)
        groups -= minimums[:, None]
    steps = scales.astype(np.float32)[:, None]
    numbers = np.rint(np.divide(groups, steps, out=np.zeros_like(groups), where=steps > 0))  # 0 where the scale is 0
    return np.clip(numbers, *bounds).astype(layout.dtype).reshape(-1, num_columns)[:num_inputs], scales, minimums


def _finite(values: np.ndarray, dtype: Any, weight_format: str) -> np.ndarray:
    """Rounds values to dtype. Raises ValueError if a result is not finite."""
    with np.errstate(over="ignore"):
        rounded = values.astype(dtype)
    if not np.isfinite(rounded).all():
        raise ValueError(f"weights are not finite, or too large for {weight_format}: store them as bf16 or fp32")
    return rounded
