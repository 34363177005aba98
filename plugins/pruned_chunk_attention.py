# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""Attention of packed rows over a paged KV pool: decode steps, verified chunks and prompt chunks.

One program attends for up to BLOCK_M (row, query head) pairs of one sequence that share a KV head: first
to the sequence's context in the pool, then to the rows of its own chunk, which it also writes to the pool.
A pruned row is not there and costs nothing. Knows nothing of who calls it; `reference` says the same in
plain torch, `attention_config` how large the tiles are.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from plugins import reference
from plugins.attention_config import launch_config, padded_head_dim
from plugins.attention_tiles import attend_chunk, attend_context, write_rows
from plugins.launch import cdiv, check_attention, compute_capability, on_grid, runs_kernel
from plugins.split_combine import combine_splits, split_workspace

LOG2_E = math.log2(math.e)


@triton.jit(
    do_not_specialize=["num_blocks", "table_stride", "num_splits"],
    do_not_specialize_on_alignment=["block_table", "cu_rows", "context_lens", "slot_mapping"],
)
def pruned_chunk_attention_kernel(
    q,  # [T, H, HEAD_DIM], rows q_stride apart
    k_new,  # [T, Hkv, HEAD_DIM]
    v_new,
    k_pool,  # [Hkv, num_blocks, KV_BLOCK_SIZE, HEAD_DIM]
    v_pool,
    block_table,  # [B, table_stride]
    cu_rows,  # [B + 1]
    context_lens,  # [B]
    slot_mapping,  # [T]
    q_stride,
    k_stride,
    v_stride,
    num_blocks,
    table_stride,
    num_splits,
    out,  # [T, H, HEAD_DIM]; None where the context is split
    mixed_parts,  # [T, H, num_splits, HEAD_DIM] float32, else None
    stat_parts,  # [T, H, num_splits, 2] float32: maximum (base 2), sum
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    KV_BLOCK_SIZE: tl.constexpr,
    SCALE_LOG2: tl.constexpr,
    BLOCK_M: tl.constexpr,  # (row, query head) pairs of a program
    BLOCK_N: tl.constexpr,  # tokens of context per iteration
    BLOCK_C: tl.constexpr,  # rows of the chunk per iteration
    BLOCK_D: tl.constexpr,  # HEAD_DIM, padded
):
    """Grid: (row tiles * num_splits, Hkv, B)."""
    ROWS: tl.constexpr = BLOCK_M // GROUP  # rows of a program
    part = tl.program_id(0) % num_splits
    tile_start = tl.program_id(0) // num_splits * ROWS
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    first_row = tl.load(cu_rows + sequence)
    num_rows = tl.load(cu_rows + sequence + 1) - first_row
    context = tl.load(context_lens + sequence)
    if tile_start >= num_rows:
        return

    dims = tl.arange(0, BLOCK_D)[None, :]
    pair = tl.arange(0, BLOCK_M)
    row = tile_start + pair // GROUP  # of the chunk
    is_row = (pair // GROUP < ROWS) & (row < num_rows)
    is_cell = is_row[:, None] & (dims < HEAD_DIM)
    head = kv_head * GROUP + pair % GROUP
    query_row = (first_row + row).to(tl.int64)
    query = tl.load(q + query_row[:, None] * q_stride + head[:, None] * HEAD_DIM + dims, mask=is_cell, other=0.0)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    part_len = tl.cdiv(tl.cdiv(context, BLOCK_N), num_splits) * BLOCK_N
    part_end = tl.minimum(context, (part + 1) * part_len)
    pool_head = kv_head.to(tl.int64) * num_blocks * (KV_BLOCK_SIZE * HEAD_DIM)
    k_head, v_head = k_pool + pool_head, v_pool + pool_head
    table = block_table + sequence.to(tl.int64) * table_stride
    row_max, row_sum, mixed = attend_context(
        query, k_head, v_head, table, num_blocks, part * part_len, part_end, row_max, row_sum, mixed, dims,
        HEAD_DIM, KV_BLOCK_SIZE, SCALE_LOG2, BLOCK_N,
    )  # fmt: skip
    if part == num_splits - 1:
        tile_end = tl.minimum(num_rows, tile_start + ROWS)
        k_rows = k_new + first_row.to(tl.int64) * k_stride + kv_head * HEAD_DIM
        v_rows = v_new + first_row.to(tl.int64) * v_stride + kv_head * HEAD_DIM
        row_max, row_sum, mixed = attend_chunk(
            query, k_rows, v_rows, k_stride, v_stride, row, tile_end, row_max, row_sum, mixed, dims,
            HEAD_DIM, SCALE_LOG2, BLOCK_C,
        )  # fmt: skip
        # A row has one tile and a KV head its own programs, so each slot has one writer. No program of this
        # call reads a slot: they lie at or above context_lens, and contexts are read below it.
        owned = tile_start + tl.arange(0, BLOCK_M)
        slot = tl.load(slot_mapping + first_row + owned, mask=owned < tile_end, other=-1)
        slot = tl.where(slot < num_blocks * KV_BLOCK_SIZE, slot, -1)
        write_rows(k_rows, k_stride, slot, k_head, owned, dims, HEAD_DIM)
        write_rows(v_rows, v_stride, slot, v_head, owned, dims, HEAD_DIM)

    target = query_row * (tl.num_programs(1) * GROUP) + head  # (row, head) of the call
    if out is not None:
        result = (mixed / row_sum[:, None]).to(out.dtype.element_ty)
        tl.store(out + target[:, None] * HEAD_DIM + dims, result, mask=is_cell)
    else:
        target = target * num_splits + part
        tl.store(mixed_parts + target[:, None] * HEAD_DIM + dims, mixed, mask=is_cell)
        tl.store(stat_parts + target * 2, row_max, mask=is_row)
        tl.store(stat_parts + target * 2 + 1, row_sum, mask=is_row)


def pruned_chunk_attention(
    q: torch.Tensor,  # [T, H, hd]
    k_new: torch.Tensor,  # [T, Hkv, hd]
    v_new: torch.Tensor,
    k_pool: torch.Tensor,  # [Hkv, num_blocks, kv_block_size, hd]
    v_pool: torch.Tensor,
    block_table: torch.Tensor,  # [B, MB] int32
    cu_rows: torch.Tensor,  # [B + 1] int32
    context_lens: torch.Tensor,  # [B] int32, tokens in the pool before this call
    slot_mapping: torch.Tensor,  # [T] int32, block * kv_block_size + offset, or -1: not written
    out: torch.Tensor,  # [T, H, hd]
    *,
    max_rows: int,
    num_splits: int = 1,
    workspace: torch.Tensor | None = None,
    scale: float | None = None,
) -> None:
    """Queues the call on the current stream; writes `out` and the pools in place.

    Rows from cu_rows[B] on belong to nobody: they are not read, not written, and their `out` is left.
    max_rows: at least the most rows of a sequence; with T, B, MB and num_splits all that a captured graph fixes.
    A slot lies at or above its sequence's context_lens, and no two rows share one. workspace: float32, at
    least workspace_numel(...) values; allocated where None. scale: default head_dim ** -0.5.
    Raises ValueError where shapes or types do not fit together.
    """
    tensors = (q, k_new, v_new, k_pool, v_pool, block_table, cu_rows, context_lens, slot_mapping)
    check_attention(*tensors, out)
    num_kv_heads, num_blocks, kv_block_size, head_dim = k_pool.shape
    softmax_scale = head_dim**-0.5 if scale is None else scale
    if max_rows < 1 or num_splits < 1:
        raise ValueError(f"max_rows = {max_rows}, num_splits = {num_splits}: both must be at least 1")
    if not runs_kernel(pruned_chunk_attention_kernel, q):
        reference.pruned_chunk_attention(*tensors, out, softmax_scale)
        return
    if q.shape[0] == 0 or context_lens.shape[0] == 0:
        return
    group = q.shape[1] // num_kv_heads
    config = launch_config(q.element_size(), head_dim, group, max_rows, compute_capability(q))
    mixed_parts = stat_parts = None
    if num_splits > 1:
        mixed_parts, stat_parts = split_workspace(workspace, q, num_splits)
    num_tiles = cdiv(max_rows, config.block_m // group)
    run = on_grid(pruned_chunk_attention_kernel, num_tiles * num_splits, num_kv_heads, context_lens.shape[0])
    run(
        *tensors,
        q.stride(0),
        k_new.stride(0),
        v_new.stride(0),
        num_blocks,
        block_table.shape[1],
        num_splits,
        out if num_splits == 1 else None,
        mixed_parts,
        stat_parts,
        HEAD_DIM=head_dim,
        GROUP=group,
        KV_BLOCK_SIZE=kv_block_size,
        SCALE_LOG2=softmax_scale * LOG2_E,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_C=config.block_c,
        BLOCK_D=padded_head_dim(head_dim),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if mixed_parts is not None and stat_parts is not None:
        combine_splits(mixed_parts, stat_parts, cu_rows, out)
