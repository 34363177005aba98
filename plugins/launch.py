# ruff: noqa: PLR0917 (the arguments of a kernel, in its order)
"""Helpers of launchers: the choice between kernel and reference, and checks of arguments.

Only shapes and types are checked, which are known on the host, so no check waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def runs_kernel(kernel: Any, tensor: torch.Tensor) -> bool:
    """Returns whether the kernel runs: on a GPU, or anywhere under TRITON_INTERPRET=1. Else the reference runs."""
    return tensor.is_cuda or not isinstance(kernel, triton.JITFunction)


def on_grid(kernel: Any, *grid: int) -> Any:
    """Returns a launcher of `kernel` over `grid` programs, which queues a call on the current stream."""
    return kernel[grid]


def check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], *dtypes: torch.dtype, may_have_row_stride: bool = False
) -> None:
    """Raises ValueError unless a tensor has this shape, one of these types, and is contiguous.

    may_have_row_stride: rows may have a larger stride, as in a slice of a wider product.
    """
    if tensor.shape != shape:
        raise ValueError(f"{name}: shape {list(tensor.shape)}, expected {list(shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: dtype {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    if not (tensor[:1] if may_have_row_stride else tensor).is_contiguous():
        raise ValueError(f"{name}: strides {list(tensor.stride())}, must be contiguous")


def compute_capability(tensor: torch.Tensor) -> int:
    """Returns the capability of a tensor's GPU, e.g. 90; without a GPU, the one that tables are written for."""
    if not tensor.is_cuda:
        return 90
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor


def check_attention(q, k_new, v_new, k_pool, v_pool, block_table, cu_rows, context_lens, slot_mapping, out) -> None:
    """Raises ValueError naming the first tensor whose shape, type or layout does not match the others."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, num_sequences = k_pool.shape[0], context_lens.shape[0]
    if num_heads % num_kv_heads:
        raise ValueError(f"q: {num_heads} heads, not a multiple of the pool's {num_kv_heads}")
    check_tensor("q", q, (num_rows, num_heads, head_dim), *FLOAT_DTYPES, may_have_row_stride=True)
    for name, tensor in (("k_new", k_new), ("v_new", v_new)):
        check_tensor(name, tensor, (num_rows, num_kv_heads, head_dim), q.dtype, may_have_row_stride=True)
    for name, tensor in (("k_pool", k_pool), ("v_pool", v_pool)):
        check_tensor(name, tensor, (*k_pool.shape[:3], head_dim), q.dtype)
    check_tensor("block_table", block_table, (num_sequences, block_table.shape[1]), torch.int32)
    check_tensor("cu_rows", cu_rows, (num_sequences + 1,), torch.int32)
    check_tensor("context_lens", context_lens, (num_sequences,), torch.int32)
    check_tensor("slot_mapping", slot_mapping, (num_rows,), torch.int32)
    check_tensor("out", out, (num_rows, num_heads, head_dim), q.dtype)
