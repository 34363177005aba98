# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""The steps of the attention kernel: its items, online softmax over the context, then over the chunk, and the writes.

Device functions that pruned_chunk_attention_kernel inlines. In all of them, dims [1, BLOCK_D] are the
head's dimensions, padded. row_max, row_sum [BLOCK_M] and mixed [BLOCK_M, BLOCK_D] are the running softmax.
"""

# pyright: reportGeneralTypeIssues=false
# (pyright assumes that a call of one device function by another never returns)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def divide(context, num_splits, min_part_tokens, BLOCK_N: tl.constexpr):
    """Returns the tokens of each part of a context but the last, at least min_part_tokens, and the number of parts."""
    part_len = tl.cdiv(tl.cdiv(context, BLOCK_N), num_splits) * BLOCK_N
    part_len = tl.maximum(part_len, tl.maximum(min_part_tokens, BLOCK_N))
    return part_len, tl.maximum(tl.cdiv(context, part_len), 1)


@triton.jit
def find_item(
    item, cu_rows, context_lens, num_sequences, num_rows, max_context, num_splits, min_part_tokens,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Finds a KV head's item number `item`; returns its sequence, its number there, and the number of all items.

    An item is a row tile of a sequence and a part with tokens of its context, or the only part of an empty one.
    A sequence whose lengths exceed the call has none, because TensorRT times a layer on arbitrary contents.
    """
    sequence, before, total = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for start in range(0, num_sequences, BLOCK_B):
        index = start + tl.arange(0, BLOCK_B)
        first = tl.load(cu_rows + index, mask=index < num_sequences, other=0)
        last = tl.load(cu_rows + index + 1, mask=index < num_sequences, other=0)
        context = tl.load(context_lens + index, mask=index < num_sequences, other=0)
        is_within = (first >= 0) & (first <= last) & (last <= num_rows) & (context >= 0) & (context <= max_context)
        _, num_parts = divide(context, num_splits, min_part_tokens, BLOCK_N)
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
    shrink = tl.exp2(row_max - new_max)
    weights = tl.exp2(scores - new_max[:, None])
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * shrink[:, None], input_precision="ieee")
    return new_max, row_sum, mixed


@triton.jit
def _blocks(table, num_blocks, token, end, KV_BLOCK_SIZE: tl.constexpr):
    """Returns the blocks of tokens, clamped to the pool, because compilers time layers on arbitrary contents."""
    block = tl.load(table + token // KV_BLOCK_SIZE, mask=token < end, other=0)
    return tl.minimum(tl.maximum(block, 0), num_blocks - 1)


@triton.jit
def attend_context(
    query, k_head, v_head, table, num_blocks, start, end, row_max, row_sum, mixed, dims,
    HEAD_DIM: tl.constexpr, KV_BLOCK_SIZE: tl.constexpr, SCALE_LOG2: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attends to tokens [start, end) of the pool, which earlier calls wrote. All rows see them."""
    token = start + tl.arange(0, BLOCK_N)
    block = _blocks(table, num_blocks, token, end, KV_BLOCK_SIZE)
    for _ in range(start, end, BLOCK_N):
        is_token = token < end
        slot = block.to(tl.int64) * KV_BLOCK_SIZE + token % KV_BLOCK_SIZE
        elements = slot[:, None] * HEAD_DIM + dims
        is_value = is_token[:, None] & (dims < HEAD_DIM)  # other memory may hold anything
        keys = tl.load(k_head + elements, mask=is_value, other=0.0)
        values = tl.load(v_head + elements, mask=is_value, other=0.0)
        # The table is read one iteration ahead, so that loads of keys and values do not depend on a load of the same
        # iteration. The compiler then keeps two tiles in flight. (Two ahead, it would keep none.)
        token += BLOCK_N
        block = _blocks(table, num_blocks, token, end, KV_BLOCK_SIZE)
        row_max, row_sum, mixed = attend_columns(
            query, keys, values, is_token[None, :], row_max, row_sum, mixed, SCALE_LOG2
        )
    return row_max, row_sum, mixed


@triton.jit
def attend_chunk(
    query, k_rows, v_rows, k_stride, v_stride, last_seen, end, row_max, row_sum, mixed, dims,
    HEAD_DIM: tl.constexpr, SCALE_LOG2: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Attends to rows [0, end) of the chunk up to last_seen [BLOCK_M]. The pool is not read: others may write it."""
    for start in range(0, end, BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        is_value = (column < end)[:, None] & (dims < HEAD_DIM)
        keys = tl.load(k_rows + column.to(tl.int64)[:, None] * k_stride + dims, mask=is_value, other=0.0)
        values = tl.load(v_rows + column.to(tl.int64)[:, None] * v_stride + dims, mask=is_value, other=0.0)
        visible = (column[None, :] <= last_seen[:, None]) & (column < end)[None, :]
        row_max, row_sum, mixed = attend_columns(query, keys, values, visible, row_max, row_sum, mixed, SCALE_LOG2)
    return row_max, row_sum, mixed


@triton.jit
def write_rows(rows, stride, slot, pool_head, row, dims, HEAD_DIM: tl.constexpr):
    """Writes rows `row` [N] of a chunk to their KV positions of one head. Rows with a negative `slot` are skipped."""
    is_written = (slot >= 0)[:, None] & (dims < HEAD_DIM)
    new = tl.load(rows + row.to(tl.int64)[:, None] * stride + dims, mask=is_written, other=0.0)
    tl.store(pool_head + slot.to(tl.int64)[:, None] * HEAD_DIM + dims, new, mask=is_written)
