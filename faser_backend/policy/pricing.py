"""What rows, columns and draft calls of a batch cost and are worth: prices for confidence trimming.

Brings together the cost model (time), the calibration of margins (worth) and running means of what rounds came
to. Shared by the policies that trim.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from faser_backend.core.decision import WHOLE, PipelineMode, TrimRule
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.batch_times import BatchTimes, BatchTimesCache
from faser_backend.policy.beliefs import Beliefs
from faser_backend.policy.calibration import MarginCurve
from faser_backend.policy.cost_model import DRAFT
from faser_backend.policy.knowledge import Knowledge

_FADE = 0.95  # of the running means, per round
_MEMORY_TOKENS = 20_000.0  # emitted, after which older prompts fade: many are read before their answers begin
_PRIOR_TOKENS = 2000.0  # emitted without a prompt: when a server starts it reads many and has emitted nothing
_CHUNK = 256  # tokens of a prompt that the draft reads at a time, for their price


class RoundMeans:
    """Running means over rounds that drafted, per sequence."""

    def __init__(self) -> None:
        self.rows, self.accepted = 3.0, 1.0  # until rounds were seen

    def observe(self, record: StepRecord) -> None:
        rows = record.server_rows
        if not record.frontier.num_drafted[rows].any():
            return
        num_rows, num_accepted = record.frontier.num_rows[rows], record.acceptance.num_accepted[rows]
        self.rows += (1.0 - _FADE) * (float(num_rows.sum()) / num_rows.size - self.rows)
        self.accepted += (1.0 - _FADE) * (float(num_accepted.sum()) / num_rows.size - self.accepted)


class PromptTokens:
    """How many tokens of prompts are read for each token that is emitted."""

    def __init__(self) -> None:
        self._num_read, self._num_emitted = 0.0, _PRIOR_TOKENS

    def observe(self, record: StepRecord) -> None:
        num_emitted = float(record.acceptance.num_emitted.sum())
        fade = max(1.0 - num_emitted / _MEMORY_TOKENS, 0.0)
        self._num_read = fade * self._num_read + sum(chunk.num_tokens for chunk in record.plan.prefills)
        self._num_emitted = fade * self._num_emitted + num_emitted

    @property
    def per_emitted(self) -> float:
        return self._num_read / self._num_emitted


class Pricer:
    """Makes trim rules. Learns from every step."""

    def __init__(self, knowledge: Knowledge, max_draft_tokens: int) -> None:
        self.costs = knowledge.costs
        self.beliefs = Beliefs(knowledge.margins, max_draft_tokens)
        self.means = RoundMeans()
        self.prompts = PromptTokens()
        chunk_us = self.costs.call_us(DRAFT, WHOLE, _CHUNK, 1, _CHUNK, max_rows=_CHUNK, num_logit_rows=0)
        self.draft_read_us = float(chunk_us) / _CHUNK  # of a token of a prompt
        self.max_draft_tokens = max_draft_tokens
        self._times = BatchTimesCache(self.costs, max_draft_tokens)

    def context(self, sequences: Sequence[RunningSequence]) -> int:
        return self.costs.batch_context([sequence.num_tokens for sequence in sequences])

    def times(self, size: int, context: int, partition: str) -> BatchTimes:
        """See BatchTimesCache."""
        return self._times.of(size, context, partition)

    def plain_speed(self, times: BatchTimes) -> float:
        """Tokens per microsecond of plain decoding."""
        return times.size / times.verify_us(0, 0)

    def best_uniform(self, times: BatchTimes, *, is_trimmed: bool) -> tuple[float, int]:
        """The best rounds in which all draft alike and then are verified: tokens per microsecond, and the length.

        is_trimmed: what deciding by confidence takes is charged, not what it gains.
        """
        kept = times.best_uniform.get(is_trimmed)
        version = self.beliefs.version
        if kept is None or kept[0] != version:
            speeds = self.uniform_speeds(times, is_trimmed=is_trimmed)
            best = int(speeds.argmax())
            kept = times.best_uniform[is_trimmed] = version, float(speeds[best]), best + 1
        return kept[1:]

    def uniform_speeds(self, times: BatchTimes, *, is_trimmed: bool = False) -> np.ndarray:
        """[K] tokens per microsecond of serial rounds in which all draft alike; is_trimmed: as in best_uniform."""
        round_us = times.uniform_target_us + times.uniform_overhead_us + times.uniform_draft_us
        if is_trimmed:
            round_us = round_us + times.uniform_trim_us
        return times.size * self.uniform_tokens / round_us

    @property
    def uniform_tokens(self) -> np.ndarray:
        """[K] tokens per sequence of uniform rounds of 1..K draft tokens."""
        return 1.0 + self.beliefs.survival.cumsum()

    def rule(self, times: BatchTimes, tokens_per_us: float) -> TrimRule:
        """tokens_per_us: what the batch earns per time, at which time is priced."""
        curve = self.beliefs.curve
        usual = min(max(round((self.means.rows - 1.0) * times.size), 1), times.target_us.size - 1)
        verify_us = times.step_us
        return TrimRule(
            margin_knots=MarginCurve.margin_knots,
            match_probs=curve.match_probs,
            margin_shares=curve.margin_shares,
            verify_us=verify_us,
            column_us=times.column_us,
            draft_us=times.trimmed_draft_us,  # a chain that goes on is decided on again
            tokens_per_us=tokens_per_us,
            draft_round_us=times.draft_round_us,
            row_price=tokens_per_us * float(verify_us[usual] - verify_us[0]) / usual,
        )

    @property
    def draft_prompt_us(self) -> float:
        """What it takes the draft to read prompts, per token that is emitted: speculation pays it."""
        return self.prompts.per_emitted * self.draft_read_us

    def observe(self, record: StepRecord) -> None:
        self.prompts.observe(record)
        self.beliefs.observe(record)
        if record.plan.decision.mode is not PipelineMode.RUN_AHEAD:  # no rule trims its chains
            self.means.observe(record)
