# ruff: noqa: PLR0917 (emitters take their arguments by position)
"""Tiles of `products` for the matrix units of a CPU (Intel's AMX), emitted as LLVM instructions.

A unit multiplies up to 16 rows of 32 bfloat16 numbers by 32 rows of 16 and sums in float32. That takes as long as
vectors take for one or two rows, so up to 16 rows cost little more than reading their weights. Units read bfloat16
only, so an input is rounded, or split into two numbers, the nearest and the remainder, which represent it to 2^-17
(layout.num_parts). bf16 weights are read as stored, int8 and int4 are widened exactly, and fp16 is split into two. The
product of two remainders is omitted.

A result sums the products of 32 inputs, parts in a fixed order, then those of the next 32, whatever rows and blocks
are beside it. For integer formats these sums are scaled and added as in `vector_products`. The bits differ from those
of vectors.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from typing import NamedTuple

from llvmlite import binding, ir
from numba.core import cgutils

from faser_backend.cpu.kernels.layouts import GROUP_SIZE, LANES, Layout
from faser_backend.cpu.kernels.vector_products import (
    AHEAD_BYTES,
    BIT,
    BLOCKS_KINDS,
    SHORT,
    VOID,
    ceil_divide,
    halves_of_group,
    integers,
    join_pairs,
    new_function,
    numbers,
    pairs,
    prefetch,
    put,
    round_to_bfloat16,
    scale,
    store_bfloat16,
    sum_of_group,
)
from faser_backend.cpu.kernels.vectors import (
    BYTE,
    BYTES,
    CACHE_LINE,
    FLOAT,
    FLOATS,
    INT64,
    INTEGERS,
    VECTOR,
    load,
    multiply_add,
    splat,
    store,
)

SWITCH = "FASER_MATRIX_UNITS"  # environment variable; "off" computes products with vectors
UNIT_FEATURES = ("amx-tile", "amx-bf16", "avx512bw")
ARCH_PRCTL, ASK_FOR_PERMISSION, TILE_DATA = 158, 0x1023, 18  # a process asks Linux once for the tiles' registers

TILE_SIZE, TILE_BYTES = 16, 1024  # rows of a register, of CACHE_LINE bytes each
TILE_ROWS = 2 * TILE_SIZE  # rows of x that go over a matrix together
NUM_PARTS = 2  # bfloat16 numbers of an input and of a weight, at most
# Registers: sums of two tiles of rows by two blocks, a part of each tile of rows, and the weights of the blocks.
SUMS, PARTS, WEIGHTS = ((0, 1), (2, 3)), (4, 5), (6, 7)
# Bytes of the work space, in this order: shapes of registers, sums as registers leave them and what they add up to,
# weights of two blocks, twice.
FLOAT_BYTES, LINE = 4, INT64(CACHE_LINE)
SPACES = (CACHE_LINE, 4 * TILE_BYTES, 4 * TILE_BYTES, 2 * 2 * NUM_PARTS * TILE_BYTES)
STRIP_BYTES = 1 << 19  # see products: rows are split again for each strip, and CPUs with AMX have large caches
ROWS_AT_ONCE = 4  # rows whose sums are scaled together; the last ones may be padding
# By parts of an input: pairs (part of the input, part of a weight) whose products are summed, in this order.
_EXACT = ("bf16", "int8", "int4")  # formats whose numbers bfloat16 holds
PRODUCTS = {
    0: {},
    1: dict.fromkeys(_EXACT, ((0, 0),)) | {"fp16": ((0, 0), (0, 1))},
    2: dict.fromkeys(_EXACT, ((0, 0), (1, 0))) | {"fp16": ((0, 0), (1, 0), (0, 1))},
}


def has_matrix_units() -> bool:
    """Tells whether products may use matrix units: see find_matrix_units."""
    return find_matrix_units()[0]


@cache
def find_matrix_units() -> tuple[bool, str]:
    """Returns whether products use matrix units, and the units' name or the reason why not.

    The CPU must have them, Linux must grant this process their registers, and SWITCH must not be "off".
    """
    if os.environ.get(SWITCH) == "off":
        return False, f"{SWITCH} = off"
    features = binding.get_host_cpu_features()
    missing = [name for name in UNIT_FEATURES if not features.get(name, False)]
    if missing:
        return False, f"this CPU has no {', '.join(missing)}"
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False, "used on Linux alone"
    if ctypes.CDLL(None).syscall(ARCH_PRCTL, ASK_FOR_PERMISSION, TILE_DATA):
        return False, "Linux refuses the tiles' registers to this process"
    return True, "AMX"


def takes(layout: Layout) -> bool:
    """Tells whether matrix units compute products of this layout on this machine."""
    return layout.name in PRODUCTS[layout.num_parts] and has_matrix_units()


def group_floats(layout: Layout) -> int:
    """Returns the floats that prepare_rows writes for a group of a row: its sum and its parts."""
    return 1 + layout.num_parts * CACHE_LINE // FLOAT_BYTES


def work_floats() -> int:
    """Returns the floats of a thread's work space, which may have any alignment."""
    return (CACHE_LINE + sum(SPACES)) // FLOAT_BYTES


class Space(NamedTuple):
    """Addresses in a work space."""

    shapes: ir.Value
    sums: ir.Value  # [tile][block][row][LANES] float32
    totals: ir.Value  # the same shape
    weights: ir.Value  # [parity of the group][block][part], tiles


class Packed(NamedTuple):
    """Addresses in packed rows."""

    group_sums: ir.Value  # [row][group] float32
    parts: ir.Value  # [tile][group][part][row][GROUP_SIZE] bfloat16


def space_at(builder, address) -> Space:
    """Returns the addresses in a work space of work_floats()."""
    aligned = builder.and_(builder.add(builder.ptrtoint(address, INT64), INT64(CACHE_LINE - 1)), INT64(-CACHE_LINE))
    areas = [builder.inttoptr(aligned, BYTES)]
    for num_bytes in SPACES[:-1]:
        areas.append(builder.gep(areas[-1], [INT64(num_bytes)]))
    return Space(*areas)


def packed_at(builder, packed, num_inputs) -> Packed:
    """Returns the addresses in what prepare_rows made of up to TILE_ROWS rows."""
    num_sums = builder.mul(ceil_divide(builder, num_inputs, GROUP_SIZE), INT64(TILE_ROWS))
    return Packed(packed, builder.bitcast(builder.gep(packed, [num_sums]), BYTES))


def set_shapes(builder, shapes, num_rows) -> None:
    """Configures the rows and bytes of each register: the 64 bytes of palette 1."""
    zeros = ir.VectorType(BYTE, CACHE_LINE)([0] * CACHE_LINE)
    builder.store(zeros, builder.bitcast(shapes, zeros.type.as_pointer()), align=CACHE_LINE)
    builder.store(BYTE(1), shapes)
    rows = dict.fromkeys(WEIGHTS, INT64(TILE_SIZE))
    for tile in range(len(SUMS)):
        count = rows_of_tile(builder, INT64(tile), num_rows)
        is_there = builder.icmp_signed(">", count, INT64(0))
        rows |= dict.fromkeys((*SUMS[tile], PARTS[tile]), builder.select(is_there, count, INT64(1)))
    for register, count in rows.items():
        line_bytes = builder.bitcast(builder.gep(shapes, [INT64(16 + 2 * register)]), SHORT.as_pointer())
        builder.store(SHORT(CACHE_LINE), line_bytes)
        builder.store(builder.trunc(count, BYTE), builder.gep(shapes, [INT64(48 + register)]))
    unit(builder, "ldtilecfg", shapes)


def unit(builder, name: str, *values) -> None:
    """Emits an instruction of the unit; registers are given as integers."""
    values = [BYTE(value) if isinstance(value, int) else value for value in values]
    kind = ir.FunctionType(VOID, [value.type for value in values])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), values)


def rows_of_tile(builder, tile, num_rows):
    """Returns the rows of a tile; 0 or less for a tile without rows."""
    left = builder.sub(num_rows, builder.mul(tile, INT64(TILE_SIZE)))
    return builder.select(builder.icmp_signed("<", left, INT64(TILE_SIZE)), left, INT64(TILE_SIZE))


def prepare_function(module: ir.Module, layout: Layout) -> ir.Function:
    """Returns the function that writes a work space: the rows' parts and, for int4, the sums of their groups.

    It takes the parameters of `products.prepare_rows`.
    """
    has_sums, num_parts = layout.num_scales > 1, layout.num_parts
    name = f"row_parts{num_parts}{'_sums' * has_sums}"
    function, builder = new_function(module, name, [FLOATS, FLOATS, INT64, INT64, INT64])
    if builder is None:
        return function
    packed, x, x_stride, num_inputs, num_rows = function.args
    own = packed_at(builder, packed, num_inputs)
    groups = ceil_divide(builder, num_inputs, GROUP_SIZE)
    with cgutils.for_range_slice(builder, INT64(0), num_rows, INT64(1), INT64) as (row, _):
        inputs = builder.gep(x, [builder.mul(row, x_stride)])
        tile = builder.udiv(row, INT64(TILE_SIZE))
        part_bytes = builder.mul(rows_of_tile(builder, tile, num_rows), INT64(CACHE_LINE))
        first = builder.mul(builder.mul(tile, groups), INT64(num_parts * TILE_BYTES))
        first = builder.add(first, builder.mul(builder.urem(row, INT64(TILE_SIZE)), INT64(CACHE_LINE)))
        with cgutils.for_range_slice(builder, INT64(0), groups, INT64(1), INT64) as (group, _):
            at = builder.add(first, builder.mul(builder.mul(group, INT64(num_parts)), part_bytes))
            halves = halves_of_group(builder, inputs, group, num_inputs)
            if has_sums:
                total = sum_of_group(builder, halves, is_rounded=num_parts == 1)
                store(builder, total, own.group_sums, builder.add(builder.mul(row, groups), group))
            for half in range(len(halves)):
                values = halves[half]
                for part in range(num_parts):
                    nearest = round_to_bfloat16(builder, values)
                    offset = builder.add(at, builder.mul(INT64(part), part_bytes))
                    offset = builder.add(offset, INT64(half * CACHE_LINE // 2))
                    store_bfloat16(builder, nearest, builder.gep(own.parts, [offset]))
                    values = builder.fsub(values, nearest)
    builder.ret_void()
    return function


def blocks_function(module: ir.Module, layout: Layout) -> ir.Function:
    """Returns the function that multiplies up to TILE_ROWS split rows by a range of blocks.

    It takes the parameters of `vector_products.blocks_function`.
    """
    function, builder = new_function(module, f"row_unit_blocks_{layout.title}", BLOCKS_KINDS)
    if builder is None:
        return function
    y, y_stride, _, _, weights, num_inputs, num_columns, num_blocks, num_rows, adds, *areas, _, _, _ = function.args
    set_shapes(builder, space_at(builder, areas[1]).shapes, num_rows)
    has_two_tiles = builder.icmp_signed(">", num_rows, INT64(TILE_SIZE))
    block_bytes = builder.mul(ceil_divide(builder, num_inputs, GROUP_SIZE), INT64(layout.unit_bytes))

    def multiply(block, blocks: int) -> None:
        column = builder.mul(block, INT64(LANES))
        target, left = builder.gep(y, [column]), builder.sub(num_columns, column)
        stored = builder.gep(weights, [builder.mul(block, block_bytes)])
        with builder.if_else(has_two_tiles) as branches:
            for branch, tiles in zip(branches, (2, 1), strict=True):
                with branch:
                    function = _tiles_function(module, layout, tiles, blocks)
                    builder.call(function, [target, y_stride, stored, num_inputs, left, num_rows, adds, *areas])

    pairs = builder.and_(num_blocks, INT64(-2))
    with cgutils.for_range_slice(builder, INT64(0), pairs, INT64(2), INT64) as (block, _):
        multiply(block, 2)
    with builder.if_then(builder.icmp_signed("<", pairs, num_blocks)):
        multiply(pairs, 1)
    unit(builder, "tilerelease")
    builder.ret_void()
    return function


def _tiles_function(module: ir.Module, layout: Layout, tiles: int, blocks: int) -> ir.Function:
    """Returns the function for y[:num_rows] = (or +=) split rows @ blocks; one or two each of tiles and blocks."""
    kinds = [FLOATS, INT64, BYTES, INT64, INT64, INT64, BIT, FLOATS, BYTES]
    function, builder = new_function(module, f"row_unit_tiles_{layout.title}_{tiles}_{blocks}", kinds)
    if builder is None:
        return function
    y, y_stride, weights, num_inputs, num_columns, num_rows, adds, packed, work = function.args
    space, own = space_at(builder, work), packed_at(builder, packed, num_inputs)
    groups = ceil_divide(builder, num_inputs, GROUP_SIZE)
    block_bytes = builder.mul(groups, INT64(layout.unit_bytes))
    rows = [rows_of_tile(builder, INT64(tile), num_rows) for tile in range(tiles)]
    pairs = [(tile, block) for tile in range(tiles) for block in range(blocks)]
    for tile, block in pairs:
        if layout.num_scales:
            clear(builder, tile_of(builder, space.totals, tile, block))
        else:
            unit(builder, "tilezero", SUMS[tile][block])
    with cgutils.for_range_slice(builder, INT64(0), groups, INT64(1), INT64) as (group, _):
        at = builder.mul(group, INT64(layout.unit_bytes))
        units = [
            builder.gep(weights, [builder.add(builder.mul(INT64(block), block_bytes), at)]) for block in range(blocks)
        ]
        for address in units:
            prefetch(builder, builder.gep(address, [INT64(AHEAD_BYTES)]), layout.unit_bytes)
        _add_products(builder, layout, units, space, own.parts, group, groups, rows)
        if layout.num_scales:
            for tile, block in pairs:
                unit(builder, "tilestored64", SUMS[tile][block], tile_of(builder, space.sums, tile, block), LINE)
            for block, address in enumerate(units):
                for tile in range(tiles):
                    _scale_sums(builder, layout, address, space, own.group_sums, tile, block, group, groups, rows[tile])
    for tile, block in pairs:
        totals = tile_of(builder, space.totals, tile, block)
        if not layout.num_scales:
            unit(builder, "tilestored64", SUMS[tile][block], totals, LINE)
        column = INT64(block * LANES)
        with cgutils.for_range_slice(builder, INT64(0), rows[tile], INT64(1), INT64) as (row, _):
            total = builder.bitcast(builder.gep(totals, [builder.mul(row, LINE)]), VECTOR.as_pointer())
            offset = builder.add(builder.mul(builder.add(row, INT64(tile * TILE_SIZE)), y_stride), column)
            put(builder, total, builder.gep(y, [offset]), builder.sub(num_columns, column), adds)
    builder.ret_void()
    return function


def _add_products(builder, layout: Layout, units, space: Space, parts, group, groups, rows) -> None:
    """Adds the products of GROUP_SIZE inputs to the sums in registers; scaled formats start from 0."""
    tiles_of_weights = [
        _weight_tiles(builder, layout, address, space, block, group) for block, address in enumerate(units)
    ]
    held_part = held_weight = None
    for part, weight in PRODUCTS[layout.num_parts][layout.name]:
        if weight != held_weight:
            for block, tiles in enumerate(tiles_of_weights):
                unit(builder, "tileloadd64", WEIGHTS[block], tiles[weight], LINE)
        for tile, num_rows in enumerate(rows):
            if part != held_part:
                part_bytes = builder.mul(num_rows, LINE)
                number = builder.add(builder.mul(group, INT64(layout.num_parts)), INT64(part))
                first = builder.mul(INT64(tile * layout.num_parts * TILE_BYTES), groups)
                address = builder.gep(parts, [builder.add(first, builder.mul(number, part_bytes))])
                unit(builder, "tileloadd64", PARTS[tile], address, LINE)
            for block in range(len(units)):
                if layout.num_scales and held_part is None:
                    unit(builder, "tilezero", SUMS[tile][block])
                unit(builder, "tdpbf16ps", SUMS[tile][block], PARTS[tile], WEIGHTS[block])
        held_part, held_weight = part, weight


def _weight_tiles(builder, layout: Layout, address, space: Space, block: int, group):
    """Returns the addresses of the weights' parts as a unit reads them: as stored, or widened in the work space.

    Even and odd groups use different areas, so a group need not wait until the unit has read the one before.
    """
    if layout.name == "bf16":
        return [address]
    num_parts = 1 + max(weight for _, weight in PRODUCTS[layout.num_parts][layout.name])
    area = builder.mul(builder.and_(group, INT64(1)), INT64(len(WEIGHTS) * NUM_PARTS * TILE_BYTES))
    offsets = [INT64((block * NUM_PARTS + part) * TILE_BYTES) for part in range(num_parts)]
    tiles = [builder.gep(space.weights, [builder.add(area, offset)]) for offset in offsets]
    for pair in range(GROUP_SIZE // 2):
        if num_parts == 1:
            put_line(builder, pairs(builder, layout, address, INT64(pair)), tiles[0], pair)
            continue
        both = [numbers(builder, layout, address, INT64(2 * pair), step) for step in range(2)]
        for tile in tiles:  # cut to bfloat16; what is left of a half is then a bfloat16 number
            bits = [builder.and_(builder.bitcast(values, INTEGERS), integers(-0x10000)) for values in both]
            nearest = [builder.bitcast(values, VECTOR) for values in bits]
            put_line(builder, join_pairs(builder, *nearest), tile, pair)
            both = [builder.fsub(values, of_them) for values, of_them in zip(both, nearest, strict=True)]
    return tiles


def _scale_sums(builder, layout: Layout, address, space: Space, x_sums, tile, block, group, groups, num_rows) -> None:
    """Adds to the totals scale * sums and then, for int4, minimum * the sums of the rows' groups."""
    sums, totals = (tile_of(builder, area, tile, block) for area in (space.sums, space.totals))
    scales = [scale(builder, layout, address, index) for index in range(layout.num_scales)]
    with cgutils.for_range_slice(builder, INT64(0), num_rows, INT64(ROWS_AT_ONCE), INT64) as (first, _):
        for step in range(ROWS_AT_ONCE):
            row = builder.add(first, INT64(step))
            at = builder.mul(row, LINE)
            address_of_total = builder.bitcast(builder.gep(totals, [at]), VECTOR.as_pointer())
            of_group = builder.load(builder.bitcast(builder.gep(sums, [at]), VECTOR.as_pointer()))
            total = multiply_add(builder, scales[0], of_group, builder.load(address_of_total))
            if len(scales) > 1:
                own = builder.add(builder.mul(builder.add(row, INT64(tile * TILE_SIZE)), groups), group)
                x_sum = splat(builder, load(builder, x_sums, own, FLOAT), LANES)
                total = multiply_add(builder, scales[1], x_sum, total)
            builder.store(total, address_of_total)


def put_line(builder, words, tile, index: int) -> None:
    target = builder.bitcast(builder.gep(tile, [INT64(index * CACHE_LINE)]), words.type.as_pointer())
    builder.store(words, target, align=CACHE_LINE)


def clear(builder, tile) -> None:
    for row in range(TILE_SIZE):
        put_line(builder, VECTOR([0.0] * LANES), tile, row)


def tile_of(builder, area, tile: int, block: int):
    return builder.gep(area, [INT64((2 * tile + block) * TILE_BYTES)])
