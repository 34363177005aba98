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

import numba
import numpy as np
from llvmlite import binding
from numba.extending import overload

from faser_backend.cpu.kernels.compile import WITHIN_KERNELS
from faser_backend.cpu.kernels.rows import LOG2_E, ONE, exp2, inlined, inlined_reassociated, spliced
from faser_backend.cpu.kernels.vectors import GROUP, LANES, copy_row, mix_group, prefetch, score_group

TILE_ROWS = 8  # pairs of a tile
POOL_DTYPES = {"fp32": numba.float32, "fp16": numba.uint16}  # by the manifest's words; numba knows no halves


def scratch_width(num_columns: int) -> int:
    """Columns of `scratch` where block_table's width * block is num_columns."""
    return -(-(num_columns + GROUP) // LANES) * LANES


def has_halves() -> bool:
    """Whether this CPU converts halves by instructions; elsewhere a kernel for them cannot be linked."""
    features = binding.get_host_cpu_features()
    return features.get("f16c", not features.get("sse2", False))  # other CPUs than x86's: as of ARMv8


def kernel_directory() -> str:
    """Directory of compiled kernels; numba makes the directory. Raises RuntimeError where they cannot be."""
    return str(numba.njit(cache=True)(row_of_pair.py_func).stats.cache_path)


@inlined
def attend_units(
    q, k, v, k_pool, v_pool, block_table, cu_rows, context_lens, trunk_lens, ancestors, attended, scratch, widened,
    first_unit, last_unit, scale, attends, head_dim,
):  # fmt: skip
    """Computes the units [first_unit, last_unit) of a call; unit = sequence * Hkv + KV head. For kernels to take in
    whole: head_dim is a constant there.

    q, attended [T, H, head_dim] and k, v [T, Hkv, head_dim], all rotated; query head h belongs to KV head
    h // (H // Hkv). Pools [Hkv, NB, block, head_dim] are written in place. block_table [B, MB], cu_rows [B + 1] and
    context_lens [B], the KV position of a sequence's first row, are int64, as are trunk_lens [B] and ancestors [T],
    which are empty where there are no trees (TreeRows in core/batch.py). scratch [TILE_ROWS, scratch_width(MB * block)]
    and widened [block, head_dim] are work space of the calling thread. Where attends is False, keys and values are
    written and no row attends. Nothing is checked: indices that do not fit read and write foreign memory.

    What all rows of a tile find in the same blocks is read once for the tile: all that the rows of a chain see, and of
    those of a tree whole blocks of the trunk. What lies behind it is gathered row by row in the order of positions, so
    that a row's bits are those that it has in a chain.
    """
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
        is_tree = num_rows > 0 and ancestors.size > 0 and ancestors[first_row] != 0
        trunk = trunk_lens[sequence] if is_tree else context
        num_pairs = num_rows * heads_per_kv if attends else 0
        for tile in range(0, num_pairs, TILE_ROWS):
            pairs = tile, min(tile + TILE_ROWS, num_pairs), first_row, kv_head, heads_per_kv
            longest = 0
            for pair in range(tile, pairs[1]):
                longest = max(longest, num_seen(ancestors, trunk, first_row, pair // heads_per_kv, is_tree))
            shared = trunk // kv_block_size * kv_block_size if is_tree else longest
            columns = trunk, shared, longest
            is_followed = pairs[1] == num_pairs and unit + 1 < last_unit
            num_ahead = context_lens[next_sequence] if is_followed else 0
            score_tile(
                scratch, q, k_pool[kv_head], blocks, columns, ancestors, pairs, widened, v_pool[kv_head],
                longest if tile == 0 else 0, head_dim,
            )  # fmt: skip
            for pair in range(tile, pairs[1]):
                seen = num_seen(ancestors, trunk, first_row, pair // heads_per_kv, is_tree)
                softmax(scratch[pair - tile], seen, max(seen, shared), scale)
            mix_tile(
                attended, scratch, v_pool[kv_head], blocks, columns, ancestors, pairs, widened, k_pool[next_kv_head],
                block_table[next_sequence], num_ahead, head_dim,
            )  # fmt: skip


@inlined
def score_tile(
    scratch, q, keys, blocks, columns, ancestors, pairs, widened, values, num_ahead, head_dim,
):  # fmt: skip
    """Scores of a tile's pairs over what they see; asks for the values of the first num_ahead columns meanwhile."""
    (_, shared, longest), (tile, tile_end, first_row, kv_head, heads_per_kv) = columns, pairs
    kv_block_size = keys.shape[1]
    for column in range(0, shared, kv_block_size):
        last = min(kv_block_size, shared - column) - 1
        if column < num_ahead:
            prefetch(values[blocks[column // kv_block_size]])  # pyright: ignore[reportCallIssue]
        block = readable(keys[blocks[column // kv_block_size]], last, widened, head_dim)
        for pair in range(tile, tile_end):
            query = row_of_pair(q, first_row, pair, kv_head, heads_per_kv)
            for t in range(0, last + 1, GROUP):
                score_group(scratch[pair - tile], column + t, query, block, t, last, head_dim)  # pyright: ignore[reportCallIssue]
    for column in range(shared, longest, kv_block_size):
        for pair in range(tile, tile_end):
            last = gather_block(widened, keys, blocks, columns, ancestors, pairs, pair, column, head_dim)
            query = row_of_pair(q, first_row, pair, kv_head, heads_per_kv)
            for t in range(0, last + 1, GROUP):
                score_group(scratch[pair - tile], column + t, query, widened, t, last, head_dim)  # pyright: ignore[reportCallIssue]


@inlined
def mix_tile(
    attended, scratch, values, blocks, columns, ancestors, pairs, widened, next_keys, next_blocks, num_ahead, head_dim,
):  # fmt: skip
    """attended = the values of the same columns, weighted; asks for the next unit's first num_ahead keys meanwhile."""
    (_, shared, longest), (tile, tile_end, first_row, kv_head, heads_per_kv) = columns, pairs
    kv_block_size = values.shape[1]
    for pair in range(tile, tile_end):
        mixed = row_of_pair(attended, first_row, pair, kv_head, heads_per_kv)
        for d in range(head_dim):
            mixed[d] = 0
    for column in range(0, shared, kv_block_size):
        last = min(kv_block_size, shared - column) - 1
        if column < num_ahead:
            prefetch(next_keys[next_blocks[column // kv_block_size]])  # pyright: ignore[reportCallIssue]
        block = readable(values[blocks[column // kv_block_size]], last, widened, head_dim)
        for pair in range(tile, tile_end):
            mixed = row_of_pair(attended, first_row, pair, kv_head, heads_per_kv)
            for t in range(0, last + 1, GROUP):
                mix_group(mixed, scratch[pair - tile], column + t, block, t, last, head_dim)  # pyright: ignore[reportCallIssue]
    for column in range(shared, longest, kv_block_size):
        for pair in range(tile, tile_end):
            last = gather_block(widened, values, blocks, columns, ancestors, pairs, pair, column, head_dim)
            mixed = row_of_pair(attended, first_row, pair, kv_head, heads_per_kv)
            for t in range(0, last + 1, GROUP):
                mix_group(mixed, scratch[pair - tile], column + t, widened, t, last, head_dim)  # pyright: ignore[reportCallIssue]


@inlined
def num_seen(ancestors, trunk, first_row, row, is_tree):
    """Positions that a sequence's row sees, its own included."""
    if is_tree:
        return trunk + count_bits(ancestors[first_row + row])
    return trunk + row + 1


@inlined
def count_bits(bits):
    """The bits of an int64 that are set, the sign included."""
    count = 0
    while bits != 0:
        bits &= bits - 1
        count += 1
    return count


@inlined
def gather_block(widened, pool, blocks, columns, ancestors, pairs, pair, column, head_dim):
    """widened[t] = the KV head's row at the (column + t)-th position that the pair's row of a tree sees: those of the
    trunk, then those of its bits. Returns the last t; heads of a row share what was gathered for the first of them."""
    trunk, (tile, _, first_row, _, heads_per_kv) = columns[0], pairs
    bits = ancestors[first_row + pair // heads_per_kv]
    last = min(pool.shape[1], trunk + count_bits(bits) - column) - 1
    if pair == tile or pair % heads_per_kv == 0:
        for position in range(column, min(trunk, column + last + 1)):
            copy_row(widened[position - column], row_at(pool, blocks, position), head_dim)  # pyright: ignore[reportCallIssue]
        offset = 0
        for index in range(trunk, column + last + 1):
            while (bits >> offset) & 1 == 0:
                offset += 1
            if index >= column:
                copy_row(widened[index - column], row_at(pool, blocks, trunk + offset), head_dim)  # pyright: ignore[reportCallIssue]
            offset += 1
    return last


@inlined
def write_rows(pool, blocks, context, rows, head_dim):
    """rows [n, head_dim] go to positions context, context + 1, ... of a KV head's pool [NB, block, head_dim]."""
    for row in range(rows.shape[0]):
        copy_row(row_at(pool, blocks, context + row), rows[row], head_dim)  # pyright: ignore[reportCallIssue]


@spliced
def row_at(pool, blocks, position):
    """The [head_dim] of a KV head's pool [NB, block, head_dim] at a position of the sequence whose blocks these are."""
    return pool[blocks[position // pool.shape[1]], position % pool.shape[1]]


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
