"""What rows, columns and draft calls of a batch cost and are worth: prices for confidence trimming.

Brings together the cost model (time), the calibration of margins (worth) and running means of what rounds came
to. Shared by the policies that trim.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from faser_backend.core.decision import PipelineMode, TrimRule
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.calibration import MatchCalibration
from faser_backend.policy.cost_model import DRAFT, TARGET, CostModel
from faser_backend.policy.knowledge import Knowledge

_GRID = 48  # row counts at which the cost model is asked; between them times are interpolated
_FADE = 0.95  # of the running means, per round


class RoundMeans:
    """Running means over rounds that drafted, per sequence: what a round costs and yields."""

    def __init__(self) -> None:
        self.tokens, self.rows, self.drafted, self.draft_calls = 2.0, 3.0, 2.0, 2.0  # until rounds were seen

    def observe(self, record: StepRecord) -> None:
        size = record.num_tokens.size
        num_drafted = record.frontier.num_drafted
        if not num_drafted.any():
            return
        self.tokens += (1.0 - _FADE) * (float(record.acceptance.num_emitted.sum()) / size - self.tokens)
        self.rows += (1.0 - _FADE) * (float(record.frontier.num_rows.sum()) / size - self.rows)
        self.drafted += (1.0 - _FADE) * (float(num_drafted.sum()) / size - self.drafted)
        self.draft_calls += (1.0 - _FADE) * (int(num_drafted.max()) - self.draft_calls)

    @property
    def active_share(self) -> float:
        """Share of the sequences that take part in a usual draft call."""
        return min(1.0, self.drafted / self.draft_calls)


class BatchTimes:
    """Predicted microseconds of a batch on one partition."""

    def __init__(self, costs: CostModel, size: int, context: int, partition: str, max_draft_tokens: int) -> None:
        most = size * max_draft_tokens
        extra = np.unique(np.linspace(0, most, min(most + 1, _GRID)).astype(np.int64))
        rows = size + extra
        times = costs.call_us(TARGET, partition, rows, size, context, max_rows=1)
        grid = np.arange(most + 1)
        self.target_us = np.interp(grid, extra, times)  # [N + 1] with 0..N rows beside the anchors, unpadded
        self.overhead_us = np.interp(grid, extra, costs.overhead.step(size, rows))  # [N + 1] around the calls
        two, one = costs.call_us(TARGET, partition, size, size, context, max_rows=np.array([2, 1]))
        self.column_us = float(two - one)  # for every row of the longest chain
        active = np.unique(np.linspace(1, size, min(size, _GRID)).astype(np.int64))
        times = costs.call_us(DRAFT, partition, active, active, context, num_logit_rows=active)
        times = times + costs.overhead.draft_call(active)
        self.draft_us = np.interp(np.arange(size + 1), active, times)  # [B + 1] of a call for 0..B sequences

    def verify_us(self, num_extra: float, num_columns: float) -> float:
        """The target's call with so many rows beside the anchors, num_columns of them in the longest chain."""
        return (
            float(np.interp(num_extra, np.arange(self.target_us.size), self.target_us)) + num_columns * self.column_us
        )

    def step_overhead_us(self, num_extra: float) -> float:
        return float(np.interp(num_extra, np.arange(self.overhead_us.size), self.overhead_us))


class Pricer:
    """Makes trim rules. Learns from every step."""

    def __init__(self, knowledge: Knowledge, max_draft_tokens: int) -> None:
        self.costs = knowledge.costs
        self.match = MatchCalibration(knowledge.margins)
        self.means = RoundMeans()
        self.max_draft_tokens = max_draft_tokens

    def context(self, sequences: Sequence[RunningSequence]) -> int:
        return self.costs.batch_context([sequence.num_tokens for sequence in sequences])

    def times(self, size: int, context: int, partition: str) -> BatchTimes:
        return BatchTimes(self.costs, size, context, partition, self.max_draft_tokens)

    def plain_speed(self, times: BatchTimes) -> float:
        """Tokens per microsecond of plain decoding."""
        return (times.draft_us.size - 1) / float(times.target_us[0] + times.overhead_us[0])

    def serial_speed(self, times: BatchTimes) -> float:
        """Tokens per microsecond of usual rounds that draft and verify in turn."""
        size, means = times.draft_us.size - 1, self.means
        num_extra = (means.rows - 1.0) * size
        verify_us = times.verify_us(num_extra, means.draft_calls) + times.step_overhead_us(num_extra)
        return size * means.tokens / (verify_us + self.propose_us(times))

    def propose_us(self, times: BatchTimes) -> float:
        """The draft calls of a usual round."""
        size = times.draft_us.size - 1
        return self.means.draft_calls * float(times.draft_us[max(1, round(self.means.active_share * size))])

    def rule(self, times: BatchTimes, tokens_per_us: float) -> TrimRule:
        """tokens_per_us: what the batch earns per time, at which time is priced."""
        match = self.match
        return TrimRule(
            margin_knots=match.margin_knots,
            match_probs=match.match_probs,
            margin_shares=match.margin_shares,
            verify_us=times.target_us + times.overhead_us,
            column_us=times.column_us,
            draft_us=times.draft_us,
            tokens_per_us=tokens_per_us,
        )

    def observe(self, record: StepRecord) -> None:
        self.match.observe(record)
        if record.plan.decision.mode is not PipelineMode.RUN_AHEAD:  # whose chains no rule has trimmed
            self.means.observe(record)
