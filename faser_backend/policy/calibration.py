"""The chance that a draft token is accepted: a curve over its margin, shifted by an offset of each request.

Margins fall into fixed bins. Each bin counts tests and acceptances, starts with the counts of `faser profile` (or a
guess) and follows the traffic. A token is tested only if all tokens before it were accepted, so the counts estimate the
factors of a chain's survival.

The chance of a draft token of request i with margin m is sigmoid(logit c(m) + offset_i). Each source of chains has its
own curve c. The offset has a normal prior and is updated with every test, as in online logistic regression:
precision += sum p (1 - p), offset += sum (y - p) / precision. It begins at the mean of its adapter, or of its kind,
greedy or sampled, which the profile tells at first.

`DrafterChoice` chooses between two drafters of a request the one whose chain is worth more tokens. A look-up costs next
to nothing, so it comes first, and its chain says how many of its tokens agree: its chances are known. What the draft
model would make of the same step is not known before it is asked: it counts as its mean chance, less the price of its
calls where the step has a trim rule. Each source has a curve of its own, of greedy and of sampled requests apart,
learned from every proposal whose continuation became known, whether it was verified or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from faser_backend.core.decision import TrimRule
from faser_backend.core.frontier import CLIENT, MAIN, Frontier
from faser_backend.core.plan import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence

KINDS = ("greedy", "sampled")  # of requests, whose draft tokens are accepted at different rates
MARGIN_KNOTS = np.array([0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0])  # logits; bin starts
_PRIOR_TESTS, _GUESS_TESTS = 200.0, 16.0  # weight of what is known at the start, and of a guess, in tests
_MEMORY_TESTS = 2000.0  # older evidence fades beyond so many tests
# New tests that are worth fitting the curve again: a share of those that are known, within bounds.
_REFIT_SHARE, _FEWEST_TESTS, _MOST_TESTS = 0.25, 8.0, 256.0
_MAX_LOGIT = 7.0  # chances from 0.1 % to 99.9 %: counts resolve no more
# Guess without a profile: the curve of the demo pair, rounded.
_GUESSED_PROBS = 1.0 - 0.7 * np.exp(-0.55 * MARGIN_KNOTS)
_GUESSED_SHARES = np.diff(1.0 - np.exp(-np.append(MARGIN_KNOTS, np.inf) / 2.5))
OFFSET_STD = 0.6  # of the prior: requests' acceptance differs by 7 to 15 points
_PRIOR_PRECISION = OFFSET_STD**-2
_GROUP_SHARE, _MOST_GROUPS = 0.02, 1024  # of an offset in the mean of its adapter or kind, per step; means kept
_CHAINS_FADE = 0.99  # by chain, of the shares of sources
_MOST_PRECISION = _PRIOR_PRECISION + 25.0  # about 150 tests: a text may change


@dataclass(frozen=True, slots=True, eq=False)
class MarginCounts:
    """Draft tokens by margin: [M] tested and [M] accepted, M = MARGIN_KNOTS.size."""

    tested: np.ndarray
    accepted: np.ndarray

    @classmethod
    def of(cls, margins: np.ndarray, is_accepted: np.ndarray) -> MarginCounts:
        """Counts tested draft tokens: margins [n], is_accepted bool [n]."""
        bins, size = margin_bins(margins), MARGIN_KNOTS.size
        return cls(*(np.bincount(bins, each, size) for each in (np.ones(bins.size), is_accepted)))


def margin_bins(margins: np.ndarray) -> np.ndarray:
    """Returns the bin of each margin. Negative margins, which rejection sampling produces, belong to the first."""
    return np.maximum(np.searchsorted(MARGIN_KNOTS, margins, side="right") - 1, 0)


def rising_shares(accepted: np.ndarray, tested: np.ndarray) -> np.ndarray:
    """Returns accepted / tested [M], tested > 0, fitted so that it never falls: isotonic regression.

    A larger margin never means a smaller chance. A bin weighs its tests, so that a thin one does not lift those
    above it: the fit at k is the largest over i <= k of the smallest over j >= k of the mean of bins i..j.
    """
    total = np.concatenate([[0.0], np.cumsum(tested)])
    hits = np.concatenate([[0.0], np.cumsum(accepted)])
    is_range = np.triu(np.ones((tested.size, tested.size), np.bool_))
    means = np.full(is_range.shape, np.inf)  # [i, j]
    np.divide(hits[1:] - hits[:-1, None], total[1:] - total[:-1, None], out=means, where=is_range)
    smallest = np.minimum.accumulate(means[:, ::-1], axis=1)[:, ::-1]
    return np.where(is_range, smallest, -np.inf).max(axis=0)


@dataclass(frozen=True, eq=False)
class MarginCurve:
    """Draft tokens by margin: the share [M] of each bin, summing to 1, and its chance of acceptance [M]."""

    # A bin's chance holds at its middle; held at its start, chances in between would come out too high.
    margin_knots: ClassVar[np.ndarray] = np.append(0.5 * (MARGIN_KNOTS[1:] + MARGIN_KNOTS[:-1]), MARGIN_KNOTS[-1] + 2.0)

    margin_shares: np.ndarray
    match_probs: np.ndarray

    @cached_property
    def match_logits(self) -> np.ndarray:
        """[M] of match_probs."""
        return logits(self.match_probs)

    @cached_property
    def mean_chance(self) -> float:
        """Chance of a draft token whose margin is not known yet, in (0, 1)."""
        return float(self.margin_shares @ self.match_probs)

    def logits(self, margins: np.ndarray) -> np.ndarray:
        """Returns the log odds that draft tokens with these margins are accepted, same shape."""
        return np.interp(margins, self.margin_knots, self.match_logits)

    def chances(self, margins: np.ndarray) -> np.ndarray:
        """Returns the chance of acceptance of draft tokens with these margins, same shape."""
        return sigmoid(self.logits(margins))


_GUESS = MarginCounts(_GUESS_TESTS * _GUESSED_SHARES, _GUESS_TESTS * _GUESSED_SHARES * _GUESSED_PROBS)


class MatchCalibration:
    """Chances of acceptance by margin, updated online."""

    def __init__(self, known: MarginCounts | None) -> None:
        known = known if known is not None and known.tested.any() else _GUESS
        weight = min(1.0, _PRIOR_TESTS / float(known.tested.sum()))
        self._tested, self._accepted = weight * known.tested, weight * known.accepted
        self._fresh: list[tuple[np.ndarray, np.ndarray]] = []  # margins and outcomes since the last fit
        self._num_fresh = 0
        self._refresh()

    def _refresh(self) -> None:
        # Half a test of the guess stays in every bin, so that an empty bin does not divide by zero.
        tested, self._num_known = self._tested + 0.5, float(self._tested.sum())
        self.curve = MarginCurve(tested / tested.sum(), rising_shares(self._accepted + 0.5 * _GUESSED_PROBS, tested))

    def observe(self, margins: np.ndarray, num_accepted: np.ndarray, num_tested: np.ndarray) -> None:
        """Counts the tests of chains [B] with margins [B, K]; the curve is fitted again once there are enough."""
        columns = np.arange(margins.shape[1])
        is_tested = columns < num_tested[:, None]
        self._fresh.append((margins[is_tested], (columns < num_accepted[:, None])[is_tested]))
        self._num_fresh += self._fresh[-1][0].size
        if self._num_fresh >= min(max(_REFIT_SHARE * self._num_known, _FEWEST_TESTS), _MOST_TESTS):
            fresh = MarginCounts.of(*map(np.concatenate, zip(*self._fresh, strict=True)))
            self._fresh, self._num_fresh = [], 0
            fade = max(0.0, 1.0 - float(fresh.tested.sum()) / _MEMORY_TESTS)
            self._tested = self._tested * fade + fresh.tested
            self._accepted = self._accepted * fade + fresh.accepted
            self._refresh()


def logits(chances: np.ndarray | float) -> np.ndarray:
    """Returns log(c / (1 - c)), between -_MAX_LOGIT and _MAX_LOGIT."""
    edge = 1.0 / (1.0 + math.exp(_MAX_LOGIT))
    bounded = np.clip(chances, edge, 1.0 - edge)
    return np.log(bounded / (1.0 - bounded))


def sigmoid(scores: np.ndarray) -> np.ndarray:
    return 0.5 + 0.5 * np.tanh(0.5 * scores)  # which never overflows


def hats(knots: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Returns the weights [n, k] of linear interpolation between ascending knots [k] at x [n], constant outside."""
    return np.stack([np.interp(x, knots, unit) for unit in np.eye(knots.size)], axis=1)


class AcceptanceModel:
    """Learns chances of acceptance from every step's tests: a curve over margins, and an offset of each request."""

    def __init__(self, margins: Mapping[str, MarginCounts]) -> None:
        """margins: counts of the engine's drafter, by kind of request."""
        counts = [(each.tested, each.accepted) for each in margins.values()]
        known = MarginCounts(*np.sum(counts, axis=0)) if counts else None
        self._calibrations = [MatchCalibration(known if source == MAIN else None) for source in range(CLIENT)]
        self._num_chains = np.eye(CLIENT)[MAIN]  # by source, older ones faded
        self._requests: dict[RunningSequence, tuple[float, float]] = {}  # offset, precision
        usual = float(logits(self._calibrations[MAIN].curve.mean_chance))
        rates = {kind: each.accepted.sum() / each.tested.sum() for kind, each in margins.items() if each.tested.any()}
        self._means = {kind: float(logits(rate)) - usual for kind, rate in rates.items()}  # of offsets, see _group_of
        self.num_tests = 0

    @property
    def has_look_ups(self) -> bool:
        """Whether look-ups make chains beside the engine's drafter."""
        return bool(self._num_chains[1:].any())

    @property
    def curves(self) -> list[MarginCurve]:
        """Chances by source of chains, the engine's drafter first; those that make chains."""
        return [each.curve for each in (self._calibrations if self.has_look_ups else self._calibrations[:1])]

    @property
    def shares(self) -> np.ndarray:
        """[S] of the sources among the latest chains, summing to 1."""
        return self._num_chains / self._num_chains.sum()

    def offsets(self, sequences: Sequence[RunningSequence]) -> np.ndarray:
        """Returns the offset [B] of each request. Forgets the requests that are gone."""
        if len(self._requests) > 2 * len(sequences) + 16:
            self._requests = {each: self._requests[each] for each in sequences if each in self._requests}
            self._means = dict([*self._means.items()][-_MOST_GROUPS:])
        return np.array([self._known_of(each)[0] for each in sequences])

    def _known_of(self, sequence: RunningSequence) -> tuple[float, float]:
        """Returns offset and precision of a request; a new one begins at the mean of its adapter or kind."""
        return self._requests.get(sequence, (self._means.get(_group_of(sequence), 0.0), _PRIOR_PRECISION))

    def observe(self, record: StepRecord) -> None:
        """Learns from the tests of the server's own drafts in a step."""
        frontier = record.frontier
        if frontier.margins is None or frontier.margins.shape[1] == 0:
            return
        columns = np.arange(frontier.margins.shape[1])
        for source in set(frontier.sources.tolist()).intersection(range(CLIENT)):
            calibration, rows = self._calibrations[source], np.flatnonzero(frontier.sources == source)
            sequences, margins = [record.plan.decodes[row] for row in rows], frontier.margins[rows]
            num_accepted = record.acceptance.num_accepted[rows]
            num_tested = np.minimum(num_accepted + 1, record.num_testable[rows])
            offset, precision = np.array([self._known_of(each) for each in sequences]).T
            chances = sigmoid(calibration.curve.logits(margins) + offset[:, None]) * (columns < num_tested[:, None])
            expected = chances.sum(axis=1)
            precision = np.minimum(precision + expected - (chances * chances).sum(axis=1), _MOST_PRECISION)
            # Accepted tokens are all tested: the sum of y - p is their number less the sum of p.
            offset = offset + (num_accepted - expected) / precision
            self._requests.update(zip(sequences, zip(offset.tolist(), precision.tolist(), strict=True), strict=True))
            for each, found in zip(sequences, offset.tolist(), strict=True):
                mean = self._means.get(group := _group_of(each), 0.0)
                self._means[group] = mean + _GROUP_SHARE * (found - mean)
            calibration.observe(margins, num_accepted, num_tested)
            self.num_tests += int(num_tested.sum())
            count = np.count_nonzero(frontier.num_drafted[rows])
            self._num_chains *= _CHAINS_FADE**count
            self._num_chains[source] += count


def _group_of(sequence: RunningSequence) -> str:
    """Returns the adapter of a request, or its kind without one: requests of a group are accepted alike."""
    return sequence.request.lora_name or KINDS[not sequence.request.sampling.is_greedy]


class DrafterChoice:
    """Chooses by calibrated chances, which start from the same guess for every source."""

    def __init__(self) -> None:
        self.calibrations = {
            (source, kind): MatchCalibration(None) for source in range(CLIENT) for kind in range(len(KINDS))
        }

    def takes_look_up(
        self, found: Frontier, num_wanted: np.ndarray, is_sampled: np.ndarray, trim: TrimRule | None
    ) -> np.ndarray:
        """Returns bool [B]: for which sequences the look-ups' chains `found` replace the draft model's.

        num_wanted [B] tokens asked for, is_sampled [B]: not greedy.
        """
        if not found.num_drafted.any():
            return np.zeros(num_wanted.shape, np.bool_)
        assert found.margins is not None
        kinds = is_sampled.astype(np.int64)
        row_price = call_price = 0.0
        if trim is not None:
            size = int(np.count_nonzero(num_wanted))
            row_price, call_price = trim.row_price, trim.draft_price(size) / max(size, 1)
        curves = {key: calibration.curve for key, calibration in self.calibrations.items()}
        chances = np.array([curve.match_probs for curve in curves.values()])  # [sources x kinds, M]
        # A look-up's count has a bin of the margins to itself.
        groups = len(KINDS) * found.sources + kinds
        survival = chances[groups[:, None], margin_bins(found.margins)].cumprod(axis=1)
        columns = np.arange(found.drafted.shape[1])
        worth = ((columns < found.num_drafted[:, None]) * np.maximum(survival - row_price, 0.0)).sum(axis=1)
        columns = np.arange(int(num_wanted.max()))
        means = np.array([curves[MAIN, kind].mean_chance for kind in range(len(KINDS))])
        gains = np.maximum(means[:, None] ** (columns + 1) - (row_price + call_price), 0.0)  # [kinds, K]
        models = ((columns < num_wanted[:, None]) * gains[kinds]).sum(axis=1)
        return (worth > 0.0) & (worth >= models)

    def observe(self, source: int, is_sampled: bool, margins: np.ndarray, num_accepted: int, num_tested: int) -> None:
        """Learns from one chain with margins [K]."""
        calibration = self.calibrations[source, int(is_sampled)]
        calibration.observe(margins[None], np.array([num_accepted]), np.array([num_tested]))
