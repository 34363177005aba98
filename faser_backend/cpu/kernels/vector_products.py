# ruff: noqa: PLR0917 (emitters take their arguments by position)
"""Vector code of `products`, emitted as LLVM instructions: tiles of a few rows times a block of columns.

A tile is a function of the compiled module, with layout and number of rows as constants. All tiles sum in the same
order, so the bits of a result do not depend on the tile.

Inputs in one part (layout.num_parts) and weights that bfloat16 holds are multiplied by VDPBF16PS where the CPU has it:
rows are packed to bfloat16, and a lane adds the product of a pair's odd input, then that of its even one. Without it,
VPMADDWD multiplies integers: a group's inputs are packed to words, 16-bit integers times a scale, whose sums are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils

from faser_backend.cpu.kernels.layouts import GROUP_SIZE, LANES, Layout
from faser_backend.cpu.kernels.vectors import (
    BYTE,
    BYTES,
    CACHE_LINE,
    FLOAT,
    FLOATS,
    HALF,
    INT32,
    INT64,
    INTEGERS,
    VECTOR,
    fold,
    load,
    multiply_add,
    pick,
    prefetch_line,
    splat,
    store,
)


class BFloat(ir.Type):
    """The type bfloat of LLVM, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


BIT, SHORT, VOID = ir.IntType(1), ir.IntType(16), ir.VoidType()
SHORTS = ir.VectorType(SHORT, LANES)
PAIRS = ir.VectorType(BFloat(), 2 * LANES)
UNROLLED = 4  # inputs, or pairs of them, of an inner loop's iteration; with more, sums no longer stay in registers
PAIRS_OF_GROUP = GROUP_SIZE // 2
# Blocks of a strip that dots multiply at once. They share the broadcasts of inputs, which else take as long as the
# dots, and their sums hide the latency of dots.
DOT_BLOCKS = 2
BLOCKS_KINDS = [FLOATS, INT64, FLOATS, INT64, BYTES, *[INT64] * 4, BIT, FLOATS, BYTES, BYTES, INT64, INT64]
STRIP_BYTES, AHEAD_BYTES = 1 << 17, 4096  # see products; the distance of prefetches from a read
binding.initialize_native_asmparser()
_has = binding.get_host_cpu_features()
HAS_DOTS = all(_has.get(name, False) for name in ("avx512bf16", "avx512bw"))
DOT_FORMATS = ("bf16", "int8", "int4")  # whose numbers bfloat16 holds
HAS_WORDS = bool(_has.get("avx2", False)) and not _has.get("avx512f", False)
USED = f"{', '.join(DOT_FORMATS)} weights by VDPBF16PS" if HAS_DOTS else "int8, int4 weights by VPMADDWD" * HAS_WORDS
MOST_WORD, ROUNDER = 32767.0, 1.5 * 2**23  # a sum with it has the rounded integer in its low bits


def has_dots(layout: Layout) -> bool:
    """Tells whether vectors multiply this layout by VDPBF16PS on this CPU."""
    return HAS_DOTS and layout.num_parts == 1 and layout.name in DOT_FORMATS


def has_words(layout: Layout) -> bool:
    """Tells whether vectors multiply this layout by VPMADDWD on this CPU."""
    return HAS_WORDS and layout.num_parts == 1 and layout.num_scales > 0


def has_pairs(layout: Layout) -> bool:
    return has_dots(layout) or has_words(layout)


def widened(layout: Layout) -> Layout:
    """Returns the layout of a strip's copy for many rows, halves as floats, or `layout` if none is made."""
    if layout.number_bits != 16 or not layout.num_parts or has_dots(layout):
        return layout
    return replace(layout, number_bits=32, dtype=np.float32, is_paired=False, is_widened=True)


def group_floats(layout: Layout) -> int:
    """Returns the floats that prepare_rows writes for a group of a row: its pairs, and num_singles numbers."""
    return PAIRS_OF_GROUP * has_pairs(layout) + num_singles(layout)


def num_singles(layout: Layout) -> int:
    """Counts the numbers of a packed group beside its pairs: the scale of its words, and for int4 its sum."""
    return has_words(layout) + (layout.num_scales > 1)


def most_tile_rows(features: dict[str, bool], others: int = 0) -> int:
    """Returns the most rows of a tile on a CPU with these features, with so many registers for other numbers besides.

    Their sums leave registers for weights and inputs. There are at most 8, because rows 4 KiB apart compete for the 8
    cache lines of a set.
    """
    registers_per_sum = 1 if features.get("avx512f", False) else 2 if features.get("avx", False) else 4
    has_16_registers = features.get("sse2", False) and registers_per_sum > 1
    return min(8, ((12 if has_16_registers else 20) - others) // registers_per_sum)


TILE_ROWS = most_tile_rows(_has)
FIRST_ROWS = most_tile_rows(_has, others=4)  # of the tile that widens a strip


def blocks_function(module: ir.Module, layout: Layout) -> ir.Function:
    """Returns the function that multiplies up to TILE_ROWS rows by a range of blocks.

    It takes the parameters of `products.multiply_blocks` from y on.
    """
    function, builder = new_function(module, f"row_blocks_{layout.title}", BLOCKS_KINDS)
    if builder is None:
        return function
    y, y_stride, x, x_stride, weights, num_inputs, num_columns, num_blocks, num_rows, adds, packed, *others = (
        function.args
    )
    (work, ahead, spread, index), wide = others, widened(layout)
    is_strip, is_first = builder.icmp_signed(">", spread, INT64(0)), builder.icmp_signed("==", index, INT64(0))
    end = function.append_basic_block()
    choice = builder.switch(num_rows, end)
    for rows in range(1, TILE_ROWS + 1):
        with builder.goto_block(function.append_basic_block()):
            choice.add_case(INT64(rows), builder.block)
            # Memory is read best as one stream, so blocks go side by side in a strip only. Its first tile writes the
            # numbers that the others read.
            kinds: list[Any] = [(layout, 1, False, BIT(1))]
            if has_dots(layout):
                kinds.insert(0, (layout, DOT_BLOCKS, False, is_strip))
            elif wide is not layout:
                first = [(layout, 1, True, builder.and_(is_strip, is_first))] if rows == FIRST_ROWS else []
                kinds[:0] = [*first, (wide, 1, False, is_strip)]
            done = INT64(0)
            for kind, side, writes, is_chosen in kinds:
                tile = tile_function(module, kind, rows, side, writes=writes)
                shift = builder.add(spread, INT64((kind.number_bits // layout.number_bits).bit_length() - 1))
                stop = builder.select(is_chosen, builder.and_(num_blocks, INT64(-side)), done)
                with cgutils.for_range_slice(builder, done, stop, INT64(side), INT64) as (block, _):
                    column = builder.mul(block, INT64(LANES))
                    target, left = builder.gep(y, [column]), builder.sub(num_columns, column)
                    passed, written = (builder.mul(block, block_bytes(builder, of, num_inputs)) for of in (kind, wide))
                    stored = builder.gep(weights if kind is layout else work, [passed])
                    copy, asked = builder.gep(work, [written]), builder.gep(ahead, [builder.lshr(passed, shift)])
                    values = [target, y_stride, x, x_stride, stored, num_inputs, left, adds, packed, copy, asked, shift]
                    builder.call(tile, values)
                done = stop
            builder.branch(end)
    builder.position_at_end(end)
    builder.ret_void()
    return function


def block_bytes(builder, layout: Layout, num_inputs):
    return builder.mul(ceil_divide(builder, num_inputs, layout.unit_rows), INT64(layout.unit_bytes))


def tile_function(module: ir.Module, layout: Layout, num_rows: int, num_blocks: int, *, writes: bool) -> ir.Function:
    """Returns the function for y[:num_rows, :num_columns] = (or +=) x[:num_rows] @ blocks of weights.

    Parameters: y, its row stride, x, its row stride, the blocks, num_inputs, num_columns (more count as all),
    adds, what prepare_rows made of x, copy, ahead and spread. writes: write the block to `copy`, widened.
    """
    kinds = [FLOATS, INT64, FLOATS, INT64, BYTES, INT64, INT64, BIT, FLOATS, BYTES, BYTES, INT64]
    name = f"row_tile_{layout.title}_{num_rows}_{num_blocks}{'_writes' * writes}"
    function, builder = new_function(module, name, kinds)
    if builder is None:
        return function
    y, y_stride, x, x_stride, block, num_inputs, num_columns, adds, packed, copy, ahead, spread = function.args
    num_groups = ceil_divide(builder, num_inputs, GROUP_SIZE)
    distance = block_bytes(builder, layout, num_inputs)
    blocks = [builder.gep(block, [builder.mul(distance, INT64(b))]) for b in range(num_blocks)]
    if has_pairs(layout):
        # The rows' pairs may be read by assembly, so that LLVM must not take them for unread.
        builder.asm(ir.FunctionType(VOID, []), "", "~{memory}", [], side_effect=True)
        x, x_stride = packed_pairs(builder, layout, packed, num_groups)
        count, group_size = builder.mul(num_groups, INT64(PAIRS_OF_GROUP)), PAIRS_OF_GROUP
    else:
        count, group_size = num_inputs, GROUP_SIZE
    rows = [builder.gep(x, [builder.mul(INT64(r), x_stride)]) for r in range(num_rows)]
    totals = new_sums(builder, num_blocks * num_rows)  # block by block
    if layout.num_scales:
        with cgutils.for_range_slice(builder, INT64(0), num_groups, INT64(1), INT64) as (index, _):
            first = builder.mul(index, INT64(group_size))
            size = INT64(group_size)
            if not has_dots(layout):
                left = builder.sub(count, first)
                size = builder.select(builder.icmp_signed("<", left, size), left, size)
            passed = builder.mul(index, INT64(layout.unit_bytes))
            groups = [builder.gep(block, [passed]) for block in blocks]
            asked = builder.gep(ahead, [builder.lshr(builder.mul(passed, INT64(num_blocks)), spread)])
            sums = new_sums(builder, num_blocks * num_rows, INTEGERS if has_words(layout) else VECTOR)
            own = [builder.gep(row, [first]) for row in rows]
            add_products(builder, layout, own, groups, size, sums, asked, spread, None)
            of_rows = [builder.add(builder.mul(INT64(r), num_groups), index) for r in range(num_rows)]
            offsets = [builder.mul(of_row, INT64(num_singles(layout))) for of_row in of_rows]
            for b, group in enumerate(groups):
                of_block = slice(b * num_rows, (b + 1) * num_rows)
                add_group(builder, layout, group, sums[of_block], packed, offsets, totals[of_block])
    else:
        add_products(builder, layout, rows, blocks, count, totals, ahead, spread, copy if writes else None)
    for index, total in enumerate(totals):
        block, r = divmod(index, num_rows)
        column = INT64(block * LANES)
        target = builder.gep(y, [builder.add(builder.mul(INT64(r), y_stride), column)])
        put(builder, total, target, builder.sub(num_columns, column), adds)
    builder.ret_void()
    return function


def add_products(builder, layout: Layout, rows, blocks, count, sums, ahead, spread, copy) -> None:
    """Emits sums[b, r] += rows[r][k] * blocks[b][k] for k = 0, 1, ... count - 1, fused; of pairs if it has them.

    It writes the block's numbers to `copy`, if any, as floats.
    """
    is_paired = has_pairs(layout)
    pairs_of, multiply = (words, multiply_words) if has_words(layout) else (pairs, dot)
    step_bytes = layout.row_bytes * (1 + is_paired) * len(blocks)

    def add(k, step):
        weights = [(pairs_of if is_paired else numbers)(builder, layout, block, k, step) for block in blocks]
        if copy is not None:
            at = builder.mul(builder.add(k, INT64(step)), INT64(LANES))
            store(builder, weights[0], builder.bitcast(copy, FLOATS), at)
        for r, row in enumerate(rows):
            totals = sums[r :: len(rows)]
            if has_dots(layout) and len(blocks) == 1:
                builder.store(dot_of_row(builder, builder.load(totals[0]), row, k, step, weights[0]), totals[0])
                continue
            x = splat(builder, load(builder, row, builder.add(k, INT64(step)), INT32 if is_paired else FLOAT), LANES)
            for values, total in zip(weights, totals, strict=True):
                builder.store((multiply if is_paired else multiply_add)(builder, x, values, builder.load(total)), total)

    whole = builder.and_(count, INT64(-UNROLLED))
    with cgutils.for_range_slice(builder, INT64(0), whole, INT64(UNROLLED), INT64) as (k, _):
        passed = builder.lshr(builder.mul(k, INT64(step_bytes)), spread)
        prefetch(builder, builder.gep(ahead, [passed]), CACHE_LINE if layout.is_widened else UNROLLED * step_bytes)
        for step in range(UNROLLED):
            add(k, step)
    if not is_paired:  # pairs are padded to whole groups
        with cgutils.for_range_slice(builder, whole, count, INT64(1), INT64) as (k, _):
            add(k, 0)


def dot(builder, x, weights, sums):
    """Returns sums + x's odd numbers * the weights' odd ones + even * even, pairs of bfloat16.

    Each product is added by a fused multiply-add. Denormal numbers count as 0, and become 0 in sums.
    """
    kind = ir.FunctionType(VECTOR, [VECTOR, PAIRS, PAIRS])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    return builder.call(function, [sums, builder.bitcast(x, PAIRS), builder.bitcast(weights, PAIRS)])


def multiply_words(builder, x, halves, sums):
    """Returns sums + x's even words * the even ones + odd * odd, integers of 32 bits. halves: of the columns."""
    kind = ir.FunctionType(ir.VectorType(INT32, LANES // 2), [SHORTS, SHORTS])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pmadd.wd")
    x = builder.bitcast(pick(builder, x, x, range(LANES // 2)), SHORTS)
    return builder.add(sums, pick(builder, *(builder.call(function, [x, half]) for half in halves), range(LANES)))


def dot_of_row(builder, sums, row, k, step: int, weights):
    """Returns `dot` of row[k + step], which the instruction itself reads. LLVM has no pattern for that, but a broadcast
    for a single vector of weights makes calls of 4 to 8 rows 6 % to 8 % longer with int8."""
    kind = ir.FunctionType(VECTOR, [VECTOR, FLOATS, INT64, INT32, INTEGERS])
    text = "vdpbf16ps ${4:c}($2,$3,4){1to16}, $5, $0"
    return builder.asm(kind, text, "=v,0,r,r,i,v", [sums, row, k, INT32(4 * step), weights], side_effect=False)


def add_group(builder, layout: Layout, group, sums, packed, offsets, totals) -> None:
    """Emits totals[r] += scale * sums[r] and then, for int4, += minimum * the sum of row r's group."""
    scales = [scale(builder, layout, group, index) for index in range(layout.num_scales)]
    for of_group, offset, of_row in zip(sums, offsets, totals, strict=True):
        of_numbers = builder.load(of_group)
        if has_words(layout):
            x_scale = splat(builder, load(builder, packed, offset, FLOAT), LANES)
            of_numbers = builder.fmul(builder.sitofp(of_numbers, VECTOR), x_scale)
        total = multiply_add(builder, scales[0], of_numbers, builder.load(of_row))
        if len(scales) > 1:
            x_sum = load(builder, packed, builder.add(offset, INT64(num_singles(layout) - 1)), FLOAT)
            total = multiply_add(builder, scales[1], splat(builder, x_sum, LANES), total)
        builder.store(total, of_row)


def numbers(builder, layout: Layout, block, k, step: int = 0):
    """Returns the numbers k + step of the block's columns as floats, [LANES].

    k must be even or step 0, so that the compiler sees that the two rows of a pair share their bytes.
    """
    row, step_rows = (builder.lshr(k, INT64(1)), step // 2) if layout.is_paired else (k, step)
    stored = {32: FLOAT, 16: INT32 if layout.is_paired else HALF, 8: BYTE, 4: BYTE}[layout.number_bits]
    offset = builder.mul(builder.add(row, INT64(step_rows)), INT64((1 + layout.is_paired) * layout.row_bytes))
    values = read(builder, builder.gep(block, [offset]), stored)
    if stored == FLOAT:
        return values
    if stored == HALF:
        return builder.fpext(values, VECTOR)
    if layout.name == "int8":
        return builder.sitofp(builder.sext(values, INTEGERS), VECTOR)
    bits = layout.number_bits  # of each number of a pair: the even row's are the low ones
    is_odd = INT32(step % 2) if step else builder.trunc(builder.and_(k, INT64(1)), INT32)
    if layout.name == "bf16":  # which are the upper half of a float32
        left = builder.mul(builder.sub(INT32(1), is_odd), INT32(bits))
        values = builder.shl(values, splat(builder, left, LANES))
        return builder.bitcast(builder.and_(values, splat(builder, INT32(-0x10000), LANES)), VECTOR)
    right = builder.mul(is_odd, INT32(bits))
    values = builder.lshr(builder.zext(values, INTEGERS), splat(builder, right, LANES))
    return builder.sitofp(builder.and_(values, splat(builder, INT32(15), LANES)), VECTOR)


def pairs(builder, layout: Layout, block, pair, step: int = 0):
    """Returns the numbers of pair `pair + step` of the block's rows as bfloat16, the even row's in the low bits."""
    pair = builder.add(pair, INT64(step))
    if layout.name == "int8":
        both = [numbers(builder, layout, block, builder.mul(pair, INT64(2)), i) for i in range(2)]
        return join_pairs(builder, *both)
    stored = read(
        builder,
        builder.gep(block, [builder.mul(pair, INT64(2 * layout.row_bytes))]),
        INT32 if layout.name == "bf16" else BYTE,
    )
    return stored if layout.name == "bf16" else _look_up_pairs(builder, stored)


def words(builder, layout: Layout, block, pair, step: int = 0):
    """Returns the numbers of pair `pair + step` of the block's rows as words, the even row's first, by half block."""
    pair = builder.add(pair, INT64(step))
    address = builder.gep(block, [builder.mul(pair, INT64(2 * layout.row_bytes))])
    even = read(builder, address, BYTE)
    if layout.is_paired:
        low, shift = (even.type([number] * LANES) for number in (15, 4))
        even, odd = builder.and_(even, low), builder.lshr(even, shift)
    else:
        odd = read(builder, builder.gep(address, [INT64(layout.row_bytes)]), BYTE)
    orders = ([lane + row for lane in range(i, i + LANES // 2) for row in (0, LANES)] for i in (0, LANES // 2))
    return [builder.sext(pick(builder, even, odd, order), SHORTS) for order in orders]


def join_pairs(builder, even, odd):
    """Joins two vectors of floats that are bfloat16 numbers."""
    even, odd = (builder.bitcast(values, INTEGERS) for values in (even, odd))
    return builder.or_(builder.lshr(even, integers(16)), odd)


def _look_up_pairs(builder, stored):
    """Returns bytes of two int4 numbers as bfloat16, [LANES] pairs, by a table of sixteen."""
    values = builder.zext(stored, INTEGERS)
    indices = builder.and_(builder.or_(values, builder.shl(values, integers(12))), integers(0xF000F))
    numbers = np.arange(16, dtype=ml_dtypes.bfloat16).view(np.uint16).tolist()
    kind = ir.VectorType(SHORT, 2 * LANES)
    look_up = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind, kind]), "llvm.x86.avx512.permvar.hi.512"
    )
    found = builder.call(look_up, [kind(numbers * 2), builder.bitcast(indices, kind)])
    return builder.bitcast(found, INTEGERS)


def scale(builder, layout: Layout, group, index: int):
    """Returns the group's scales (index 0) or minimums (1) as floats, [LANES]."""
    address = builder.gep(group, [INT64(GROUP_SIZE * layout.row_bytes + index * LANES * 2)])
    return builder.fpext(read(builder, address, HALF), VECTOR)


def packed_pairs(builder, layout: Layout, packed, num_groups):
    """Returns the address of packed rows, behind the single numbers of their groups, and their distance in pairs.

    A cache line between rows keeps rows of 4 KiB from competing for the same lines of the cache.
    """
    singles = builder.mul(num_groups, INT64(TILE_ROWS * num_singles(layout)))
    distance = builder.add(builder.mul(num_groups, INT64(PAIRS_OF_GROUP)), INT64(LANES))
    return builder.gep(packed, [singles]), distance


def prepare_function(module: ir.Module, layout: Layout) -> ir.Function | None:
    """Returns the function of `products.prepare_rows`, or None if products read the rows alone."""
    if not group_floats(layout):
        return None
    kinds = [FLOATS, FLOATS, INT64, INT64, INT64]
    function, builder = new_function(module, f"pack_rows_{layout.title}", kinds)
    if builder is None:
        return function
    packed, x, x_stride, num_inputs, num_rows = function.args
    num_groups = ceil_divide(builder, num_inputs, GROUP_SIZE)
    target, distance = packed_pairs(builder, layout, packed, num_groups)
    with cgutils.for_range_slice(builder, INT64(0), num_rows, INT64(1), INT64) as (row, _):
        inputs = builder.gep(x, [builder.mul(row, x_stride)])
        own = builder.gep(target, [builder.mul(row, distance)])
        with cgutils.for_range_slice(builder, INT64(0), num_groups, INT64(1), INT64) as (group, _):
            halves = halves_of_group(builder, inputs, group, num_inputs)
            at, first = builder.add(builder.mul(row, num_groups), group), builder.mul(group, INT64(PAIRS_OF_GROUP))
            total = sum_of_group(builder, halves, is_rounded=has_dots(layout))
            pair, x_scale = words_of_group(builder, halves, total) if has_words(layout) else (None, None)
            for index, number in enumerate(([x_scale] * has_words(layout) + [total])[: num_singles(layout)]):
                store(builder, number, packed, builder.add(builder.mul(at, INT64(num_singles(layout))), INT64(index)))
            if has_pairs(layout):
                store(builder, pair or join(builder, *halves), own, first)
    builder.ret_void()
    return function


def halves_of_group(builder, inputs, group, num_inputs):
    """Returns a group's inputs as two vectors, with 0 behind the last input."""
    first = builder.mul(group, INT64(GROUP_SIZE))
    return [load_up_to(builder, inputs, builder.add(first, INT64(i)), num_inputs) for i in (0, LANES)]


def sum_of_group(builder, halves, *, is_rounded: bool):
    """Adds the halves of a group, then those of the result, until one number is left. is_rounded: to bfloat16 first."""
    low, high = (round_to_bfloat16(builder, half) for half in halves) if is_rounded else halves
    return fold(builder, builder.fadd(low, high))


def words_of_group(builder, halves, total):
    """Returns a group's inputs as pairs of words, the even one in the low bits, and the scale [1] of the words.

    The scale is NaN if their total [1] is not finite. A group of zeros times infinity gives NaN, whose low bits are 0.
    """
    inputs, kind = pick(builder, halves[0], halves[1], range(GROUP_SIZE)), ir.VectorType(INT32, GROUP_SIZE)
    sizes = builder.and_(builder.bitcast(inputs, kind), kind([0x7FFFFFFF] * GROUP_SIZE))
    sizes = builder.bitcast(sizes, inputs.type)
    most = fold(builder, sizes, lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))
    ratio = builder.fdiv(most.type([MOST_WORD]), most)
    scaled = builder.fmul(inputs, pick(builder, ratio, ratio, [0] * GROUP_SIZE))
    rounded = builder.bitcast(builder.fadd(scaled, inputs.type([ROUNDER] * GROUP_SIZE)), kind)
    even, odd = (pick(builder, rounded, rounded, range(first, GROUP_SIZE, 2)) for first in (0, 1))
    pair = builder.or_(builder.and_(even, integers(0xFFFF)), builder.shl(odd, integers(16)))
    return pair, builder.fadd(builder.fmul(most, most.type([1 / MOST_WORD])), builder.fmul(total, total.type([0.0])))


def load_up_to(builder, inputs, k, num_inputs):
    """Returns inputs[k : k + LANES], with 0 from num_inputs on."""
    copy = cgutils.alloca_once(builder, VECTOR)
    with builder.if_else(builder.icmp_signed("<=", builder.add(k, INT64(LANES)), num_inputs)) as (whole, part):
        with whole:
            builder.store(load(builder, inputs, k, VECTOR), copy)
        with part:
            builder.store(VECTOR([0.0] * LANES), copy)
            with cgutils.for_range_slice(builder, k, num_inputs, INT64(1), INT64) as (at, _):
                store(builder, load(builder, inputs, at, FLOAT), builder.bitcast(copy, FLOATS), builder.sub(at, k))
    return builder.load(copy)


def join(builder, low, high, lanes: Sequence[int] = range(2 * LANES)):
    """Rounds two vectors to bfloat16, nearest, ties to even, and returns these lanes of them, two to a float.

    Denormal numbers become 0.
    """
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(PAIRS, [VECTOR, VECTOR]), name)
    both = builder.bitcast(builder.call(function, [high, low]), ir.VectorType(SHORT, 2 * LANES))
    return builder.bitcast(pick(builder, both, both, lanes), VECTOR)


def round_to_bfloat16(builder, values):
    """Rounds to the nearest bfloat16, ties to even; the result is float32. NaN stays NaN."""
    bits = builder.bitcast(values, INTEGERS)
    is_odd = builder.and_(builder.lshr(bits, integers(16)), integers(1))
    rounded = builder.add(bits, builder.add(is_odd, integers(0x7FFF)))
    quiet = builder.or_(bits, integers(0x400000))
    rounded = builder.select(builder.fcmp_unordered("uno", values, values), quiet, rounded)
    return builder.bitcast(builder.and_(rounded, integers(-0x10000)), VECTOR)


def store_bfloat16(builder, values, address) -> None:
    """Stores floats that are bfloat16 numbers, [LANES], at an address of any alignment."""
    shorts = builder.trunc(builder.lshr(builder.bitcast(values, INTEGERS), integers(16)), SHORTS)
    builder.store(shorts, builder.bitcast(address, SHORTS.as_pointer()), align=2)


def integers(value: int):
    return INTEGERS([value] * LANES)


def new_function(module: ir.Module, name: str, kinds) -> tuple[ir.Function, ir.IRBuilder | None]:
    """Returns the module's function of that name, and a builder if it is new."""
    if name in module.globals:
        return module.globals[name], None
    function = ir.Function(module, ir.FunctionType(VOID, kinds), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    return function, ir.IRBuilder(function.append_basic_block())


def new_sums(builder, num_rows: int, kind: ir.VectorType = VECTOR):
    """Allocates num_rows vectors that start as 0."""
    sums = [cgutils.alloca_once(builder, kind) for _ in range(num_rows)]
    for total in sums:
        builder.store(kind(None), total)
    return sums


def put(builder, total, target, num_columns, adds) -> None:
    """Emits target[:num_columns] = (or +=) the total; memory behind it belongs to another row."""

    def put_values(values, at):
        before = builder.select(adds, load(builder, target, at, values.type), values.type(None))
        store(builder, builder.fadd(before, values), target, at)

    with builder.if_else(builder.icmp_signed(">=", num_columns, INT64(LANES))) as (whole, part):
        with whole:
            put_values(builder.load(total), INT64(0))
        with part:
            lanes = builder.bitcast(total, FLOATS)
            with cgutils.for_range_slice(builder, INT64(0), num_columns, INT64(1), INT64) as (lane, _):
                put_values(load(builder, lanes, lane, FLOAT), lane)


def prefetch(builder, address, num_bytes: int) -> None:
    for line in range(0, num_bytes, CACHE_LINE):
        prefetch_line(builder, builder.gep(address, [INT64(line)]))


def read(builder, address, kind):
    """Loads LANES numbers of this kind, at any alignment."""
    return builder.load(builder.bitcast(address, ir.VectorType(kind, LANES).as_pointer()), align=1)


def ceil_divide(builder, a, b: int):
    return builder.udiv(builder.add(a, INT64(b - 1)), INT64(b))
