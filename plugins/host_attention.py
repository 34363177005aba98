# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""Attention of packed rows over a paged KV pool on a CPU, compiled by numba: what `reference` says, fast.

Work comes in units, one KV head of one sequence each. A unit writes its new keys and values to the pool and
then attends tile by tile: a tile is up to TILE_ROWS pairs (row, query head), which share each block of keys and
of values while it is in the cache. Knows nothing of threads, models or engines.

The bits of a row's result depend on its query, the keys and values that it sees, its position and the size of a
block. They do not depend on the other rows, sequences or units of the call, nor on which blocks hold the context:
all pairs run through the same code; products are summed by vector code whose order is written out here, in groups
of four columns that begin with their block; and a softmax goes over exactly the columns that its row sees. A row
that is shorter than the longest of its tile mixes that row's columns with weight 0, which changes no bit: this call
wrote them, so they are finite. What lies behind the longest row of a tile is never read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

TILE_ROWS = 8  # pairs of a tile
GROUP = 4  # columns that the inner loops take at a time
LANES = 16  # floats of a vector; a narrower CPU splits it, with the same result
LOG2_E = np.float32(np.log2(np.e))
HALF, ONE, SMALLEST_EXPONENT = np.float32(0.5), np.float32(1), np.float32(-126)

Kernel = Callable[..., None]
warn_once = cache(logging.getLogger(__name__).warning)  # per text: a process has a kernel for each head_dim

f32 = {num_dims: numba.types.Array(numba.float32, num_dims, "C") for num_dims in (1, 2, 3, 4)}
i64 = {num_dims: numba.types.Array(numba.int64, num_dims, "C") for num_dims in (1, 2)}
SIGNATURE = numba.void(
    f32[3], f32[3], f32[3], f32[4], f32[4],  # q, k, v, k_pool, v_pool
    i64[2], i64[1], i64[1],  # block_table, cu_rows, context_lens
    f32[3], f32[2], numba.int32[::1],  # attended, scratch, exponents
    numba.int64, numba.int64, numba.float32, numba.boolean,  # first_unit, last_unit, scale, attends
)  # fmt: skip

# LLVM sees head_dim as a constant everywhere, and numba can keep the kernel on disk as its closure is an int alone.
inlined = numba.njit(forceinline=True, error_model="numpy")
# Vector reductions of a softmax. Their order is a function of the number of columns: its loops exist once.
inlined_reassociated = numba.njit(
    forceinline=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz", "arcp", "nnan", "ninf"}
)

FLOAT, INT32, INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(FLOAT, LANES)


def scratch_width(num_columns: int) -> int:
    """Columns of `scratch` and `exponents` where block_table's width * block is num_columns."""
    return -(-(num_columns + GROUP) // LANES) * LANES


@cache
def attention_kernel(head_dim: int) -> Kernel:
    """The kernel for heads of head_dim values; compiled once per CPU and kept on disk, later loaded.

    It runs without the interpreter's lock, so that threads can do ranges of units side by side. All arrays are
    C-contiguous, writable and, where no type is given, float32: TypeError otherwise. Nothing else is checked:
    shapes and indices that do not fit read and write foreign memory. What a row sees is finite.
    """

    def kernel(
        q,  # [T, H, head_dim], rotated; query head h belongs to KV head h // (H // Hkv)
        k,  # [T, Hkv, head_dim], rotated
        v,
        k_pool,  # [Hkv, NB, block, head_dim]; written in place
        v_pool,
        block_table,  # [B, MB] int64
        cu_rows,  # [B + 1] int64
        context_lens,  # [B] int64: the position of a sequence's first row
        attended,  # [T, H, head_dim]: the result
        scratch,  # [TILE_ROWS, scratch_width(MB * block)]: work space of the calling thread
        exponents,  # [scratch_width(MB * block)] int32: likewise
        first_unit,  # unit = sequence * Hkv + KV head
        last_unit,  # exclusive
        scale,
        attends,  # False: keys and values are written and no row attends
    ):
        num_kv_heads, kv_block_size = k_pool.shape[0], k_pool.shape[2]
        heads_per_kv = q.shape[1] // num_kv_heads
        for unit in range(first_unit, last_unit):
            sequence, kv_head = unit // num_kv_heads, unit % num_kv_heads
            first_row, num_rows = cu_rows[sequence], cu_rows[sequence + 1] - cu_rows[sequence]
            context, blocks = context_lens[sequence], block_table[sequence]
            for row in range(num_rows):
                block, offset = blocks[(context + row) // kv_block_size], (context + row) % kv_block_size
                for d in range(head_dim):
                    k_pool[kv_head, block, offset, d] = k[first_row + row, kv_head, d]
                    v_pool[kv_head, block, offset, d] = v[first_row + row, kv_head, d]
            num_pairs = num_rows * heads_per_kv if attends else 0
            for tile in range(0, num_pairs, TILE_ROWS):
                tile_end = min(tile + TILE_ROWS, num_pairs)
                num_columns = context + (tile_end - 1) // heads_per_kv + 1  # of the longest row
                for column in range(0, num_columns, kv_block_size):
                    keys = k_pool[kv_head, blocks[column // kv_block_size]]
                    last = min(kv_block_size, num_columns - column) - 1
                    for pair in range(tile, tile_end):
                        scores = scratch[pair - tile]
                        query = row_of_pair(q, first_row, pair, kv_head, heads_per_kv)
                        for t in range(0, last + 1, GROUP):
                            score_group(scores, column + t, query, keys, t, last, head_dim)  # pyright: ignore[reportCallIssue]
                for pair in range(tile, tile_end):
                    softmax(scratch[pair - tile], exponents, context + pair // heads_per_kv + 1, num_columns, scale)
                    mixed = row_of_pair(attended, first_row, pair, kv_head, heads_per_kv)
                    for d in range(head_dim):
                        mixed[d] = 0
                for column in range(0, num_columns, kv_block_size):
                    values = v_pool[kv_head, blocks[column // kv_block_size]]
                    last = min(kv_block_size, num_columns - column) - 1
                    for pair in range(tile, tile_end):
                        weights = scratch[pair - tile]
                        mixed = row_of_pair(attended, first_row, pair, kv_head, heads_per_kv)
                        for t in range(0, last + 1, GROUP):
                            mix_group(mixed, weights, column + t, values, t, last, head_dim)  # pyright: ignore[reportCallIssue]

    options = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(SIGNATURE, cache=True, **options)(kernel)
    except (RuntimeError, OSError) as error:  # no directory to write to, or no room in it
        warn_once(f"attention is compiled anew in every process; NUMBA_CACHE_DIR can name where to keep it ({error})")
    return numba.njit(SIGNATURE, **options)(kernel)


def kernel_directory() -> str:
    """Where compiled kernels are kept; numba makes the directory. Raises RuntimeError where they cannot be."""
    return str(numba.njit(cache=True)(row_of_pair.py_func).stats.cache_path)


@inlined
def row_of_pair(array, first_row, pair, kv_head, heads_per_kv):
    """The pair's [head_dim] of an array [T, H, head_dim]; pairs go through the heads of a row, then the rows."""
    return array[first_row + pair // heads_per_kv, kv_head * heads_per_kv + pair % heads_per_kv]


@inlined_reassociated
def softmax(scores, exponents, num_visible, num_columns, scale):
    """scores[:num_visible] become weights whose sum is 1; scores[num_visible:num_columns] become 0.

    A weight is 2^x = 2^n * 2^f with n = round(x) and |f| <= 1/2. The polynomial is the one of degree 5 with the least
    relative error on that range, 7.5e-8, or 2.2e-7 with the roundings of float32. 2^n is put together from its bits,
    in an array because numba reinterprets whole arrays only. x is at least -126, where the exponents of float32 end:
    such a weight is 1e-38 in place of 0, which no sum that holds a 1 can tell apart.
    """
    largest = scores[0]
    for t in range(num_visible):
        largest = max(largest, scores[t])
    to_log2 = scale * LOG2_E
    offset = largest * to_log2
    for t in range(num_visible):
        x = max(scores[t] * to_log2 - offset, SMALLEST_EXPONENT)
        n = np.floor(x + HALF)
        f = x - n
        power = np.float32(1.3276472e-3)
        power = power * f + np.float32(9.6755414e-3)
        power = power * f + np.float32(5.5507133e-2)
        power = power * f + np.float32(2.4022120e-1)
        power = power * f + np.float32(6.9314697e-1)
        power = power * f + np.float32(1.0000001)
        exponents[t] = (np.int32(n) + np.int32(127)) << np.int32(23)
        scores[t] = power
    powers_of_2 = exponents.view(np.float32)
    total = np.float32(0)
    for t in range(num_visible):
        weight = scores[t] * powers_of_2[t]
        scores[t] = weight
        total += weight
    inverse = ONE / total
    for t in range(num_visible):
        scores[t] *= inverse
    for t in range(num_visible, num_columns):
        scores[t] = 0


@intrinsic
def score_group(_typing, scores, column, query, keys, first, last, head_dim):
    """scores[column + i] = query . keys[min(first + i, last)] for i < GROUP.

    LANES partial sums of each product are added in halves; values of head_dim beyond whole vectors follow one by one.
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
def mix_group(_typing, mixed, weights, column, values, first, last, head_dim):
    """mixed += (w0 * v0 + w1 * v1) + (w2 * v2 + w3 * v3), wi = weights[column + i] and vi = values[first + i].

    Where first + i is behind last, wi is 0 and vi is values[last], which adds +-0 to a sum: no bit changes.
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


def row_address(context, builder, signature, arguments, argument, row=None):
    """Address of the argument's first value, or of its row's."""
    array = context.make_array(signature.args[argument])(context, builder, arguments[argument])
    if row is None:
        return array.data
    row_length = cgutils.unpack_tuple(builder, array.shape)[1]
    return builder.gep(array.data, [builder.mul(row, row_length)])


def group_columns(builder, first, last):
    """first, first + 1 ..., GROUP in all, none behind last: what is not there is not read."""
    columns = [builder.add(first, INT64(i)) for i in range(GROUP)]
    return [builder.select(builder.icmp_signed("<", t, last), t, last) for t in columns]


def multiply_add(builder, a, b, c):
    """a * b + c, one rounding where the CPU has such an instruction: of c, no product is ever fused instead."""
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def add_halves(builder, vectors):
    """GROUP vectors of LANES -> the vector of their sums, [GROUP]."""
    while len(vectors) > 1:  # one behind another
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
    """Lanes of a, then b."""
    return builder.shuffle_vector(a, b, ir.VectorType(INT32, len(lanes))(list(lanes)))


def splat(builder, value, num_lanes):
    vector = builder.insert_element(ir.VectorType(FLOAT, num_lanes)(ir.Undefined), value, INT32(0))
    return pick(builder, vector, vector, [0] * num_lanes)


def load(builder, row, offset, kind):
    address = builder.bitcast(builder.gep(row, [offset]), kind.as_pointer())
    return builder.load(address, align=4)


def store(builder, value, row, offset):
    builder.store(value, builder.bitcast(builder.gep(row, [offset]), value.type.as_pointer()), align=4)
