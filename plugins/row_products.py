# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""Products of packed rows and a big matrix on a CPU, compiled by numba: weights as stored, sums in float32.

Weights are widened in registers, and the rows of a tile share one pass over them; many rows go tile by tile over a
strip of blocks while it is in the cache. `row_layouts` says how weights are stored, `row_vectors` holds the tiles, and
`row_unit_tiles` those of a CPU with matrix units, which have bits of their own.
Knows nothing of threads, models or engines: callers share out ranges of blocks.

The bits of a result depend on its row and its column alone, not on the other rows, the range of blocks or the tile: a
lane adds up k = 0, 1, 2, ... by fused multiply-adds. Of the integer formats it adds up a group that way and then
scale * that sum to its total, then, for int4, minimum * the sum of the group's inputs.

The functions are called from compiled code, format_code being a constant there (an index into FORMATS): each format is
compiled when it is called for. Nothing is checked: shapes and offsets that do not fit touch foreign memory.
"""

from __future__ import annotations

from typing import Any

from numba.extending import overload

from plugins.host_compile import WITHIN_KERNELS
from plugins.row_layouts import (
    COLUMNS_AT_ONCE,
    FORMATS,
    GROUP_SIZE,
    LANES,
    LAYOUTS,
    num_blocks,
    restore_matrix,
    store_groups,
    store_matrix,
    stored_bytes,
)
from plugins.row_tiles import most_rows, multiply_blocks, prepare_rows, prepared_size, strip_bytes, weight_at

__all__ = [
    "COLUMNS_AT_ONCE",
    "FORMATS",
    "GROUP_SIZE",
    "LANES",
    "multiply_rows",
    "num_blocks",
    "read_column",
    "restore_matrix",
    "score_columns",
    "scratch_size",
    "store_groups",
    "store_matrix",
    "stored_bytes",
]

FLOAT_BYTES = 4
INLINED: Any = {**WITHIN_KERNELS, "forceinline": True}


def scratch_size(num_inputs: int) -> int:
    """Numbers of `scratch`: what is prepared of a tile's rows, and a block's products. What is enough for some
    num_inputs is so for fewer."""
    return LANES + prepared_size(num_inputs)


def multiply_rows(
    format_code: int,
    y,  # [at least num_rows, num_outputs] float32
    x,  # [at least num_rows, num_inputs] float32
    weights,  # [bytes] uint8
    offset: int,  # of the matrix, bytes into weights; a multiple of 64
    num_inputs: int,
    num_outputs: int,
    first_block: int,
    last_block: int,  # exclusive
    num_rows: int,
    adds: bool,
    scratch,  # [scratch_size(num_inputs)] float32, the calling thread's own
) -> None:
    """y[:num_rows] = x[:num_rows] @ W in the columns of these blocks; where it adds, += the finished sums."""
    raise NotImplementedError


def read_column(format_code: int, out, weights, offset: int, num_inputs: int, num_outputs: int, column: int) -> None:
    """out[:num_inputs] = W[:, column], as restore_matrix gives it: an embedding where the head is tied to it."""
    raise NotImplementedError


def score_columns(
    format_code: int,
    scores,  # [num_candidates] float32
    x_row,  # [num_inputs] float32
    weights,
    offset: int,
    num_inputs: int,
    num_outputs: int,
    candidates,  # [num_candidates] columns
    scratch,  # as of multiply_rows
) -> None:
    """scores[c] = x_row @ W[:, candidates[c]], with the bits of multiply_rows."""
    raise NotImplementedError


@overload(multiply_rows, prefer_literal=True, jit_options=INLINED)
def _multiply_rows(
    format_code, y, x, weights, offset, num_inputs, num_outputs, first_block, last_block, num_rows, adds, scratch
):
    code = format_code.literal_value
    layout = LAYOUTS[FORMATS[code]]
    unit_rows, unit_bytes = layout.unit_rows, layout.unit_bytes
    tile_rows, most_strip_bytes = most_rows(layout), strip_bytes(layout)

    def multiply(
        format_code, y, x, weights, offset, num_inputs, num_outputs, first_block, last_block, num_rows, adds, scratch
    ):
        block_bytes = (num_inputs + unit_rows - 1) // unit_rows * unit_bytes
        stored, results = weights.ctypes.data + offset, y.ctypes.data
        inputs, prepared = x.ctypes.data, scratch.ctypes.data
        num_tiles = (num_rows + tile_rows - 1) // tile_rows
        strip_blocks = max(most_strip_bytes // block_bytes if num_tiles > 1 else last_block - first_block, 1)
        for first in range(first_block, last_block, strip_blocks):
            for tile in range(num_tiles):
                row, end = tile * tile_rows, min((tile + 1) * tile_rows, num_rows)
                x_rows = inputs + row * num_inputs * FLOAT_BYTES
                prepare_rows(code, prepared, x_rows, num_inputs, num_inputs, end - row)  # pyright: ignore[reportCallIssue]
                multiply_blocks(  # pyright: ignore[reportCallIssue]
                    code, results + (row * num_outputs + first * LANES) * FLOAT_BYTES, num_outputs, x_rows, num_inputs,
                    stored + first * block_bytes, num_inputs, num_outputs - first * LANES,
                    min(strip_blocks, last_block - first), end - row, adds, prepared,
                )  # fmt: skip

    return multiply


@overload(read_column, prefer_literal=True, jit_options=INLINED)
def _read_column(format_code, out, weights, offset, num_inputs, num_outputs, column):
    code = format_code.literal_value
    unit_rows, unit_bytes = LAYOUTS[FORMATS[code]].unit_rows, LAYOUTS[FORMATS[code]].unit_bytes

    def read(format_code, out, weights, offset, num_inputs, num_outputs, column):
        block_bytes = (num_inputs + unit_rows - 1) // unit_rows * unit_bytes
        block = weights.ctypes.data + offset + column // LANES * block_bytes
        for k in range(num_inputs):
            out[k] = weight_at(code, block, k, column % LANES)  # pyright: ignore[reportCallIssue]

    return read


@overload(score_columns, prefer_literal=True, jit_options=INLINED)
def _score_columns(format_code, scores, x_row, weights, offset, num_inputs, num_outputs, candidates, scratch):
    code = format_code.literal_value
    unit_rows, unit_bytes = LAYOUTS[FORMATS[code]].unit_rows, LAYOUTS[FORMATS[code]].unit_bytes

    def score(format_code, scores, x_row, weights, offset, num_inputs, num_outputs, candidates, scratch):
        block_bytes = (num_inputs + unit_rows - 1) // unit_rows * unit_bytes
        stored, inputs = weights.ctypes.data + offset, x_row.ctypes.data
        products, prepared = scratch.ctypes.data, scratch.ctypes.data + LANES * FLOAT_BYTES
        prepare_rows(code, prepared, inputs, num_inputs, num_inputs, 1)  # pyright: ignore[reportCallIssue]
        held = -1  # the block whose products these are: columns of a block are one tile
        for c in range(candidates.shape[0]):
            block, lane = candidates[c] // LANES, candidates[c] % LANES
            if block != held:
                multiply_blocks(  # pyright: ignore[reportCallIssue]
                    code, products, LANES, inputs, num_inputs, stored + block * block_bytes, num_inputs, LANES, 1, 1,
                    False, prepared,
                )  # fmt: skip
                held = block
            scores[c] = scratch[lane]

    return score
