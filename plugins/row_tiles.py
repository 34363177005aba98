# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""The vector code of `row_vectors` as functions of compiled code.

Memory is given by addresses: int64. A format is an index into FORMATS and a constant. Whoever calls keeps the arrays
alive. The vector code becomes functions of the module that is compiled, which has them once, however often they are
called; as compiled functions of numba's they would be compiled again with each caller. Knows nothing of threads.
"""

from __future__ import annotations

from numba.core import types
from numba.extending import intrinsic

from plugins.host_vectors import INT64, multiply_add
from plugins.row_layouts import FORMATS, GROUP_SIZE, LANES, LAYOUTS
from plugins.row_vectors import BIT, BYTES, FLOATS, blocks_function, numbers, scale, sums_function, tile_function

i64 = types.int64


@intrinsic(prefer_literal=True)
def multiply_blocks(
    _typing, code, y, y_stride, x, x_stride, weights, num_inputs, num_columns, num_blocks, num_rows, adds, sums
):
    """y[:num_rows] = (or +=) x[:num_rows] @ the num_blocks blocks that begin at `weights`, up to TILE_ROWS rows.

    y is the address of the first row's first block, strides are in floats, num_columns goes from there on to the end of
    y's row, and sums [num_rows, num_groups] are those of x's groups: int4 reads them.
    """
    layout = LAYOUTS[FORMATS[code.literal_value]]

    def emit(context, builder, _signature, arguments):
        _, y, y_stride, x, x_stride, weights, num_inputs, num_columns, num_blocks, num_rows, adds, sums = arguments
        y, x, sums = (builder.inttoptr(address, FLOATS) for address in (y, x, sums))
        weights = builder.inttoptr(weights, BYTES)
        values = [y, y_stride, x, x_stride, weights, num_inputs, num_columns, num_blocks, num_rows, adds, sums]
        builder.call(blocks_function(builder.module, layout), values)
        return context.get_dummy_value()

    return types.void(code, *[i64] * 9, types.boolean, i64), emit


@intrinsic(prefer_literal=True)
def multiply_block(_typing, code, y, x, weights, num_inputs, sums):
    """y[:LANES] = x[:num_inputs] @ the block at `weights`, with the bits of multiply_blocks; arguments as there."""
    layout = LAYOUTS[FORMATS[code.literal_value]]

    def emit(context, builder, _signature, arguments):
        _, y, x, weights, num_inputs, sums = arguments
        y, x, sums = (builder.inttoptr(address, FLOATS) for address in (y, x, sums))
        values = [y, INT64(LANES), x, num_inputs, builder.inttoptr(weights, BYTES), num_inputs, INT64(LANES), BIT(0)]
        builder.call(tile_function(builder.module, layout, num_rows=1), [*values, sums])
        return context.get_dummy_value()

    return types.void(code, *[i64] * 5), emit


@intrinsic
def sum_groups(_typing, sums, x, x_stride, num_inputs, num_rows):
    """sums [num_rows, num_groups] = the sums of the groups of x's rows, each in one fixed order."""

    def emit(context, builder, _signature, arguments):
        sums, x = (builder.inttoptr(address, FLOATS) for address in arguments[:2])
        builder.call(sums_function(builder.module), [sums, x, *arguments[2:]])
        return context.get_dummy_value()

    return types.void(i64, i64, i64, i64, i64), emit


@intrinsic(prefer_literal=True)
def weight_at(_typing, code, block, k, lane):
    """The block's weight for input k and column `lane`, float32, as restore_matrix gives it."""
    layout = LAYOUTS[FORMATS[code.literal_value]]

    def emit(_context, builder, _signature, arguments):
        _, block, k, lane = arguments
        block = builder.inttoptr(block, BYTES)
        if not layout.num_scales:
            return numbers(builder, layout, block, k, lane=lane)
        group = builder.gep(block, [builder.mul(builder.udiv(k, INT64(GROUP_SIZE)), INT64(layout.unit_bytes))])
        number = numbers(builder, layout, group, builder.urem(k, INT64(GROUP_SIZE)), lane=lane)
        scales = [scale(builder, layout, group, index, lane) for index in range(layout.num_scales)]
        if len(scales) == 1:
            return builder.fmul(number, scales[0])
        return multiply_add(builder, number, scales[0], scales[1])  # fused or not: number * scale is exact

    return types.float32(code, i64, i64, i64), emit
