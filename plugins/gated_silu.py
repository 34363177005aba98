"""The gate of an MLP: silu of one half of the fused projection, times the other half."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from faser_backend.plugins import reference
from faser_backend.plugins.launch import FLOAT_DTYPES, check_tensor, on_grid, runs_kernel

BLOCK = 1024
NUM_WARPS = 4


@triton.jit
def gated_silu_kernel(
    gate_up,  # [T, 2 * size]
    size,
    out,  # [T, size]
    BLOCK: tl.constexpr,
):
    """Grid: (T, size / BLOCK, rounded up)."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_dim = dims < size
    pointers = gate_up + row * (2 * size) + dims
    gate = tl.load(pointers, mask=is_dim, other=0.0).to(tl.float32)
    up = tl.load(pointers + size, mask=is_dim, other=0.0).to(tl.float32)
    tl.store(out + row * size + dims, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=is_dim)


def gated_silu(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Computes out [T, I] from gate_up [T, 2 * I], of one type; queued on the current stream.

    Raises ValueError if shapes or types do not match.
    """
    num_rows, size = out.shape
    check_tensor("gate_up", gate_up, (num_rows, 2 * size), *FLOAT_DTYPES)
    check_tensor("out", out, (num_rows, size), gate_up.dtype)
    if not runs_kernel(gated_silu_kernel, gate_up):
        reference.gated_silu(gate_up, out)
    elif num_rows:
        on_grid(gated_silu_kernel, num_rows, -(-size // BLOCK))(gate_up, size, out, BLOCK=BLOCK, num_warps=NUM_WARPS)
