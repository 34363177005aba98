"""How likely a draft token is accepted: the traffic's calibrated curve, shifted by what each request turned out to be.

The chance of a draft token of request i with margin m is sigmoid(logit c(m) + offset_i). The curve c is calibrated of
greedy and of sampled requests apart, and of each source of chains (policy/calibration.py). The offset has a normal
prior and is updated with every test, as in online logistic regression: precision += sum p (1 - p), offset +=
sum (y - p) / precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from faser_backend.core.frontier import CLIENT, MAIN
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.calibration import KINDS, MarginCounts, MarginCurve, MatchCalibration, sigmoid

OFFSET_STD = 0.6  # of the prior: requests' acceptance differs by 7 to 15 points
_PRIOR_PRECISION = OFFSET_STD**-2
_CHAINS_FADE = 0.998  # by chain, of the shares of sources
_MOST_PRECISION = _PRIOR_PRECISION + 25.0  # about 150 tests: a text may change


class AcceptanceModel:
    """Learns from every step's tests. Asked about the sequences that are looked at."""

    def __init__(self, margins: Mapping[str, MarginCounts]) -> None:
        # By source of chains and kind of request; margins are the engine's drafter's.
        self._calibrations = [
            [MatchCalibration(margins.get(kind) if source == MAIN else None) for kind in KINDS]
            for source in range(CLIENT)
        ]
        self._num_chains = np.eye(CLIENT)[MAIN]  # by source, of late
        self._requests: dict[RunningSequence, tuple[float, float]] = {}  # offset, precision
        self.num_tests = 0

    @property
    def version(self) -> tuple[int, ...]:
        """Changes with the curves."""
        return tuple(calibration.version for of_source in self._calibrations for calibration in of_source)

    @property
    def source_shares(self) -> np.ndarray:
        """[CLIENT] shares of the chains of late, summing to 1."""
        return self._num_chains / self._num_chains.sum()

    @property
    def has_look_ups(self) -> bool:
        """Whether others than the engine's drafter make chains."""
        return bool(self._num_chains[1:].any())

    def curve(self, sampled_share: float, source: int = MAIN) -> MarginCurve:
        """The chances by margin of a batch in which this share of the requests does not decode greedily."""
        greedy, sampled = (calibration.curve for calibration in self._calibrations[source])
        if sampled_share in (0.0, 1.0):
            return sampled if sampled_share else greedy
        return greedy.mixed(sampled, sampled_share)

    def match_logits(self, sampled_share: float) -> np.ndarray:
        """As a TrimRule holds them: [M], or [CLIENT, M] where look-ups make chains."""
        sources = range(CLIENT if self.has_look_ups else 1)
        found = np.stack([self.curve(sampled_share, source).match_logits for source in sources])
        return found if self.has_look_ups else found[0]

    def offsets(self, sequences: Sequence[RunningSequence]) -> np.ndarray:
        """[B] what is added to the logits of each request's chances. Forgets the requests that are gone."""
        known = self._requests
        if len(known) > 2 * len(sequences) + 16:
            self._requests = known = {each: known[each] for each in sequences if each in known}
        return np.array([known[each][0] if each in known else 0.0 for each in sequences])

    def observe(self, record: StepRecord) -> None:
        """Learns from what the step's target accepted of the server's own drafts."""
        margins = record.frontier.margins
        if margins is None or margins.shape[1] == 0:
            return
        decodes, rows = record.plan.decodes, record.server_rows
        num_accepted = record.acceptance.num_accepted
        num_tested = np.minimum(num_accepted + 1, record.num_testable)
        if not isinstance(rows, slice):
            decodes = [decodes[row] for row in rows]
            margins, num_accepted, num_tested = margins[rows], num_accepted[rows], num_tested[rows]
        groups = np.array([not each.request.sampling.is_greedy for each in decodes], np.int64)  # kinds
        sources = record.frontier.sources[rows]
        groups += len(KINDS) * sources
        if self.has_look_ups or sources.any():
            self._count_chains(sources[record.frontier.num_drafted[rows] > 0])
        for group in np.unique(groups).tolist():
            of_group = slice(None) if (groups == group).all() else np.flatnonzero(groups == group)
            own = decodes if isinstance(of_group, slice) else [decodes[index] for index in of_group]
            source, kind = divmod(group, len(KINDS))
            calibration = self._calibrations[source][kind]
            self._observe(calibration, own, margins[of_group], num_accepted[of_group], num_tested[of_group])

    def _count_chains(self, sources: np.ndarray) -> None:
        """sources [n] of a step's chains."""
        self._num_chains *= _CHAINS_FADE**sources.size
        self._num_chains += np.bincount(sources, minlength=CLIENT)

    def _observe(
        self,
        calibration: MatchCalibration,
        sequences: list[RunningSequence],
        margins: np.ndarray,
        num_accepted: np.ndarray,
        num_tested: np.ndarray,
    ) -> None:
        """margins [B, K], num_accepted and num_tested [B], of one kind of requests."""
        known, fresh = self._requests, (0.0, _PRIOR_PRECISION)
        of_request = np.fromiter(
            chain.from_iterable(known.get(each, fresh) for each in sequences), np.float64, 2 * len(sequences)
        )
        offset, precision = of_request[::2], of_request[1::2]
        columns = np.arange(margins.shape[1])
        is_tested = columns < num_tested[:, None]
        chances = sigmoid(calibration.curve.logits(margins) + offset[:, None])
        information = np.where(is_tested, chances * (1.0 - chances), 0.0).sum(axis=1)
        # Accepted tokens are all tested: the sum of y - p is their number less the sum of p.
        surprise = num_accepted - np.where(is_tested, chances, 0.0).sum(axis=1)
        precision = np.minimum(precision + information, _MOST_PRECISION)
        offset = offset + surprise / precision
        known.update(zip(sequences, zip(offset.tolist(), precision.tolist(), strict=True), strict=True))
        tested = int(num_tested.sum())
        self.num_tests += tested
        calibration.observe(margins, num_accepted, num_tested)


def sampled_share(sequences: Sequence[RunningSequence]) -> float:
    """The share of the requests that do not decode greedily."""
    return sum([not sequence.request.sampling.is_greedy for sequence in sequences]) / len(sequences)
