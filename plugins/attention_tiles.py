# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""The steps of the attention kernel: online softmax over the context, then over the chunk, and the writes.

Device functions, inlined into pruned_chunk_attention_kernel. In all of them dims [1, BLOCK_D] are the
head's dimensions, padded; row_max, row_sum [BLOCK_M] and mixed [BLOCK_M, BLOCK_D] are the running softmax.
"""

# pyright: reportGeneralTypeIssues=false
# (it takes a call of one device function by another for one that never returns)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_columns(query, keys, values, visible, row_max, row_sum, mixed, SCALE_LOG2: tl.constexpr):
    """One step of the online softmax, in base 2 and float32: columns `keys` [N, D] join what was seen before."""
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
    """The blocks of tokens, in the pool whatever the table says: compilers time layers on any contents."""
    block = tl.load(table + token // KV_BLOCK_SIZE, mask=token < end, other=0)
    return tl.minimum(tl.maximum(block, 0), num_blocks - 1)


@triton.jit
def attend_context(
    query,
    k_head,
    v_head,
    table,
    num_blocks,
    start,
    end,
    row_max,
    row_sum,
    mixed,
    dims,
    HEAD_DIM: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    SCALE_LOG2: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Tokens [start, end) of the pool: they lie below context_lens, written by earlier calls. Every row sees them."""
    token = start + tl.arange(0, BLOCK_N)
    block = _blocks(table, num_blocks, token, end, KV_BLOCK_SIZE)
    for _ in range(start, end, BLOCK_N):
        is_token = token < end
        slot = block.to(tl.int64) * KV_BLOCK_SIZE + token % KV_BLOCK_SIZE
        cells = slot[:, None] * HEAD_DIM + dims
        is_cell = is_token[:, None] & (dims < HEAD_DIM)  # other cells are never read: they may hold anything
        keys = tl.load(k_head + cells, mask=is_cell, other=0.0)
        values = tl.load(v_head + cells, mask=is_cell, other=0.0)
        # The table is read one iteration ahead, so that loads of keys and values do not hang on a load of their own
        # iteration: the compiler then keeps two tiles in flight. (Two ahead, it would keep none.)
        token += BLOCK_N
        block = _blocks(table, num_blocks, token, end, KV_BLOCK_SIZE)
        row_max, row_sum, mixed = attend_columns(
            query, keys, values, is_token[None, :], row_max, row_sum, mixed, SCALE_LOG2
        )
    return row_max, row_sum, mixed


@triton.jit
def attend_chunk(
    query,
    k_rows,
    v_rows,
    k_stride,
    v_stride,
    row,
    end,
    row_max,
    row_sum,
    mixed,
    dims,
    HEAD_DIM: tl.constexpr,
    SCALE_LOG2: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Rows [0, end) of the chunk, each row up to itself. Not from the pool: another program may be writing them."""
    for start in range(0, end, BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        is_cell = (column < end)[:, None] & (dims < HEAD_DIM)
        keys = tl.load(k_rows + column.to(tl.int64)[:, None] * k_stride + dims, mask=is_cell, other=0.0)
        values = tl.load(v_rows + column.to(tl.int64)[:, None] * v_stride + dims, mask=is_cell, other=0.0)
        visible = (column[None, :] <= row[:, None]) & (column < end)[None, :]
        row_max, row_sum, mixed = attend_columns(query, keys, values, visible, row_max, row_sum, mixed, SCALE_LOG2)
    return row_max, row_sum, mixed


@triton.jit
def write_rows(rows, stride, slot, pool_head, row, dims, HEAD_DIM: tl.constexpr):
    """Rows `row` [N] of a chunk to their slots of one KV head; those whose slot is negative are not read either."""
    is_written = (slot >= 0)[:, None] & (dims < HEAD_DIM)
    new = tl.load(rows + row.to(tl.int64)[:, None] * stride + dims, mask=is_written, other=0.0)
    tl.store(pool_head + slot.to(tl.int64)[:, None] * HEAD_DIM + dims, new, mask=is_written)
