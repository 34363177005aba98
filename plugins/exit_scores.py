# ruff: noqa: PLR0917 (the arguments of a kernel, in its order)
"""Scores of a few candidate tokens at an exit layer: rows of the head, not the whole head.

A row's candidates are scored against its hidden state behind the final norm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from faser_backend.plugins import reference
from faser_backend.plugins.launch import FLOAT_DTYPES, check_tensor, on_grid, runs_kernel

BLOCK_C = 4  # candidates of a program: they share the hidden state, and leave enough programs to fill a GPU
BLOCK_D = 1024
NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_candidates"])
def exit_scores_kernel(
    hidden,  # [T, hidden_size]
    head,  # [vocab_size, hidden_size]
    candidates,  # [T, num_candidates] int64
    hidden_size,
    num_candidates,
    out,  # [T, num_candidates] float32
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid: (T, num_candidates / BLOCK_C, rounded up)."""
    row = tl.program_id(0).to(tl.int64)
    candidate = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_candidate = candidate < num_candidates
    token = tl.load(candidates + row * num_candidates + candidate, mask=is_candidate, other=0)
    head_rows = head + token[:, None] * hidden_size
    sums = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    for start in range(0, hidden_size, BLOCK_D):
        dims = start + tl.arange(0, BLOCK_D)
        is_dim = dims < hidden_size
        state = tl.load(hidden + row * hidden_size + dims, mask=is_dim, other=0.0).to(tl.float32)
        weights = tl.load(head_rows + dims[None, :], mask=is_candidate[:, None] & is_dim[None, :], other=0.0)
        sums += weights.to(tl.float32) * state[None, :]
    tl.store(out + row * num_candidates + candidate, tl.sum(sums, 1), mask=is_candidate)


def exit_scores(hidden: torch.Tensor, head: torch.Tensor, candidates: torch.Tensor, out: torch.Tensor) -> None:
    """Computes out[t, c] = hidden[t] . head[candidates[t, c]], summed in float32; queued on the current stream.

    hidden [T, d] and head [V, d] of any float type; candidates [T, C] int64, all below V, also in padding rows;
    out [T, C] float32. Raises ValueError if shapes or types do not match.
    """
    num_rows, hidden_size = hidden.shape
    num_candidates = candidates.shape[1]
    check_tensor("hidden", hidden, (num_rows, hidden_size), *FLOAT_DTYPES)
    check_tensor("head", head, (head.shape[0], hidden_size), *FLOAT_DTYPES)
    check_tensor("candidates", candidates, (num_rows, num_candidates), torch.int64)
    check_tensor("out", out, (num_rows, num_candidates), torch.float32)
    if not runs_kernel(exit_scores_kernel, hidden):
        reference.exit_scores(hidden, head, candidates, out)
    elif out.numel():
        on_grid(exit_scores_kernel, num_rows, -(-num_candidates // BLOCK_C))(
            hidden, head, candidates, hidden_size, num_candidates, out,
            BLOCK_C=BLOCK_C, BLOCK_D=BLOCK_D, num_warps=NUM_WARPS,
        )  # fmt: skip
