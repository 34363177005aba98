# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""Writes new keys and values into a paged pool, for engines whose attention does not write them itself.

`slot_mapping` gives each row its KV position in the pool, or -1 for a row that is not written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from faser_backend.plugins import reference
from faser_backend.plugins.launch import FLOAT_DTYPES, check_tensor, on_grid, runs_kernel

NUM_WARPS = 1  # a row of one head is at most a few hundred values


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slot_mapping"])
def write_kv_kernel(
    k_new,  # [T, Hkv, HEAD_DIM], rows k_stride apart
    v_new,
    slot_mapping,  # [T]
    k_stride,
    v_stride,
    num_slots,  # of a head: num_blocks * kv_block_size
    k_pool,  # [Hkv, num_slots, HEAD_DIM]
    v_pool,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid: (T, Hkv)."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    slot = tl.load(slot_mapping + row).to(tl.int64)
    if slot < 0:
        return
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    elements = (kv_head.to(tl.int64) * num_slots + slot) * HEAD_DIM + dims
    keys = tl.load(k_new + row * k_stride + kv_head * HEAD_DIM + dims, mask=is_dim)
    values = tl.load(v_new + row * v_stride + kv_head * HEAD_DIM + dims, mask=is_dim)
    tl.store(k_pool + elements, keys, mask=is_dim)
    tl.store(v_pool + elements, values, mask=is_dim)


def write_kv(
    k_new: torch.Tensor, v_new: torch.Tensor, slot_mapping: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor
) -> None:
    """Writes k_new and v_new [T, Hkv, hd] to the pools; queued on the current stream.

    slot_mapping [T] int32: block * kv_block_size + offset, or -1; no two rows share one. Pools [Hkv,
    num_blocks, kv_block_size, hd]. Raises ValueError if shapes or types do not match.
    """
    num_rows = slot_mapping.shape[0]
    num_kv_heads, num_blocks, kv_block_size, head_dim = k_pool.shape
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        check_tensor(name, pool, tuple(k_pool.shape), *FLOAT_DTYPES)
    for name, tensor in (("k_new", k_new), ("v_new", v_new)):
        check_tensor(name, tensor, (num_rows, num_kv_heads, head_dim), k_pool.dtype, may_have_row_stride=True)
    check_tensor("slot_mapping", slot_mapping, (num_rows,), torch.int32)
    if not runs_kernel(write_kv_kernel, k_pool):
        reference.write_kv(k_new, v_new, slot_mapping, k_pool, v_pool)
    elif num_rows:
        on_grid(write_kv_kernel, num_rows, num_kv_heads)(
            k_new,
            v_new,
            slot_mapping,
            k_new.stride(0),
            v_new.stride(0),
            num_blocks * kv_block_size,
            k_pool,
            v_pool,
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            num_warps=NUM_WARPS,
        )
