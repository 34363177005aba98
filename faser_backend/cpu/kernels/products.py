# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""Products of packed rows and a weight matrix on a CPU, compiled by numba: weights as stored, sums in float32.

Weights are widened in registers, and the rows of a tile share one pass over them. Many rows go tile by tile over a
strip of blocks in the cache, which the first may widen. `pack` prepares rows once for all matrices that read them.
`layouts` defines how weights are stored. `vector_products` and, on a CPU with matrix units, `matrix_units` emit the
tiles. Threads share a matrix's blocks of columns, without a barrier.

A result's bits depend on its row and column alone, not on other rows, the range of blocks or the tile. A lane sums
k = 0, 1, 2, ... by fused multiply-adds from +0; k = 1, 0, 3, 2, ... where pairs of bfloat16 are multiplied. For an
integer format it sums a group that way, or its words exactly, then adds scale * that sum to its total and, for int4,
minimum * the sum of the group's inputs.

Products of bfloat16 read denormal numbers, and round denormal sums, as 0; others keep them. Infinities and NaN follow
IEEE 754: an infinite input times a weight of 0 is NaN, and an input that bfloat16 cannot hold becomes infinite.

`code` (see code_of) is a constant of the calling kernel, so only the formats in use are compiled. Vector code
becomes functions of the compiled module, once each; as numba functions they would be compiled again for each caller.
Nothing is checked: shapes and offsets that do not fit access foreign memory.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic
from numba.misc.special import literally

from faser_backend.core.model import COMPUTES, TWO_PARTS
from faser_backend.cpu.kernels import matrix_units, vector_products
from faser_backend.cpu.kernels.compilation import WITHIN_KERNELS, Kernel, compile_kernel, f32
from faser_backend.cpu.kernels.layouts import FORMATS, GROUP_SIZE, HALVES, LANES, LAYOUTS, num_groups
from faser_backend.cpu.kernels.matrix_units import FLOAT_BYTES
from faser_backend.cpu.kernels.rows import inlined
from faser_backend.cpu.kernels.vector_products import AHEAD_BYTES, BYTES, DOT_BLOCKS, FIRST_ROWS, numbers, scale
from faser_backend.cpu.kernels.vectors import FLOATS, INT32, INT64, multiply_add

STORED = numba.types.Array(numba.uint8, 1, "C", readonly=True)  # a weight file
# Typed, so that `multiply` is compiled for all such values at once and not for each of them.
NO_BIAS, REPLACES, ADDS = np.int64(-1), np.bool_(False), np.bool_(True)
# By code; in arrays, as numba would compile a function to index each tuple. Tiles: rows of x that pass over a matrix
# together. Strips: bytes of weights that stay in the second-level cache while many rows pass over them. Group floats:
# what a row's group takes when it is packed.
_LAYOUTS = (
    *(replace(each, num_parts=len(COMPUTES) - index) for index in range(len(COMPUTES)) for each in LAYOUTS.values()),
    HALVES,
)
HALVES_CODE = len(_LAYOUTS) - 1
_VECTOR_CODE = tuple(matrix_units if matrix_units.takes(layout) else vector_products for layout in _LAYOUTS)
UNIT_ROWS, UNIT_BYTES = (np.array([getattr(each, name) for each in _LAYOUTS]) for name in ("unit_rows", "unit_bytes"))
TILE_ROWS, STRIP_BYTES = (np.array([getattr(of, name) for of in _VECTOR_CODE]) for name in ("TILE_ROWS", "STRIP_BYTES"))
GROUP_FLOATS = np.array([of.group_floats(layout) for of, layout in zip(_VECTOR_CODE, _LAYOUTS, strict=True)])
# By code, the bytes of a unit in a strip; see vector_products.widened.
_CACHED_BYTES = np.array([
    (vector_products.widened(layout) if of is vector_products else layout).unit_bytes
    for of, layout in zip(_VECTOR_CODE, _LAYOUTS, strict=True)
])  # fmt: skip
# By code, floats between packed rows. Without, any number of rows makes a tile, so that tiles are alike.
PADDING = LANES * (GROUP_FLOATS > 1)
# Codes whose products VDPBF16PS computes; attention then multiplies so too.
DOT_CODES = [i for i, of in enumerate(_VECTOR_CODE) if of is vector_products and vector_products.has_dots(_LAYOUTS[i])]
# Blocks of a strip that are multiplied at once; matrix units hold the sums of two, too.
SIDE_BY_SIDE = np.where([of is matrix_units or i in DOT_CODES for i, of in enumerate(_VECTOR_CODE)], DOT_BLOCKS, 1)
i64 = types.int64


def code_of(weight_format: str, compute: str = TWO_PARTS) -> int:
    """Returns the code of products of this format (one of FORMATS) with this arithmetic (one of COMPUTES)."""
    return COMPUTES.index(compute) * len(FORMATS) + FORMATS.index(weight_format)


@lru_cache(256)
def packed_size(num_inputs: int, num_rows: int) -> int:
    """Returns the floats that `pack` writes for so many rows, at most, with any code."""
    return max(
        -(-num_rows // rows) * rows * (num_groups(num_inputs) * floats + padding)
        for rows, floats, padding in zip(TILE_ROWS, GROUP_FLOATS, PADDING, strict=True)
    )


def scratch_size(num_inputs: int) -> int:
    """Returns the floats of `scratch`, enough for any code and for fewer inputs too.

    It holds one block's products, the work space of matrix units or a widened strip, and a packed row.
    """
    strip = max(vector_products.STRIP_BYTES, num_groups(num_inputs) * max(_CACHED_BYTES)) // FLOAT_BYTES
    work = max(strip, matrix_units.work_floats() * matrix_units.has_matrix_units())
    return LANES + work + packed_size(num_inputs, 1)


@inlined
def tile_floats(code, num_inputs):
    """Returns the floats of a packed tile of rows."""
    return TILE_ROWS[code] * (-(-num_inputs // GROUP_SIZE) * GROUP_FLOATS[code] + PADDING[code])


@numba.njit(**WITHIN_KERNELS)
def pack(code, packed, rows, first, last):
    """Packs rows first .. last - 1, first a multiple of TILE_ROWS, into packed [packed_size(num_inputs, num_rows)]."""
    code = literally(code)
    num_inputs, tile_rows = rows.shape[1], TILE_ROWS[code]
    for row in range(first, last, tile_rows):
        target = packed.ctypes.data + row // tile_rows * tile_floats(code, num_inputs) * FLOAT_BYTES
        source = rows.ctypes.data + row * num_inputs * FLOAT_BYTES
        num_rows = min(tile_rows, last - row)
        prepare_rows(code, target, source, num_inputs, num_inputs, num_rows)  # pyright: ignore[reportCallIssue]


@inlined
def share_of(num_columns, thread, num_threads):
    """Returns the blocks of columns [first, last) that this thread computes."""
    num_blocks = -(-num_columns // LANES)
    return num_blocks * thread // num_threads, num_blocks * (thread + 1) // num_threads


@numba.njit(**WITHIN_KERNELS)
def multiply(code, out, rows, packed, offset, bias_offset, adds, num_rows, crew, file):
    """Computes a thread's columns of out = (or +=) rows @ matrix + bias, for the first num_rows rows, packed by `pack`.

    crew: the thread's index and the number of threads. file: weights, vectors and the thread's scratch. `offset` counts
    bytes of weights up to the matrix, `bias_offset` floats of vectors up to the bias; -1 means no bias.
    """
    code = literally(code)
    weights, vectors, scratch = file
    first, last = share_of(out.shape[1], crew[0], crew[1])
    multiply_rows(code, out, rows, packed, weights, offset, first, last, num_rows, adds, scratch)
    if bias_offset >= 0:
        for row in range(num_rows):
            for column in range(first * LANES, min(last * LANES, out.shape[1])):
                out[row, column] += vectors[bias_offset + column]


@numba.njit(forceinline=True, **WITHIN_KERNELS)
def multiply_rows(
    code,
    y,  # [at least num_rows, num_outputs] float32
    x,  # [at least num_rows, num_inputs] float32
    packed,  # the rows as `pack` makes them
    weights,  # [bytes] uint8
    offset,  # of the matrix, bytes into weights; a multiple of 64
    first_block,
    last_block,  # exclusive
    num_rows,
    adds,
    scratch,  # [scratch_size(num_inputs)] float32, the calling thread's own
):
    """Computes y[:num_rows] = (or, if `adds`, +=) x[:num_rows] @ W in the columns of these blocks."""
    code = literally(code)
    num_inputs, num_outputs, tile_rows = x.shape[1], y.shape[1], TILE_ROWS[code]
    num_units = -(-num_inputs // UNIT_ROWS[code])
    block_bytes, cached_bytes = num_units * UNIT_BYTES[code], num_units * _CACHED_BYTES[code]
    stored, results, work = weights.ctypes.data + offset, y.ctypes.data, scratch.ctypes.data + LANES * FLOAT_BYTES
    packed_floats, first_rows = tile_floats(code, num_inputs) // tile_rows, tile_rows
    if PADDING[code] == 0 and num_rows > tile_rows:
        first_rows, others = FIRST_ROWS, num_rows - FIRST_ROWS
        tile_rows = -(-others // -(-others // tile_rows))
    num_tiles = 1 + -(-max(num_rows - first_rows, 0) // tile_rows)
    side = SIDE_BY_SIDE[code]
    strip_blocks = STRIP_BYTES[code] // (side * cached_bytes) * side if num_tiles > 1 else last_block - first_block
    strip_blocks = max(strip_blocks, side)
    strip_bytes, spread = strip_blocks * block_bytes, min(num_tiles // 2, 2)
    for first in range(first_block, last_block, strip_blocks):
        for tile in range(num_tiles):
            row = first_rows + (tile - 1) * tile_rows if tile else 0
            end = min(first_rows + tile * tile_rows, num_rows)
            # The first tiles of a strip each ask for a part of the next one, so that memory is read all the time.
            ahead = stored + first * block_bytes
            if num_tiles == 1:
                ahead += AHEAD_BYTES
            elif tile < 1 << spread:
                ahead += strip_bytes + (tile * strip_bytes >> spread)
            multiply_blocks(  # pyright: ignore[reportCallIssue]
                code, results + (row * num_outputs + first * LANES) * FLOAT_BYTES, num_outputs,
                x.ctypes.data + row * num_inputs * FLOAT_BYTES, num_inputs, stored + first * block_bytes,
                num_inputs, num_outputs - first * LANES, min(strip_blocks, last_block - first), end - row, adds,
                packed.ctypes.data + row * packed_floats * FLOAT_BYTES, work, ahead, spread, tile,
            )  # fmt: skip


@numba.njit(forceinline=True, **WITHIN_KERNELS)
def read_column(code, out, weights, offset, column):
    """Reads out [num_inputs] = W[:, column]: a token's embedding."""
    code = literally(code)
    block_bytes = -(-out.size // UNIT_ROWS[code]) * UNIT_BYTES[code]
    block = weights.ctypes.data + offset + column // LANES * block_bytes
    for k in range(out.size):
        out[k] = weight_at(code, block, k, column % LANES)  # pyright: ignore[reportCallIssue]


@numba.njit(forceinline=True, **WITHIN_KERNELS)
def score_columns(code, scores, row, weights, offset, candidates, scratch):
    """Computes scores[c] = row [1, num_inputs] @ W[:, candidates[c]], with the bits of multiply_rows."""
    code = literally(code)
    block_bytes = -(-row.shape[1] // UNIT_ROWS[code]) * UNIT_BYTES[code]
    products, packed = scratch[:LANES].reshape(1, LANES), scratch[scratch.size - tile_floats(code, row.shape[1]) :]
    first, last = np.int64(0), np.int64(1)  # typed, as NO_BIAS is
    pack(code, packed, row, first, last)
    held = -1  # the block whose products `scratch` holds
    for c in range(candidates.shape[0]):
        block, lane = candidates[c] // LANES, candidates[c] % LANES
        if block != held:
            start = offset + block * block_bytes
            multiply_rows(code, products, row, packed, weights, start, first, last, last, REPLACES, scratch)
            held = block
        scores[c] = products[0, lane]


@cache
def product_kernel(code: int) -> Kernel:
    """Returns a kernel that computes out = rows @ matrix; code: see code_of.

    It is compiled once per CPU and stored on disk. Every thread of a call runs it. Nothing is checked.
    """
    signature = numba.void(numba.int64, numba.int64, f32[2], f32[2], f32[1], STORED, numba.int64, f32[1])

    def kernel(
        thread,
        num_threads,
        out,  # [T, num_outputs]
        rows,  # [T, num_inputs]
        packed,  # [packed_size(num_inputs, T)]: this thread's own
        weights,
        offset,  # of the matrix, bytes into weights
        scratch,  # [scratch_size(num_inputs)]: this thread's own
    ):
        crew, file = (thread, num_threads), (weights, scratch, scratch)
        pack(code, packed, rows, 0, rows.shape[0])
        multiply(code, out, rows, packed, offset, NO_BIAS, REPLACES, rows.shape[0], crew, file)

    return compile_kernel(kernel, signature)


# Vector code as functions of compiled code. Arrays are passed as addresses (int64); the caller keeps them alive.


@intrinsic(prefer_literal=True)
def multiply_blocks(
    _typing, code, y, y_stride, x, x_stride, weights, num_inputs, num_columns, num_blocks, num_rows, adds, packed,
    work, ahead, spread, index,
):  # fmt: skip
    """Computes y[:num_rows] = (or +=) x[:num_rows] @ the num_blocks blocks at `weights`, for up to TILE_ROWS rows.

    y: address of the first row's first block. Strides are in floats. num_columns: from there to the end of y's row.
    packed: what prepare_rows made of these rows. work: of matrix units, or the widened strip, which tile `index` 0
    writes. From `ahead` on, memory is asked for what is read later, a byte for 2 ** spread bytes that are read.
    """
    code_value = code.literal_value

    def emit(context, builder, _signature, arguments):
        _, y, y_stride, x, x_stride, weights, *sizes, adds, packed, work, ahead, spread, index = arguments
        y, x, packed = (builder.inttoptr(address, FLOATS) for address in (y, x, packed))
        weights, work, ahead = (builder.inttoptr(address, BYTES) for address in (weights, work, ahead))
        values = [y, y_stride, x, x_stride, weights, *sizes, adds, packed, work, ahead, spread, index]
        function = _VECTOR_CODE[code_value].blocks_function(builder.module, _LAYOUTS[code_value])
        builder.call(function, values)
        return context.get_dummy_value()

    return types.void(code, *[i64] * 9, types.boolean, *[i64] * 5), emit


@intrinsic(prefer_literal=True)
def prepare_rows(_typing, code, prepared, x, x_stride, num_inputs, num_rows):
    """Writes to `prepared` what products of up to TILE_ROWS rows read beside x, or instead of it.

    For int4 these are the sums of the rows' groups [num_rows, num_groups], each in one fixed order; where pairs are
    multiplied the rows, as bfloat16 in one part or two, or as words and their scales. Otherwise nothing is written.
    """
    code_value = code.literal_value

    def emit(context, builder, _signature, arguments):
        _, prepared, x, *values = arguments
        prepared, x = (builder.inttoptr(address, FLOATS) for address in (prepared, x))
        function = _VECTOR_CODE[code_value].prepare_function(builder.module, _LAYOUTS[code_value])
        if function is not None:
            builder.call(function, [prepared, x, *values])
        return context.get_dummy_value()

    return types.void(code, i64, i64, i64, i64, i64), emit


@intrinsic(prefer_literal=True)
def weight_at(_typing, code, block, k, lane):
    """Returns the block's weight for input k and column `lane`, float32: number * scale + minimum."""
    layout = _LAYOUTS[code.literal_value]

    def emit(_context, builder, _signature, arguments):
        _, block, k, lane = arguments
        group = builder.inttoptr(block, BYTES)
        if layout.num_scales:
            group = builder.gep(group, [builder.mul(builder.udiv(k, INT64(GROUP_SIZE)), INT64(layout.unit_bytes))])
            k = builder.urem(k, INT64(GROUP_SIZE))
        weights = numbers(builder, layout, group, k)
        scales = [scale(builder, layout, group, index) for index in range(layout.num_scales)]
        if len(scales) == 1:
            weights = builder.fmul(weights, scales[0])
        elif scales:
            weights = multiply_add(builder, weights, scales[0], scales[1])
        return builder.extract_element(weights, builder.trunc(lane, INT32))

    return types.float32(code, i64, i64, i64), emit
