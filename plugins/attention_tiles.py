# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""The steps of the attention kernel: its items, online softmax over the tokens of a part, and the writes.

Device functions that pruned_chunk_attention_kernel inlines. In all of them, dims [1, BLOCK_D] are the head's
dimensions, padded. row_max [BLOCK_M], row_sum [BLOCK_M, 8] (equal columns) and mixed [BLOCK_M, BLOCK_D] are a running
softmax.

A row's bits depend on its own tokens alone: tiles and parts begin at fixed tokens of the sequence, tokens that a row
does not see change nothing, and all sums are `dot`s, which add in ascending order for any BLOCK_M, or joins of parts in
order.
"""

# pyright: reportGeneralTypeIssues=false
# (pyright assumes that a call of one device function by another never returns)

from __future__ import annotations

import triton
import triton.language as tl

from faser_backend.plugins.attention_config import MAX_DOUBLINGS

DOUBLINGS = tl.constexpr(MAX_DOUBLINGS)


@triton.jit
def part_start(part, PART_TOKENS: tl.constexpr):
    """Returns the first token of a part, see attention_config.count_parts."""
    doublings = tl.maximum(part // 8 - 1, 0)
    return (part - 8 * doublings) * PART_TOKENS * (1 << doublings)


@triton.jit
def count_parts(tokens, PART_TOKENS: tl.constexpr):
    """Returns the number of parts, as attention_config.count_parts."""
    last, doublings = tokens - 1, tokens * 0
    for n in tl.static_range(DOUBLINGS):
        doublings += (last >= (16 * PART_TOKENS << n)).to(tl.int32)
    return last // (PART_TOKENS * (1 << doublings)) + 8 * doublings + 1


@triton.jit
def find_item(
    item, cu_rows, context_lens, num_sequences, num_rows, max_context, num_splits,
    PART_TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Finds a KV head's item number `item`; returns its sequence, its number there, and the number of all items.

    An item is a row tile of a sequence and a part of its tokens; the last of num_splits items takes all later parts.
    A sequence whose lengths exceed the call has none, because TensorRT times a layer on arbitrary contents.
    """
    sequence, before, total = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for start in range(0, num_sequences, BLOCK_B):
        index = start + tl.arange(0, BLOCK_B)
        first = tl.load(cu_rows + index, mask=index < num_sequences, other=0)
        last = tl.load(cu_rows + index + 1, mask=index < num_sequences, other=0)
        context = tl.load(context_lens + index, mask=index < num_sequences, other=0)
        is_within = (first >= 0) & (first <= last) & (last <= num_rows) & (context >= 0) & (context <= max_context)
        num_parts = tl.minimum(count_parts(context + last - first, PART_TOKENS), num_splits)
        count = tl.where(is_within, tl.cdiv(last - first, ROWS) * num_parts, 0)
        is_before = total + tl.cumsum(count, 0) <= item
        sequence += tl.sum(is_before.to(tl.int32), 0)
        before += tl.sum(tl.where(is_before, count, 0), 0)
        total += tl.sum(count, 0)
    return sequence, item - before, total


@triton.jit
def attend_columns(query, keys, values, visible, row_max, row_sum, mixed, SCALE_LOG2: tl.constexpr):
    """Adds columns `keys` [N, D] to the online softmax, in base 2 and float32."""
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * SCALE_LOG2
    scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    base = tl.where(new_max > float("-inf"), new_max, 0.0)  # a row that has seen no token yet
    shrink = tl.exp2(row_max - base)[:, None]
    weights = tl.exp2(scores - base[:, None]).to(values.dtype)
    # tl.sum would add in an order that depends on BLOCK_M.
    ones = tl.full([keys.shape[0], 8], 1.0, tl.float32).to(values.dtype)
    row_sum = tl.dot(weights, ones, row_sum * shrink, input_precision="ieee")
    mixed = tl.dot(weights, values, mixed * shrink, input_precision="ieee")
    return new_max, row_sum, mixed


@triton.jit
def join(row_max, row_sum, mixed, part_max, part_sum, part_mixed):
    """Adds the softmax of a part to that of the parts before it; sums [BLOCK_M]. Without tokens it changes nothing."""
    new_max = tl.maximum(row_max, part_max)
    base = tl.where(new_max > float("-inf"), new_max, 0.0)
    shrink, weight = tl.exp2(row_max - base), tl.exp2(part_max - base)
    mixed = mixed * shrink[:, None] + part_mixed * weight[:, None]
    return new_max, row_sum * shrink + part_sum * weight, mixed


@triton.jit
def _blocks(table, num_blocks, token, end, KV_BLOCK_SIZE: tl.constexpr):
    """Returns the blocks of tokens, clamped to the pool, because compilers time layers on arbitrary contents."""
    block = tl.load(table + token // KV_BLOCK_SIZE, mask=token < end, other=0)
    return tl.minimum(tl.maximum(block, 0), num_blocks - 1)


@triton.jit
def attend_tokens(
    query, k_head, v_head, table, num_blocks, k_rows, v_rows, k_stride, v_stride, part, end, context, last_seen, dims,
    HEAD_DIM: tl.constexpr, KV_BLOCK_SIZE: tl.constexpr, SCALE_LOG2: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PART_TOKENS: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Attends to tokens from a part on up to `end`: the context's in the pool, which all rows see, then the chunk's.

    A row of the chunk is seen up to last_seen [BLOCK_M], and not read through the pool: others may write it. Returns
    the softmax: row_max, row_sum [BLOCK_M], mixed.
    """
    row_max, part_max = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum, part_sum = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, 8], tl.float32)
    mixed, part_mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    last_seen, start = tl.minimum(last_seen, end - context - 1), part_start(part, PART_TOKENS)
    next_start, token = start, start + tl.arange(0, BLOCK_N)
    block = _blocks(table, num_blocks, token, context, KV_BLOCK_SIZE)
    for first in range(start, end, BLOCK_N):
        row = token - context
        slot = (block.to(tl.int64) * KV_BLOCK_SIZE + token % KV_BLOCK_SIZE)[:, None] * HEAD_DIM
        new, is_old = row.to(tl.int64)[:, None], (row < 0)[:, None]
        is_value = (token < end)[:, None] & (dims < HEAD_DIM)  # other memory may hold anything
        # Newer compilers do not see the alignment of a choice.
        k_from = tl.multiple_of(tl.where(is_old, k_head + slot, k_rows + new * k_stride), (ALIGNMENT, ALIGNMENT))
        v_from = tl.multiple_of(tl.where(is_old, v_head + slot, v_rows + new * v_stride), (ALIGNMENT, ALIGNMENT))
        keys = tl.load(k_from + dims, mask=is_value, other=0.0)
        values = tl.load(v_from + dims, mask=is_value, other=0.0)
        visible = row[None, :] <= last_seen[:, None]
        # The table is read one iteration ahead, so that loads of keys and values do not depend on a load of the same
        # iteration. The compiler then keeps two tiles in flight. (Two ahead, it would keep none.)
        token += BLOCK_N
        block = _blocks(table, num_blocks, token, context, KV_BLOCK_SIZE)
        if first == next_start:  # of a part; not a loop over parts: at each, loads would begin again
            part += 1
            next_start = part_start(part, PART_TOKENS)
            row_max, row_sum, mixed = join(row_max, row_sum, mixed, part_max, tl.max(part_sum, 1), part_mixed)
            part_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
            part_sum, part_mixed = tl.zeros_like(part_sum), tl.zeros_like(part_mixed)
        part_max, part_sum, part_mixed = attend_columns(
            query, keys, values, visible, part_max, part_sum, part_mixed, SCALE_LOG2
        )
    return join(row_max, row_sum, mixed, part_max, tl.max(part_sum, 1), part_mixed)


@triton.jit
def write_rows(rows, stride, slot, pool_head, row, dims, HEAD_DIM: tl.constexpr):
    """Writes rows `row` [N] of a chunk to their KV positions of one head. Rows with a negative `slot` are skipped."""
    is_written = (slot >= 0)[:, None] & (dims < HEAD_DIM)
    new = tl.load(rows + row.to(tl.int64)[:, None] * stride + dims, mask=is_written, other=0.0)
    tl.store(pool_head + slot.to(tl.int64)[:, None] * HEAD_DIM + dims, new, mask=is_written)
