# ruff: noqa: PLR0917 (emitters take their arguments by position)
"""Vector code of attention on a CPU: scores and mixing of a few pairs (row, query head) at a time.

A register of keys or values that was loaded serves several pairs, and one of a pair several columns. Every sum runs
through its terms one by one, so its bits do not depend on the pairs that are computed beside it.

`dots`, a constant, is 1 if VDPBF16PS multiplies (see vector_products): rows then hold two bfloat16 numbers per float.
"""

from __future__ import annotations

from functools import reduce

import numba
from llvmlite import binding, ir
from numba.core import cgutils
from numba.extending import intrinsic

from faser_backend.cpu.kernels.vector_products import dot, join
from faser_backend.cpu.kernels.vectors import (
    BYTES,
    FLOAT,
    HALF,
    INT32,
    INT64,
    LANES,
    VECTOR,
    fold,
    getters,
    load,
    multiply_add,
    pick,
    power_of_2,
    prefetch_line,
    splat,
    store,
)

COLUMNS = 64  # whose weights are relative to one maximum: COLUMNS * i to COLUMNS * (i + 1) - 1 of a sequence
VECTORS = COLUMNS // LANES
# An inner loop has the sums of some pairs times some vectors in registers; several hide the latency of sums.
HAS_MANY_REGISTERS = binding.get_host_cpu_features().get("avx512f", False)
PAIRS = 4 if HAS_MANY_REGISTERS else 6
BY_NUMBER = [lane // 2 + LANES * (lane % 2) for lane in range(2 * LANES)]
LEAST_SCORE = -1e38
NUM_SEEN, LARGEST, TOTAL, FACTOR = range(4)  # indices into a pair's state


@intrinsic(prefer_literal=True)
def transpose_keys(_typing, dots, keys, k_rows, v_rows, pool_rows, num_columns, head_dim):
    """Computes keys[d, t] = k_rows[pool_rows[t], d], for num_columns columns and those that fill a vector.

    With dots, keys[d, t] holds d and d + head_dim / 2. Prefetches the next group's rows of both pools.
    """

    def emit(context, builder, signature, arguments):
        num_columns, head_dim = arguments[5:]
        keys, k_rows, v_rows, pool_rows = getters(context, builder, signature, arguments, 4, first=1)
        by_halves = BY_NUMBER[:LANES], BY_NUMBER[LANES:]
        length = builder.lshr(head_dim, INT64(dots.literal_value))
        vectors_end = builder.and_(length, INT64(-LANES))
        with cgutils.for_range_slice(builder, INT64(0), num_columns, INT64(LANES), INT64) as (column, _):
            columns = [builder.add(column, INT64(i)) for i in range(LANES)]
            rows = [k_rows(pool_row(builder, pool_rows, t)) for t in columns]
            later = [pool_row(builder, pool_rows, builder.add(t, INT64(COLUMNS))) for t in columns]
            next_rows = [pool(row) for row in later for pool in (k_rows, v_rows)]
            with cgutils.for_range_slice(builder, INT64(0), head_dim, INT64(2 * LANES), INT64) as (d, _):
                for row in next_rows:
                    prefetch_line(builder, builder.bitcast(builder.gep(row, [d]), BYTES))
            with cgutils.for_range_slice(builder, INT64(0), vectors_end, INT64(LANES), INT64) as (d, _):
                starts = [d, builder.add(d, length)][: 1 + dots.literal_value]
                square = [[load_wide(builder, row, start, VECTOR) for start in starts] for row in rows]
                square = [join(builder, *of, lanes=BY_NUMBER) if dots.literal_value else of[0] for of in square]
                for _ in range(LANES.bit_length() - 1):
                    halves = zip(square[: LANES // 2], square[LANES // 2 :], strict=True)
                    square = [pick(builder, a, b, lanes) for a, b in halves for lanes in by_halves]
                for i, values in enumerate(square):
                    store(builder, values, keys(builder.add(d, INT64(i))), column)
            with cgutils.for_range_slice(builder, vectors_end, length, INT64(1), INT64) as (d, _):
                values = VECTOR(ir.Undefined)
                for i, row in enumerate(rows):
                    values = builder.insert_element(values, load_wide(builder, row, d, FLOAT), INT32(i))
                store(builder, values, keys(d), column)
        return context.get_dummy_value()

    return numba.void(dots, keys, k_rows, v_rows, pool_rows, numba.intp, numba.intp), emit


@intrinsic(prefer_literal=True)
def join_rows(_typing, dots, target, low, high, width):
    """Rounds two rows to bfloat16 and writes the pairs of their numbers; target may be `low`. Nothing without dots."""

    def emit(context, builder, signature, arguments):
        target, *rows = (of() for of in getters(context, builder, signature, arguments, 3, first=1))
        if not dots.literal_value:
            return context.get_dummy_value()
        with cgutils.for_range_slice(builder, INT64(0), arguments[4], INT64(LANES), INT64) as (d, _):
            both = [load_wide(builder, row, d, VECTOR) for row in rows]
            store(builder, join(builder, *both, lanes=BY_NUMBER), target, d)
        return context.get_dummy_value()

    return numba.void(dots, target, low, high, numba.intp), emit


@intrinsic(prefer_literal=True)
def attend_pairs(
    _typing, dots, mixed, weights, state, queries, keys, values, v_rows, pool_rows, column, num_columns, num_pairs,
    head_dim
):  # fmt: skip
    """Adds a group's first num_columns columns to the sums of at most PAIRS pairs.

    A score is queries[pair] . keys[:, t], summed d by d, and a weight 2^(score - largest), or 0 where the column is
    hidden; largest is that of all groups so far. state [pair, 4]: NUM_SEEN columns from the sequence's first on,
    LARGEST, the sum of weights, and the factor that older weights take because LARGEST has grown. A weight that
    underflows float32 becomes 1e-38, which changes no sum that holds a 1. mixed[pair] takes the factor, then weight
    times v_rows[pool_rows[t]], t by t. With dots, values and weights [PAIRS, COLUMNS] are joined, t and t + 1.
    """
    has_dots = dots.literal_value

    def emit(context, builder, signature, arguments):
        column, num_columns, num_pairs, head_dim = arguments[9:]
        column, num_products = builder.sitofp(column, FLOAT), builder.lshr(head_dim, INT64(has_dots))
        num_terms = builder.lshr(builder.add(num_columns, INT64(has_dots)), INT64(has_dots))
        mixed, weights, state, queries, keys, values, v_rows, pool_rows = getters(
            context, builder, signature, arguments, 8, first=1
        )
        offsets = [INT64(LANES * v) for v in range(VECTORS)]

        def first_rows(array, pairs):
            return [array(INT64(pair)) for pair in range(pairs)]

        def score(queries, first, vectors):
            """Returns the scores of `vectors` vectors of columns, of each pair."""

            def keys_of(d):
                return [load(builder, keys(d), at, VECTOR) for at in offsets[first : first + vectors]]

            zeros = [[VECTOR([0.0] * LANES)] * vectors for _ in queries]
            return add_products(builder, has_dots, zeros, queries, num_products, keys_of)

        def mix(targets, weights, states, d, kind, vectors):
            """Mixes `vectors` vectors, or numbers, from d on."""
            offsets = [builder.add(d, INT64(LANES * v)) for v in range(vectors)]
            factors = [spread(builder, load(builder, of_pair, INT64(FACTOR), FLOAT), kind) for of_pair in states]
            both = zip(targets, factors, strict=True)
            starts = [[builder.fmul(load(builder, row, at, kind), factor) for at in offsets] for row, factor in both]

            def values_of(t):
                row = values(t) if has_dots else v_rows(pool_row(builder, pool_rows, t))
                return [load_wide(builder, row, at, kind) for at in offsets]

            sums = add_products(builder, has_dots, starts, weights, num_terms, values_of)
            store_all(builder, sums, targets, offsets)

        for pairs in range(1, PAIRS + 1):
            at_once = VECTORS if HAS_MANY_REGISTERS else max(VECTORS // pairs, 1)
            with builder.if_then(builder.icmp_signed("==", num_pairs, INT64(pairs))):
                for first in range(0, VECTORS, at_once):
                    scores = score(first_rows(queries, pairs), first, at_once)
                    store_all(builder, scores, first_rows(weights, pairs), offsets[first:])
        with cgutils.for_range_slice(builder, INT64(0), num_pairs, INT64(1), INT64) as (pair, _):
            scores = [load(builder, weights(pair), at, VECTOR) for at in offsets]
            found = weights_of(builder, scores, state(pair), column)
            if has_dots:
                found = [join(builder, *found[v : v + 2]) for v in range(0, VECTORS, 2)]
            store_all(builder, [found], [weights(pair)], offsets)
        for pairs in range(1, PAIRS + 1):
            at_once = VECTORS if HAS_MANY_REGISTERS else max(VECTORS // pairs, 1)
            steps = ((VECTOR, at_once, at_once * LANES), (VECTOR, 1, LANES), (FLOAT, 1, 1))[: 3 - has_dots]
            with builder.if_then(builder.icmp_signed("==", num_pairs, INT64(pairs))):
                targets, rows, states = (first_rows(array, pairs) for array in (mixed, weights, state))
                start = INT64(0)
                for kind, vectors, step in steps:
                    stop = builder.and_(head_dim, INT64(-step))
                    with cgutils.for_range_slice(builder, start, stop, INT64(step), INT64) as (d, _):
                        mix(targets, rows, states, d, kind, vectors)
                    start = stop
        return context.get_dummy_value()

    arrays = (mixed, weights, state, queries, keys, values, v_rows, pool_rows)
    return numba.void(dots, *arrays, *[numba.intp] * 4), emit


def weights_of(builder, scores, state, column):
    """Returns the weights of a pair's scores, and updates its state; see attend_pairs."""

    def larger(a, b):
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    end = splat(builder, builder.fsub(load(builder, state, INT64(NUM_SEEN), FLOAT), column), LANES)
    lanes = [VECTOR(list(range(first, first + LANES))) for first in range(0, COLUMNS, LANES)]
    is_seen = [builder.fcmp_ordered("<", each, end) for each in lanes]
    least, zero = (VECTOR([number] * LANES) for number in (LEAST_SCORE, 0.0))
    scores = [builder.select(seen, x, least) for seen, x in zip(is_seen, scores, strict=True)]
    before = splat(builder, load(builder, state, INT64(LARGEST), FLOAT), LANES)
    largest = reduce(larger, scores, before)
    for distance in (8, 4, 2, 1):
        others = pick(builder, largest, largest, [lane ^ distance for lane in range(LANES)])
        largest = larger(largest, others)
    weights = [power_of_2(builder, builder.fsub(x, largest)) for x in scores]
    weights = [builder.select(seen, x, zero) for seen, x in zip(is_seen, weights, strict=True)]
    factor, total = power_of_2(builder, builder.fsub(before, largest)), reduce(builder.fadd, weights)
    first = largest, factor, fold(builder, total)
    most, factor, total = (builder.extract_element(x, INT32(0)) for x in first)
    total = multiply_add(builder, load(builder, state, INT64(TOTAL), FLOAT), factor, total)
    for index, value in ((LARGEST, most), (TOTAL, total), (FACTOR, factor)):
        store(builder, value, state, INT64(index))
    return weights


def pool_row(builder, pool_rows, t):
    return builder.sext(load(builder, pool_rows(), t, INT32), INT64)


def load_wide(builder, row, offset, kind):
    """Loads float32 or halves as float32."""
    if row.type == FLOAT.as_pointer():
        return load(builder, row, offset, kind)
    return builder.fpext(load(builder, row, offset, HALF if kind == FLOAT else ir.VectorType(HALF, LANES)), kind)


def spread(builder, x, kind):
    return splat(builder, x, LANES) if kind == VECTOR else x


def add_products(builder, has_dots, starts, rows, count, values_of):
    """Returns starts[i][j] + the sum of rows[i][k] * values_of(k)[j], k = 0, 1, ... count - 1; of pairs with dots."""
    sums = [[cgutils.alloca_once_value(builder, start) for start in of_row] for of_row in starts]
    with cgutils.for_range_slice(builder, INT64(0), count, INT64(1), INT64) as (k, _):
        values = values_of(k)
        for row, totals in zip(rows, sums, strict=True):
            x = spread(builder, load(builder, row, k, FLOAT), values[0].type)
            for total, value in zip(totals, values, strict=True):
                builder.store((dot if has_dots else multiply_add)(builder, x, value, builder.load(total)), total)
    return [[builder.load(total) for total in totals] for totals in sums]


def store_all(builder, values, rows, offsets):
    for row, of_row in zip(rows, values, strict=True):
        for value, at in zip(of_row, offsets, strict=False):
            store(builder, value, row, at)
