"""The matrix units of a CPU (Intel's AMX): whether they may be used, their registers and instructions, and the work
space of products that use them.

A unit multiplies up to 16 rows of 32 bfloat16 numbers by 32 rows of 16 and adds up in float32, in the time that vectors
take for one or two rows. Knows nothing of formats of weights.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from typing import NamedTuple

from llvmlite import binding, ir
from numba.core import cgutils

from plugins.host_vectors import BYTE, CACHE_LINE, INT64
from plugins.row_layouts import GROUP_SIZE, num_groups
from plugins.row_vectors import BYTES, FLOATS, SHORT, VOID, ceil_divide

SWITCH = "FASER_MATRIX_UNITS"  # of the environment: "off" leaves products to the vectors
UNIT_FEATURES = ("amx-tile", "amx-bf16", "avx512bw")
ARCH_PRCTL, ASK_FOR_PERMISSION, TILE_DATA = 158, 0x1023, 18  # a process asks Linux once for the tiles' registers

TILE_SIZE, TILE_BYTES = 16, 1024  # rows of a register, of CACHE_LINE bytes each
TILE_ROWS = 2 * TILE_SIZE  # rows of x that go over a matrix together
NUM_PARTS = 2  # bfloat16 numbers of an input, and at most of a weight
# Registers: sums of two tiles of rows by two blocks, a part of each tile of rows, and the weights of the blocks.
SUMS, PARTS, WEIGHTS = ((0, 1), (2, 3)), (4, 5), (6, 7)
# Bytes of the work space, in this order: shapes of registers, sums as registers leave them and what they add up to,
# weights of two blocks, twice. Behind them the sums of groups of the rows, and the rows in parts.
FLOAT_BYTES = 4
SPACES = (CACHE_LINE, 4 * TILE_BYTES, 4 * TILE_BYTES, 2 * 2 * NUM_PARTS * TILE_BYTES)


def has_matrix_units() -> bool:
    """Whether products may use them: see find_matrix_units."""
    return find_matrix_units()[0]


@cache
def find_matrix_units() -> tuple[bool, str]:
    """Whether this CPU has them, Linux lets this process use them and the environment does not say otherwise; and the
    name of the units, or what is missing."""
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


def scratch_size(num_inputs: int) -> int:
    """Floats of the work space; it may begin anywhere."""
    groups = num_groups(num_inputs)
    num_bytes = CACHE_LINE + sum(SPACES) + TILE_ROWS * groups * (FLOAT_BYTES + NUM_PARTS * CACHE_LINE)
    return num_bytes // FLOAT_BYTES


class Space(NamedTuple):
    """Addresses in a work space."""

    shapes: ir.Value
    sums: ir.Value  # [tile][block][row][LANES] float32
    totals: ir.Value  # likewise
    weights: ir.Value  # [turn][block][part], tiles
    group_sums: ir.Value  # [row][group] float32
    parts: ir.Value  # [tile][group][part][row][GROUP_SIZE] bfloat16


def space_at(builder, address, num_inputs) -> Space:
    """Of a work space of scratch_size(num_inputs)."""
    aligned = builder.and_(builder.add(builder.ptrtoint(address, INT64), INT64(CACHE_LINE - 1)), INT64(-CACHE_LINE))
    places = [builder.inttoptr(aligned, BYTES)]
    for num_bytes in SPACES:
        places.append(builder.gep(places[-1], [INT64(num_bytes)]))
    groups = ceil_divide(builder, num_inputs, GROUP_SIZE)
    parts = builder.gep(places[-1], [builder.mul(groups, INT64(TILE_ROWS * FLOAT_BYTES))])
    shapes, sums, totals, weights, group_sums = places
    return Space(shapes, sums, totals, weights, builder.bitcast(group_sums, FLOATS), parts)


def set_shapes(builder, shapes, num_rows) -> None:
    """Tells the unit the rows and bytes of each register: the 64 bytes of palette 1."""
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
    """An instruction of the unit; registers are numbers."""
    values = [BYTE(value) if isinstance(value, int) else value for value in values]
    kind = ir.FunctionType(VOID, [value.type for value in values])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), values)


def rows_of_tile(builder, tile, num_rows):
    """How many of the rows a tile has; not more than 0 where it has none."""
    left = builder.sub(num_rows, builder.mul(tile, INT64(TILE_SIZE)))
    return builder.select(builder.icmp_signed("<", left, INT64(TILE_SIZE)), left, INT64(TILE_SIZE))
