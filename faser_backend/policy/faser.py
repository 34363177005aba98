"""`faser`: the controller that picks lengths, early exit, pipeline mode and partition of every step together.

It weighs arms (policy/arms.py) by predicted tokens per time, corrected by how earlier predictions of each arm turned
out, and changes over only when another arm stays clearly ahead. Plain decoding is an arm like any other, so where
speculation does not pay it stops. Within a small share of the time it probes: drafts a little while it decodes
plainly, decodes plainly while it speculates, and so learns of both what the cost model cannot know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from faser_backend.core.decision import WHOLE, Decision, PipelineMode
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.arms import PLAIN, SERIAL, Arm, Promise, arms_on, promise
from faser_backend.policy.early_exit import EarlyExit, ExitCalibration, VerifyBatch, best_exit
from faser_backend.policy.knowledge import Knowledge
from faser_backend.policy.pricing import BatchTimes, Pricer

MIN_GAIN = 1.05  # predicted advantage that another arm needs
# What predictions are divided by. Speculation: for what the cost model does not see, such as the draft's own prefill
# and calls of shapes that are new. Overlap: two models at once disturb each other.
SPECULATION_HANDICAP, OVERLAP_HANDICAP = 1.08, 1.1
PATIENCE = 8  # decisions in a row in which it needs it
PROBE_SHARE = 0.01  # of the time that may go into probing the arm that is not chosen
PROBE_STEPS = 3  # in a row: the first one after a change finds caches cold and is not counted
PROBE_TOKENS = 2  # drafted to see whether speculation would pay again
_FADE = 0.97  # of an arm's correction, per step that it ran
_AGE_FADE = 0.995  # and per step that it did not


class Corrections:
    """By how much steps of each arm take longer than predicted, as a running mean of logarithms."""

    def __init__(self) -> None:
        self._log_ratio: dict[Arm, float] = {}
        self._last_step: dict[Arm, int] = {}
        self._num_steps = 0

    def knows(self, arm: Arm) -> bool:
        return arm in self._log_ratio

    def age(self, arm: Arm) -> int:
        """Steps since the arm was seen at work."""
        return self._num_steps - self._last_step.get(arm, -(10**6))

    def factor(self, arm: Arm) -> float:
        """Of an arm that never ran: the mean of those that did, for a slow machine is slow with every arm."""
        known = self._log_ratio
        if arm in known:
            return math.exp(known[arm])
        return math.exp(sum(known.values()) / len(known)) if known else 1.0

    def observe(self, arm: Arm, predicted_us: float, measured_us: float) -> None:
        # A step that the machine lost to something else says little about the arm: cut at a factor of 2.
        ratio = min(max(math.log(measured_us / predicted_us), -math.log(2.0)), math.log(2.0))
        # The machine's speed changes with time: the older what is known of an arm, the more a new step counts.
        old = self._log_ratio.get(arm, ratio)
        self._log_ratio[arm] = ratio + _FADE * _AGE_FADE ** self.age(arm) * (old - ratio)
        self._last_step[arm] = self._num_steps
        self._num_steps += 1


class Faser:
    """The whole of phase management, on the partitions that the cost model knows."""

    is_drafting = True

    def __init__(self, knowledge: Knowledge, max_draft_tokens: int) -> None:
        self._pricer = Pricer(knowledge, max_draft_tokens)
        self._exits: tuple[ExitCalibration, ...] = knowledge.exits
        self.partitions = knowledge.costs.partitions
        self._arms = arms_on(self.partitions)
        self._corrections = Corrections()
        self.arm: Arm | None = None  # of the last step; probes aside
        self._challenger = SERIAL
        self._num_ahead = 0  # decisions in a row that the challenger was ahead
        self._probe_us = 0.0  # time that may be spent on probing
        self._probe_arm = PLAIN
        self._num_probing = 0  # steps of the current probe that are left
        self._last_arm: Arm | None = None  # that was observed, probes included

    def decide(self, sequences: Sequence[RunningSequence]) -> Decision:
        pricer, size = self._pricer, len(sequences)
        context = pricer.context(sequences)
        promises = {arm: promise(pricer, arm, size, context) for arm in self._arms}
        chosen = self._choose(promises)
        speed = max(item.tokens_per_us for item in promises.values())
        times = pricer.times(size, context, WHOLE)
        arm = self._probed_arm(chosen, times)
        if arm == PLAIN:
            return Decision([0] * size)
        if chosen == PLAIN:
            return Decision([PROBE_TOKENS] * size)
        cohort = size if arm.mode is not PipelineMode.PING_PONG else max(size // 2, 1)
        pruner = self._pruner(cohort, context, speed, arm)
        assert arm.mode is not None
        if arm.mode is PipelineMode.RUN_AHEAD:
            length = promises[arm].num_draft_tokens
            assert length is not None
            return Decision([length] * size, arm.mode, arm.partition, pruner=pruner)
        rule = pricer.rule(pricer.times(cohort, context, arm.partition), speed)
        return Decision([pricer.max_draft_tokens] * size, arm.mode, arm.partition, rule, pruner)

    def _probed_arm(self, chosen: Arm, times: BatchTimes) -> Arm:
        """The chosen arm, or for a few steps another one, when a share of the time saved up pays for them.

        A first look at plain decoding comes at once: it is cheap, and tells whether slow steps are the arm's or the
        machine's.
        """
        self._probe_us += PROBE_SHARE * times.verify_us(0, 0)
        if self._num_probing == 0:
            others = [arm for arm in (PLAIN, SERIAL) if arm != chosen]
            stalest = max(others, key=self._corrections.age)
            price_us = self._probe_price_us(times) if chosen == PLAIN else times.verify_us(0, 0)
            is_urgent = chosen != PLAIN and not self._corrections.knows(PLAIN)
            if is_urgent or self._probe_us >= PROBE_STEPS * price_us:
                self._probe_us, self._num_probing = 0.0, PROBE_STEPS
                self._probe_arm = PLAIN if is_urgent else stalest
        if self._num_probing == 0 or self._probe_arm == chosen:
            self._num_probing = 0
            return chosen
        self._num_probing -= 1
        return self._probe_arm

    @staticmethod
    def _probe_price_us(times: BatchTimes) -> float:
        """What a step that drafts PROBE_TOKENS for all takes beyond a plain one."""
        rows_us = times.verify_us(PROBE_TOKENS * times.size, PROBE_TOKENS) - times.verify_us(0, 0)
        return rows_us + PROBE_TOKENS * float(times.draft_us[times.size])

    def _choose(self, promises: dict[Arm, Promise]) -> Arm:
        """The arm of this step: the last one, unless a challenger has been ahead for long enough."""
        speeds = {arm: item.tokens_per_us / self._corrections.factor(arm) for arm, item in promises.items()}
        for arm in speeds:
            speeds[arm] /= 1.0 if arm == PLAIN else SPECULATION_HANDICAP
            speeds[arm] /= 1.0 if arm in {PLAIN, SERIAL} else OVERLAP_HANDICAP
        best = max(speeds, key=speeds.__getitem__)
        if self.arm is None:  # overlapped arms have to beat one that was seen at work
            self.arm = max((PLAIN, SERIAL), key=speeds.__getitem__)
        if speeds[best] < MIN_GAIN * speeds[self.arm]:
            self._num_ahead = 0
            return self.arm
        self._num_ahead = self._num_ahead + 1 if best == self._challenger else 1
        self._challenger = best
        if self._num_ahead >= PATIENCE:
            self.arm, self._num_ahead = best, 0
        return self.arm

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
        is_warm, self._last_arm = arm == self._last_arm, arm
        predicted_us = self._predicted_us(record, arm)
        if is_warm and predicted_us > 0.0:
            self._corrections.observe(arm, predicted_us, record.step_us + record.drafting_us)

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
            us = max(verify_us, _draft_calls_us(drafting, lengths)) + lanes_us
            if record.drafting_us:
                us += _draft_calls_us(times, record.frontier.num_drafted)
            return us
        return verify_us + _draft_calls_us(times, record.frontier.num_drafted)


def _draft_calls_us(times: BatchTimes, lengths: np.ndarray) -> float:
    """Draft calls for chains of these lengths [B]: each for those that are not done yet."""
    steps = np.arange(int(lengths.max(initial=0)))
    return float(times.draft_us[np.count_nonzero(steps[:, None] < lengths, axis=1)].sum())
