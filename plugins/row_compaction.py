"""Gathers the rows that an early exit kept, so that later segments compute only these. Values are unchanged."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from faser_backend.plugins import reference
from faser_backend.plugins.launch import FLOAT_DTYPES, cdiv, check_tensor, on_grid, runs_kernel

BLOCK_D = 2048
NUM_WARPS = 4


@triton.jit
def compact_rows_kernel(
    hidden,  # [T, hidden_size]
    kept,  # [num_kept] int64
    hidden_size,
    out,  # [num_kept, hidden_size]
    BLOCK_D: tl.constexpr,
):
    """Grid: (num_kept, hidden_size / BLOCK_D, rounded up)."""
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(kept + row)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_dim = dims < hidden_size
    tl.store(out + row * hidden_size + dims, tl.load(hidden + source * hidden_size + dims, mask=is_dim), mask=is_dim)


def compact_rows(hidden: torch.Tensor, kept: torch.Tensor, out: torch.Tensor) -> None:
    """Computes out[i] = hidden[kept[i]]; queued on the current stream.

    hidden [T, d]; kept [n] int64, all below T; out [n, d], which must not overlap hidden.
    Raises ValueError if shapes or types do not match.
    """
    num_kept, hidden_size = kept.shape[0], hidden.shape[1]
    check_tensor("hidden", hidden, (hidden.shape[0], hidden_size), *FLOAT_DTYPES)
    check_tensor("kept", kept, (num_kept,), torch.int64)
    check_tensor("out", out, (num_kept, hidden_size), hidden.dtype)
    if not runs_kernel(compact_rows_kernel, hidden):
        reference.compact_rows(hidden, kept, out)
    elif num_kept:
        on_grid(compact_rows_kernel, num_kept, cdiv(hidden_size, BLOCK_D))(
            hidden, kept, hidden_size, out, BLOCK_D=BLOCK_D, num_warps=NUM_WARPS
        )
