"""Noise in torch against the noise in numpy: equal integers, close logarithms."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from faser_backend.cpu import noise
from faser_backend.cpu.noise import GumbelNoise, seed_keys
from faser_backend.cuda.noise import TorchNoise

torch.set_num_threads(1)

CPU = torch.device("cpu")
WORD = 2**64 - 1
VOCABULARIES = [1, 4, 2051, 2**17 - 1, 2**17 + 1, 152_000]


def random_rows(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws keys [count] uint64 and positions [count], with the extreme ones among them."""
    rng = np.random.default_rng(seed)
    keys = seed_keys(rng.integers(0, WORD, count, dtype=np.uint64, endpoint=True))
    keys[:4] = 0, WORD, 2**63, 2**63 - 1
    positions = rng.integers(0, 2**40, count)
    positions[:3] = 0, 1, 2**40
    return keys, positions


def tensors(keys: np.ndarray, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(keys.view(np.int64)), torch.from_numpy(positions)


def sums_by_numpy(vocab_size: int, keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns [R, V] uint32 from the numpy generator's own table and counters."""
    table, log2_size = noise.noise_table(vocab_size)
    words = noise._counters(keys, positions)
    first, second = words % np.uint64(2**log2_size), words >> np.uint64(64 - log2_size)
    columns = np.arange(vocab_size)
    return np.stack([table[int(a) + columns] + table[int(b) + columns] for a, b in zip(first, second, strict=True)])


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_sums_are_equal_bit_for_bit(vocab_size: int) -> None:
    keys, positions = random_rows(vocab_size, 8)
    sums = TorchNoise(vocab_size, CPU).sums(*tensors(keys, positions))
    assert sums.dtype == torch.int32
    assert np.array_equal(sums.numpy().view(np.uint32), sums_by_numpy(vocab_size, keys, positions))


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_values_agree_to_the_last_bits(vocab_size: int) -> None:
    keys, positions = random_rows(vocab_size + 1, max(6, 400_000 // vocab_size))
    expected = GumbelNoise(vocab_size).log_exponentials(keys, positions)
    values = TorchNoise(vocab_size, CPU).log_exponentials(*tensors(keys, positions))
    assert values.dtype == torch.float32 and torch.isfinite(values).all()
    np.testing.assert_allclose(values.numpy(), expected, rtol=1e-6, atol=4e-7)


def test_rows_do_not_depend_on_their_batch() -> None:
    keys, positions = tensors(*random_rows(4, 9))
    source = TorchNoise(77, CPU)
    together = source.log_exponentials(keys, positions)
    for row in range(9):
        assert torch.equal(source.log_exponentials(keys[row : row + 1], positions[row : row + 1])[0], together[row])


def test_tables_are_shared_and_large_vocabularies_refused() -> None:
    first, second = TorchNoise(2048, CPU), TorchNoise(2048, CPU)
    assert first._windows.data_ptr() == second._windows.data_ptr()
    with pytest.raises(ValueError, match="vocab_size = 2000000"):
        TorchNoise(2_000_000, CPU)
