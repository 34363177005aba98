"""The noise of cpu/noise.py on a GPU: the same table, the same integers, bit for bit.

Everything up to the uniforms is integer work, so that host and device draw the same; only the two logarithms may
differ in their last bits. torch has no unsigned 64-bit arithmetic: words live in int64, whose products and sums
wrap as they should, and whose right shifts copy the sign, which a mask takes out again.
Nothing here reads the device on the host, so all of it may be captured in a graph.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from faser_backend.cpu import noise
from faser_backend.plugins.perturb_logits import perturb_logits

_UNIFORM_STEP = 2.0**-24


def _signed(value: int) -> int:
    """The int64 with the bits of a word in [0, 2^64)."""
    return value - (1 << 64) if value >> 63 else value


_INCREMENT = _signed(0x9E3779B97F4A7C15)
_MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def _shifted(words: torch.Tensor, count: int) -> torch.Tensor:
    """words [R] shifted right by count >= 1 as if they were unsigned."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _mixed(words: torch.Tensor) -> torch.Tensor:
    words = (words ^ _shifted(words, 30)) * _MULTIPLIERS[0]
    words = (words ^ _shifted(words, 27)) * _MULTIPLIERS[1]
    return words ^ _shifted(words, 31)


@lru_cache(maxsize=4)
def _device_table(vocab_size: int, device: torch.device) -> torch.Tensor:
    table, _ = noise.noise_table(vocab_size)
    return torch.tensor(table.view(np.int32), device=device)  # a copy: the table itself may not be written


class TorchNoise:
    """Noise rows over a vocabulary on one device. Immutable; the table is shared by all instances of a process."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Raises ValueError for a vocabulary of more than 2^20 tokens."""
        self._log2_size = log2_size = noise.noise_table(vocab_size)[1]
        self._table = _device_table(vocab_size, device)
        # Row i is the window that starts at entry i: a view of the table that takes no memory.
        self._windows = self._table.as_strided((1 << log2_size, vocab_size), (1, 1))
        self._mask = (1 << log2_size) - 1
        self._shift = 64 - log2_size

    def sums(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[R, V] int32 with the bits of a sum of two table entries modulo 2^32: see cpu/noise.py."""
        words = _mixed(positions * _INCREMENT + keys)
        sums = self._windows.index_select(0, words & self._mask)
        sums += self._windows.index_select(0, _shifted(words, self._shift))
        return sums

    def log_exponentials(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[R, V] float32, minus a Gumbel variate, for keys [R] int64 (the bits of device.noise.seed_keys) and
        positions [R] int64. All values are finite."""
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
        """[R, V]: logits [R, V] float32 times scale [R], less log_exponentials times weight [R], which is 1 or 0:
        noise is finite, so that a row of weight 0 has none. On a GPU one kernel, of which this is the definition."""
        if logits.is_cuda:
            out = torch.empty_like(logits)
            perturb_logits(logits, self._table, self._log2_size, keys, positions, scale, weight, out)
            return out
        scores = logits * scale[:, None]
        return scores.addcmul_(self.log_exponentials(keys, positions), weight[:, None], value=-1.0)
