"""What is believed of draft tokens' chances: greedy and sampled requests apart, from a profile and from the traffic.

On the demo pair the target accepts 87 % of tested draft tokens at temperature 0, 72 % at 0.8 and 65 % at 1, and
requests of one temperature differ by 7 to 8 % (standard deviation, of which 3 to 5 % is the luck of a hundred tests).
Learned together, whatever the last requests were is what the next ones are held for.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from faser_backend.core.decision import PipelineMode
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.calibration import MarginCounts, MarginCurve, MatchCalibration
from faser_backend.policy.survival_rates import SurvivalRates

KINDS = ("greedy", "sampled")  # of requests


class Beliefs:
    """Asked about the batch that was looked at last, in which the kinds count by their requests."""

    def __init__(self, margins: Mapping[str, MarginCounts], max_draft_tokens: int) -> None:
        self._matches = [MatchCalibration(margins.get(kind)) for kind in KINDS]
        self._rates = [SurvivalRates(max_draft_tokens, matches.curve.mean_chance) for matches in self._matches]
        self.sampled_share = 0.0  # of the requests that were looked at
        self._mixed: tuple[Hashable, MarginCurve] | None = None

    def look_at(self, sequences: Sequence[RunningSequence]) -> None:
        self.sampled_share = sampled_share(sequences)

    @property
    def is_mixed(self) -> bool:
        return 0.0 < self.sampled_share < 1.0

    @property
    def version(self) -> Hashable:
        """Changes with `survival`."""
        if not self.is_mixed:
            kind = int(self.sampled_share)
            return kind, self._rates[kind].version
        return self.sampled_share, self._rates[0].version, self._rates[1].version

    @property
    def survival(self) -> np.ndarray:
        """[K] the chance that the first 1..K draft tokens are all accepted."""
        greedy, sampled = self._rates
        if not self.is_mixed:
            return (sampled if self.sampled_share else greedy).survival
        return (1.0 - self.sampled_share) * greedy.survival + self.sampled_share * sampled.survival

    @property
    def curve(self) -> MarginCurve:
        """Chances by margin."""
        greedy, sampled = self._matches
        if not self.is_mixed:
            return (sampled if self.sampled_share else greedy).curve
        version = self.sampled_share, greedy.version, sampled.version
        if self._mixed is None or self._mixed[0] != version:
            self._mixed = version, greedy.curve.mixed(sampled.curve, self.sampled_share)
        return self._mixed[1]

    @property
    def num_tests(self) -> float:
        """Of first draft tokens, older ones counting less."""
        greedy, sampled = self._rates
        return (1.0 - self.sampled_share) * greedy.num_tests + self.sampled_share * sampled.num_tests

    def chances(self, margins: np.ndarray) -> np.ndarray:
        """The chance of acceptance of draft tokens with these margins, same shape."""
        return self.curve.chances(margins)

    def observe(self, record: StepRecord) -> None:
        """Learns from what a step's target accepted, and from nothing else of it."""
        if not record.frontier.num_drafted.any():
            return
        share, is_client = sampled_share(record.plan.decodes), record.frontier.is_client
        if is_client is None and share in (0.0, 1.0):
            self._observe(int(share), record, slice(None))
            return
        is_sampled = np.array([not sequence.request.sampling.is_greedy for sequence in record.plan.decodes])
        is_server = np.ones_like(is_sampled) if is_client is None else ~is_client
        for kind, rows in enumerate((is_server & ~is_sampled, is_server & is_sampled)):
            if rows.any():
                self._observe(kind, record, rows)

    def _observe(self, kind: int, record: StepRecord, rows: np.ndarray | slice) -> None:
        """rows: of the step, those of the kind."""
        margins, decision, matches = record.frontier.margins, record.plan.decision, self._matches[kind]
        num_accepted, num_testable = record.acceptance.num_accepted[rows], record.num_testable[rows]
        if margins is not None:
            matches.observe(margins[rows], num_accepted, num_testable)
        if decision.mode is not PipelineMode.RUN_AHEAD:  # whose chains go on behind others
            self._rates[kind].observe(
                num_accepted.tolist(),
                num_testable.tolist(),
                matches.curve.mean_chance,
                is_trimmed=decision.trim is not None,
            )


def sampled_share(sequences: Sequence[RunningSequence]) -> float:
    """Of requests that do not decode greedily."""
    return sum([not sequence.request.sampling.is_greedy for sequence in sequences]) / len(sequences)
