"""Noise on torch's CPU device: the host's own, in torch's tensors."""

import numpy as np
import pytest
import torch

from faser_backend.cpu.noise import GumbelNoise, seed_keys
from faser_backend.cuda.sampler import TorchNoise

CPU = torch.device("cpu")
WORD = 2**64 - 1


@pytest.mark.parametrize("vocab_size", [1, 4, 2051])
def test_scores_have_the_hosts_noise_where_rows_are_random(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    keys = seed_keys(rng.integers(0, WORD, 6, dtype=np.uint64, endpoint=True))
    keys[:4] = 0, WORD, 2**63, 2**63 - 1
    positions = np.array([0, 1, 2**40, *rng.integers(0, 2**40, 3)])
    logits, scale = rng.normal(size=(6, vocab_size)).astype(np.float32), np.array([1, 2, 1, 0.5, 1, 1], np.float32)
    weight = np.array([1, 1, 0, 1, 1, 0], np.float32)
    given = (torch.from_numpy(each) for each in (logits, keys.view(np.int64), positions, scale, weight))
    scores = TorchNoise(vocab_size, CPU).perturbed(*given).numpy()
    noise = GumbelNoise(vocab_size).log_exponentials(keys, positions)
    np.testing.assert_allclose(scores, logits * scale[:, None] - noise * weight[:, None], rtol=1e-6, atol=1e-6)
    assert np.array_equal(scores[[2, 5]], logits[[2, 5]])


def test_tables_are_shared_and_large_vocabularies_refused() -> None:
    first, second = TorchNoise(2048, CPU), TorchNoise(2048, CPU)
    assert first._table.data_ptr() == second._table.data_ptr()
    with pytest.raises(ValueError, match="vocab_size = 2000000"):
        TorchNoise(2_000_000, CPU)
