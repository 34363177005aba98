# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""A residual addition and the RMS norm behind it, in one pass over each row.

Between two matrix products, a decoder layer reads its hidden states for little else.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from faser_backend.plugins import reference
from faser_backend.plugins.launch import FLOAT_DTYPES, check_tensor, on_grid, runs_kernel

MAX_HIDDEN_SIZE = 16_384  # a program holds a row in registers


@triton.jit
def add_rms_norm_kernel(
    hidden,  # [T, hidden_size]
    delta,  # [T, hidden_size], or None
    weight,  # [hidden_size] float32
    eps,
    hidden_size,
    summed,  # [T, hidden_size]; None where delta is
    out,  # [T, hidden_size]
    BLOCK_D: tl.constexpr,
):
    """Grid: (T,)."""
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < hidden_size
    indices = tl.program_id(0).to(tl.int64) * hidden_size + dims
    values = tl.load(hidden + indices, mask=is_dim, other=0.0).to(tl.float32)
    if delta is not None:
        values += tl.load(delta + indices, mask=is_dim, other=0.0).to(tl.float32)
        rounded = values.to(summed.dtype.element_ty)  # the norm is of what the next layers read
        tl.store(summed + indices, rounded, mask=is_dim)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / hidden_size + eps)
    normed = values * scale * tl.load(weight + dims, mask=is_dim, other=0.0)
    tl.store(out + indices, normed.to(out.dtype.element_ty), mask=is_dim)


def add_rms_norm(
    hidden: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    summed: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Computes summed = hidden + delta and out = RMS norm of summed; without delta, of hidden.

    hidden, delta, summed, out: [T, d] of one type, not overlapping. weight: [d] float32. Queued on the current stream.
    Raises ValueError if shapes or types do not match.
    """
    num_rows, hidden_size = hidden.shape
    if hidden_size > MAX_HIDDEN_SIZE:
        raise ValueError(f"hidden_size = {hidden_size}: must be at most {MAX_HIDDEN_SIZE}")
    if (delta is None) != (summed is None):
        raise ValueError("delta and summed: give both or neither")
    check_tensor("hidden", hidden, (num_rows, hidden_size), *FLOAT_DTYPES)
    check_tensor("weight", weight, (hidden_size,), torch.float32)
    for name, tensor in (("delta", delta), ("summed", summed), ("out", out)):
        if tensor is not None:
            check_tensor(name, tensor, (num_rows, hidden_size), hidden.dtype)
    if not runs_kernel(add_rms_norm_kernel, hidden):
        reference.add_rms_norm(hidden, delta, weight, eps, summed, out)
    elif num_rows:
        block_d = 1 << (hidden_size - 1).bit_length()
        on_grid(add_rms_norm_kernel, num_rows)(
            hidden, delta, weight, eps, hidden_size, summed, out, BLOCK_D=block_d, num_warps=num_warps(block_d)
        )


def num_warps(block_d: int) -> int:
    """Returns the warps for 16 values per thread, in [1, 16]."""
    return max(1, min(16, block_d // 512))
