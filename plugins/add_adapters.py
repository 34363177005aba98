# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""LoRA adapters beside products: a row x with an adapter gets (x @ a) @ b, summed in float32.

A row's adapter is the address of its table on the device, so a captured graph serves any adapters. A program reads one
row and sums in a fixed order, so a row's bits depend on its own values and adapter alone.
"""
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from faser_backend.plugins import reference
from faser_backend.plugins.launch import FLOAT_DTYPES, check_tensor, on_grid, runs_kernel

BLOCK_RANK, BLOCK_IN, BLOCK_OUT = 16, 256, 256
RANK_PROGRAMS = 4  # share the ranks of a row
NUM_WARPS = 4


@triton.jit
def find_matrix(adapters, row, entry, IS_B: tl.constexpr):
    """Returns the rank of a row's adapter, and its matrix of the entry; the rank is 0 if there is none."""
    table = tl.load(adapters + row)
    rank, address = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    if table != 0:
        words = table.to(tl.pointer_type(tl.int64))
        address = tl.load(words + 1 + 2 * entry + IS_B)
        if address != 0:
            rank = tl.load(words)
    return rank.to(tl.int32), tl.multiple_of(address.to(tl.pointer_type(tl.float16)), 16)


@triton.jit(do_not_specialize=["first_entry"])
def lower_rows_kernel(
    rows,  # [T, size], rows row_stride apart
    row_stride,
    adapters,  # [T]
    first_entry,
    size,
    lowered,  # [num_programs(2), T, MAX_RANK] float32
    MAX_RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """Computes x @ a. Grid: (T, programs that share the ranks, entries)."""
    row, module = tl.program_id(0).to(tl.int64), tl.program_id(2)
    rank, a = find_matrix(adapters, row, first_entry + module, False)  # [rank, size]
    target = lowered + (module * tl.num_programs(0) + row) * MAX_RANK
    for first in range(tl.program_id(1) * BLOCK_RANK, rank, tl.num_programs(1) * BLOCK_RANK):
        ranks = first + tl.arange(0, BLOCK_RANK)
        sums = tl.zeros((BLOCK_RANK,), tl.float32)
        for start in range(0, size, BLOCK_IN):
            dims = start + tl.arange(0, BLOCK_IN)
            values = tl.load(rows + row * row_stride + dims, mask=dims < size, other=0.0).to(tl.float32)
            is_weight = (ranks < rank)[:, None] & (dims < size)[None, :]
            weights = tl.load(a + ranks[:, None].to(tl.int64) * size + dims[None, :], mask=is_weight, other=0.0)
            sums += tl.sum(values[None, :] * weights.to(tl.float32), axis=1)
        tl.store(target + ranks, sums, mask=ranks < rank)


@triton.jit(do_not_specialize=["first_entry"])
def raise_rows_kernel(
    lowered,
    adapters,
    first_entry,
    first_width,  # outputs of the first entry
    other_width,  # of each other
    out,  # [T, outputs of all entries], rows out_stride apart
    out_stride,
    MAX_RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """Adds lowered @ b to out. Grid: (T, most outputs of an entry / BLOCK_OUT, rounded up, entries)."""
    row, module = tl.program_id(0).to(tl.int64), tl.program_id(2)
    rank, b = find_matrix(adapters, row, first_entry + module, True)  # [rank, outputs]
    width, start = first_width, tl.full((), 0, tl.int32)
    if module > 0:
        width, start = other_width, first_width + (module - 1) * other_width
    columns = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    source = lowered + (module * tl.num_programs(0) + row) * MAX_RANK
    sums = tl.zeros((BLOCK_OUT,), tl.float32)
    for first in range(0, rank, BLOCK_RANK):
        ranks = first + tl.arange(0, BLOCK_RANK)
        values = tl.load(source + ranks, mask=ranks < rank, other=0.0)
        is_weight = (ranks < rank)[:, None] & (columns < width)[None, :]
        weights = tl.load(b + ranks[:, None].to(tl.int64) * width + columns[None, :], mask=is_weight, other=0.0)
        sums += tl.sum(values[:, None] * weights.to(tl.float32), axis=0)
    pointers, is_column = out + row * out_stride + start + columns, (columns < width) & (rank > 0)
    sums += tl.load(pointers, mask=is_column, other=0.0).to(tl.float32)
    tl.store(pointers, sums.to(out.dtype.element_ty), mask=is_column)


def add_adapters(
    rows: torch.Tensor, adapters: torch.Tensor, entry: int, widths: Sequence[int], max_rank: int, out: torch.Tensor
) -> None:
    """Adds rows' adapters to out [T, sum(widths)], products of rows [T, K] side by side; queued on the current stream.

    adapters: [T] int64, addresses of tables on the device; 0: none. A table is the rank, then for each entry the
    addresses of a [rank, K] and b [rank, width], float16, multiples of 16; 0: none. Those from `entry` on have the
    outputs `widths`, all but the first alike. max_rank: of any adapter. Raises ValueError if these do not fit.
    """
    num_rows, size = rows.shape
    check_tensor("rows", rows, (num_rows, size), *FLOAT_DTYPES)
    check_tensor("out", out, (num_rows, sum(widths)), rows.dtype)
    check_tensor("adapters", adapters, (num_rows,), torch.int64)
    if not runs_kernel(lower_rows_kernel, rows):
        reference.add_adapters(rows, adapters, entry, widths, out)
    elif num_rows:
        lowered = rows.new_empty((len(widths), num_rows, max_rank), dtype=torch.float32)
        blocks = {"MAX_RANK": max_rank, "BLOCK_RANK": BLOCK_RANK, "num_warps": NUM_WARPS}
        on_grid(lower_rows_kernel, num_rows, RANK_PROGRAMS, len(widths))(
            rows, rows.stride(0), adapters, entry, size, lowered, BLOCK_IN=BLOCK_IN, **blocks
        )
        on_grid(raise_rows_kernel, num_rows, -(-max(widths) // BLOCK_OUT), len(widths))(
            *(lowered, adapters, entry, widths[0], widths[-1], out, out.stride(0)), BLOCK_OUT=BLOCK_OUT, **blocks
        )
