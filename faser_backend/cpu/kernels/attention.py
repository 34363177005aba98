# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""Attention of packed rows over a paged KV pool on a CPU, compiled by numba; `plugins/reference.py` defines the result.

The work is divided into units, one KV head of one sequence each. A unit writes its new keys and values to the pool and
then attends tile by tile. A tile is up to TILE_ROWS pairs (row, query head), which share each block of keys and values
while it is in the cache.

A pool holds float32 or halves. Halves are widened block by block, once for all pairs of a tile, and all arithmetic is
float32. Attention of many sequences is bound by memory: halves are half the bytes, values are prefetched while keys are
read, and the next unit's keys while values are read.

The bits of a row's result depend on its query, the keys and values that it sees, its position and the block size, not
on other rows, sequences or units, nor on which blocks hold the context. All pairs run through the same code. Vector
code sums products in a fixed order, in groups of four columns aligned to blocks. A softmax covers exactly the columns
that its row sees. A row with fewer columns than the longest of its tile mixes the others with weight 0, which changes
no bit, because this call wrote them and they are finite. Columns behind the longest row of a tile are never read.
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import binding
from numba.extending import overload

from faser_backend.cpu.kernels.compilation import WITHIN_KERNELS
from faser_backend.cpu.kernels.rows import LOG2_E, ONE, exp2, inlined, inlined_reassociated, spliced
from faser_backend.cpu.kernels.vectors import GROUP, LANES, copy_row, mix_group, prefetch, score_group

TILE_ROWS = 8  # pairs of a tile
POOL_DTYPES = {"fp32": numba.float32, "fp16": numba.uint16}  # by the manifest's names; numba has no halves


def scratch_width(num_columns: int) -> int:
    """Returns the columns of `scratch` for a block table that covers num_columns positions."""
    return -(-(num_columns + GROUP) // LANES) * LANES


def has_halves() -> bool:
    """Tells whether this CPU has instructions for halves; without them a kernel for halves cannot be linked."""
    features = binding.get_host_cpu_features()
    return features.get("f16c", not features.get("sse2", False))  # on CPUs other than x86: since ARMv8


def kernel_directory() -> str:
    """Returns the directory of compiled kernels, which numba creates. Raises RuntimeError if none is writable."""
    return str(numba.njit(cache=True)(row_of_pair.py_func).stats.cache_path)


@inlined
def attend_units(
    q, k, v, k_pool, v_pool, block_table, cu_rows, context_lens, attended, scratch, widened, first_unit, last_unit,
    scale, attends, head_dim,
):  # fmt: skip
    """Computes the units [first_unit, last_unit) of a call; unit = sequence * Hkv + KV head.

    It is inlined into kernels, where head_dim is a constant. q, attended [T, H, head_dim] and k, v [T, Hkv, head_dim]
    are rotated; query head h belongs to KV head h // (H // Hkv). Pools [Hkv, NB, block, head_dim] are written in place.
    block_table [B, MB], cu_rows [B + 1] and context_lens [B], the position of a sequence's first row, are int64.
    scratch [TILE_ROWS, scratch_width(MB * block)] and widened [block, head_dim] are the calling thread's. If `attends`
    is False, keys and values are written and no row attends. Nothing is checked: indices that do not fit access foreign
    memory.
    """
    num_kv_heads = k_pool.shape[0]
    heads_per_kv = q.shape[1] // num_kv_heads
    for unit in range(first_unit, last_unit):
        sequence, kv_head = unit // num_kv_heads, unit % num_kv_heads
        first_row, num_rows = cu_rows[sequence], cu_rows[sequence + 1] - cu_rows[sequence]
        context, blocks = context_lens[sequence], block_table[sequence]
        next_sequence, next_kv_head = (unit + 1) // num_kv_heads, (unit + 1) % num_kv_heads
        rows = slice(first_row, first_row + num_rows)
        write_rows(k_pool[kv_head], blocks, context, k[rows, kv_head], head_dim)
        write_rows(v_pool[kv_head], blocks, context, v[rows, kv_head], head_dim)
        num_pairs = num_rows * heads_per_kv if attends else 0
        for tile in range(0, num_pairs, TILE_ROWS):
            pairs = tile, min(tile + TILE_ROWS, num_pairs), first_row, kv_head, heads_per_kv
            num_columns = context + (pairs[1] - 1) // heads_per_kv + 1  # of the longest row
            is_followed = pairs[1] == num_pairs and unit + 1 < last_unit
            num_ahead = context_lens[next_sequence] if is_followed else 0
            score_tile(
                scratch, q, k_pool[kv_head], blocks, num_columns, pairs, widened, v_pool[kv_head],
                num_columns if tile == 0 else 0, head_dim,
            )  # fmt: skip
            for pair in range(tile, pairs[1]):
                softmax(scratch[pair - tile], context + pair // heads_per_kv + 1, num_columns, scale)
            mix_tile(
                attended, scratch, v_pool[kv_head], blocks, num_columns, pairs, widened, k_pool[next_kv_head],
                block_table[next_sequence], num_ahead, head_dim,
            )  # fmt: skip


@inlined
def score_tile(scratch, q, keys, blocks, num_columns, pairs, widened, values, num_ahead, head_dim):
    """Computes the scores of a tile's pairs; prefetches the values of the first num_ahead columns."""
    tile, tile_end, first_row, kv_head, heads_per_kv = pairs
    kv_block_size = keys.shape[1]
    for column in range(0, num_columns, kv_block_size):
        last = min(kv_block_size, num_columns - column) - 1
        if column < num_ahead:
            prefetch(values[blocks[column // kv_block_size]])  # pyright: ignore[reportCallIssue]
        block = readable(keys[blocks[column // kv_block_size]], last, widened, head_dim)
        for pair in range(tile, tile_end):
            query = row_of_pair(q, first_row, pair, kv_head, heads_per_kv)
            for t in range(0, last + 1, GROUP):
                score_group(scratch[pair - tile], column + t, query, block, t, last, head_dim)  # pyright: ignore[reportCallIssue]


@inlined
def mix_tile(
    attended, scratch, values, blocks, num_columns, pairs, widened, next_keys, next_blocks, num_ahead, head_dim
):
    """Computes attended = the weighted sum of values; prefetches the next unit's first num_ahead keys."""
    tile, tile_end, first_row, kv_head, heads_per_kv = pairs
    kv_block_size = values.shape[1]
    for pair in range(tile, tile_end):
        mixed = row_of_pair(attended, first_row, pair, kv_head, heads_per_kv)
        for d in range(head_dim):
            mixed[d] = 0
    for column in range(0, num_columns, kv_block_size):
        last = min(kv_block_size, num_columns - column) - 1
        if column < num_ahead:
            prefetch(next_keys[next_blocks[column // kv_block_size]])  # pyright: ignore[reportCallIssue]
        block = readable(values[blocks[column // kv_block_size]], last, widened, head_dim)
        for pair in range(tile, tile_end):
            mixed = row_of_pair(attended, first_row, pair, kv_head, heads_per_kv)
            for t in range(0, last + 1, GROUP):
                mix_group(mixed, scratch[pair - tile], column + t, block, t, last, head_dim)  # pyright: ignore[reportCallIssue]


@inlined
def write_rows(pool, blocks, context, rows, head_dim):
    """Writes rows [n, head_dim] to positions context, context + 1, ... of a KV head's pool [NB, block, head_dim]."""
    for row in range(rows.shape[0]):
        copy_row(row_at(pool, blocks, context + row), rows[row], head_dim)  # pyright: ignore[reportCallIssue]


@spliced
def row_at(pool, blocks, position):
    """Returns the row [head_dim] of a KV head's pool [NB, block, head_dim] at a position of a sequence."""
    return pool[blocks[position // pool.shape[1]], position % pool.shape[1]]


def readable(block, last, widened, head_dim):
    """Returns the block [kv_block_size, head_dim] as float32: itself, or its rows up to `last` in `widened`."""
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
    """Returns the pair's row [head_dim] of an array [T, H, head_dim]; pairs enumerate a row's heads, then rows."""
    return array[first_row + pair // heads_per_kv, kv_head * heads_per_kv + pair % heads_per_kv]


@inlined_reassociated
def softmax(scores, num_visible, num_columns, scale):
    """Turns scores[:num_visible] into weights with sum 1, and scores[num_visible:num_columns] into 0.

    A weight that underflows float32 becomes 1e-38, which changes no sum that holds a 1.
    """
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
