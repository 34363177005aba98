"""Noise: a pure function of (seed, position) with the right distribution, and independent where promised."""

import numpy as np
import pytest
from scipy import stats

from faser_backend.cpu import noise
from faser_backend.cpu.noise import GumbelNoise, seed_keys, uniforms

WORD = 2**64 - 1
NUM_DRAWS = 200_000


def mix_by_hand(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & WORD
    return word ^ word >> 31


def row_by_hand(vocab_size: int, seed: int, position: int) -> np.ndarray:
    """Returns standard Gumbel noise in float64, one token at a time."""
    table = noise._table(20, vocab_size)
    key = mix_by_hand((seed + 0x9E3779B97F4A7C15) & WORD)
    word = mix_by_hand((key + position * 0x9E3779B97F4A7C15) & WORD)
    first, second = word % 2**20, word >> 44
    uniform = [(int(table[first + token]) + int(table[second + token])) % 2**32 / 2**32 for token in range(vocab_size)]
    return -np.log(-np.log(uniform))


def gumbel(vocab_size: int, seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return -GumbelNoise(vocab_size).log_exponentials(seed_keys(seeds), positions)


def draws(gumbel_minus: GumbelNoise, probs: np.ndarray, seeds: np.ndarray, position: int) -> np.ndarray:
    scores = np.log(probs).astype(np.float32)
    chunks = np.array_split(seeds.astype(np.uint64), max(1, seeds.size * probs.size // 200_000))
    noises = (gumbel_minus.log_exponentials(seed_keys(s), np.full(s.size, position)) for s in chunks)
    return np.concatenate([(scores - noise).argmax(axis=1) for noise in noises])


def p_value(token_ids: np.ndarray, probs: np.ndarray) -> float:
    observed = np.bincount(token_ids, minlength=probs.size)
    return float(stats.chisquare(observed, probs * token_ids.size).pvalue)


class TestDefinition:
    @pytest.mark.parametrize(("seed", "position"), [(0, 0), (0, 1), (1, 0), (12345, 700), (WORD, 2**40), (2**63, 9)])
    def test_row_follows_its_definition(self, seed: int, position: int) -> None:
        row = gumbel(11, np.array([seed], np.uint64), np.array([position]))[0]
        np.testing.assert_allclose(row, row_by_hand(11, seed, position), rtol=2e-6, atol=2e-6)

    def test_table_never_changes(self) -> None:
        # A change here changes the tokens of every seeded request: it needs a major release.
        assert noise._table(20, 8)[:4].tolist() == [2385908352, 441727616, 1015576192, 151831680]

    def test_every_stratum_occurs_once(self) -> None:
        strata = noise._table(20, 8)[: 2**20] >> np.uint32(12)
        assert np.array_equal(np.sort(strata), np.arange(2**20))

    @pytest.mark.parametrize("num_tokens", [1, 4, 33])
    def test_single_entries_are_those_of_the_row_bit_for_bit(self, num_tokens: int) -> None:
        rng = np.random.default_rng(num_tokens)
        source, keys = GumbelNoise(2051), seed_keys(rng.integers(0, 2**63, 50).astype(np.uint64))
        positions, token_ids = rng.integers(0, 1000, 50), rng.integers(0, 2051, (50, num_tokens))
        rows = source.log_exponentials(keys, positions)
        expected = np.take_along_axis(rows, token_ids, axis=1)
        assert np.array_equal(source.log_exponentials_at(keys, positions, token_ids), expected)

    def test_values_are_finite(self) -> None:
        rows = gumbel(2048, np.arange(200, dtype=np.uint64), np.arange(200))
        assert np.isfinite(rows).all()
        assert rows.min() > -2.9 and rows.max() < 16.7

    def test_large_vocabularies_get_a_larger_table(self) -> None:
        rows = gumbel(152_000, np.array([1, 2], np.uint64), np.array([0, 0]))
        assert rows.shape == (2, 152_000)
        assert abs(rows.mean() - 0.5772) < 0.01
        with pytest.raises(ValueError, match="vocab_size = 2000000"):
            GumbelNoise(2_000_000)


class TestDistribution:
    def test_single_values_are_gumbel(self) -> None:
        rows = gumbel(4, np.arange(NUM_DRAWS, dtype=np.uint64), np.full(NUM_DRAWS, 3))
        assert stats.kstest(rows[:, 2], "gumbel_r").pvalue > 1e-3

    @pytest.mark.parametrize("seed", range(4))
    def test_draws_follow_the_probabilities(self, seed: int) -> None:
        probs = np.random.default_rng(seed).dirichlet(np.ones(8))
        token_ids = draws(GumbelNoise(8), probs, np.arange(NUM_DRAWS) * (2 * seed + 1), seed)
        assert p_value(token_ids, probs) > 1e-3
        assert p_value(token_ids, 0.99 * probs + 0.01 * np.roll(probs, 1)) < 1e-3

    def test_flat_distribution_over_many_tokens_and_why_windows_are_added(self) -> None:
        probs = np.full(2048, 1 / 2048)
        source = GumbelNoise(2048)
        assert p_value(draws(source, probs, np.arange(NUM_DRAWS), 0), probs) > 1e-3

        class SingleWindow(GumbelNoise):
            """Half of the construction, in which the finite table shows."""

            def log_exponentials(self, keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
                words = noise._counters(keys, positions)
                window = self._windows[(words & self._mask).view(np.int64)]
                return np.log(-np.log((window * 2.0**-32).astype(np.float32)))

        assert p_value(draws(SingleWindow(2048), probs, np.arange(NUM_DRAWS), 0), probs) < 1e-3

    @pytest.mark.parametrize("neighbour", ["position", "seed"])
    def test_neighbours_are_independent(self, neighbour: str) -> None:
        probs = np.random.default_rng(9).dirichlet(np.full(6, 2.0))
        source = GumbelNoise(6)
        seeds = np.arange(NUM_DRAWS) * 2
        first = draws(source, probs, seeds, 10)
        second = draws(source, probs, seeds, 11) if neighbour == "position" else draws(source, probs, seeds + 1, 10)
        joint = np.outer(probs, probs).ravel()
        assert p_value(first * 6 + second, joint) > 1e-3
        assert p_value(first * 6 + np.where(seeds % 50, second, first), joint) < 1e-3


class TestUniforms:
    def test_every_part_of_the_counter_matters(self) -> None:
        seeds, positions, purposes, rounds = (axis.ravel() for axis in np.indices((12, 12, 3, 12)))
        keys = seed_keys(seeds.astype(np.uint64))
        values = np.concatenate(
            [uniforms(keys[purposes == p], positions[purposes == p], p, rounds[purposes == p]) for p in range(3)]
        )
        assert values.dtype == np.float64 and values.min() > 0 and values.max() < 1
        assert np.unique(values).size == values.size
        assert stats.kstest(values, "uniform").pvalue > 1e-3

    @pytest.mark.parametrize("other", ["purpose", "round", "position"])
    def test_neighbours_are_independent(self, other: str) -> None:
        keys = seed_keys(np.arange(NUM_DRAWS, dtype=np.uint64))
        zeros = np.zeros(NUM_DRAWS, np.int64)
        first = uniforms(keys, zeros, 0, zeros)
        second = uniforms(keys, zeros + (other == "position"), int(other == "purpose"), zeros + (other == "round"))
        cells = (first * 16).astype(int) * 16 + (second * 16).astype(int)
        assert p_value(cells, np.full(256, 1 / 256)) > 1e-3
