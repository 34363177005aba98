"""Random ragged calls of the attention kernel, for the GPU check and for tests.

All that a call must not read is NaN: KV positions never written, blocks of no sequence, padding rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

NAN = float("nan")
SENTINEL = 77.0  # in `out` before a call; rows of no sequence keep it


class Call(NamedTuple):
    """The tensors of a call, in the order of every implementation."""

    q: torch.Tensor
    k_new: torch.Tensor
    v_new: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    block_table: torch.Tensor
    cu_rows: torch.Tensor
    context_lens: torch.Tensor
    slot_mapping: torch.Tensor
    out: torch.Tensor

    def to(self, device: str) -> Call:
        return Call(*(tensor.to(device) for tensor in self))

    def with_own_results(self) -> Call:
        """Returns the same inputs with pools and `out` of its own."""
        return self._replace(k_pool=self.k_pool.clone(), v_pool=self.v_pool.clone(), out=self.out.clone())


@dataclass(frozen=True)
class Shape:
    rows: tuple[int, ...]  # of each sequence
    contexts: tuple[int, ...]
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 32
    kv_block_size: int = 8
    dtype: torch.dtype = torch.float32
    num_padding_rows: int = 0
    pruned_writes: float = 0.0  # share of rows whose KV slot is -1
    is_fused: bool = False  # q, k_new and v_new are slices of one tensor


def make_call(shape: Shape, seed: int) -> Call:
    """Draws the tensors of a call. Everything that it must not read is NaN."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    hd, bs, num_kv = shape.head_dim, shape.kv_block_size, shape.num_kv_heads
    num_rows = sum(shape.rows)
    total_rows = num_rows + shape.num_padding_rows
    heads = (num_kv * shape.group, num_kv, num_kv)
    if shape.is_fused:
        q, k_new, v_new = torch.randn(total_rows, sum(heads), hd, dtype=shape.dtype).split(heads, dim=1)
    else:
        q, k_new, v_new = (torch.randn(total_rows, n, hd, dtype=shape.dtype) for n in heads)
    for tensor in (q, k_new, v_new):
        tensor[num_rows:] = NAN

    num_columns = max(-(-(c + r) // bs) for c, r in zip(shape.contexts, shape.rows, strict=True)) + 1
    num_blocks = len(shape.rows) * num_columns + 3
    table = rng.permutation(num_blocks)[: len(shape.rows) * num_columns].reshape(-1, num_columns)
    k_pool, v_pool = torch.full((2, num_kv, num_blocks, bs, hd), NAN, dtype=shape.dtype)
    slots = np.full(total_rows, -1)
    first = 0
    for blocks, context, rows in zip(table, shape.contexts, shape.rows, strict=True):
        positions = np.arange(context + rows)
        slot_mapping = blocks[positions // bs] * bs + positions % bs
        for pool in (k_pool, v_pool):
            pool.view(num_kv, -1, hd)[:, slot_mapping[:context]] = torch.randn(num_kv, context, hd, dtype=shape.dtype)
        slots[first : first + rows] = np.where(rng.random(rows) < shape.pruned_writes, -1, slot_mapping[context:])
        first += rows

    def int32(values) -> torch.Tensor:
        return torch.tensor(np.asarray(values), dtype=torch.int32)

    cu_rows = int32(np.cumsum([0, *shape.rows]))
    out = torch.full((total_rows, heads[0], hd), SENTINEL, dtype=shape.dtype)
    lists = int32(table), cu_rows, int32(shape.contexts), int32(slots)
    return Call(q, k_new, v_new, k_pool, v_pool, *lists, out)


def random_shape(rng: np.random.Generator, dtype: torch.dtype) -> Shape:
    """Draws decoding, verification, prompt chunks or empty calls, with contexts at block borders."""
    num_sequences = int(rng.integers(1, 5))
    bs = int(rng.choice([8, 16, 32, 64, 128], p=[0.4, 0.3, 0.1, 0.1, 0.1]))
    kind = rng.choice(["decode", "verify", "prefill", "nothing"], p=[0.3, 0.5, 0.13, 0.07])
    rows = {
        "decode": np.ones(num_sequences),
        "verify": rng.integers(0, 18 if num_sequences < 3 else 6, num_sequences),
        "prefill": np.append(rng.integers(0, 2, num_sequences - 1), rng.integers(18, 40)),
        "nothing": np.zeros(num_sequences),
    }[kind]
    border = rng.integers(0, max(2, 64 // bs), num_sequences) * bs + rng.integers(-1, 2, num_sequences)
    contexts = np.where(rng.random(num_sequences) < 0.5, border, rng.integers(0, 64, num_sequences)).clip(0)
    return Shape(
        rows=tuple(int(n) for n in rows),
        contexts=tuple(int(n) for n in contexts),
        num_kv_heads=int(rng.integers(1, 3 if num_sequences < 3 else 2)),
        group=int(rng.integers(1, 9)),
        head_dim=int(rng.choice([32, 64, 80, 96, 112, 128, 256], p=[0.4, 0.2, 0.1, 0.1, 0.05, 0.1, 0.05])),
        kv_block_size=bs,
        dtype=dtype,
        num_padding_rows=int(rng.integers(0, 4)) or int(not rows.any()),  # a call has at least one row
        pruned_writes=float(rng.choice([0.0, 0.3, 1.0], p=[0.7, 0.2, 0.1])),
        is_fused=bool(rng.random() < 0.3),
    )
