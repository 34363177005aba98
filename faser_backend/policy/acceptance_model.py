"""How likely a draft token is accepted: the traffic's calibrated curve, shifted by what each request turned out to be.

The chance of a draft token of request i with margin m is sigmoid(logit c(m) + offset_i). The curve c is calibrated of
greedy and of sampled requests apart (policy/calibration.py). The offset has a normal prior and is updated with every
test, as in online logistic regression: precision += sum p (1 - p), offset += sum (y - p) / precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.calibration import KINDS, MarginCounts, MarginCurve, MatchCalibration, sigmoid

OFFSET_STD = 0.6  # of the prior: requests' acceptance differs by 7 to 15 points
_PRIOR_PRECISION = OFFSET_STD**-2
_MOST_PRECISION = _PRIOR_PRECISION + 25.0  # about 150 tests: a text may change


class AcceptanceModel:
    """Learns from every step's tests. Asked about the sequences that are looked at."""

    def __init__(self, margins: Mapping[str, MarginCounts]) -> None:
        self._calibrations = [MatchCalibration(margins.get(kind)) for kind in KINDS]
        self._requests: dict[RunningSequence, tuple[float, float]] = {}  # offset, precision
        self.num_tests = 0

    @property
    def version(self) -> tuple[int, ...]:
        """Changes with the curves."""
        return tuple(calibration.version for calibration in self._calibrations)

    def curve(self, sampled_share: float) -> MarginCurve:
        """The chances by margin of a batch in which this share of the requests does not decode greedily."""
        greedy, sampled = (calibration.curve for calibration in self._calibrations)
        if sampled_share in (0.0, 1.0):
            return sampled if sampled_share else greedy
        return greedy.mixed(sampled, sampled_share)

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
        is_sampled = np.array([not each.request.sampling.is_greedy for each in decodes], np.bool_)
        num_sampled = np.count_nonzero(is_sampled)
        for kind, calibration in enumerate(self._calibrations):
            if num_sampled == (len(decodes) if kind else 0):
                of_kind: np.ndarray | slice = slice(None)
            elif num_sampled == (0 if kind else len(decodes)):
                continue
            else:
                of_kind = np.flatnonzero(is_sampled == bool(kind))
            own = decodes if isinstance(of_kind, slice) else [decodes[index] for index in of_kind]
            self._observe(calibration, own, margins[of_kind], num_accepted[of_kind], num_tested[of_kind])

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
