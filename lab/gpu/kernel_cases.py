"""Inputs of kernels: random ragged calls to check against the references, and uniform ones to time.

Pools are larger than any call, and each timed copy of a call lies in other blocks, so that what is timed comes from
memory and not from the cache that the copy before filled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from lab.shapes import AttentionShape

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Largest difference from the float32 reference, relative to 1 + its size. Products of float32 are exact in the kernel;
# half types round the weights of the mix and the result.
TOLERANCES = {"fp32": 1e-5, "fp16": 4e-3, "bf16": 3e-2}


class Geometry(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_block_size: int


# Few, because each is compiled anew; tests without a GPU cover many more.
GEOMETRIES = {
    "fp32": (Geometry(32, 8, 128, 16), Geometry(4, 2, 64, 16)),
    "fp16": (Geometry(32, 8, 128, 16), Geometry(5, 1, 96, 8)),
    "bf16": (Geometry(32, 8, 128, 16), Geometry(16, 8, 128, 16)),
}


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """The tensors of one call, in the launcher's order, and what the host knows of it."""

    tensors: tuple[torch.Tensor, ...]  # q, k_new, v_new, k_pool, v_pool, block_table, cu_rows, context_lens, slots
    out: torch.Tensor
    max_rows: int

    def cloned(self) -> AttentionCall:
        """The same call on pools and an output of its own."""
        q, k_new, v_new, k_pool, v_pool, *rest = self.tensors
        return AttentionCall((q, k_new, v_new, k_pool.clone(), v_pool.clone(), *rest), self.out.clone(), self.max_rows)


def random_call(
    geometry: Geometry, dtype: torch.dtype, device: str, rng: np.random.Generator, *, max_context: int = 300
) -> AttentionCall:
    """Empty chunks, single rows, block borders, contexts of nothing, rows without slots and rows that are nobody's."""
    size = geometry.kv_block_size
    num_sequences = int(rng.integers(1, 7))
    counts = rng.integers(0, 9, num_sequences)
    if rng.random() < 0.1:
        counts[:] = 0  # all rows pruned
    contexts = rng.integers(0, max_context, num_sequences)
    snapped = rng.random(num_sequences) < 0.3
    contexts[snapped] -= contexts[snapped] % size
    num_padding = int(rng.integers(0, 4))
    is_written = rng.random(int(counts.sum())) < 0.8
    heads, kv_heads, head_dim, size = geometry
    cu_rows = np.concatenate([[0], np.cumsum(counts)])
    used, total = int(cu_rows[-1]), int(cu_rows[-1]) + num_padding
    num_columns = max(1, int(-(-(contexts + counts).max() // size)))
    num_blocks = counts.size * num_columns + 3
    table = rng.permutation(num_blocks)[: counts.size * num_columns].reshape(counts.size, num_columns)
    sequence = np.repeat(np.arange(counts.size), counts)
    position = contexts[sequence] + np.arange(used) - cu_rows[sequence]
    slots = np.full(total, -1)
    slots[:used] = np.where(is_written, table[sequence, position // size] * size + position % size, -1)
    generator = torch.Generator(device).manual_seed(int(rng.integers(1 << 31)))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    def ints(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    pool = (kv_heads, num_blocks, size, head_dim)
    tensors = (
        *(normal(total, heads, head_dim), normal(total, kv_heads, head_dim), normal(total, kv_heads, head_dim)),
        *(normal(*pool), normal(*pool)),
        *(ints(table), ints(cu_rows), ints(contexts), ints(slots)),
    )
    out = torch.full((total, heads, head_dim), 7.0, dtype=dtype, device=device)  # so that an unwritten row shows
    return AttentionCall(tensors, out, max(1, int(counts.max())))


def timed_calls(
    shape: AttentionShape, num_calls: int, dtype: torch.dtype, device: str, seed: int
) -> list[AttentionCall]:
    """num_calls uniform calls over one pool, each in blocks of its own."""
    generator = torch.Generator(device).manual_seed(seed)
    b, context, rows, heads, kv_heads, head_dim, size = shape
    each = -(-(context + rows) // size)
    num_blocks = num_calls * b * each

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(dims, generator=generator, device=device, dtype=torch.float32).to(dtype)

    pools = [
        torch.empty((kv_heads, num_blocks, size, head_dim), dtype=dtype, device=device).normal_(generator=generator)
        for _ in range(2)
    ]
    cu_rows = torch.arange(b + 1, device=device, dtype=torch.int32) * rows
    contexts = torch.full((b,), context, device=device, dtype=torch.int32)
    positions = context + torch.arange(rows, device=device)
    calls = []
    for index in range(num_calls):
        table = torch.arange(index * b * each, (index + 1) * b * each, device=device, dtype=torch.int32).view(b, each)
        slots = (table[:, positions // size].long() * size + positions % size).flatten().int()
        q, k_new, v_new = (normal(b * rows, count, head_dim) for count in (heads, kv_heads, kv_heads))
        tensors = (q, k_new, v_new, *pools, table, cu_rows, contexts, slots)
        calls.append(AttentionCall(tensors, torch.empty_like(q), rows))
    return calls
