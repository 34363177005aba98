# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""Rotary embedding of queries and keys of the fused projection, behind their norms if a model has them.

Dimension i of a head is rotated with i + head_dim / 2. Values are not touched.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from faser_backend.plugins import reference
from faser_backend.plugins.launch import FLOAT_DTYPES, check_tensor, on_grid, runs_kernel

HEADS = 4  # of a row, that a program of one warp rotates
NUM_WARPS = 1


@triton.jit(do_not_specialize=["num_heads", "num_rotated"])
def rotate_heads_kernel(
    qkv,  # [T, at least num_rotated, 2 * HALF], rows row_stride apart
    positions,  # [T]
    cos,  # [max_context, HALF] float32
    sin,
    q_norm,  # [2 * HALF] float32; None without norms
    k_norm,
    eps,
    row_stride,
    num_heads,  # of the queries, which come first
    num_rotated,  # and of the keys
    out,  # [T, num_rotated, 2 * HALF]
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Grid: (T, (query heads + key heads) / HEADS, rounded up)."""
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dims = tl.arange(0, BLOCK_H)[None, :]
    is_dim = dims < HALF
    is_value = is_dim & (head < num_rotated)
    pointers = qkv + row * row_stride + head * (2 * HALF) + dims
    first = tl.load(pointers, mask=is_value, other=0.0).to(tl.float32)
    second = tl.load(pointers + HALF, mask=is_value, other=0.0).to(tl.float32)
    if q_norm is not None:
        weights = tl.where(head < num_heads, q_norm, k_norm) + dims
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        first = first * scale * tl.load(weights, mask=is_value, other=0.0)
        second = second * scale * tl.load(weights + HALF, mask=is_value, other=0.0)
    angle = tl.load(positions + row) * HALF + dims
    cosine = tl.load(cos + angle, mask=is_dim, other=0.0)
    sine = tl.load(sin + angle, mask=is_dim, other=0.0)
    target = out + (row * num_rotated + head) * (2 * HALF) + dims
    tl.store(target, (first * cosine - second * sine).to(out.dtype.element_ty), mask=is_value)
    tl.store(target + HALF, (second * cosine + first * sine).to(out.dtype.element_ty), mask=is_value)


def rotate_heads(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out: torch.Tensor,
    *,
    num_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Rotates queries and keys of qkv [T, H + 2 * Hkv, hd], behind norms if given, to out [T, H + Hkv, hd].

    positions [T] int64, all below max_context; cos and sin [max_context, hd / 2] float32; q_norm, k_norm [hd]
    float32. Queued on the current stream. Raises ValueError if shapes or types do not match.
    """
    num_rows, num_all, head_dim = qkv.shape
    num_rotated, half = (num_heads + num_all) // 2, head_dim // 2
    check_tensor("qkv", qkv, (num_rows, num_all, 2 * half), *FLOAT_DTYPES, may_have_row_stride=True)
    check_tensor("positions", positions, (num_rows,), torch.int64)
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table, (cos.shape[0], half), torch.float32)
    check_tensor("out", out, (num_rows, num_rotated, head_dim), qkv.dtype)
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm: give both or neither")
    if q_norm is not None and k_norm is not None:
        check_tensor("q_norm", q_norm, (head_dim,), torch.float32)
        check_tensor("k_norm", k_norm, (head_dim,), torch.float32)
    if not runs_kernel(rotate_heads_kernel, qkv):
        reference.rotate_heads(qkv, positions, cos, sin, q_norm, k_norm, eps, num_heads, out)
    elif num_rows:
        on_grid(rotate_heads_kernel, num_rows, -(-num_rotated // HEADS))(
            qkv, positions, cos, sin, q_norm, k_norm, eps, qkv.stride(0), num_heads, num_rotated, out,
            HALF=half, BLOCK_H=triton.next_power_of_2(half), HEADS=HEADS, num_warps=NUM_WARPS,
        )  # fmt: skip
