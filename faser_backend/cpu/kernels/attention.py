# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""Attention of packed rows over a paged KV pool on a CPU, compiled by numba; `plugins/reference.py` defines the result.

The work is divided into items, one KV head of one sequence and a tile of its rows each; threads take the next item when
they have done one. An item reads the pool in groups of COLUMNS columns: it transposes the keys, once for all pairs
(row, query head) of the tile, computes scores, turns them into weights relative to the largest score so far, and adds
the weighted values up. Sums of older groups take a factor when a larger score is found.

A pool holds float32 or halves; all arithmetic is float32. Attention of many sequences is bound by memory: halves are
half the bytes, and the next group is prefetched.

The bits of a row's result depend on its query, the keys and values that it sees and its position, not on other rows,
sequences, items or tiles, nor on which blocks hold the context. A score is summed along head_dim, a result along the
columns, one by one; the sum of a group's weights has one order, because its loop is compiled once. A row mixes columns
behind it, which a row beside it sees, with weight 0; this changes no bit, because this call wrote them and they are
finite.
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import binding

from faser_backend.cpu.kernels.attention_vectors import (
    COLUMNS,
    FACTOR,
    LARGEST,
    PAIRS,
    TOTAL,
    mix_pairs,
    score_pairs,
    transpose_keys,
)
from faser_backend.cpu.kernels.rows import LOG2_E, ONE, exp2, inlined, inlined_reassociated, spliced
from faser_backend.cpu.kernels.vectors import copy_row

TILE_PAIRS = 96  # of an item, at most, unless a single row has more
LEAST_SCORE = np.float32(-1e38)
POOL_DTYPES = {"fp32": numba.float32, "fp16": numba.uint16}  # by the manifest's names; numba has no halves


def space_size(head_dim: int, heads_per_kv: int) -> int:
    """Returns the floats of a thread's `space`."""
    return max(TILE_PAIRS, heads_per_kv) * (2 * head_dim + COLUMNS + 3) + head_dim * COLUMNS + 2 * COLUMNS


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
    q, k_pool, v_pool, blocks, position, first_row, num_rows, kv_head, attended, space, scale, head_dim
):  # fmt: skip
    """Computes one KV head's part of attended for num_rows rows of a sequence, the first at this position.

    It is inlined into kernels, where head_dim is a constant. q, attended [T, H, head_dim], q rotated; query head h
    belongs to KV head h // (H // Hkv). Pools [Hkv, NB, block, head_dim] hold the rows' own keys and values. blocks
    [MB] int64. space [space_size(head_dim, H // Hkv)] is the calling thread's. Nothing is checked: indices that do not
    fit access foreign memory.
    """
    heads_per_kv = q.shape[1] // k_pool.shape[0]
    num_pairs = num_rows * heads_per_kv
    queries, mixed, scores, state, keys, pool_rows = parts_of(space, num_pairs, head_dim)
    k_pool, v_pool = k_pool[kv_head], v_pool[kv_head]
    for pair in range(num_pairs):
        query = row_of_pair(q, first_row, pair, kv_head, heads_per_kv)
        for d in range(head_dim):
            queries[pair, d] = query[d] * (scale * LOG2_E)
            mixed[pair, d] = 0
        state[pair, LARGEST], state[pair, TOTAL] = LEAST_SCORE, 0
    num_columns = position + num_rows
    for column in range(0, num_columns, COLUMNS):
        locate(pool_rows, blocks, column, num_columns, k_pool.shape[1])
        transpose_keys(keys, k_pool, pool_rows, min(num_columns - column, COLUMNS), head_dim)  # pyright: ignore[reportCallIssue]
        first_pair = max(column - position, 0) * heads_per_kv  # rows before it do not see the group
        for pair in range(first_pair, num_pairs, PAIRS):
            score_pairs(scores, queries, keys, pair, min(num_pairs - pair, PAIRS), head_dim)  # pyright: ignore[reportCallIssue]
        for pair in range(first_pair, num_pairs):
            weigh(scores[pair], state[pair], min(position + pair // heads_per_kv + 1 - column, COLUMNS))
        for pair in range(first_pair, num_pairs, PAIRS):
            count = min(num_pairs - pair, PAIRS)
            end = min(position + (pair + count - 1) // heads_per_kv + 1 - column, COLUMNS)  # that the last pair sees
            mix_pairs(mixed, scores, state, v_pool, pool_rows, pair, count, end, head_dim)  # pyright: ignore[reportCallIssue]
    for pair in range(num_pairs):
        result = row_of_pair(attended, first_row, pair, kv_head, heads_per_kv)
        inverse = ONE / state[pair, TOTAL]
        for d in range(head_dim):
            result[d] = mixed[pair, d] * inverse


@spliced
def parts_of(space, num_pairs, head_dim):
    """Returns the parts of a thread's space: queries, mixed, scores, state, keys and pool_rows."""
    mixed = num_pairs * head_dim
    scores = 2 * mixed
    state = scores + num_pairs * COLUMNS
    keys = state + num_pairs * 3
    pool_rows = keys + head_dim * COLUMNS
    return (
        space[:mixed].reshape(num_pairs, head_dim),
        space[mixed:scores].reshape(num_pairs, head_dim),
        space[scores:state].reshape(num_pairs, COLUMNS),
        space[state:keys].reshape(num_pairs, 3),
        space[keys:pool_rows].reshape(head_dim, COLUMNS),
        space[pool_rows : pool_rows + 2 * COLUMNS].view(np.int32),
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


@inlined_reassociated
def weigh(scores, state, num_visible):
    """Turns scores [COLUMNS] into weights 2^(score - largest), largest being that of all groups so far; 0 if hidden.

    state [3]: LARGEST, the sum of weights, and the factor that older weights take because LARGEST has grown. A weight
    that underflows float32 becomes 1e-38, which changes no sum that holds a 1.
    """
    for t in range(num_visible, COLUMNS):
        scores[t] = LEAST_SCORE
    largest = state[LARGEST]
    for t in range(COLUMNS):
        largest = max(largest, scores[t])
    total = np.float32(0)
    for t in range(COLUMNS):
        weight = exp2(scores[t] - largest)
        scores[t] = weight
        total += weight
    factor = exp2(state[LARGEST] - largest)
    state[LARGEST], state[TOTAL], state[FACTOR] = largest, state[TOTAL] * factor + total, factor
    for t in range(num_visible, COLUMNS):
        scores[t] = 0


@inlined
def write_rows(pool, blocks, context, rows, head_dim):
    """Writes rows [n, head_dim] to positions context, context + 1, ... of a KV head's pool [NB, block, head_dim]."""
    for row in range(rows.shape[0]):
        copy_row(row_at(pool, blocks, context + row), rows[row], head_dim)  # pyright: ignore[reportCallIssue]


@spliced
def row_at(pool, blocks, position):
    """Returns the row [head_dim] of a KV head's pool [NB, block, head_dim] at a position of a sequence."""
    return pool[blocks[position // pool.shape[1]], position % pool.shape[1]]


@spliced
def row_of_pair(array, first_row, pair, kv_head, heads_per_kv):
    """Returns the pair's row [head_dim] of an array [T, H, head_dim]; pairs enumerate a row's heads, then rows."""
    return array[first_row + pair // heads_per_kv, kv_head * heads_per_kv + pair % heads_per_kv]
