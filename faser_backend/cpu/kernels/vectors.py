# ruff: noqa: PLR0917 (emitters take their arguments by position)
"""Vector code that all kernels of the CPU share, emitted as LLVM instructions: every sum has one order on any CPU.

Compiled code calls the intrinsics as functions of rows: contiguous arrays whose last dimension is a row's.
"""

from __future__ import annotations

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

GROUP = 4  # columns of an inner loop's iteration
LANES = 16  # floats of a vector; a narrower CPU splits it, with the same result
CACHE_LINE = 64  # bytes
LARGEST_HALF = 65504.0

BYTE, HALF, FLOAT, INT32, INT64 = ir.IntType(8), ir.HalfType(), ir.FloatType(), ir.IntType(32), ir.IntType(64)
BYTES, FLOATS = BYTE.as_pointer(), FLOAT.as_pointer()
VECTOR = ir.VectorType(FLOAT, LANES)


@intrinsic
def score_group(_typing, scores, column, query, keys, first, last, head_dim):
    """Computes scores[column + i] = query . keys[min(first + i, last)] for i < GROUP.

    The LANES partial sums of each product are added in halves. Values of head_dim beyond whole vectors follow one by
    one.
    """

    def emit(context, builder, signature, arguments):
        _, column, _, _, first, last, head_dim = arguments
        scores, query = (row_address(context, builder, signature, arguments, i) for i in (0, 2))
        columns = group_columns(builder, first, last)
        rows = [row_address(context, builder, signature, arguments, 3, t) for t in columns]
        vectors_end = builder.and_(head_dim, INT64(-LANES))
        partial = [cgutils.alloca_once_value(builder, VECTOR([0.0] * LANES)) for _ in rows]
        with cgutils.for_range_slice(builder, INT64(0), vectors_end, INT64(LANES), INT64) as (d, _):
            x = load(builder, query, d, VECTOR)
            for row, total in zip(rows, partial, strict=True):
                builder.store(multiply_add(builder, x, load(builder, row, d, VECTOR), builder.load(total)), total)
        sums = cgutils.alloca_once_value(builder, add_halves(builder, [builder.load(total) for total in partial]))
        with cgutils.for_range_slice(builder, vectors_end, head_dim, INT64(1), INT64) as (d, _):
            x = splat(builder, load(builder, query, d, FLOAT), GROUP)
            y = x
            for i, row in enumerate(rows):
                y = builder.insert_element(y, load(builder, row, d, FLOAT), INT32(i))
            builder.store(multiply_add(builder, x, y, builder.load(sums)), sums)
        store(builder, builder.load(sums), scores, column)
        return context.get_dummy_value()

    return numba.void(scores, numba.intp, query, keys, numba.intp, numba.intp, numba.intp), emit


@intrinsic
def copy_row(_typing, target, source, head_dim):
    """Copies target[:head_dim] = source, each of float32 or halves; halves have the type uint16.

    Halves are rounded to nearest, ties to even. A value too large for a half becomes the largest half, because an
    infinite key would make its row's softmax NaN.
    """

    def emit(context, builder, signature, arguments):
        target, source, head_dim = (
            row_address(context, builder, signature, arguments, 0),
            row_address(context, builder, signature, arguments, 1),
            arguments[2],
        )
        to, of = (HALF if row.dtype == numba.uint16 else FLOAT for row in signature.args[:2])

        def copy(d, num_lanes):
            kinds = [kind if num_lanes == 1 else ir.VectorType(kind, num_lanes) for kind in (to, of)]
            values = load(builder, source, d, kinds[1])
            if of == HALF and to == FLOAT:
                values = builder.fpext(values, kinds[0])
            elif of == FLOAT and to == HALF:
                values = builder.fptrunc(clamp(builder, values, LARGEST_HALF), kinds[0])
            store(builder, values, target, d)

        vectors_end = builder.and_(head_dim, INT64(-LANES))
        with cgutils.for_range_slice(builder, INT64(0), vectors_end, INT64(LANES), INT64) as (d, _):
            copy(d, LANES)
        with cgutils.for_range_slice(builder, vectors_end, head_dim, INT64(1), INT64) as (d, _):
            copy(d, 1)
        return context.get_dummy_value()

    return numba.void(target, source, numba.intp), emit


@intrinsic
def prefetch(_typing, block):
    """Prefetches a block [rows, head_dim] into the cache."""

    def emit(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        first, num_bytes = builder.bitcast(array.data, BYTES), builder.mul(array.nitems, array.itemsize)
        with cgutils.for_range_slice(builder, INT64(0), num_bytes, INT64(CACHE_LINE), INT64) as (offset, _):
            prefetch_line(builder, builder.gep(first, [offset]))
        return context.get_dummy_value()

    return numba.void(block), emit


@intrinsic
def mix_group(_typing, mixed, weights, column, values, first, last, head_dim):
    """Computes mixed += (w0 * v0 + w1 * v1) + (w2 * v2 + w3 * v3), wi = weights[column + i], vi = values[first + i].

    If first + i > last, wi is 0 and vi is values[last]: this adds +-0 to a sum, which changes no bit.
    """

    def emit(context, builder, signature, arguments):
        _, _, column, _, first, last, head_dim = arguments
        mixed, weights = (row_address(context, builder, signature, arguments, i) for i in (0, 1))
        columns = group_columns(builder, first, last)
        rows = [row_address(context, builder, signature, arguments, 3, t) for t in columns]
        w = []
        for i in range(GROUP):
            is_there = builder.icmp_signed("<=", builder.add(first, INT64(i)), last)
            w.append(builder.select(is_there, load(builder, weights, builder.add(column, INT64(i)), FLOAT), FLOAT(0.0)))

        def add(d, w, kind):
            x = [load(builder, row, d, kind) for row in rows]
            sums = [multiply_add(builder, w[i + 1], x[i + 1], builder.fmul(w[i], x[i])) for i in range(0, GROUP, 2)]
            while len(sums) > 1:
                sums = [builder.fadd(a, b) for a, b in zip(sums[::2], sums[1::2], strict=True)]
            store(builder, builder.fadd(load(builder, mixed, d, kind), *sums), mixed, d)

        vectors_end = builder.and_(head_dim, INT64(-LANES))
        wide = [splat(builder, x, LANES) for x in w]
        with cgutils.for_range_slice(builder, INT64(0), vectors_end, INT64(LANES), INT64) as (d, _):
            add(d, wide, VECTOR)
        with cgutils.for_range_slice(builder, vectors_end, head_dim, INT64(1), INT64) as (d, _):
            add(d, w, FLOAT)
        return context.get_dummy_value()

    return numba.void(mixed, weights, numba.intp, values, numba.intp, numba.intp, numba.intp), emit


@intrinsic
def power_of_2(_typing, exponent):
    """Returns 2^exponent as float32, made from its bits, for an int32 from -126 to 127."""

    def emit(_context, builder, _signature, arguments):
        biased = builder.add(arguments[0], INT32(127))
        return builder.bitcast(builder.shl(biased, INT32(23)), FLOAT)

    return numba.float32(numba.int32), emit


def prefetch_line(builder, address):
    """Prefetches the cache line that holds this byte."""
    ask = builder.module.declare_intrinsic(
        "llvm.prefetch", [BYTES], ir.FunctionType(ir.VoidType(), [BYTES, INT32, INT32, INT32])
    )
    to_read, to_nearest_cache, of_data = INT32(0), INT32(3), INT32(1)
    builder.call(ask, [address, to_read, to_nearest_cache, of_data])


def row_address(context, builder, signature, arguments, argument, row=None):
    """Returns the address of the argument's first value, or of the first value of a row."""
    array = context.make_array(signature.args[argument])(context, builder, arguments[argument])
    if row is None:
        return array.data
    row_length = cgutils.unpack_tuple(builder, array.shape)[1]
    return builder.gep(array.data, [builder.mul(row, row_length)])


def group_columns(builder, first, last):
    """Returns the GROUP columns first, first + 1, ..., each at most `last`, so that nothing behind it is read."""
    columns = [builder.add(first, INT64(i)) for i in range(GROUP)]
    return [builder.select(builder.icmp_signed("<", t, last), t, last) for t in columns]


def multiply_add(builder, a, b, c):
    """Returns a * b + c, fused if the CPU can; c is never the fused product."""
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def clamp(builder, values, most):
    """Clamps values to [-most, most]; NaN stays NaN."""
    for bound, is_beyond in ((most, ">"), (-most, "<")):
        limit = FLOAT(bound) if values.type == FLOAT else splat(builder, FLOAT(bound), values.type.count)
        values = builder.select(builder.fcmp_ordered(is_beyond, values, limit), limit, values)
    return values


def add_halves(builder, vectors):
    """Returns the sums [GROUP] of GROUP vectors of LANES."""
    while len(vectors) > 1:
        num_lanes = 2 * vectors[0].type.count
        vectors = [pick(builder, a, b, range(num_lanes)) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    (sums,) = vectors
    half = LANES // 2
    while half:
        low = [i for i in range(sums.type.count) if i // half % 2 == 0]
        high = [i + half for i in low]
        sums = builder.fadd(pick(builder, sums, sums, low), pick(builder, sums, sums, high))
        half //= 2
    return sums


def pick(builder, a, b, lanes):
    """Returns these lanes of a and b, those of b counted behind a's."""
    return builder.shuffle_vector(a, b, ir.VectorType(INT32, len(lanes))(list(lanes)))


def splat(builder, value, num_lanes):
    vector = builder.insert_element(ir.VectorType(value.type, num_lanes)(ir.Undefined), value, INT32(0))
    return pick(builder, vector, vector, [0] * num_lanes)


def load(builder, row, offset, kind):
    address = builder.bitcast(builder.gep(row, [offset]), kind.as_pointer())
    return builder.load(address, align=alignment(kind))


def store(builder, value, row, offset):
    address = builder.bitcast(builder.gep(row, [offset]), value.type.as_pointer())
    builder.store(value, address, align=alignment(value.type))


def alignment(kind):
    """Returns the alignment in bytes of a single number: rows may begin at any number."""
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    return 2 if element == HALF else 4
