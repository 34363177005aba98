"""From the margin of a draft token to the chance that the target accepts it.

Margins fall into fixed bins; each bin counts tests and acceptances, starting from what `faser profile` counted (or
from a guess) and following the traffic. A tested token is one that all tokens before it let through, so the counts
estimate exactly the factor that a chain's survival is the product of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

KINDS = ("greedy", "sampled")  # of requests, whose draft tokens are accepted at different rates
MARGIN_KNOTS = np.array([0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0])  # logits; bin starts
_PRIOR_TESTS = 200.0  # weight of what is known at the start, in tests
_MEMORY_TESTS = 2000.0  # older evidence fades beyond so many tests
_REFRESH_TESTS = 64  # new tests that are worth fitting the curve again
# Guess without a profile: the logistic curve of the demo pair, rounded.
_MAX_LOGIT = 7.0  # calibrated chances of 0.1 % and 99.9 % say all that counts can tell
_GUESSED_PROBS = 1.0 - 0.7 * np.exp(-0.55 * MARGIN_KNOTS)
_GUESSED_SHARES = np.diff(1.0 - np.exp(-np.append(MARGIN_KNOTS, np.inf) / 2.5))


@dataclass(frozen=True, slots=True, eq=False)
class MarginCounts:
    """Draft tokens by margin: [M] tested and [M] accepted, M = MARGIN_KNOTS.size."""

    tested: np.ndarray
    accepted: np.ndarray

    @classmethod
    def of(cls, margins: np.ndarray, is_accepted: np.ndarray) -> MarginCounts:
        """margins [n] of tested draft tokens, is_accepted bool [n]."""
        bins = margin_bins(margins)
        size = MARGIN_KNOTS.size
        tested = np.bincount(bins, minlength=size).astype(np.float64)
        return cls(tested, np.bincount(bins, weights=is_accepted, minlength=size))


def margin_bins(margins: np.ndarray) -> np.ndarray:
    """The bin of each margin; negative margins (rejection sampling knows such) belong to the first."""
    return np.maximum(np.searchsorted(MARGIN_KNOTS, margins, side="right") - 1, 0)


def rising_shares(accepted: np.ndarray, tested: np.ndarray) -> np.ndarray:
    """[M] accepted / tested, tested > 0, as far as it can be had from bins that never fall: isotonic regression.

    More margin never means less chance. Each bin weighs what it tested, so that a thin one does not lift those
    above it: the fit at k is the largest over i <= k of the smallest over j >= k of the mean of bins i..j.
    """
    total = np.concatenate([[0.0], np.cumsum(tested)])
    hits = np.concatenate([[0.0], np.cumsum(accepted)])
    is_range = np.triu(np.ones((tested.size, tested.size), np.bool_))
    means = np.full(is_range.shape, np.inf)  # [i, j]
    np.divide(hits[1:] - hits[:-1, None], total[1:] - total[:-1, None], out=means, where=is_range)
    smallest = np.minimum.accumulate(means[:, ::-1], axis=1)[:, ::-1]
    return np.where(is_range, smallest, -np.inf).max(axis=0)


@dataclass(frozen=True, slots=True, eq=False)
class MarginCurve:
    """Of draft tokens by margin: [M] how often such margins occur, summing to 1, and [M] the chance of acceptance."""

    # A bin's chance holds at its middle; held at its start, chances in between would come out too high.
    margin_knots: ClassVar[np.ndarray] = np.append(0.5 * (MARGIN_KNOTS[1:] + MARGIN_KNOTS[:-1]), MARGIN_KNOTS[-1] + 2.0)

    margin_shares: np.ndarray
    match_probs: np.ndarray
    match_logits: np.ndarray = field(init=False)  # [M] of match_probs
    mean_chance: float = field(init=False)  # of a draft token whose margin is not known yet, in (0, 1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "match_logits", logits(self.match_probs))
        object.__setattr__(self, "mean_chance", float(self.margin_shares @ self.match_probs))

    def logits(self, margins: np.ndarray) -> np.ndarray:
        """Returns the log odds that draft tokens with these margins are accepted, same shape."""
        return np.interp(margins, self.margin_knots, self.match_logits)

    def chances(self, margins: np.ndarray) -> np.ndarray:
        """Returns the chance of acceptance of draft tokens with these margins, same shape."""
        return sigmoid(self.logits(margins))

    def mixed(self, other: MarginCurve, share: float) -> MarginCurve:
        """Of draft tokens of which a share in [0, 1] follows the other curve."""
        own, others = (1.0 - share) * self.margin_shares, share * other.margin_shares
        shares = own + others
        return MarginCurve(shares, (own * self.match_probs + others * other.match_probs) / shares)


class MatchCalibration:
    """Chances of acceptance by margin, updated online."""

    def __init__(self, known: MarginCounts | None) -> None:
        if known is None or not known.tested.any():
            tested = _GUESSED_SHARES * _PRIOR_TESTS
            accepted = tested * _GUESSED_PROBS
        else:
            weight = min(1.0, _PRIOR_TESTS / float(known.tested.sum()))
            tested = known.tested * weight
            accepted = known.accepted * weight
        self._tested, self._accepted = tested, accepted
        self._fresh: list[tuple[np.ndarray, np.ndarray]] = []  # margins and outcomes since the last fit
        self._num_fresh = 0
        self.version = 0  # rises with every fit
        self._refresh()

    def _refresh(self) -> None:
        self.version += 1
        # Half a test of the guess stays in every bin: one that is never seen must not divide by zero.
        tested = self._tested + 0.5
        self.curve = MarginCurve(tested / tested.sum(), rising_shares(self._accepted + 0.5 * _GUESSED_PROBS, tested))

    def observe(self, margins: np.ndarray, num_accepted: np.ndarray, num_tested: np.ndarray) -> None:
        """Counts the tests of chains [B] with margins [B, K]; the curve is fitted again once there are enough."""
        columns = np.arange(margins.shape[1])
        is_tested = columns < num_tested[:, None]
        self._fresh.append((margins[is_tested], (columns < num_accepted[:, None])[is_tested]))
        self._num_fresh += self._fresh[-1][0].size
        if self._num_fresh >= _REFRESH_TESTS:
            self._count_fresh()

    def _count_fresh(self) -> None:
        fresh = MarginCounts.of(*map(np.concatenate, zip(*self._fresh, strict=True)))
        self._fresh, self._num_fresh = [], 0
        fade = max(0.0, 1.0 - float(fresh.tested.sum()) / _MEMORY_TESTS)
        self._tested = self._tested * fade + fresh.tested
        self._accepted = self._accepted * fade + fresh.accepted
        self._refresh()


def logits(chances: np.ndarray) -> np.ndarray:
    """Returns log(c / (1 - c)), between -_MAX_LOGIT and _MAX_LOGIT."""
    edge = 1.0 / (1.0 + math.exp(_MAX_LOGIT))
    bounded = np.clip(chances, edge, 1.0 - edge)
    return np.log(bounded / (1.0 - bounded))


def sigmoid(scores: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-np.clip(scores, -500.0, 500.0)))
