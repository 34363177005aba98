# ruff: noqa: PLR0917 (emitters take their arguments by position)
"""Vector code of attention on a CPU: scores and mixing of a few pairs (row, query head) at a time.

A register of keys or values that was loaded serves several pairs, and one of a pair several columns. Every sum runs
through its terms one by one, so its bits do not depend on the pairs that are computed beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numba
from llvmlite import binding, ir
from numba.core import cgutils
from numba.extending import intrinsic

from faser_backend.cpu.kernels.vectors import (
    BYTES,
    FLOAT,
    HALF,
    INT32,
    INT64,
    LANES,
    VECTOR,
    load,
    multiply_add,
    pick,
    prefetch_line,
    row_address,
    splat,
    store,
)

PAIRS = 4 if binding.get_host_cpu_features().get("avx512f") else 1  # of an inner loop: their sums fit registers
COLUMNS = 64  # whose weights are relative to one maximum: COLUMNS * i to COLUMNS * (i + 1) - 1 of a sequence
VECTORS = COLUMNS // LANES
LARGEST, TOTAL, FACTOR = range(3)  # indices into a pair's state


@intrinsic
def transpose_keys(_typing, keys, pool, pool_rows, num_columns, head_dim):
    """Computes keys[d, t] = pool[pool_rows[t], d] as float32, for num_columns columns and those that fill a vector.

    Prefetches the next group's.
    """

    def emit(context, builder, signature, arguments):
        _, _, _, num_columns, head_dim = arguments
        pool_rows = row_address(context, builder, signature, arguments, 2)
        low = [lane // 2 + LANES * (lane % 2) for lane in range(LANES)]
        high = [lane + LANES // 2 for lane in low]
        vectors_end = builder.and_(head_dim, INT64(-LANES))
        with cgutils.for_range_slice(builder, INT64(0), num_columns, INT64(LANES), INT64) as (column, _):
            columns = [builder.add(column, INT64(i)) for i in range(LANES)]
            rows = [row_in_pool(context, builder, signature, arguments, 1, pool_rows, t) for t in columns]
            later = [builder.add(t, INT64(COLUMNS)) for t in columns]
            next_rows = [row_in_pool(context, builder, signature, arguments, 1, pool_rows, t) for t in later]

            def put(values, d):
                store(builder, values, row_address(context, builder, signature, arguments, 0, d), column)

            with cgutils.for_range_slice(builder, INT64(0), vectors_end, INT64(LANES), INT64) as (d, _):
                square = [load_wide(builder, row, d, VECTOR) for row in rows]
                for row in next_rows:
                    prefetch(builder, row, d)
                for _ in range(LANES.bit_length() - 1):
                    halves = zip(square[: LANES // 2], square[LANES // 2 :], strict=True)
                    square = [pick(builder, a, b, lanes) for a, b in halves for lanes in (low, high)]
                for i, values in enumerate(square):
                    put(values, builder.add(d, INT64(i)))
            with cgutils.for_range_slice(builder, vectors_end, head_dim, INT64(1), INT64) as (d, _):
                values = VECTOR(ir.Undefined)
                for i, row in enumerate(rows):
                    values = builder.insert_element(values, load_wide(builder, row, d, FLOAT), INT32(i))
                put(values, d)
        return context.get_dummy_value()

    return numba.void(keys, pool, pool_rows, numba.intp, numba.intp), emit


@intrinsic
def score_pairs(_typing, scores, queries, keys, first, num_pairs, head_dim):
    """Computes scores[pair, column] = queries[pair] . keys[:, column], d by d, for at most PAIRS pairs from `first`."""

    def emit(context, builder, signature, arguments):
        for pairs in cases(builder, arguments[4]):
            target, queries = rows_of(context, builder, signature, arguments, (0, 1), arguments[3], pairs)
            offsets = [INT64(LANES * v) for v in range(VECTORS)]
            sums = [[cgutils.alloca_once_value(builder, VECTOR([0.0] * LANES)) for _ in offsets] for _ in queries]
            with cgutils.for_range_slice(builder, INT64(0), arguments[5], INT64(1), INT64) as (d, _):
                row = row_address(context, builder, signature, arguments, 2, d)
                add_products(builder, sums, queries, d, [load(builder, row, at, VECTOR) for at in offsets])
            store_sums(builder, sums, target, offsets)
        return context.get_dummy_value()

    return numba.void(scores, queries, keys, *[numba.intp] * 3), emit


@intrinsic
def mix_pairs(_typing, mixed, weights, state, pool, pool_rows, first, num_pairs, num_columns, head_dim):
    """Computes mixed[pair] = mixed[pair] * state[pair, FACTOR] + the sum of weights[pair, t] * pool[pool_rows[t]].

    It adds t by t, t < num_columns, for at most PAIRS pairs from `first`, and prefetches the next group's.
    """

    def emit(context, builder, signature, arguments):
        _, _, _, _, _, first, num_pairs, num_columns, head_dim = arguments
        pool_rows = row_address(context, builder, signature, arguments, 4)

        def mix(pairs, d, kind, vectors):
            """Mixes `vectors` vectors, or numbers, from d on."""
            target, weights, states = rows_of(context, builder, signature, arguments, range(3), first, pairs)
            offsets = [builder.add(d, INT64(LANES * v)) for v in range(vectors)]
            sums = []
            for row, of_pair in zip(target, states, strict=True):
                factor = spread(builder, load(builder, of_pair, INT64(FACTOR), FLOAT), kind)
                start = [builder.fmul(load(builder, row, at, kind), factor) for at in offsets]
                sums.append([cgutils.alloca_once_value(builder, x) for x in start])
            with cgutils.for_range_slice(builder, INT64(0), num_columns, INT64(1), INT64) as (t, _):
                row = row_in_pool(context, builder, signature, arguments, 3, pool_rows, t)
                next_row = row_in_pool(
                    context, builder, signature, arguments, 3, pool_rows, builder.add(t, INT64(COLUMNS))
                )
                for at in offsets:
                    prefetch(builder, next_row, at)
                add_products(builder, sums, weights, t, [load_wide(builder, row, at, kind) for at in offsets])
            store_sums(builder, sums, target, offsets)

        for pairs in cases(builder, num_pairs):
            start = INT64(0)
            for kind, vectors, step in ((VECTOR, VECTORS, COLUMNS), (VECTOR, 1, LANES), (FLOAT, 1, 1)):
                stop = builder.and_(head_dim, INT64(-step))
                with cgutils.for_range_slice(builder, start, stop, INT64(step), INT64) as (d, _):
                    mix(pairs, d, kind, vectors)
                start = stop
        return context.get_dummy_value()

    return numba.void(mixed, weights, state, pool, pool_rows, *[numba.intp] * 4), emit


def cases(builder, num_pairs) -> Iterator[int]:
    """Yields 1 to PAIRS; what is emitted meanwhile runs if num_pairs is that number."""
    for case in range(1, PAIRS + 1):
        with builder.if_then(builder.icmp_signed("==", num_pairs, INT64(case))):
            yield case


def rows_of(context, builder, signature, arguments, of, first, pairs):
    """Returns the rows' addresses of some pairs in each of these arguments."""
    rows = [builder.add(first, INT64(i)) for i in range(pairs)]
    return [[row_address(context, builder, signature, arguments, i, row) for row in rows] for i in of]


def row_in_pool(context, builder, signature, arguments, argument, pool_rows, t):
    """Returns the address of the row at pool_rows[t] of a pool; halves are told by the address's type."""
    row = builder.sext(load(builder, pool_rows, t, INT32), INT64)
    address = row_address(context, builder, signature, arguments, argument, row)
    is_half = signature.args[argument].dtype == numba.uint16
    return builder.bitcast(address, HALF.as_pointer()) if is_half else address


def load_wide(builder, row, offset, kind):
    """Loads float32 or halves as float32."""
    if row.type == FLOAT.as_pointer():
        return load(builder, row, offset, kind)
    return builder.fpext(load(builder, row, offset, HALF if kind == FLOAT else ir.VectorType(HALF, LANES)), kind)


def prefetch(builder, row, offset):
    prefetch_line(builder, builder.bitcast(builder.gep(row, [offset]), BYTES))


def spread(builder, x, kind):
    return splat(builder, x, LANES) if kind == VECTOR else x


def add_products(builder, sums, rows, at, values):
    """Adds rows[i][at] * values[j] to sums[i][j]."""
    for row, totals in zip(rows, sums, strict=True):
        x = spread(builder, load(builder, row, at, FLOAT), values[0].type)
        for total, value in zip(totals, values, strict=True):
            builder.store(multiply_add(builder, x, value, builder.load(total)), total)


def store_sums(builder, sums, rows, offsets):
    for row, totals in zip(rows, sums, strict=True):
        for total, at in zip(totals, offsets, strict=True):
            store(builder, builder.load(total), row, at)
