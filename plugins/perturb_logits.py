# ruff: noqa: PLR0917 (the arguments of a kernel, in its order)
"""Divides logits by a temperature and adds Gumbel noise, in one pass instead of a dozen torch operators.

The noise of a row is the sum modulo 1 of two windows of one table of uniforms, at offsets hashed from the row's
key and position. The device's noise module defines it and is this kernel's reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from faser_backend.plugins.launch import check_tensor, on_grid

BLOCK_V = 2048
NUM_WARPS = 4


@triton.jit
def mixed(word):
    """Applies the finaliser of splitmix64. word is unsigned, so shifts bring in zeros and products wrap."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


# Rows of a packed block of parameters start at any multiple of 8 bytes. Without this, every new combination of
# alignments would be compiled again, with no gain for single numbers.
@triton.jit(do_not_specialize_on_alignment=["keys", "positions", "scale", "is_random"])
def perturb_logits_kernel(
    logits,  # [R, vocab_size] float32
    table,  # [2^LOG2_SIZE + vocab_size] int32
    keys,  # [R] int64
    positions,  # [R] int64
    scale,  # [R] float32
    is_random,  # [R] float32, 1 or 0
    vocab_size,
    out,  # [R, vocab_size] float32
    LOG2_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid: (R, vocab_size / BLOCK_V, rounded up)."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_token = token < vocab_size
    position = tl.load(positions + row).to(tl.uint64)
    word = mixed(position * 0x9E3779B97F4A7C15 + tl.load(keys + row).to(tl.uint64))
    first = (word & ((1 << LOG2_SIZE) - 1)).to(tl.int64)
    second = (word >> (64 - LOG2_SIZE)).to(tl.int64)
    sums = tl.load(table + first + token, mask=is_token, other=256) + tl.load(
        table + second + token, mask=is_token, other=0
    )
    # Bits 8 and up of a sum are an odd number of 24 bits, which float32 holds exactly.
    uniform = ((sums >> 8) & 0xFFFFFF).to(tl.float32) * (1.0 / (1 << 24))
    noise = tl.log(-tl.log(uniform))
    scores = tl.load(logits + row * vocab_size + token, mask=is_token, other=0.0) * tl.load(scale + row)
    scores = tl.where(tl.load(is_random + row) > 0.0, scores - noise, scores)
    tl.store(out + row * vocab_size + token, scores, mask=is_token)


def perturb_logits(
    logits: torch.Tensor,
    table: torch.Tensor,
    log2_size: int,
    keys: torch.Tensor,
    positions: torch.Tensor,
    scale: torch.Tensor,
    is_random: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Computes out[r] = logits[r] * scale[r] - is_random[r] * log_exponentials(keys[r], positions[r]).

    logits, out [R, V] float32, which may be the same tensor; table [2^log2_size + V] int32; keys, positions [R]
    int64; scale, is_random [R] float32. Raises ValueError if shapes or types do not match. CPU
    tensors are not supported: use the definition. Queued on the current stream.
    """
    num_rows, vocab_size = logits.shape
    check_tensor("logits", logits, (num_rows, vocab_size), torch.float32)
    check_tensor("table", table, ((1 << log2_size) + vocab_size,), torch.int32)
    for name, tensor, dtype in (
        ("keys", keys, torch.int64),
        ("positions", positions, torch.int64),
        ("scale", scale, torch.float32),
        ("is_random", is_random, torch.float32),
    ):
        check_tensor(name, tensor, (num_rows,), dtype)
    check_tensor("out", out, (num_rows, vocab_size), torch.float32)
    if num_rows:
        on_grid(perturb_logits_kernel, num_rows, -(-vocab_size // BLOCK_V))(
            logits, table, keys, positions, scale, is_random, vocab_size, out,
            LOG2_SIZE=log2_size, BLOCK_V=BLOCK_V, num_warps=NUM_WARPS,
            enable_fp_fusion=False,  # rounds products as the host does
        )  # fmt: skip
