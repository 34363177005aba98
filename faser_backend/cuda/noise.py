"""The noise of cpu/noise.py on a GPU: one kernel over the same table, with the same integers, bit for bit.

Only the two logarithms may differ in their last bits. Nothing reads the device on the host, so all of it may be
captured in a graph. On a torch CPU device the host's own noise is used.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from faser_backend.cpu.noise import GumbelNoise, noise_table
from faser_backend.plugins.perturb_logits import perturb_logits


@lru_cache(maxsize=4)
def _device_table(vocab_size: int, device: torch.device) -> torch.Tensor:
    table, _ = noise_table(vocab_size)
    return torch.tensor(table.view(np.int32), device=device)  # a copy, because the table is read-only


class TorchNoise:
    """Noise rows over a vocabulary on one device. Immutable; all instances of a process share the table."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Raises ValueError for a vocabulary of more than 2^20 tokens."""
        self._log2_size = noise_table(vocab_size)[1]
        self._table = _device_table(vocab_size, device)
        self._on_host = GumbelNoise(vocab_size)

    def perturbed(
        self,
        logits: torch.Tensor,
        keys: torch.Tensor,
        positions: torch.Tensor,
        scale: torch.Tensor,
        weight: torch.Tensor,
    ) -> torch.Tensor:
        """Returns logits [R, V] float32 * scale [R] - log_exponentials * weight [R], where weight is 1 or 0.

        keys [R] int64 are the bits of cpu.noise.seed_keys; positions [R] int64. A row of weight 0 has no noise, because
        noise is finite.
        """
        if logits.is_cuda:
            out = torch.empty_like(logits)
            perturb_logits(logits, self._table, self._log2_size, keys, positions, scale, weight, out)
            return out
        noise = torch.from_numpy(self._on_host.log_exponentials(keys.numpy().view(np.uint64), positions.numpy()))
        return (logits * scale[:, None]).addcmul_(noise, weight[:, None], value=-1.0)
