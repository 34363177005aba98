"""The layout of `row_products`' weights in memory, and matrices brought into it, in numpy.

A matrix [num_inputs, num_outputs] is stored in blocks of LANES columns, one behind another; a block holds its rows in
order, LANES numbers each, so that a product reads memory forward. Columns are filled up with zeros, and rows to whole
groups of GROUP_SIZE but for fp32. The integer formats keep a group's rows, then one scale a column and, for int4, one
minimum a column, all halves: a weight is number * scale, or number * scale + minimum. Two rows of int4 and of bf16 lie
side by side, column by column, the even row in the low bits. Knows nothing of kernels or models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

LANES = 16  # columns of a block
GROUP_SIZE = 32  # inputs that share a scale, and that a matrix unit takes at a time
COLUMNS_AT_ONCE = 1024  # whole blocks: who stores a large matrix does it in such parts, which are copied meanwhile


@dataclass(frozen=True)
class Layout:
    """Bits of a number and how many halves a column has in a group: none, a scale, or a scale and a minimum."""

    name: str
    number_bits: int
    dtype: Any  # of numbers; those of int4 are half as long when they are stored
    num_scales: int = 0
    is_paired: bool = False  # two rows lie side by side

    @property
    def row_bytes(self) -> int:
        """Bytes of a block's row."""
        return LANES * self.number_bits // 8

    @property
    def unit_rows(self) -> int:
        """A block is so many rows, and their scales, again and again."""
        return 1 if self.name == "fp32" else GROUP_SIZE

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


def num_blocks(num_outputs: int) -> int:
    return -(-num_outputs // LANES)


def num_groups(num_inputs: int) -> int:
    return -(-num_inputs // GROUP_SIZE)


def stored_bytes(num_inputs: int, num_outputs: int, weight_format: str) -> int:
    layout = LAYOUTS[weight_format]
    return num_blocks(num_outputs) * -(-num_inputs // layout.unit_rows) * layout.unit_bytes


def store_matrix(weight: np.ndarray, weight_format: str) -> np.ndarray:
    """weight [num_inputs, num_outputs] of any float type -> uint8 [stored_bytes].

    Floats are rounded to the nearest, ties to even. Integers are quantised by GROUP_SIZE inputs of a column: int8 from
    -127 to 127 by the largest magnitude, int4 from the least to the largest value. Raises ValueError where a weight or
    a scale is not finite in the format.
    """
    layout = LAYOUTS[weight_format]
    if layout.num_scales:
        return store_groups(*_quantised(weight.astype(np.float32), layout), weight_format)
    return _packed(_finite(weight, layout.dtype, weight_format), (), layout)


def store_groups(
    numbers: np.ndarray,  # [num_inputs, num_outputs] int8 for int8, uint8 of 0 to 15 for int4
    scales: np.ndarray,  # [num_groups, num_outputs] float16
    minimums: np.ndarray | None,  # likewise; None for int8
    weight_format: str,
) -> np.ndarray:
    """Integers that are quantised already, as they are -> uint8 [stored_bytes]."""
    halves = [scales] if minimums is None else [scales, minimums]
    checked = [_finite(each, np.float16, weight_format) for each in halves]
    return _packed(numbers, checked, LAYOUTS[weight_format])


def _packed(numbers: np.ndarray, halves: Any, layout: Layout) -> np.ndarray:
    """numbers [num_inputs, num_outputs], and a [num_groups, num_outputs] of each scale, as they are stored."""
    rows = _in_blocks(numbers, layout.unit_rows)
    if layout.is_paired:
        even, odd = rows[:, 0::2], rows[:, 1::2]
        rows = even | odd << 4 if layout.name == "int4" else np.stack([even, odd], axis=3)
    number_bytes = layout.unit_rows * layout.row_bytes
    stored_rows = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1, number_bytes)
    parts = [stored_rows, *(_in_blocks(each, 1).view(np.uint8) for each in halves)]
    return np.concatenate(parts, axis=2).reshape(-1)


def _in_blocks(numbers: np.ndarray, unit_rows: int) -> np.ndarray:
    """[num_rows, num_columns] -> [num_blocks, whole units of rows, LANES], contiguous, filled up with zeros."""
    num_rows, num_columns = numbers.shape
    whole_rows = -(-num_rows // unit_rows) * unit_rows
    filled = np.zeros((whole_rows, num_blocks(num_columns) * LANES), numbers.dtype)
    filled[:num_rows, :num_columns] = numbers
    return np.ascontiguousarray(filled.reshape(whole_rows, -1, LANES).transpose(1, 0, 2))


def _quantised(weight: np.ndarray, layout: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """weight [num_inputs, num_columns] float32 -> numbers, scales and minimums as of store_groups."""
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
    """Values rounded to dtype. Raises ValueError where one of them is no finite number then."""
    with np.errstate(over="ignore"):
        rounded = values.astype(dtype)
    if not np.isfinite(rounded).all():
        raise ValueError(f"weights are not finite, or too large for {weight_format}: store them as bf16 or fp32")
    return rounded
