# ruff: noqa: PLR0917 (emitters take their arguments by position)
"""Vector code of `products`, emitted as LLVM instructions: tiles of a few rows times a block of columns.

A tile is a function of the compiled module, with layout and number of rows as constants. All tiles sum in the same
order, so the bits of a result do not depend on the tile.
"""

from __future__ import annotations

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
    VECTOR,
    add_halves,
    load,
    multiply_add,
    prefetch_line,
    splat,
    store,
)

BIT, SHORT, VOID = ir.IntType(1), ir.IntType(16), ir.VoidType()
INTEGERS = ir.VectorType(INT32, LANES)
UNROLLED = 4  # inputs of an inner loop's iteration; with more, sums no longer stay in registers
STRIP_BYTES = 1 << 17  # see products
AHEAD_BYTES = 4096  # distance of prefetches from a read


def most_tile_rows(features: dict[str, bool]) -> int:
    """Returns the most rows of a tile on a CPU with these features.

    Their sums leave registers for weights and inputs. There are at most 8, because rows 4 KiB apart compete for the 8
    cache lines of a set.
    """
    registers_per_sum = 1 if features.get("avx512f", False) else 2 if features.get("avx", False) else 4
    has_16_registers = features.get("sse2", False) and registers_per_sum > 1
    return min(8, (12 if has_16_registers else 20) // registers_per_sum)


TILE_ROWS = most_tile_rows(binding.get_host_cpu_features())


def blocks_function(module: ir.Module, layout: Layout) -> ir.Function:
    """Returns the function that multiplies up to TILE_ROWS rows by a range of blocks.

    It takes the parameters of `products.multiply_blocks` from y on.
    """
    kinds = [FLOATS, INT64, FLOATS, INT64, BYTES, INT64, INT64, INT64, INT64, BIT, FLOATS]
    function, builder = new_function(module, f"row_blocks_{layout.name}", kinds)
    if builder is None:
        return function
    y, y_stride, x, x_stride, weights, num_inputs, num_columns, num_blocks, num_rows, adds, sums = function.args
    block_bytes = builder.mul(ceil_divide(builder, num_inputs, layout.unit_rows), INT64(layout.unit_bytes))
    end = function.append_basic_block()
    choice = builder.switch(num_rows, end)
    for rows in range(1, TILE_ROWS + 1):
        with builder.goto_block(function.append_basic_block()):
            choice.add_case(INT64(rows), builder.block)
            tile = tile_function(module, layout, rows)
            with cgutils.for_range_slice(builder, INT64(0), num_blocks, INT64(1), INT64) as (block, _):
                column = builder.mul(block, INT64(LANES))
                target, left = builder.gep(y, [column]), builder.sub(num_columns, column)
                stored = builder.gep(weights, [builder.mul(block, block_bytes)])
                builder.call(tile, [target, y_stride, x, x_stride, stored, num_inputs, left, adds, sums])
            builder.branch(end)
    builder.position_at_end(end)
    builder.ret_void()
    return function


def tile_function(module: ir.Module, layout: Layout, num_rows: int) -> ir.Function:
    """Returns the function for y[:num_rows, :num_columns] = (or +=) x[:num_rows] @ one block of weights.

    Parameters: y, its row stride, x, its row stride, the block, num_inputs, num_columns (more than LANES counts as
    LANES), adds, and the sums of x's groups [num_rows, num_groups]. One block at a time reads memory as one stream;
    several blocks side by side are slower.
    """
    kinds = [FLOATS, INT64, FLOATS, INT64, BYTES, INT64, INT64, BIT, FLOATS]
    function, builder = new_function(module, f"row_tile_{layout.name}_{num_rows}", kinds)
    if builder is None:
        return function
    y, y_stride, x, x_stride, block, num_inputs, num_columns, adds, x_sums = function.args
    rows = [builder.gep(x, [builder.mul(INT64(r), x_stride)]) for r in range(num_rows)]
    totals = new_sums(builder, num_rows)
    if layout.num_scales:
        num_groups = ceil_divide(builder, num_inputs, GROUP_SIZE)
        with cgutils.for_range_slice(builder, INT64(0), num_groups, INT64(1), INT64) as (index, _):
            first = builder.mul(index, INT64(GROUP_SIZE))
            size = least(builder, builder.sub(num_inputs, first), INT64(GROUP_SIZE))
            group = builder.gep(block, [builder.mul(index, INT64(layout.unit_bytes))])
            sums = new_sums(builder, num_rows)
            add_products(builder, layout, [builder.gep(row, [first]) for row in rows], group, size, sums)
            offsets = [builder.add(builder.mul(INT64(r), num_groups), index) for r in range(num_rows)]
            add_group(builder, layout, group, sums, x_sums, offsets, totals)
    else:
        add_products(builder, layout, rows, block, num_inputs, totals)
    for r, total in enumerate(totals):
        put(builder, total, builder.gep(y, [builder.mul(INT64(r), y_stride)]), num_columns, adds)
    builder.ret_void()
    return function


def add_products(builder, layout: Layout, rows, block, count, sums) -> None:
    """Emits sums[r] += rows[r][k] * block[k] for k = 0, 1, ... count - 1, by fused multiply-adds."""

    def add(k, step):
        weights = numbers(builder, layout, block, k, step)
        for row, total in zip(rows, sums, strict=True):
            x = splat(builder, load(builder, row, builder.add(k, INT64(step)), FLOAT), LANES)
            builder.store(multiply_add(builder, x, weights, builder.load(total)), total)

    whole = builder.and_(count, INT64(-UNROLLED))
    with cgutils.for_range_slice(builder, INT64(0), whole, INT64(UNROLLED), INT64) as (k, _):
        address = builder.gep(block, [builder.mul(k, INT64(layout.row_bytes))])
        ask_ahead(builder, address, UNROLLED * layout.row_bytes)
        for step in range(UNROLLED):
            add(k, step)
    with cgutils.for_range_slice(builder, whole, count, INT64(1), INT64) as (k, _):
        add(k, 0)


def add_group(builder, layout: Layout, group, sums, x_sums, offsets, totals) -> None:
    """Emits totals[r] += scale * sums[r] and then, for int4, += minimum * x_sums[offsets[r]]."""
    scales = [scale(builder, layout, group, index) for index in range(layout.num_scales)]
    for of_group, offset, of_row in zip(sums, offsets, totals, strict=True):
        total = multiply_add(builder, scales[0], builder.load(of_group), builder.load(of_row))
        if len(scales) > 1:
            x_sum = splat(builder, load(builder, x_sums, offset, FLOAT), LANES)
            total = multiply_add(builder, scales[1], x_sum, total)
        builder.store(total, of_row)


def numbers(builder, layout: Layout, block, k, step: int = 0):
    """Returns the numbers k + step of the block's columns as floats, [LANES].

    k must be even or step 0, so that the compiler sees that the two rows of a pair share their bytes.
    """
    row, step_rows = (builder.lshr(k, INT64(1)), step // 2) if layout.is_paired else (k, step)
    stored = {"fp32": FLOAT, "fp16": HALF, "bf16": INT32, "int8": BYTE, "int4": BYTE}[layout.name]
    offset = builder.mul(builder.add(row, INT64(step_rows)), INT64((1 + layout.is_paired) * layout.row_bytes))
    values = read(builder, builder.gep(block, [offset]), stored)
    if layout.name == "fp32":
        return values
    if layout.name == "fp16":
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


def scale(builder, layout: Layout, group, index: int):
    """Returns the group's scales (index 0) or minimums (1) as floats, [LANES]."""
    address = builder.gep(group, [INT64(GROUP_SIZE * layout.row_bytes + index * LANES * 2)])
    return builder.fpext(read(builder, address, HALF), VECTOR)


def prepare_function(module: ir.Module, layout: Layout) -> ir.Function | None:
    """Returns the function of `products.prepare_rows`, or None if products read the rows alone."""
    return sums_function(module) if layout.num_scales > 1 else None


def sums_function(module: ir.Module) -> ir.Function:
    """Returns the function that sums the groups of rows of x; it takes the parameters of `products.prepare_rows`.

    The two halves of a group are added, then the halves of the result, until one number is left. A shorter last group
    is summed one by one.
    """
    function, builder = new_function(module, "row_sums", [FLOATS, FLOATS, INT64, INT64, INT64])
    if builder is None:
        return function
    sums, x, x_stride, num_inputs, num_rows = function.args
    num_groups = ceil_divide(builder, num_inputs, GROUP_SIZE)
    num_whole = builder.udiv(num_inputs, INT64(GROUP_SIZE))
    with cgutils.for_range_slice(builder, INT64(0), num_rows, INT64(1), INT64) as (row, _):
        inputs = builder.gep(x, [builder.mul(row, x_stride)])
        target = builder.gep(sums, [builder.mul(row, num_groups)])
        with cgutils.for_range_slice(builder, INT64(0), num_whole, INT64(1), INT64) as (group, _):
            at = builder.mul(group, INT64(GROUP_SIZE))
            low, high = (load(builder, inputs, builder.add(at, INT64(i)), VECTOR) for i in (0, GROUP_SIZE // 2))
            store(builder, add_halves(builder, [builder.fadd(low, high)]), target, group)
        with builder.if_then(builder.icmp_unsigned("<", num_whole, num_groups)):
            total = cgutils.alloca_once(builder, FLOAT)
            builder.store(FLOAT(0.0), total)
            first = builder.mul(num_whole, INT64(GROUP_SIZE))
            with cgutils.for_range_slice(builder, first, num_inputs, INT64(1), INT64) as (k, _):
                builder.store(builder.fadd(builder.load(total), load(builder, inputs, k, FLOAT)), total)
            store(builder, builder.load(total), target, num_whole)
    builder.ret_void()
    return function


def new_function(module: ir.Module, name: str, kinds) -> tuple[ir.Function, ir.IRBuilder | None]:
    """Returns the module's function of that name, and a builder if it is new."""
    if name in module.globals:
        return module.globals[name], None
    function = ir.Function(module, ir.FunctionType(VOID, kinds), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    return function, ir.IRBuilder(function.append_basic_block())


def new_sums(builder, num_rows: int):
    """Allocates num_rows vectors that start as 0."""
    sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(num_rows)]
    for total in sums:
        builder.store(VECTOR([0.0] * LANES), total)
    return sums


def put(builder, total, target, num_columns, adds) -> None:
    """Emits target[:num_columns] = (or +=) the total; memory behind it belongs to another row."""

    def put_values(values, at):
        with builder.if_else(adds) as (added, written):
            with added:
                store(builder, builder.fadd(load(builder, target, at, values.type), values), target, at)
            with written:
                store(builder, values, target, at)

    with builder.if_else(builder.icmp_signed(">=", num_columns, INT64(LANES))) as (whole, part):
        with whole:
            put_values(builder.load(total), INT64(0))
        with part:
            lanes = builder.bitcast(total, FLOATS)
            with cgutils.for_range_slice(builder, INT64(0), num_columns, INT64(1), INT64) as (lane, _):
                put_values(load(builder, lanes, lane, FLOAT), lane)


def ask_ahead(builder, address, num_bytes: int) -> None:
    """Prefetches num_bytes that lie AHEAD_BYTES behind an address."""
    for line in range(0, num_bytes, CACHE_LINE):
        prefetch_line(builder, builder.gep(address, [INT64(AHEAD_BYTES + line)]))


def read(builder, address, kind):
    """Loads LANES numbers of this kind, at any alignment."""
    return builder.load(builder.bitcast(address, ir.VectorType(kind, LANES).as_pointer()), align=1)


def ceil_divide(builder, a, b: int):
    return builder.udiv(builder.add(a, INT64(b - 1)), INT64(b))


def least(builder, a, b):
    return builder.select(builder.icmp_signed("<", a, b), a, b)
