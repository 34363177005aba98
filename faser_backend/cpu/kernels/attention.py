# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""Attention of packed rows over a paged KV pool on a CPU, compiled by numba; `plugins/reference.py` defines the result.

The work is divided into items, one KV head of one sequence and a tile of its rows each; threads take the next item when
they have done one. An item reads the pool in groups of COLUMNS columns: it transposes the keys, once for all pairs
(row, query head) of the tile, computes scores, turns them into weights relative to the largest score so far, and adds
the weighted values up. Sums of older groups take a factor when a larger score is found.

A pool holds float32 or halves; arithmetic is float32, or with `dots` that of VDPBF16PS (see attention_vectors).
Attention of many sequences is bound by memory: halves are half the bytes, and the next group is prefetched.

The bits of a row's result depend on its query, the keys and values that it sees and its position, not on other rows,
sequences, items or tiles, nor on which blocks hold the context. A score is summed along head_dim, a result along the
columns, one by one, or with dots two by two from an even column on; the sum of a group's weights has one order. Few
rows, many rows and rows that are read again run through the same arithmetic. A row mixes columns behind it, which a row
beside it sees, with weight 0; this changes no number, because this call wrote them and they are finite.
"""

from __future__ import annotations

import numba
from llvmlite import binding
from numba.misc.special import literally

from faser_backend.cpu.kernels.attention_vectors import (
    COLUMNS,
    LARGEST,
    LEAST_SCORE,
    NUM_SEEN,
    PAIRS,
    TOTAL,
    attend_pairs,
    join_rows,
    transpose_keys,
)
from faser_backend.cpu.kernels.rows import LOG2_E, ONE, inlined, spliced
from faser_backend.cpu.kernels.vectors import copy_row

TILE_PAIRS = 96  # of an item, at most, unless a single row has more
POOL_DTYPES = {"fp32": numba.float32, "fp16": numba.uint16}  # by the manifest's names; numba has no halves


def space_size(head_dim: int, heads_per_kv: int) -> int:
    """Returns the floats of a thread's `space`."""
    return max(TILE_PAIRS, heads_per_kv) * (2 * head_dim + 4) + (2 * head_dim + PAIRS) * COLUMNS


def tile_rows(heads_per_kv: int) -> int:
    """Returns the most rows of an item."""
    return max(TILE_PAIRS // heads_per_kv, 1)


def has_halves() -> bool:
    """Tells whether this CPU has instructions for halves; without them a kernel for halves cannot be linked."""
    features = binding.get_host_cpu_features()
    return features.get("f16c", not features.get("sse2", False))  # on CPUs other than x86: since ARMv8


def kernel_directory() -> str:
    """Returns the directory of compiled kernels, which numba creates. Raises RuntimeError if none is writable."""
    return str(numba.njit(cache=True)(row_of_pair.py_func).stats.cache_path)


@inlined
def attend_item(
    dots, q, k_pool, v_pool, blocks, position, first_row, num_rows, least, kv_head, attended, space, pool_rows, scale,
    head_dim,
):  # fmt: skip
    """Computes one KV head's part of attended for num_rows rows of a sequence, the first at this position.

    A row sees the positions up to its own, and in any case those before `least`.

    It is inlined into kernels, where dots and head_dim are constants. q, attended [T, H, head_dim], q rotated; query
    head h belongs to KV head h // (H // Hkv). Pools [Hkv, NB, block, head_dim] hold the rows' own keys and values.
    blocks [MB] int64. space [space_size(head_dim, H // Hkv)] and pool_rows [2 * COLUMNS] int32 are the calling
    thread's. Nothing is checked: indices that do not fit access foreign memory.
    """
    dots = literally(dots)
    heads_per_kv = q.shape[1] // k_pool.shape[0]
    num_pairs = num_rows * heads_per_kv
    keys, values, weights, queries, mixed, state = parts_of(space, num_pairs, head_dim)
    k_rows, v_rows = k_pool[kv_head].reshape(-1, head_dim), v_pool[kv_head].reshape(-1, head_dim)
    half = head_dim // 2
    for pair in range(num_pairs):
        query = row_of_pair(q, first_row, pair, kv_head, heads_per_kv)
        for d in range(head_dim):
            queries[pair, d] = query[d] * (scale * LOG2_E)
            mixed[pair, d] = 0
        join_rows(dots, queries[pair], queries[pair], queries[pair, half:], half)  # pyright: ignore[reportCallIssue]
        state[pair, NUM_SEEN] = max(position + pair // heads_per_kv + 1, least)
        state[pair, LARGEST], state[pair, TOTAL] = LEAST_SCORE, 0
    num_columns = max(position + num_rows, least)
    for column in range(0, num_columns, COLUMNS):
        locate(pool_rows, blocks, column, num_columns, k_pool.shape[2])
        num_read = min(num_columns - column, COLUMNS)
        transpose_keys(dots, keys, k_rows, v_rows, pool_rows, num_read, head_dim)  # pyright: ignore[reportCallIssue]
        for t in range(0, num_read, 2):
            low, high = v_rows[pool_rows[t]], v_rows[pool_rows[t + 1]]
            join_rows(dots, values[t // 2], low, high, head_dim)  # pyright: ignore[reportCallIssue]
        # Rows before the first one do not see the group.
        first_pair = 0 if column < least else max(column - position, 0) * heads_per_kv
        for pair in range(first_pair, num_pairs, PAIRS):
            count = min(num_pairs - pair, PAIRS)
            these = slice(pair, pair + count)
            num_seen = max(position + (pair + count - 1) // heads_per_kv + 1, least) - column  # by the last pair
            num_seen = min(num_seen, COLUMNS)
            attend_pairs(  # pyright: ignore[reportCallIssue]
                dots, mixed[these], weights, state[these], queries[these], keys, values, v_rows, pool_rows, column,
                num_seen, count, head_dim,
            )  # fmt: skip
    for pair in range(num_pairs):
        result = row_of_pair(attended, first_row, pair, kv_head, heads_per_kv)
        inverse = ONE / state[pair, TOTAL]
        for d in range(head_dim):
            result[d] = mixed[pair, d] * inverse


@spliced
def parts_of(space, num_pairs, head_dim):
    """Returns the parts of a thread's space: keys, values, weights, queries, mixed and state.

    Vectors come first, so that they do not cross cache lines.
    """
    values = head_dim * COLUMNS
    weights = 2 * values
    queries = weights + PAIRS * COLUMNS
    mixed = queries + num_pairs * head_dim
    state = mixed + num_pairs * head_dim
    return (
        space[:values].reshape(head_dim, COLUMNS),
        space[values:weights].reshape(COLUMNS, head_dim),
        space[weights:queries].reshape(PAIRS, COLUMNS),
        space[queries:mixed].reshape(num_pairs, head_dim),
        space[mixed:state].reshape(num_pairs, head_dim),
        space[state : state + 4 * num_pairs].reshape(num_pairs, 4),
    )


@inlined
def locate(pool_rows, blocks, column, num_columns, kv_block_size):
    """Computes pool_rows [2 * COLUMNS]: the rows of a KV head's pool that hold the columns of a group and the next one.

    Columns behind the last get the last one's row.
    """
    block, offset = column // kv_block_size, column % kv_block_size
    for i in range(pool_rows.size):
        pool_rows[i] = blocks[block] * kv_block_size + offset
        if column + i + 1 < num_columns:
            offset += 1
            if offset == kv_block_size:
                block, offset = block + 1, 0


@inlined
def write_rows(pool, blocks, context, rows, head_dim):
    """Writes rows [n, head_dim] to positions context, context + 1, ... of a KV head's pool [NB, block, head_dim]."""
    for row in range(rows.shape[0]):
        position = context + row
        target = pool[blocks[position // pool.shape[1]], position % pool.shape[1]]
        copy_row(target, rows[row], head_dim)  # pyright: ignore[reportCallIssue]


@spliced
def row_of_pair(array, first_row, pair, kv_head, heads_per_kv):
    """Returns the pair's row [head_dim] of an array [T, H, head_dim]; pairs enumerate a row's heads, then rows."""
    return array[first_row + pair // heads_per_kv, kv_head * heads_per_kv + pair % heads_per_kv]
