"""`faser`: the controller that picks lengths, early exit, pipeline mode and partition of every step together.

It weighs arms (policy/arms.py) by predicted tokens per time, corrected by how earlier predictions of each arm turned
out, and changes over only when another arm stays clearly ahead. Plain decoding is an arm like any other, so where
speculation does not pay it stops; now and then it drafts a little to see whether that is still so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from faser_backend.core.decision import Decision, PipelineMode
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.arms import PLAIN, SERIAL, Arm, Promise, arms_on, promise
from faser_backend.policy.early_exit import EarlyExit, ExitCalibration, VerifyBatch, best_exit
from faser_backend.policy.knowledge import Knowledge
from faser_backend.policy.pricing import BatchTimes, Pricer

MIN_GAIN = 1.05  # predicted advantage that another arm needs
PATIENCE = 8  # decisions in a row in which it needs it
PROBE_EVERY = 128  # plain steps, after which some drafting shows whether it would pay again
PROBE_STEPS = 2
PROBE_TOKENS = 2
_FADE = 0.97  # of an arm's correction, per step that it ran
_FORGET = 0.999  # of the other arms' corrections, per step


class Corrections:
    """By how much steps of each arm take longer than predicted, as a running mean of logarithms."""

    def __init__(self) -> None:
        self._log_ratio: dict[Arm, float] = {}

    def factor(self, arm: Arm) -> float:
        """Of an arm that never ran: the mean of those that did, for a slow machine is slow with every arm."""
        known = self._log_ratio
        if arm in known:
            return math.exp(known[arm])
        return math.exp(sum(known.values()) / len(known)) if known else 1.0

    def observe(self, arm: Arm, predicted_us: float, measured_us: float) -> None:
        # A step that the machine lost to something else says little about the arm: cut at a factor of 2.
        ratio = min(max(math.log(measured_us / predicted_us), -math.log(2.0)), math.log(2.0))
        shared = sum(self._log_ratio.values()) / max(len(self._log_ratio), 1)
        for other, value in self._log_ratio.items():
            self._log_ratio[other] = shared + (value - shared) * _FORGET
        self._log_ratio[arm] = _FADE * self._log_ratio.get(arm, ratio) + (1.0 - _FADE) * ratio


class Faser:
    """The whole of phase management, on the partitions that the cost model knows."""

    is_drafting = True

    def __init__(self, knowledge: Knowledge, max_draft_tokens: int) -> None:
        self._pricer = Pricer(knowledge, max_draft_tokens)
        self._exits: tuple[ExitCalibration, ...] = knowledge.exits
        self.partitions = knowledge.costs.partitions
        self._arms = arms_on(self.partitions)
        self._corrections = Corrections()
        self._arm = SERIAL
        self._challenger = SERIAL
        self._num_ahead = 0  # decisions in a row that the challenger was ahead
        self._num_plain = 0

    def decide(self, sequences: Sequence[RunningSequence]) -> Decision:
        pricer, size = self._pricer, len(sequences)
        context = pricer.context(sequences)
        promises = {arm: promise(pricer, arm, size, context) for arm in self._arms}
        arm = self._choose(promises)
        speed = max(item.tokens_per_us for item in promises.values())
        if arm.mode is None:
            return self._plain(size)
        self._num_plain = 0
        if arm.mode is PipelineMode.RUN_AHEAD:
            length = promises[arm].num_draft_tokens
            assert length is not None
            return Decision([length] * size, arm.mode, arm.partition, pruner=self._pruner(size, context, speed, arm))
        cohort = size if arm.mode is PipelineMode.SERIAL else max(size // 2, 1)
        rule = pricer.rule(pricer.times(cohort, context, arm.partition), speed)
        pruner = self._pruner(cohort, context, speed, arm)
        return Decision([pricer.max_draft_tokens] * size, arm.mode, arm.partition, rule, pruner)

    def _choose(self, promises: dict[Arm, Promise]) -> Arm:
        """The arm of this step: the last one, unless a challenger has been ahead for long enough."""
        speeds = {arm: item.tokens_per_us / self._corrections.factor(arm) for arm, item in promises.items()}
        best = max(speeds, key=speeds.__getitem__)
        if speeds[best] < MIN_GAIN * speeds[self._arm]:
            self._num_ahead = 0
            return self._arm
        self._num_ahead = self._num_ahead + 1 if best == self._challenger else 1
        self._challenger = best
        if self._num_ahead >= PATIENCE:
            self._arm, self._num_ahead = best, 0
        return self._arm

    def _plain(self, size: int) -> Decision:
        self._num_plain += 1
        is_probing = self._num_plain % PROBE_EVERY >= PROBE_EVERY - PROBE_STEPS
        return Decision([PROBE_TOKENS if is_probing else 0] * size)

    def _pruner(self, size: int, context: int, speed: float, arm: Arm) -> EarlyExit | None:
        """An early exit, where one is predicted to save more than it costs."""
        if not self._exits:
            return None
        means = self._pricer.means
        batch = VerifyBatch(
            size,
            round(size * means.rows),
            context,
            num_accepted=size * means.accepted,
            tokens_per_us=speed,
            is_trimmed=arm.mode is not PipelineMode.RUN_AHEAD,
            partition=arm.partition,
        )
        exit_ = best_exit(self._pricer.costs, self._exits, batch)
        return None if exit_ is None else EarlyExit((exit_,), self._pricer.match)

    def observe(self, record: StepRecord) -> None:
        self._pricer.observe(record)
        if record.plan.prefills:
            return  # its time is not the arm's
        decision = record.plan.decision
        num_drafted = record.frontier.num_drafted
        is_plain = not num_drafted.any() and not record.plan.drafts
        arm = PLAIN if is_plain else Arm(decision.mode, decision.partition)
        predicted_us = self._predicted_us(record, arm)
        if predicted_us > 0.0:
            self._corrections.observe(arm, predicted_us, record.step_us)

    def _predicted_us(self, record: StepRecord, arm: Arm) -> float:
        """What the cost model says of the step that was really made."""
        size = record.num_tokens.size
        context = self._pricer.costs.batch_context(record.num_tokens.tolist())
        times = self._pricer.times(size, context, arm.partition)
        num_rows = record.verification.num_kept
        verify_us = times.verify_us(int(num_rows.sum()) - size, int(num_rows.max()) - 1)
        if record.plan.drafts:
            lengths = np.array(record.plan.num_ahead_tokens)
            drafting = self._pricer.times(lengths.size, context, arm.partition)
            lanes_us = self._pricer.costs.overhead.lanes_us
            return max(verify_us, _draft_calls_us(drafting, lengths)) + lanes_us
        return verify_us + _draft_calls_us(times, record.frontier.num_drafted)


def _draft_calls_us(times: BatchTimes, lengths: np.ndarray) -> float:
    """Draft calls for chains of these lengths [B]: each for those that are not done yet."""
    steps = np.arange(int(lengths.max(initial=0)))
    return float(times.draft_us[np.count_nonzero(steps[:, None] < lengths, axis=1)].sum())
