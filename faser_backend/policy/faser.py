"""`faser`: the controller that picks lengths, early exit, pipeline mode and partition of every step together.

It weighs arms (policy/arms.py) by predicted tokens per time, corrected by how earlier predictions of each arm turned
out (policy/corrections.py), and changes over only when another arm stays clearly ahead. Plain decoding is an arm like
any other, so where speculation does not pay it stops, and the draft rests. Within a small share of the time it probes
(policy/probing.py), and so learns what the cost model cannot know.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from faser_backend.core.decision import WHOLE, Decision, PipelineMode
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.arms import PLAIN, SERIAL, UNIFORM, Arm, Promise, arms_on, promise
from faser_backend.policy.corrections import Corrections
from faser_backend.policy.cost_model import TARGET
from faser_backend.policy.early_exit import EarlyExit, ExitCalibration, VerifyBatch, best_exit
from faser_backend.policy.knowledge import Knowledge
from faser_backend.policy.pricing import BatchTimes, Pricer
from faser_backend.policy.probing import PROBE_STEPS, Prober, probe_price_us, probed_lengths

MIN_GAIN = 1.05  # predicted advantage that another arm needs
# What predictions are divided by. Speculation: for what the cost model does not see, such as steps in which sequences
# begin and end. Overlap: two models at once disturb each other.
SPECULATION_HANDICAP, OVERLAP_HANDICAP = 1.04, 1.1
WEIGH_EVERY = 8  # decisions, unless the batch changes by an eighth: weighing costs more than a plain decision
PATIENCE = 2  # weighings in a row in which another arm needs its advantage
LEARN_EVERY = 2  # steps of an arm that goes on: learning takes 0.1 ms, as much as a fifth of the smallest step


class Faser:
    """The whole of phase management, on the partitions that the cost model knows."""

    is_drafting = True

    def __init__(self, knowledge: Knowledge, max_draft_tokens: int) -> None:
        self._pricer = Pricer(knowledge, max_draft_tokens)
        self._exits: tuple[ExitCalibration, ...] = knowledge.exits
        self.partitions = knowledge.costs.partitions
        self._arms = arms_on(self.partitions)
        self._corrections = Corrections()
        self._prober = Prober(self._corrections)
        self.arm: Arm | None = None  # of the last step; probes aside
        self._challenger = SERIAL
        self._num_ahead = 0  # weighings in a row that the challenger was ahead
        self._promises: dict[Arm, Promise] = {}  # as last weighed
        self._plain_us = self._probe_price_us = 0.0
        self._num_unweighed, self._weighed_size = 0, 0
        self._arms_of_levels: dict[int, Arm] = {}  # as chosen last; a level is a power of two of sequences
        self._last_arm: Arm | None = None  # that was observed, probes included
        self._num_observed = 0

    def decide(self, sequences: Sequence[RunningSequence]) -> Decision:
        pricer, size = self._pricer, len(sequences)
        context = pricer.context(sequences)
        chosen = self._chosen(sequences, context)
        arm = self._prober.arm(chosen, self._plain_us, self._probe_price_us)
        if arm == PLAIN:
            return Decision([0] * size, prefills_draft=chosen != PLAIN)
        speed = max(item.tokens_per_us for item in self._promises.values())
        if chosen == PLAIN:
            rule = pricer.rule(pricer.times(size, context, WHOLE), speed) if arm.is_trimmed else None
            return Decision(probed_lengths(sequences), trim=rule, prefills_draft=False)
        assert arm.mode is not None
        cohort = size if arm.mode is not PipelineMode.PING_PONG else max(size // 2, 1)
        pruner = self._pruner(cohort, context, speed, arm)
        if arm.mode is PipelineMode.RUN_AHEAD or not arm.is_trimmed:
            length = self._promises[arm].num_draft_tokens
            assert length is not None
            return Decision([length] * size, arm.mode, arm.partition, pruner=pruner)
        rule = pricer.rule(pricer.times(cohort, context, arm.partition), speed)
        return Decision([pricer.max_draft_tokens] * size, arm.mode, arm.partition, rule, pruner)

    def _chosen(self, sequences: Sequence[RunningSequence], context: int) -> Arm:
        """The arm of this step, probes aside; weighed anew every few decisions and where the batch has changed much."""
        size = len(sequences)
        self._num_unweighed += 1
        has_changed = 8 * abs(size - self._weighed_size) > self._weighed_size
        if self.arm is None or self._num_unweighed >= WEIGH_EVERY or has_changed:
            self._num_unweighed, self._weighed_size = 0, size
            times = self._pricer.times(size, context, WHOLE)
            self._plain_us = times.verify_us(0, 0)
            self._promises = {arm: promise(self._pricer, arm, size, context) for arm in self._arms}
            self.arm = self._weigh(size.bit_length() if has_changed else self._corrections.level)
            self._probe_price_us = PROBE_STEPS * self._plain_us
            if self.arm == PLAIN:
                self._probe_price_us = probe_price_us(self._pricer, times, sequences, probed_lengths(sequences))
        assert self.arm is not None
        return self.arm

    def _weigh(self, level: int) -> Arm:
        """The arm that was chosen last on this level, unless a challenger has been ahead for long enough."""
        has_moved, self._corrections.level = level != self._corrections.level, level
        speeds = {arm: self._expected_speed(arm) for arm in self._arms}
        best = max(speeds, key=speeds.__getitem__)
        chosen = self._arms_of_levels.get(level) if has_moved else self.arm
        if chosen is None:  # overlapped and trimmed rounds have to beat what was seen at work
            chosen = max((UNIFORM, PLAIN), key=speeds.__getitem__)
        if has_moved or best != self._challenger or speeds[best] < MIN_GAIN * speeds[chosen]:
            self._num_ahead = 0
        self._challenger = best
        if speeds[best] >= MIN_GAIN * speeds[chosen]:
            self._num_ahead += 1
            if self._num_ahead >= PATIENCE:
                self._num_ahead, chosen = 0, best
        self._arms_of_levels[level] = chosen
        return chosen

    def _expected_speed(self, arm: Arm) -> float:
        """Promised tokens per microsecond, corrected by what is known of the arm."""
        corrections = self._corrections
        speed = self._promises[arm].tokens_per_us * corrections.yield_ratio(arm) / corrections.slowdown(arm)
        if arm != PLAIN:
            speed /= SPECULATION_HANDICAP
        return speed if arm.partition == WHOLE else speed / OVERLAP_HANDICAP

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
            is_trimmed=arm.is_trimmed and arm.mode is not PipelineMode.RUN_AHEAD,
            partition=arm.partition,
        )
        exit_ = best_exit(self._pricer.costs, self._exits, batch)
        return None if exit_ is None else EarlyExit((exit_,), self._pricer.match)

    def observe(self, record: StepRecord) -> None:
        arm = _arm_of(record)
        self._num_observed += 1
        if arm == self.arm == self._last_arm and self._num_observed % LEARN_EVERY:
            return
        self._pricer.observe(record)
        measured_us = record.step_us + record.drafting_us - self._prefill_us(record, arm)
        emitted = float(record.acceptance.num_emitted.sum())
        if self.arm is not None and arm != self.arm:
            self._prober.pay(measured_us - emitted / self._expected_speed(self.arm))
        if record.plan.draft_prefills and arm != self.arm:
            return  # catching up is a price of changing over, which the chosen arm has to earn, and a probe has not
        predicted_us = self._predicted_us(record, arm)
        is_warm, self._last_arm = arm == self._last_arm, arm
        if not is_warm or predicted_us <= 0.0:
            return
        self._corrections.observe(arm, predicted_us, measured_us)
        if arm == self.arm or (self.arm != PLAIN and arm.mode is PipelineMode.SERIAL):
            # Probes among plain rounds do not run as promised, those of serial rounds among others do.
            promised = self._promises[arm].tokens_per_us * predicted_us
            self._corrections.observe_yield(arm, record.num_tokens.size, emitted, promised)

    def _prefill_us(self, record: StepRecord, arm: Arm) -> float:
        """Work on prompts in the step that is not the arm's: the target's, and the draft's where nothing is drafted."""
        draft_us = record.draft_prefill_us if arm == PLAIN else 0.0
        chunks = record.plan.prefills
        if not chunks:
            return draft_us
        context = self._pricer.costs.batch_context([chunk.start + 1 for chunk in chunks])
        num_rows = [chunk.num_tokens for chunk in chunks]
        us = self._pricer.costs.call_us(
            TARGET, WHOLE, sum(num_rows), len(chunks), context, max_rows=max(num_rows), num_logit_rows=0
        )
        return draft_us + max(record.prefill_us, float(us) * self._corrections.slowdown(arm))

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


def _arm_of(record: StepRecord) -> Arm:
    """The arm that a step belongs to."""
    decision = record.plan.decision
    if not record.frontier.num_drafted.any() and not record.plan.drafts:
        return PLAIN
    is_trimmed = decision.trim is not None or decision.mode is not PipelineMode.SERIAL
    return Arm(decision.mode, decision.partition, is_trimmed)


def _draft_calls_us(times: BatchTimes, lengths: np.ndarray) -> float:
    """Draft calls for chains of these lengths [B]: each for those that are not done yet."""
    steps = np.arange(int(lengths.max(initial=0)))
    return float(times.draft_us[np.count_nonzero(steps[:, None] < lengths, axis=1)].sum())
