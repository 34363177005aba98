# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""Attention of packed rows over a paged KV pool: decode steps, verified chunks and prompt chunks.

An item of work is a KV head's attention for up to BLOCK_M (row, query head) pairs of one sequence to a part of its
tokens, which are in the pool or in the call's own chunk; with the first part it writes its rows to the pool. Programs
find items by lengths on the device. A row's result does not depend, by a bit, on the other rows of its call, see
`attention_tiles`. `reference` has the same computation, `attention_config` the sizes of tiles.
"""
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from faser_backend.plugins import reference
from faser_backend.plugins.attention_config import MAX_SPLITS, PART_TOKENS, PROGRAMS_PER_SM, launch_config, num_tiles
from faser_backend.plugins.attention_tiles import attend_tokens, count_parts, find_item, part_start, write_rows
from faser_backend.plugins.launch import check_attention, check_tensor, compute_capability, on_grid, runs_kernel
from faser_backend.plugins.split_combine import combine_splits, empty_parts, write_part


@triton.jit(
    do_not_specialize=["num_blocks", "table_stride", "num_sequences", "num_rows", "num_splits"],
    do_not_specialize_on_alignment=["block_table", "cu_rows", "context_lens", "slot_mapping", "table_width"],
)
def pruned_chunk_attention_kernel(
    q,  # [T, H, HEAD_DIM], rows q_stride apart
    k_new,  # [T, Hkv, HEAD_DIM]
    v_new,
    k_pool,  # [Hkv, num_blocks, KV_BLOCK_SIZE, HEAD_DIM]
    v_pool,
    block_table,  # [num_sequences, table_stride], or as table_width says
    cu_rows,  # [num_sequences + 1]
    context_lens,  # [num_sequences]
    slot_mapping,  # [T]
    table_width,  # [1], of the table's rows instead of table_stride; else None
    q_stride,
    k_stride,
    v_stride,
    num_blocks,
    table_stride,
    num_sequences,
    num_rows,
    num_splits,
    out,  # [T, H, HEAD_DIM]; None where parts are written
    mixed_parts,  # [T, H, num_splits, HEAD_DIM] float32, else None
    stat_parts,  # [T, H, num_splits, 2] float32: maximum (base 2), sum
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    KV_BLOCK_SIZE: tl.constexpr,
    SCALE_LOG2: tl.constexpr,
    BLOCK_M: tl.constexpr,  # (row, query head) pairs of a program
    BLOCK_N: tl.constexpr,  # tokens per iteration
    BLOCK_D: tl.constexpr,  # HEAD_DIM, padded
    PART_TOKENS: tl.constexpr,  # a multiple of BLOCK_N
    ALIGNMENT: tl.constexpr,  # bytes, of the keys and values of a row and head
    NUM_KV_HEADS: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    BLOCK_B: tl.constexpr,  # sequences whose lengths are read together
    IS_CAUSAL: tl.constexpr,  # else a row sees all rows of its chunk
):
    """Grid: (any number, Hkv). The programs of a KV head take its items in turn."""
    ROWS: tl.constexpr = BLOCK_M // GROUP  # rows of an item
    kv_head = tl.program_id(1)
    stride = table_stride if table_width is None else tl.load(table_width)
    lengths = (cu_rows, context_lens, num_sequences, num_rows, stride * KV_BLOCK_SIZE, num_splits)
    sequence, own_item, num_items = find_item(tl.program_id(0), *lengths, PART_TOKENS, ROWS, BLOCK_B)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        first_row = tl.load(cu_rows + sequence)
        own_rows = tl.load(cu_rows + sequence + 1) - first_row
        context = tl.load(context_lens + sequence)
        num_parts = tl.minimum(count_parts(context + own_rows, PART_TOKENS), num_splits)
        tile_start, first_part = own_item // num_parts * ROWS, own_item % num_parts

        dims = tl.arange(0, BLOCK_D)[None, :]
        pair = tl.arange(0, BLOCK_M)
        row = tile_start + pair // GROUP  # of the chunk
        is_row = (pair // GROUP < ROWS) & (row < own_rows)
        is_element = is_row[:, None] & (dims < HEAD_DIM)
        head = kv_head * GROUP + pair % GROUP
        query_row = (first_row + row).to(tl.int64)
        query = tl.load(q + query_row[:, None] * q_stride + head[:, None] * HEAD_DIM + dims, mask=is_element, other=0.0)
        table = block_table + sequence.to(tl.int64) * stride
        pool_head = kv_head.to(tl.int64) * num_blocks * (KV_BLOCK_SIZE * HEAD_DIM)
        k_head, v_head = k_pool + pool_head, v_pool + pool_head
        k_rows = k_new + first_row.to(tl.int64) * k_stride + kv_head * HEAD_DIM
        v_rows = v_new + first_row.to(tl.int64) * v_stride + kv_head * HEAD_DIM
        tile_end = tl.minimum(own_rows, tile_start + ROWS)
        if IS_CAUSAL:
            last_seen, rows_seen = row, tile_end
        else:
            last_seen, rows_seen = tl.zeros_like(row) + own_rows, own_rows
        end = context + rows_seen
        if first_part < num_parts - 1:
            end = tl.minimum(end, part_start(first_part + 1, PART_TOKENS))
        row_max, row_sum, mixed = attend_tokens(
            query, k_head, v_head, table, num_blocks, k_rows, v_rows, k_stride, v_stride, first_part, end, context,
            last_seen, dims, HEAD_DIM, KV_BLOCK_SIZE, SCALE_LOG2, BLOCK_M, BLOCK_N, BLOCK_D, PART_TOKENS,
            ALIGNMENT,
        )  # fmt: skip
        if first_part == 0:
            # A row has one tile and a KV head its own items, so each position has one writer. No program of
            # this call reads it: new positions are at or above context_lens, and contexts are read below it.
            owned = tile_start + tl.arange(0, BLOCK_M)
            slot = tl.load(slot_mapping + first_row + owned, mask=owned < tile_end, other=-1)
            slot = tl.where(slot < num_blocks * KV_BLOCK_SIZE, slot, -1)
            write_rows(k_rows, k_stride, slot, k_head, owned, dims, HEAD_DIM)
            write_rows(v_rows, v_stride, slot, v_head, owned, dims, HEAD_DIM)

        target = query_row * (NUM_KV_HEADS * GROUP) + head  # (row, head) of the call
        if out is not None:
            result = (mixed / row_sum[:, None]).to(out.dtype.element_ty)
            tl.store(out + target[:, None] * HEAD_DIM + dims, result, mask=is_element)
        else:
            write_part(
                mixed_parts, stat_parts, target, first_part, num_parts, num_splits, row_max, row_sum, mixed, is_row,
                dims, HEAD_DIM, MOST_PARTS,
            )  # fmt: skip
        if item + tl.num_programs(0) < num_items:
            sequence, own_item, _ = find_item(item + tl.num_programs(0), *lengths, PART_TOKENS, ROWS, BLOCK_B)


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
    part_tokens: int = PART_TOKENS,
    num_sms: int = 1 << 20,
    table_width: torch.Tensor | None = None,
    is_causal: bool = True,
) -> None:
    """Queues the call on the current stream; writes `out` and the pools in place.

    Rows from cu_rows[B] on are padding: they are not read or written, and their `out` is unchanged.
    max_rows: about how many rows a sequence has, to choose tiles; any number gives the same bits. A captured graph
    fixes it, T, B and num_splits. part_tokens: of the first parts; it alone decides the last bits of results.
    num_splits: 1, or at least the parts of every sequence, which programs of their own then take. num_sms: the SMs of
    the current stream's share, which bound the programs. table_width: [1] int32, the width of block_table's rows when
    the call runs, if they have no gaps. is_causal: otherwise a row sees all rows of its chunk, as in a drafted block,
    not only those up to itself. Positions in slot_mapping are at or above their sequence's context_lens, and distinct.
    Raises ValueError if shapes or types do not match.
    """
    tensors = (q, k_new, v_new, k_pool, v_pool, block_table, cu_rows, context_lens, slot_mapping)
    check_attention(*tensors, out)
    if table_width is not None:
        check_tensor("table_width", table_width, (1,), torch.int32)
    num_kv_heads, num_blocks, kv_block_size, head_dim = k_pool.shape
    if max_rows < 1 or not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"max_rows = {max_rows}: at least 1; num_splits = {num_splits}: must be 1 to {MAX_SPLITS}")
    if not runs_kernel(pruned_chunk_attention_kernel, q):
        reference.pruned_chunk_attention(*tensors, out, table_width, is_causal=is_causal)
        return
    group = q.shape[1] // num_kv_heads
    config = launch_config(q.element_size(), head_dim, group, max_rows, compute_capability(q))
    kv, parts = tensors[1:5], empty_parts(q, num_splits) if num_splits > 1 else None
    tiles = num_tiles(q.shape[0], context_lens.shape[0], config.block_m // group)
    programs = min(tiles * num_splits, -(-PROGRAMS_PER_SM * num_sms // num_kv_heads))
    on_grid(pruned_chunk_attention_kernel, programs, num_kv_heads)(
        *tensors,
        table_width,
        q.stride(0),
        k_new.stride(0),
        v_new.stride(0),
        num_blocks,
        block_table.shape[1],
        context_lens.shape[0],
        q.shape[0],
        num_splits,
        out if parts is None else None,
        *(parts or (None, None)),
        **config.constants(num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, kv_block_size=kv_block_size),
        PART_TOKENS=part_tokens,
        ALIGNMENT=1 if any((t.data_ptr() | t.itemsize * (t.stride(0) | t.stride(1))) % 16 for t in kv) else 16,
        BLOCK_B=32 if context_lens.shape[0] <= 32 else 512,  # 32 need no barrier; few sizes, as each is compiled
        IS_CAUSAL=is_causal,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=False,  # compilers fuse differently for other tiles
    )
    if parts is not None:
        combine_splits(*parts, cu_rows, out)
