"""How the weights of `row_products` lie in memory, and matrices brought into that layout and back, in numpy.

A matrix [num_inputs, num_outputs] is stored in blocks of LANES columns, one behind another; a block holds its rows in
order, LANES numbers each, so that a product reads memory forward. Columns are filled up with zeros, and rows to whole
groups of GROUP_SIZE but for fp32. The integer formats keep a group's rows, then one scale a column and, for int4, one
minimum a column, all halves: a weight is number * scale, or number * scale + minimum. Two rows of int4 and of bf16 lie
side by side, column by column, the even row in the low bits. Knows nothing of kernels or models.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

LANES = 16  # columns of a block
GROUP_SIZE = 32  # inputs that share a scale, and that a matrix unit takes at a time
COLUMNS_AT_ONCE = 1024  # of a matrix that is stored or restored, whole blocks: what is copied meanwhile


@dataclass(frozen=True)
class Layout:
    """Bits of a number and how many halves a column has in a group: none, a scale, or a scale and a minimum."""

    name: str
    number_bits: int
    num_scales: int = 0
    is_paired: bool = False  # two rows lie side by side

    @property
    def row_bytes(self) -> int:
        """Of a block."""
        return LANES * self.number_bits // 8

    @property
    def unit_rows(self) -> int:
        """A block is so many rows, and their scales, again and again."""
        return 1 if self.name == "fp32" else GROUP_SIZE

    @property
    def unit_bytes(self) -> int:
        return self.unit_rows * self.row_bytes + self.num_scales * LANES * 2

    def block_bytes(self, num_inputs: int) -> int:
        return -(-num_inputs // self.unit_rows) * self.unit_bytes


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("fp32", 32),
        Layout("fp16", 16),
        Layout("bf16", 16, is_paired=True),
        Layout("int8", 8, 1),
        Layout("int4", 4, 2, is_paired=True),
    )
}
FORMATS: tuple[str, ...] = tuple(LAYOUTS)
FLOATS = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


def num_blocks(num_outputs: int) -> int:
    return -(-num_outputs // LANES)


def num_groups(num_inputs: int) -> int:
    return -(-num_inputs // GROUP_SIZE)


def stored_bytes(num_inputs: int, num_outputs: int, weight_format: str) -> int:
    return num_blocks(num_outputs) * LAYOUTS[weight_format].block_bytes(num_inputs)


def store_matrix(weight: np.ndarray, weight_format: str) -> np.ndarray:
    """weight [num_inputs, num_outputs] of any float type -> uint8 [stored_bytes].

    Floats are rounded to the nearest, ties to even. Integers are quantised by GROUP_SIZE inputs of a column: int8 from
    -127 to 127 by the largest magnitude, int4 from the least to the largest value. Raises ValueError where a weight or
    a scale is not finite in the format.
    """
    num_inputs, num_outputs = weight.shape
    stored = np.zeros(stored_bytes(num_inputs, num_outputs, weight_format), np.uint8)
    for first in range(0, num_outputs, COLUMNS_AT_ONCE):
        part = weight[:, first : first + COLUMNS_AT_ONCE]
        blocks = blocks_of(stored, num_inputs, weight_format, first, part.shape[1])
        if weight_format in FLOATS:
            with np.errstate(over="ignore"):
                numbers = part.astype(FLOATS[weight_format])
            refuse_infinite(numbers, weight_format)
            blocks[...] = in_rows(numbers, LAYOUTS[weight_format]).reshape(len(blocks), -1).view(np.uint8)
        else:
            quantise = quantise_int8 if weight_format == "int8" else quantise_int4
            write_groups(blocks, *quantise(part.astype(np.float32)), weight_format)
    return stored


def store_groups(
    numbers: np.ndarray,  # [num_inputs, num_outputs] int8 for int8, uint8 of 0 to 15 for int4
    scales: np.ndarray,  # [num_inputs // 32, num_outputs] float16
    minimums: np.ndarray | None,  # likewise; None for int8
    weight_format: str,
) -> np.ndarray:
    """Integers that are quantised already, as they are -> uint8 [stored_bytes]. num_inputs is a multiple of 32."""
    num_inputs, num_outputs = numbers.shape
    if num_inputs % GROUP_SIZE:
        raise ValueError(f"{num_inputs} inputs are no multiple of {GROUP_SIZE}, which share a scale")
    if (minimums is None) != (weight_format == "int8"):
        raise ValueError("int4 has minimums and int8 has none")
    refuse_infinite(scales, weight_format)
    if minimums is not None:
        refuse_infinite(minimums, weight_format)
    stored = np.zeros(stored_bytes(num_inputs, num_outputs, weight_format), np.uint8)
    for first in range(0, num_outputs, COLUMNS_AT_ONCE):
        columns = slice(first, first + COLUMNS_AT_ONCE)
        blocks = blocks_of(stored, num_inputs, weight_format, first, numbers[:, columns].shape[1])
        lows = None if minimums is None else minimums[:, columns]
        write_groups(blocks, numbers[:, columns], scales[:, columns], lows, weight_format)
    return stored


def restore_matrix(stored: np.ndarray, num_inputs: int, num_outputs: int, weight_format: str) -> np.ndarray:
    """uint8 [stored_bytes] -> [num_inputs, num_outputs] float32: the weights of the kernels.

    They are exact but for int4, where number * scale + minimum is rounded here and not in a product.
    """
    weight = np.empty((num_inputs, num_outputs), np.float32)
    for first in range(0, num_outputs, COLUMNS_AT_ONCE):
        part = weight[:, first : first + COLUMNS_AT_ONCE]
        blocks = blocks_of(stored, num_inputs, weight_format, first, part.shape[1])
        if weight_format in FLOATS:
            rows = out_of_rows(np.ascontiguousarray(blocks).view(FLOATS[weight_format]), LAYOUTS[weight_format])
        else:
            rows = read_groups(blocks, weight_format)
        rows = rows.transpose(1, 0, 2).reshape(rows.shape[1], -1)
        part[...] = rows[:num_inputs, : part.shape[1]]
    return weight


def blocks_of(stored: np.ndarray, num_inputs: int, weight_format: str, first: int, num_columns: int) -> np.ndarray:
    """The blocks [n, block bytes] that hold num_columns columns from `first` on."""
    blocks = stored.reshape(-1, LAYOUTS[weight_format].block_bytes(num_inputs))
    return blocks[first // LANES : first // LANES + num_blocks(num_columns)]


def in_rows(numbers: np.ndarray, layout: Layout) -> np.ndarray:
    """[num_inputs, num_columns] of a format without scales -> [num_blocks, numbers of a block], as they are stored."""
    filled = np.zeros((-(-len(numbers) // layout.unit_rows) * layout.unit_rows, numbers.shape[1]), numbers.dtype)
    filled[: len(numbers)] = numbers
    rows = in_blocks(filled)
    if not layout.is_paired:
        return rows
    return np.ascontiguousarray(rows.reshape(len(rows), -1, 2, LANES).swapaxes(2, 3))


def out_of_rows(stored: np.ndarray, layout: Layout) -> np.ndarray:
    """Undoes in_rows, but for what was filled up: [num_blocks, rows, LANES]."""
    if not layout.is_paired:
        return stored.reshape(len(stored), -1, LANES)
    return stored.reshape(len(stored), -1, LANES, 2).swapaxes(2, 3).reshape(len(stored), -1, LANES)


def in_blocks(numbers: np.ndarray) -> np.ndarray:
    """[num_rows, num_columns] -> [num_blocks, num_rows, LANES], contiguous, columns filled up with zeros."""
    num_rows, num_columns = numbers.shape
    filled = np.zeros((num_rows, num_blocks(num_columns) * LANES), numbers.dtype)
    filled[:, :num_columns] = numbers
    return np.ascontiguousarray(filled.reshape(num_rows, -1, LANES).transpose(1, 0, 2))


def write_groups(blocks, numbers, scales, minimums, weight_format: str) -> None:
    """Blocks [n, block bytes] of numbers [num_inputs, num_columns] and scales [num_groups, num_columns]."""
    layout = LAYOUTS[weight_format]
    filled = np.zeros((num_groups(len(numbers)) * GROUP_SIZE, numbers.shape[1]), numbers.dtype)
    filled[: len(numbers)] = numbers
    rows = in_blocks(filled).view(np.uint8)
    if weight_format == "int4":
        rows = rows[:, 0::2] | rows[:, 1::2] << 4
    groups = blocks.reshape(len(blocks), -1, layout.unit_bytes)
    number_bytes = GROUP_SIZE * layout.row_bytes
    groups[:, :, :number_bytes] = rows.reshape(*groups.shape[:2], number_bytes)
    halves = groups[:, :, number_bytes:].view(np.float16)
    halves[:, :, :LANES] = in_blocks(scales)
    if minimums is not None:
        halves[:, :, LANES:] = in_blocks(minimums)


def read_groups(blocks, weight_format: str) -> np.ndarray:
    """Weights [n, rows, LANES] float32 of blocks [n, block bytes]."""
    layout = LAYOUTS[weight_format]
    groups = blocks.reshape(len(blocks), -1, layout.unit_bytes)
    number_bytes = GROUP_SIZE * layout.row_bytes
    stored = groups[:, :, :number_bytes].reshape(*groups.shape[:2], -1, LANES)
    halves = np.ascontiguousarray(groups[:, :, number_bytes:]).view(np.float16).astype(np.float32)
    if weight_format == "int8":
        rows = stored.view(np.int8).astype(np.float32) * halves[:, :, None]
    else:
        numbers = np.stack([stored & 15, stored >> 4], axis=3).reshape(*groups.shape[:2], GROUP_SIZE, LANES)
        rows = numbers.astype(np.float32) * halves[:, :, None, :LANES] + halves[:, :, None, LANES:]
    return rows.reshape(len(blocks), -1, LANES)


def quantise_int8(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
    """weight [num_inputs, num_columns] float32 -> int8 numbers, float16 scales of the groups, no minimums."""
    groups = in_groups(weight)
    scales = halves(np.abs(groups).max(axis=1) / 127, "int8")
    numbers = np.clip(divide(groups, scales), -127, 127)
    return numbers.astype(np.int8).reshape(-1, weight.shape[1])[: len(weight)], scales, None


def quantise_int4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """weight [num_inputs, num_columns] float32 -> uint8 numbers of 0 to 15, float16 scales and minimums."""
    groups = in_groups(weight)
    minimums = halves(groups.min(axis=1), "int4")
    scales = halves((groups.max(axis=1) - minimums) / 15, "int4")
    numbers = np.clip(divide(groups - minimums[:, None], scales), 0, 15)
    return numbers.astype(np.uint8).reshape(-1, weight.shape[1])[: len(weight)], scales, minimums


def in_groups(weight: np.ndarray) -> np.ndarray:
    """[num_inputs, num_columns] -> [num_groups, GROUP_SIZE, num_columns]; the last input is repeated to fill up."""
    missing = -len(weight) % GROUP_SIZE
    filled = np.concatenate([weight, np.repeat(weight[-1:], missing, axis=0)]) if missing else weight
    return filled.reshape(-1, GROUP_SIZE, weight.shape[1])


def divide(groups: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Whole numbers nearest to groups / scales; 0 where the scale is 0."""
    steps = scales.astype(np.float32)[:, None]
    return np.rint(np.divide(groups, steps, out=np.zeros_like(groups), where=steps > 0))


def halves(values: np.ndarray, weight_format: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16)
    refuse_infinite(rounded, weight_format)
    return rounded


def refuse_infinite(numbers: np.ndarray, weight_format: str) -> None:
    if not np.isfinite(numbers).all():
        raise ValueError(f"weights are not finite, or too large for {weight_format}: store them as bf16 or fp32")
