"""Counter-based noise: Gumbel rows for sample-and-match, uniforms for rejection sampling.

A row of noise is a pure function of (seed, position), and of the table's size above 2^17 tokens: draft and target draw
the same in any batch. Its integers are the same on every machine; the two logarithms may differ in their last bits.
A row is the sum modulo 1 of two windows of one fixed table of uniforms, at two offsets hashed from (seed, position).
Hashing every (position, token) would take 1.5 to 3 times as long.

Why two windows: the table holds N >= 2^20 stratified uniforms in a fixed random order, so the joint distribution of one
window over all offsets has an error of O(1/sqrt(N)) (total variation 0.007-0.008 over 2048 tokens, counted exactly).
The maximum of two Gumbel windows keeps a first-order error and fails a chi-square test at 10^8 draws. Addition modulo 1
is a convolution: it squares each Fourier coefficient of the error, which leaves O(1/N), invisible in 10^8 draws. The
resolution is 2^-23: a token of probability 1e-6 is drawn at its rate, one of 1e-7 at 94 % and one of 1e-8 at 3 % of it.
docs/sampling.md has measured figures.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.lib.stride_tricks import as_strided

_MIN_LOG2_SIZE = 20
_MAX_LOG2_SIZE = 23  # a table entry has 23 bits
_TABLE_SEED = 0x46415345_52303031
_MIN_UNIFORM_STEP = np.float32(2.0**-32)


def _word(value: int) -> np.ndarray:
    return np.array([value], np.uint64)  # a 1-element array: cheaper in a ufunc than a numpy scalar


# splitmix64 (Steele, Lea, Flood 2014): odd increment and the two multipliers of its finaliser.
_INCREMENT = _word(0x9E3779B97F4A7C15)
_MULTIPLIERS = (_word(0xBF58476D1CE4E5B9), _word(0x94D049BB133111EB))
_SHIFTS = (_word(30), _word(27), _word(31))


def _mix(words: np.ndarray) -> np.ndarray:
    """Scrambles uint64 words in place by a bijection."""
    words ^= words >> _SHIFTS[0]
    words *= _MULTIPLIERS[0]
    words ^= words >> _SHIFTS[1]
    words *= _MULTIPLIERS[1]
    words ^= words >> _SHIFTS[2]
    return words


def seed_keys(seeds: np.ndarray) -> np.ndarray:
    """Returns keys [R] uint64 of seeds [R] uint64, distinct for distinct seeds."""
    return _mix(seeds.astype(np.uint64) + _INCREMENT)


def _counters(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    words = positions.astype(np.uint64)
    words *= _INCREMENT
    words += keys
    return _mix(words)


def uniforms(keys: np.ndarray, positions: np.ndarray, purpose: int, rounds: np.ndarray) -> np.ndarray:
    """Returns float64 [R] in (0, 1), a pure function of (key [R], position [R], purpose, round [R]).

    `purpose` separates the draws of one position (proposal, test, recovery). `rounds` gives a position that is verified
    again new draws.
    """
    words = _counters(keys, positions)
    words += rounds.astype(np.uint64) * _MULTIPLIERS[0]
    _mix(words)
    words += _word((purpose + 1) * 0xD1B54A32D192ED03 & 0xFFFFFFFFFFFFFFFF)
    _mix(words)
    return ((words >> _word(12)) + 0.5) * 2.0**-52


@lru_cache(maxsize=4)
def _table(log2_size: int, num_padding: int) -> np.ndarray:
    """Returns [2^log2_size + num_padding] uint32, each A 2^9 + 2^7 with A of 23 bits; the end repeats the start.

    The leading bits of A take every value once, in an order made from Philox's raw words, whose stream numpy's
    compatibility policy fixes.
    """
    size = 1 << log2_size
    raw = np.random.Philox(key=_TABLE_SEED).random_raw(2 * size)
    strata = np.argsort(raw[:size], kind="stable").astype(np.uint32)
    num_free_bits = _MAX_LOG2_SIZE - log2_size
    jitter = (raw[size:] & _word((1 << num_free_bits) - 1)).astype(np.uint32)
    entries = (strata << np.uint32(num_free_bits) | jitter) << np.uint32(9) | np.uint32(1 << 7)
    return np.concatenate([entries, np.resize(entries, num_padding)])


def noise_table(vocab_size: int) -> tuple[np.ndarray, int]:
    """Returns a vocabulary's table, [2^log2_size + vocab_size] uint32, and log2_size. Raises ValueError above 2^20."""
    log2_size = max(_MIN_LOG2_SIZE, (8 * vocab_size - 1).bit_length())
    if log2_size > _MAX_LOG2_SIZE:
        raise ValueError(f"vocab_size = {vocab_size}: noise rows hold at most {2 ** (_MAX_LOG2_SIZE - 3)} tokens")
    return _table(log2_size, vocab_size), log2_size


class GumbelNoise:
    """Noise rows over a vocabulary. Immutable; all instances of a process share the table."""

    def __init__(self, vocab_size: int) -> None:
        table, log2_size = noise_table(vocab_size)
        table.flags.writeable = False
        self._windows = as_strided(table, (1 << log2_size, vocab_size), table.strides * 2, writeable=False)
        self._mask = _word((1 << log2_size) - 1)
        self._shift = _word(64 - log2_size)

    def log_exponentials(self, keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Returns [R, V] float32, log of an Exp(1) variate = minus a Gumbel variate, for keys [R] and positions [R].

        argmax(scores - log_exponentials) draws from softmax(scores). All values are finite, in (-16.7, 2.9).
        """
        words = _counters(keys, positions)
        # A table entry is A 2^9 + 2^7 with A of 23 bits, so a sum modulo 2^32 is C 2^9 + 2^8: 24 bits that
        # float32 holds exactly, the midpoint of one of 2^23 intervals of (0, 1).
        sums = self._windows[(words & self._mask).view(np.int64)]
        sums += self._windows[(words >> self._shift).view(np.int64)]
        rows = sums.astype(np.float32)
        rows *= _MIN_UNIFORM_STEP
        np.log(rows, out=rows)
        np.negative(rows, out=rows)
        return np.log(rows, out=rows)

    def log_exponentials_at(self, keys: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """Returns [R, C] float32, the entries token_ids [R, C] of the rows of `log_exponentials`."""
        words = _counters(keys, positions)
        first, second = (words & self._mask).view(np.int64), (words >> self._shift).view(np.int64)
        sums = self._windows[first[:, None], token_ids] + self._windows[second[:, None], token_ids]
        return np.log(-np.log(sums.astype(np.float32) * _MIN_UNIFORM_STEP))
