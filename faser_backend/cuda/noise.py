"""The noise of cpu/noise.py on a GPU: the same table, the same integers, bit for bit.

Everything up to the uniforms is integer arithmetic, so host and device draw the same; only the two logarithms may
differ in their last bits. torch has no unsigned 64-bit arithmetic: words are int64, whose products and sums wrap
correctly; a mask removes the sign bits that right shifts copy. Nothing reads the device on the host, so all of it may
be captured in a graph.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from faser_backend.cpu import noise
from faser_backend.plugins.perturb_logits import perturb_logits

_UNIFORM_STEP = 2.0**-24


def _signed(value: int) -> int:
    """Returns the int64 with the bits of a word in [0, 2^64)."""
    return value - (1 << 64) if value >> 63 else value


_INCREMENT = _signed(0x9E3779B97F4A7C15)
_MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def _shifted(words: torch.Tensor, count: int) -> torch.Tensor:
    """Shifts words [R] right by count >= 1 as unsigned numbers."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _mixed(words: torch.Tensor) -> torch.Tensor:
    words = (words ^ _shifted(words, 30)) * _MULTIPLIERS[0]
    words = (words ^ _shifted(words, 27)) * _MULTIPLIERS[1]
    return words ^ _shifted(words, 31)


@lru_cache(maxsize=4)
def _device_table(vocab_size: int, device: torch.device) -> torch.Tensor:
    table, _ = noise.noise_table(vocab_size)
    return torch.tensor(table.view(np.int32), device=device)  # a copy, because the table is read-only


class TorchNoise:
    """Noise rows over a vocabulary on one device. Immutable; all instances of a process share the table."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Raises ValueError for a vocabulary of more than 2^20 tokens."""
        self._log2_size = log2_size = noise.noise_table(vocab_size)[1]
        self._table = _device_table(vocab_size, device)
        # Row i is the window that starts at entry i, a view of the table.
        self._windows = self._table.as_strided((1 << log2_size, vocab_size), (1, 1))
        self._mask = (1 << log2_size) - 1
        self._shift = 64 - log2_size

    def sums(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns [R, V] int32, the bits of a sum of two table entries modulo 2^32: see cpu/noise.py."""
        words = _mixed(positions * _INCREMENT + keys)
        sums = self._windows.index_select(0, words & self._mask)
        sums += self._windows.index_select(0, _shifted(words, self._shift))
        return sums

    def log_exponentials(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns [R, V] float32, minus a Gumbel variate; all values are finite.

        keys [R] int64 are the bits of cpu.noise.seed_keys; positions [R] int64.
        """
        # A sum is C 2^9 + 2^8: its upper 24 bits are 2 C + 1, which float32 holds exactly.
        odd = (self.sums(keys, positions) >> 8) & 0xFFFFFF
        return odd.to(torch.float32).mul_(_UNIFORM_STEP).log_().neg_().log_()

    def perturbed(
        self,
        logits: torch.Tensor,
        keys: torch.Tensor,
        positions: torch.Tensor,
        scale: torch.Tensor,
        weight: torch.Tensor,
    ) -> torch.Tensor:
        """Returns logits [R, V] float32 * scale [R] - log_exponentials * weight [R], where weight is 1 or 0.

        A row of weight 0 has no noise, because noise is finite. A GPU runs one kernel that follows this definition.
        """
        if logits.is_cuda:
            out = torch.empty_like(logits)
            perturb_logits(logits, self._table, self._log2_size, keys, positions, scale, weight, out)
            return out
        scores = logits * scale[:, None]
        return scores.addcmul_(self.log_exponentials(keys, positions), weight[:, None], value=-1.0)
