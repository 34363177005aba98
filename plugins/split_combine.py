# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""Joins the parts of a sequence, in order: the second step of attention over long contexts.

Each part has an unnormalised sum of values, a maximum and a sum of weights. A part without tokens has a maximum of
-inf and no sum of values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from faser_backend.plugins.attention_tiles import join
from faser_backend.plugins.launch import on_grid

NUM_WARPS = 1  # a row of one head is at most a few hundred values


@triton.jit
def write_part(
    mixed_parts, stat_parts, pair, part, num_parts, num_splits, row_max, row_sum, mixed, is_row, dims,
    HEAD_DIM: tl.constexpr, MOST_PARTS: tl.constexpr,
):  # fmt: skip
    """Writes one part of (row, head) pairs `pair` [M]; the last part also writes those that have no tokens."""
    cell = pair * num_splits + part
    tl.store(mixed_parts + cell[:, None] * HEAD_DIM + dims, mixed, mask=is_row[:, None] & (dims < HEAD_DIM))
    tl.store(stat_parts + cell * 2, row_max, mask=is_row)
    tl.store(stat_parts + cell * 2 + 1, row_sum, mask=is_row)
    if part == num_parts - 1:
        empty = tl.arange(1, MOST_PARTS + 1)[None, :]
        pointers = stat_parts + (cell[:, None] + empty) * 2
        tl.store(pointers, float("-inf"), mask=is_row[:, None] & (part + empty < num_splits))


@triton.jit(do_not_specialize=["num_sequences", "num_splits"], do_not_specialize_on_alignment=["cu_rows"])
def combine_splits_kernel(
    mixed_parts,  # [T, H, num_splits, HEAD_DIM] float32
    stat_parts,  # [T, H, num_splits, 2] float32: maximum (base 2), sum
    cu_rows,  # [num_sequences + 1]
    num_sequences,
    out,  # [T, H, HEAD_DIM]
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid: (T, H). Padding rows are unchanged."""
    row = tl.program_id(0)
    if row >= tl.load(cu_rows + num_sequences):
        return
    pair = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    part = tl.arange(0, BLOCK_S)
    stat = stat_parts + pair * num_splits * 2
    part_max = tl.load(stat + part * 2, mask=part < num_splits, other=float("-inf"))
    num_used = tl.sum((part_max > float("-inf")).to(tl.int32), 0)  # a row sees the first parts, its own at least
    one, dims = tl.arange(0, 1), tl.arange(0, BLOCK_D)[None, :]
    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum, mixed = tl.zeros([1], tl.float32), tl.zeros([1, BLOCK_D], tl.float32)
    for used in tl.range(0, num_used, loop_unroll_factor=4):  # so that several parts are on their way
        pointers = mixed_parts + (pair * num_splits + used) * HEAD_DIM + dims
        part_mixed = tl.load(pointers, mask=dims < HEAD_DIM, other=0.0)
        new_max, new_sum = tl.load(stat + used * 2 + one), tl.load(stat + used * 2 + 1 + one)
        row_max, row_sum, mixed = join(row_max, row_sum, mixed, new_max, new_sum, part_mixed)
    tl.store(out + pair * HEAD_DIM + dims, (mixed / row_sum[:, None]).to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def combine_splits(mixed_parts: torch.Tensor, stat_parts: torch.Tensor, cu_rows: torch.Tensor, out: torch.Tensor):
    """Computes out [T, H, hd] from float32 mixed_parts [T, H, num_splits, hd], stat_parts [T, H, num_splits, 2]."""
    num_rows, num_heads, num_splits, head_dim = mixed_parts.shape
    on_grid(combine_splits_kernel, num_rows, num_heads)(
        mixed_parts, stat_parts, cu_rows, cu_rows.shape[0] - 1, out, num_splits=num_splits, HEAD_DIM=head_dim,
        BLOCK_S=triton.next_power_of_2(num_splits), BLOCK_D=triton.next_power_of_2(head_dim), num_warps=NUM_WARPS,
        enable_fp_fusion=False,  # as in the first step
    )  # fmt: skip


def empty_parts(q: torch.Tensor, num_splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates mixed_parts and stat_parts of a call with queries q [T, H, hd]."""
    num_rows, num_heads, head_dim = q.shape
    mixed = torch.empty(num_rows, num_heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
    return mixed, mixed.new_empty(num_rows, num_heads, num_splits, 2)
