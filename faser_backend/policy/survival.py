"""`survival`: draft on while a chain is likely to survive, then verify the rows that promise most tokens per time.

A chain's survival is the product of its draft tokens' calibrated chances (policy/calibration.py); which rows are
admitted is decided by policy/trim.py after drafting, with the prices that are set here from the cost model. After
TETRIS, DSpark (arXiv 2607.05147) and the adaptive verification of vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from faser_backend.core.decision import WHOLE, Decision, TrimRule
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.calibration import MatchCalibration
from faser_backend.policy.cost_model import DRAFT, TARGET, CostModel
from faser_backend.policy.knowledge import Knowledge
from faser_backend.policy.trim import continues

PROBE_EVERY = 128  # plain rounds, after which one token is drafted to see whether it would pay again
_GRID = 48  # row counts at which the cost model is asked; between them times are interpolated
_FADE = 0.95  # of the running means, per round


class RoundMeans:
    """Running means over rounds, per sequence that was verified: what a round costs and yields."""

    def __init__(self, tokens: float, rows: float, drafted: float, draft_calls: float) -> None:
        self.tokens = tokens  # emitted
        self.rows = rows  # verified
        self.drafted = drafted
        self.draft_calls = draft_calls  # of the whole round

    def observe(self, record: StepRecord) -> None:
        size = record.num_tokens.size
        self.tokens += (1.0 - _FADE) * (float(record.acceptance.num_emitted.sum()) / size - self.tokens)
        self.rows += (1.0 - _FADE) * (float(record.verification.num_kept.sum()) / size - self.rows)
        self.drafted += (1.0 - _FADE) * (float(record.frontier.num_drafted.sum()) / size - self.drafted)
        self.draft_calls += (1.0 - _FADE) * (int(record.frontier.num_drafted.max(initial=0)) - self.draft_calls)

    def draft_us(self, call_us: np.ndarray, size: int) -> float:
        """Of a usual round for `size` sequences; call_us [size + 1] of a draft call for so many."""
        num_active = min(size, self.drafted * size / max(self.draft_calls, 1e-9))
        return self.draft_calls * float(np.interp(num_active, np.arange(size + 1), call_us))


class TrimPricer:
    """Prices of rows and draft calls for a batch, and the calibration that values them."""

    def __init__(self, knowledge: Knowledge, max_draft_tokens: int) -> None:
        self.costs: CostModel = knowledge.costs
        self.match = MatchCalibration(knowledge.margins)
        self.max_draft_tokens = max_draft_tokens
        self.means = RoundMeans(tokens=2.0, rows=3.0, drafted=2.0, draft_calls=2.0)  # until rounds were seen

    def rule(self, sequences: Sequence[RunningSequence], partition: str = WHOLE) -> TrimRule:
        """The rule for a batch that drafts and verifies on this partition."""
        size = len(sequences)
        context = max(sequence.num_tokens for sequence in sequences)
        verify_us = self.verify_us(size, context, partition)
        column_us = self.column_us(size, context, partition)
        draft_us = self.draft_us(size, context, partition)
        round_draft_us = self.means.draft_us(draft_us, size)
        means = self.means
        usual_us = float(np.interp((means.rows - 1.0) * size, np.arange(verify_us.size), verify_us))
        speculating = size * means.tokens / (usual_us + round_draft_us + means.draft_calls * column_us)
        plain = size / float(verify_us[0])
        match = self.match
        return TrimRule(
            margin_knots=match.margin_knots,
            match_probs=match.match_probs,
            margin_shares=match.margin_shares,
            verify_us=verify_us,
            column_us=column_us,
            draft_us=draft_us,
            tokens_per_us=max(plain, speculating),
        )

    def verify_us(self, size: int, context: int, partition: str) -> np.ndarray:
        """[N + 1] predicted time of a step with 0..N rows beside the anchors, without drafting and padding."""
        most = size * self.max_draft_tokens
        extra = np.unique(np.linspace(0, most, min(most + 1, _GRID)).astype(np.int64))
        rows = size + extra
        times = self.costs.call_us(TARGET, partition, rows, size, context, max_rows=1)
        return np.interp(np.arange(most + 1), extra, times + self.costs.overhead.step(size, rows))

    def column_us(self, size: int, context: int, partition: str) -> float:
        """Predicted time that the longest chain costs per row of it, whatever the others are."""
        two, one = self.costs.call_us(TARGET, partition, size, size, context, max_rows=np.array([2, 1]))
        return float(two - one)

    def draft_us(self, size: int, context: int, partition: str) -> np.ndarray:
        """[B + 1] predicted time of a draft call for 0..B sequences."""
        active = np.unique(np.linspace(1, size, min(size, _GRID)).astype(np.int64))
        times = self.costs.call_us(DRAFT, partition, active, active, context, num_logit_rows=active)
        return np.interp(np.arange(size + 1), active, times + self.costs.overhead.draft_call(active))

    def observe(self, record: StepRecord) -> None:
        self.match.observe(record)
        self.means.observe(record)


class Survival:
    """Serial rounds with confidence trimming. Plain rounds where not even a first draft token pays."""

    is_drafting = True

    def __init__(self, knowledge: Knowledge, max_draft_tokens: int) -> None:
        self._pricer = TrimPricer(knowledge, max_draft_tokens)
        self._num_plain = 0

    def decide(self, sequences: Sequence[RunningSequence]) -> Decision:
        rule = self._pricer.rule(sequences)
        size = len(sequences)
        if continues(rule, np.ones(size)).any():
            self._num_plain = 0
            return Decision([self._pricer.max_draft_tokens] * size, trim=rule)
        self._num_plain += 1
        return Decision([int(self._num_plain % PROBE_EVERY == 0)] * size)

    def observe(self, record: StepRecord) -> None:
        self._pricer.observe(record)
