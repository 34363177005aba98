# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""The code of `row_vectors` and `row_unit_tiles` as functions of compiled code, and which of them is for a format.

Memory is given by addresses: int64. A format is an index into FORMATS and a constant. Whoever calls keeps the arrays
alive. The vector code becomes functions of the module that is compiled, which has them once, however often they are
called; as compiled functions of numba's they would be compiled again with each caller. Knows nothing of threads.
"""

from __future__ import annotations

from numba.core import types
from numba.extending import intrinsic

from plugins import row_unit_tiles, row_units, row_vectors
from plugins.host_vectors import INT64, multiply_add
from plugins.row_layouts import FORMATS, GROUP_SIZE, LAYOUTS, Layout, num_groups
from plugins.row_vectors import BYTES, FLOATS, numbers, scale

i64 = types.int64


def most_rows(layout: Layout) -> int:
    """Of x that go over a matrix of this layout together."""
    return row_units.TILE_ROWS if row_unit_tiles.takes(layout) else row_vectors.TILE_ROWS


def strip_bytes(layout: Layout) -> int:
    """Of weights that stay in the second-level cache while many rows go over them."""
    return row_unit_tiles.STRIP_BYTES if row_unit_tiles.takes(layout) else row_vectors.STRIP_BYTES


def prepared_size(num_inputs: int) -> int:
    """Numbers of what is prepared of the rows of one tile, in any format."""
    group_sums = row_vectors.TILE_ROWS * num_groups(num_inputs)
    return max(group_sums, row_units.scratch_size(num_inputs) if row_units.has_matrix_units() else 0)


@intrinsic(prefer_literal=True)
def multiply_blocks(
    _typing, code, y, y_stride, x, x_stride, weights, num_inputs, num_columns, num_blocks, num_rows, adds, prepared
):
    """y[:num_rows] = (or +=) x[:num_rows] @ the num_blocks blocks that begin at `weights`, up to most_rows rows.

    y is the address of the first row's first block, strides are in floats, num_columns goes from there on to the end of
    y's row, and `prepared` is what prepare_rows made of these rows.
    """
    layout = LAYOUTS[FORMATS[code.literal_value]]

    def emit(context, builder, _signature, arguments):
        _, y, y_stride, x, x_stride, weights, num_inputs, num_columns, num_blocks, num_rows, adds, prepared = arguments
        y, x, prepared = (builder.inttoptr(address, FLOATS) for address in (y, x, prepared))
        weights = builder.inttoptr(weights, BYTES)
        values = [y, y_stride, x, x_stride, weights, num_inputs, num_columns, num_blocks, num_rows, adds, prepared]
        builder.call(_blocks_function(builder.module, layout), values)
        return context.get_dummy_value()

    return types.void(code, *[i64] * 9, types.boolean, i64), emit


@intrinsic(prefer_literal=True)
def prepare_rows(_typing, code, prepared, x, x_stride, num_inputs, num_rows):
    """prepared [prepared_size] = what products read of up to most_rows rows of x beside x, or in its place.

    The sums of their groups for int4, [num_rows, num_groups], each in one fixed order; rows in parts for a matrix unit;
    else nothing.
    """
    layout = LAYOUTS[FORMATS[code.literal_value]]

    def emit(context, builder, _signature, arguments):
        _, prepared, x, *values = arguments
        prepared, x = (builder.inttoptr(address, FLOATS) for address in (prepared, x))
        if row_unit_tiles.takes(layout):
            builder.call(row_unit_tiles.split_function(builder.module, layout), [prepared, x, *values])
        elif layout.num_scales > 1:
            builder.call(row_vectors.sums_function(builder.module), [prepared, x, *values])
        return context.get_dummy_value()

    return types.void(code, i64, i64, i64, i64, i64), emit


def _blocks_function(module, layout: Layout):
    of_format = row_unit_tiles if row_unit_tiles.takes(layout) else row_vectors
    return of_format.blocks_function(module, layout)


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
