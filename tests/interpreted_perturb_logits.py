"""The kernel of temperature and noise in the Triton-language interpreter, against its definition.

Whether a kernel is interpreted is settled when it is defined: test_perturb_logits.py starts a process for this.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from faser_backend.device.cuda.noise import TorchNoise
from plugins.perturb_logits import BLOCK_V, perturb_logits

torch.set_num_threads(1)


@pytest.mark.parametrize("vocab_size", [1, 5, BLOCK_V - 1, BLOCK_V, 2 * BLOCK_V + 3, 2**17 + 1])
def test_scores_are_those_of_the_definition(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    num_rows = 6
    noise = TorchNoise(vocab_size, torch.device("cpu"))
    keys = torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, num_rows))
    keys[0], keys[1] = -1, -(2**63)
    positions = torch.from_numpy(rng.integers(0, 2**40, num_rows))
    logits = torch.from_numpy(rng.normal(0, 3, (num_rows, vocab_size)).astype(np.float32))
    logits[:, rng.integers(vocab_size)] = -torch.inf
    logits[3, 0] = torch.nan
    scale = torch.tensor([1.0, 2.0, 1.0, 0.3, 1.7, 1.0])
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    expected = noise.perturbed(logits, keys, positions, scale, weight)
    out = torch.full_like(logits, torch.nan)
    perturb_logits(logits, noise._table, noise._log2_size, keys, positions, scale, weight, out)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert torch.equal(out[2], logits[2]) and torch.equal(out[5], logits[5])
    perturb_logits(logits, noise._table, noise._log2_size, keys, positions, scale, weight, logits)
    torch.testing.assert_close(logits, out, rtol=0, atol=0, equal_nan=True)


def test_no_rows() -> None:
    noise, nothing = TorchNoise(7, torch.device("cpu")), torch.zeros((0, 7))
    column, words = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    perturb_logits(nothing, noise._table, noise._log2_size, words, words, column, column, nothing)
