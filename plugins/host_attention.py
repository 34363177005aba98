# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""Attention of packed rows over a paged KV pool on a CPU, compiled by numba: what `reference` says, fast.

Work comes in units, one KV head of one sequence each. A unit writes its new keys and values to the pool and
then attends tile by tile: a tile is up to TILE_ROWS pairs (row, query head), which share each block of keys and
of values while it is in the cache. Knows nothing of threads, models or engines.

A pool holds float32 or halves. Halves are widened block by block, once for all pairs of a tile, and all arithmetic is
float32's: where many sequences decode, attention waits for memory, and halves are half of what it waits for. For the
same reason memory is asked for ahead: for values while keys are read, and for the next unit's keys while values are.

The bits of a row's result depend on its query, the keys and values that it sees, its position and the size of a
block. They do not depend on the other rows, sequences or units of the call, nor on which blocks hold the context:
all pairs run through the same code; products are summed by vector code whose order is written out here, in groups
of four columns that begin with their block; and a softmax goes over exactly the columns that its row sees. A row
that is shorter than the longest of its tile mixes that row's columns with weight 0, which changes no bit: this call
wrote them, so they are finite. What lies behind the longest row of a tile is never read. A row of a tree goes over the
same columns as in a chain: what it sees, put together in the order of positions.
"""

from __future__ import annotations

from functools import cache

import numba
import numpy as np
from llvmlite import binding
from numba.extending import overload

from plugins.host_compile import WITHIN_KERNELS, Kernel, compile_kernel, source_stamp
from plugins.host_rows import LOG2_E, ONE, exp2, inlined, inlined_reassociated, spliced
from plugins.host_vectors import GROUP, LANES, copy_row, mix_group, prefetch, score_group

TILE_ROWS = 8  # pairs of a tile


f32 = {num_dims: numba.types.Array(numba.float32, num_dims, "C") for num_dims in (1, 2, 3)}
i64 = {num_dims: numba.types.Array(numba.int64, num_dims, "C") for num_dims in (1, 2)}
POOL_DTYPES = {"fp32": numba.float32, "fp16": numba.uint16}  # by the manifest's words; numba knows no halves

# LLVM sees head_dim as a constant everywhere, and numba can keep the kernel on disk as its closure holds ints alone.


def scratch_width(num_columns: int) -> int:
    """Columns of `scratch` where block_table's width * block is num_columns."""
    return -(-(num_columns + GROUP) // LANES) * LANES


def has_halves() -> bool:
    """Whether this CPU converts halves by instructions; elsewhere a kernel for them cannot be linked."""
    features = binding.get_host_cpu_features()
    return features.get("f16c", not features.get("sse2", False))  # other CPUs than x86's: as of ARMv8


@cache
def attention_kernel(head_dim: int, pool_dtype: str = "fp32") -> Kernel:
    """The kernel for heads of head_dim values; compiled once per CPU and kept on disk, later loaded.

    pool_dtype: of POOL_DTYPES; a pool of halves is given as uint16 of the same bits, where has_halves().
    It runs without the interpreter's lock, so that threads can do ranges of units side by side. All arrays are
    C-contiguous, writable and, where no type is given, float32: TypeError otherwise. Nothing else is checked:
    shapes and indices that do not fit read and write foreign memory. What a row sees is finite.
    """
    pool, stamp = numba.types.Array(POOL_DTYPES[pool_dtype], 4, "C"), source_stamp()
    signature = numba.void(
        f32[3], f32[3], f32[3], pool, pool,  # q, k, v, k_pool, v_pool
        i64[2], i64[1], i64[1],  # block_table, cu_rows, context_lens
        i64[1], i64[1],  # trunk_lens, ancestors
        f32[3], f32[2], f32[2],  # attended, scratch, widened
        numba.int64, numba.int64, numba.float32, numba.boolean,  # first_unit, last_unit, scale, attends
    )  # fmt: skip

    def kernel(
        q,  # [T, H, head_dim], rotated; query head h belongs to KV head h // (H // Hkv)
        k,  # [T, Hkv, head_dim], rotated
        v,
        k_pool,  # [Hkv, NB, block, head_dim]; written in place
        v_pool,
        block_table,  # [B, MB] int64
        cu_rows,  # [B + 1] int64
        context_lens,  # [B] int64: the cell of a sequence's first row, which is its position where there are no trees
        trunk_lens,  # [B] int64; like ancestors empty where there are no trees: see TreeRows in core/batch.py
        ancestors,  # [T] int64
        attended,  # [T, H, head_dim]: the result
        scratch,  # [TILE_ROWS, scratch_width(MB * block)]: work space of the calling thread
        widened,  # [block, head_dim]: likewise
        first_unit,  # unit = sequence * Hkv + KV head
        last_unit,  # exclusive
        scale,
        attends,  # False: keys and values are written and no row attends
    ):
        _ = stamp
        attend_units(
            q, k, v, k_pool, v_pool, block_table, cu_rows, context_lens, trunk_lens, ancestors, attended, scratch,
            widened, first_unit, last_unit, scale, attends, head_dim,
        )  # fmt: skip

    return compile_kernel(kernel, signature)


def kernel_directory() -> str:
    """Where compiled kernels are kept; numba makes the directory. Raises RuntimeError where they cannot be."""
    return str(numba.njit(cache=True)(row_of_pair.py_func).stats.cache_path)


@inlined
def attend_units(
    q, k, v, k_pool, v_pool, block_table, cu_rows, context_lens, trunk_lens, ancestors, attended, scratch, widened,
    first_unit, last_unit, scale, attends, head_dim,
):  # fmt: skip
    """The units [first_unit, last_unit) of a call, arrays as attention_kernel says. For kernels to take in whole:
    head_dim is a constant there."""
    num_kv_heads, kv_block_size = k_pool.shape[0], k_pool.shape[2]
    heads_per_kv = q.shape[1] // num_kv_heads
    for unit in range(first_unit, last_unit):
        sequence, kv_head = unit // num_kv_heads, unit % num_kv_heads
        first_row, num_rows = cu_rows[sequence], cu_rows[sequence + 1] - cu_rows[sequence]
        context, blocks = context_lens[sequence], block_table[sequence]
        next_sequence, next_kv_head = (unit + 1) // num_kv_heads, (unit + 1) % num_kv_heads
        rows = slice(first_row, first_row + num_rows)
        write_rows(k_pool[kv_head], blocks, context, k[rows, kv_head], head_dim)
        write_rows(v_pool[kv_head], blocks, context, v[rows, kv_head], head_dim)
        branches = branches_of(ancestors, first_row, num_rows if attends else 0)
        attend_tree(
            q, k_pool[kv_head], v_pool[kv_head], blocks, trunk_lens[sequence:], branches, attended, scratch, widened,
            first_row, kv_head, heads_per_kv, scale, head_dim,
        )  # fmt: skip
        num_pairs = num_rows * heads_per_kv if attends and branches.size == 0 else 0
        for tile in range(0, num_pairs, TILE_ROWS):
            tile_end = min(tile + TILE_ROWS, num_pairs)
            num_columns = context + (tile_end - 1) // heads_per_kv + 1  # of the longest row
            for column in range(0, num_columns, kv_block_size):
                last = min(kv_block_size, num_columns - column) - 1
                if tile == 0:
                    prefetch(v_pool[kv_head, blocks[column // kv_block_size]])  # pyright: ignore[reportCallIssue]
                keys = readable(k_pool[kv_head, blocks[column // kv_block_size]], last, widened, head_dim)
                for pair in range(tile, tile_end):
                    scores = scratch[pair - tile]
                    query = row_of_pair(q, first_row, pair, kv_head, heads_per_kv)
                    for t in range(0, last + 1, GROUP):
                        score_group(scores, column + t, query, keys, t, last, head_dim)  # pyright: ignore[reportCallIssue]
            for pair in range(tile, tile_end):
                softmax(scratch[pair - tile], context + pair // heads_per_kv + 1, num_columns, scale)
                mixed = row_of_pair(attended, first_row, pair, kv_head, heads_per_kv)
                for d in range(head_dim):
                    mixed[d] = 0
            for column in range(0, num_columns, kv_block_size):
                last = min(kv_block_size, num_columns - column) - 1
                if tile_end == num_pairs and unit + 1 < last_unit and column < context_lens[next_sequence]:
                    prefetch(k_pool[next_kv_head, block_table[next_sequence, column // kv_block_size]])  # pyright: ignore[reportCallIssue]
                values = readable(v_pool[kv_head, blocks[column // kv_block_size]], last, widened, head_dim)
                for pair in range(tile, tile_end):
                    weights = scratch[pair - tile]
                    mixed = row_of_pair(attended, first_row, pair, kv_head, heads_per_kv)
                    for t in range(0, last + 1, GROUP):
                        mix_group(mixed, weights, column + t, values, t, last, head_dim)  # pyright: ignore[reportCallIssue]


@spliced
def branches_of(ancestors, first_row, num_rows):
    """The rows' ancestors where they are a tree's; none in a chain."""
    is_tree = num_rows > 0 and ancestors.size > 0 and ancestors[first_row] != 0
    return ancestors[first_row : first_row + num_rows * is_tree]


@inlined
def attend_tree(
    q, k_pool, v_pool, blocks, trunk_lens, ancestors, attended, scratch, widened, first_row, kv_head, heads_per_kv,
    scale, head_dim,
):  # fmt: skip
    """A unit whose rows are a tree's: ancestors [rows] of its own rows, maybe none; k_pool and v_pool [NB, block,
    head_dim] of its head; trunk_lens from its own on. Whole blocks of the trunk are read once for a tile. What lies
    behind them is gathered row by row in the order of positions, so that a row's bits are those that it has in a
    chain."""
    num_pairs = ancestors.size * heads_per_kv
    for tile in range(0, num_pairs, TILE_ROWS):
        trunk = trunk_lens[0]
        shared = trunk // k_pool.shape[1] * k_pool.shape[1]
        tile_end = min(tile + TILE_ROWS, num_pairs)
        longest = trunk
        for pair in range(tile, tile_end):
            longest = max(longest, trunk + count_bits(ancestors[pair // heads_per_kv]))
        score_tile(
            q, k_pool, blocks, trunk, shared, longest, ancestors, scratch, widened, first_row, tile, tile_end, kv_head,
            heads_per_kv, head_dim,
        )  # fmt: skip
        for pair in range(tile, tile_end):
            num_visible = trunk + count_bits(ancestors[pair // heads_per_kv])
            softmax(scratch[pair - tile], num_visible, num_visible, scale)
        mix_tile(
            attended, v_pool, blocks, trunk, shared, longest, ancestors, scratch, widened, first_row, tile, tile_end,
            kv_head, heads_per_kv, head_dim,
        )  # fmt: skip


@inlined
def score_tile(
    q, k_pool, blocks, trunk, shared, longest, ancestors, scratch, widened, first_row, tile, tile_end, kv_head,
    heads_per_kv, head_dim,
):  # fmt: skip
    """Of attend_tree: scores of the pairs [tile, tile_end), each over the columns that its row sees."""
    kv_block_size = k_pool.shape[1]
    for column in range(0, shared, kv_block_size):
        keys = readable(k_pool[blocks[column // kv_block_size]], kv_block_size - 1, widened, head_dim)
        for pair in range(tile, tile_end):
            query = row_of_pair(q, first_row, pair, kv_head, heads_per_kv)
            for t in range(0, kv_block_size, GROUP):
                score_group(scratch[pair - tile], column + t, query, keys, t, kv_block_size - 1, head_dim)  # pyright: ignore[reportCallIssue]
    for column in range(shared, longest, kv_block_size):
        for pair in range(tile, tile_end):
            bits = ancestors[pair // heads_per_kv]
            last = min(kv_block_size, trunk + count_bits(bits) - column) - 1
            if last >= 0 and (pair == tile or pair % heads_per_kv == 0):  # heads of a row share what it sees
                gather_path(widened, k_pool, blocks, trunk, bits, column, last, head_dim)
            query = row_of_pair(q, first_row, pair, kv_head, heads_per_kv)
            for t in range(0, last + 1, GROUP):
                score_group(scratch[pair - tile], column + t, query, widened, t, last, head_dim)  # pyright: ignore[reportCallIssue]


@inlined
def mix_tile(
    attended, v_pool, blocks, trunk, shared, longest, ancestors, scratch, widened, first_row, tile, tile_end, kv_head,
    heads_per_kv, head_dim,
):  # fmt: skip
    """Of attend_tree: attended = the values of the same columns, weighted."""
    kv_block_size = v_pool.shape[1]
    for pair in range(tile, tile_end):
        mixed = row_of_pair(attended, first_row, pair, kv_head, heads_per_kv)
        for d in range(head_dim):
            mixed[d] = 0
    for column in range(0, shared, kv_block_size):
        values = readable(v_pool[blocks[column // kv_block_size]], kv_block_size - 1, widened, head_dim)
        for pair in range(tile, tile_end):
            mixed = row_of_pair(attended, first_row, pair, kv_head, heads_per_kv)
            for t in range(0, kv_block_size, GROUP):
                mix_group(mixed, scratch[pair - tile], column + t, values, t, kv_block_size - 1, head_dim)  # pyright: ignore[reportCallIssue]
    for column in range(shared, longest, kv_block_size):
        for pair in range(tile, tile_end):
            bits = ancestors[pair // heads_per_kv]
            last = min(kv_block_size, trunk + count_bits(bits) - column) - 1
            if last >= 0 and (pair == tile or pair % heads_per_kv == 0):
                gather_path(widened, v_pool, blocks, trunk, bits, column, last, head_dim)
            mixed = row_of_pair(attended, first_row, pair, kv_head, heads_per_kv)
            for t in range(0, last + 1, GROUP):
                mix_group(mixed, scratch[pair - tile], column + t, widened, t, last, head_dim)  # pyright: ignore[reportCallIssue]


@inlined
def count_bits(bits):
    """Of an int64, the sign included."""
    count = 0
    while bits != 0:
        bits &= bits - 1
        count += 1
    return count


@inlined
def gather_path(widened, pool, blocks, trunk, bits, column, last, head_dim):
    """widened[t] = what lies at position column + t of a row that sees the trunk and, behind it, the cells of its bits;
    for t up to `last`."""
    offset = 0
    for position in range(trunk, column + last + 1):
        while (bits >> offset) & 1 == 0:
            offset += 1
        if position >= column:
            cell = trunk + offset
            copy_row(widened[position - column], pool[blocks[cell // pool.shape[1]], cell % pool.shape[1]], head_dim)  # pyright: ignore[reportCallIssue]
        offset += 1
    for cell in range(column, min(trunk, column + last + 1)):
        copy_row(widened[cell - column], pool[blocks[cell // pool.shape[1]], cell % pool.shape[1]], head_dim)  # pyright: ignore[reportCallIssue]


@inlined
def write_rows(pool, blocks, context, rows, head_dim):
    """rows [n, head_dim] go to positions context, context + 1, ... of a KV head's pool [NB, block, head_dim]."""
    for row in range(rows.shape[0]):
        position = context + row
        cell = pool[blocks[position // pool.shape[1]], position % pool.shape[1]]
        copy_row(cell, rows[row], head_dim)  # pyright: ignore[reportCallIssue]


def readable(block, last, widened, head_dim):
    """The block [kv_block_size, head_dim] as float32: itself, or its rows up to `last` in `widened`."""
    raise NotImplementedError


@overload(readable, inline="always", jit_options=WITHIN_KERNELS)
def _readable(block, last, widened, head_dim):
    if block.dtype == numba.float32:
        return lambda block, last, widened, head_dim: block

    def widen(block, last, widened, head_dim):
        for t in range(last + 1):
            copy_row(widened[t], block[t], head_dim)  # pyright: ignore[reportCallIssue]
        return widened

    return widen


@spliced
def row_of_pair(array, first_row, pair, kv_head, heads_per_kv):
    """The pair's [head_dim] of an array [T, H, head_dim]; pairs go through the heads of a row, then the rows."""
    return array[first_row + pair // heads_per_kv, kv_head * heads_per_kv + pair % heads_per_kv]


@inlined_reassociated
def softmax(scores, num_visible, num_columns, scale):
    """scores[:num_visible] become weights whose sum is 1; scores[num_visible:num_columns] become 0. A weight too small
    for float32 is 1e-38 in place of 0, which no sum that holds a 1 can tell apart."""
    largest = scores[0]
    for t in range(num_visible):
        largest = max(largest, scores[t])
    to_log2 = scale * LOG2_E
    offset = largest * to_log2
    total = np.float32(0)
    for t in range(num_visible):
        weight = exp2(scores[t] * to_log2 - offset)
        scores[t] = weight
        total += weight
    inverse = ONE / total
    for t in range(num_visible):
        scores[t] *= inverse
    for t in range(num_visible, num_columns):
        scores[t] = 0
