"""`faser`: the controller that picks lengths, early exit, pipeline mode and partition of every step together.

It weighs arms (policy/arms.py) by predicted tokens per time, corrected by how earlier predictions of each arm turned
out (policy/corrections.py), and changes over only when another arm stays clearly ahead, or plain decoding stays as
good. Plain decoding is an arm too: where speculation does not pay it stops, and the draft rests. Within a small share
of the time it probes (policy/probing.py), and so learns what the cost model cannot know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from faser_backend.core.decision import WHOLE, Decision, PipelineMode
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.arms import PLAIN, SERIAL, UNIFORM, Arm, Place, Promise, arms_on, promise
from faser_backend.policy.beliefs import sampled_share
from faser_backend.policy.corrections import Corrections, LengthTimes
from faser_backend.policy.early_exit import EarlyExit, ExitCalibration, VerifyBatch, best_exit
from faser_backend.policy.knowledge import Knowledge
from faser_backend.policy.pricing import Pricer
from faser_backend.policy.probing import (
    COLD_STEPS,
    WORTH_A_LOOK,
    Prober,
    catch_up_us,
    is_worth_a_look,
    probe_prices,
    probed_lengths,
)
from faser_backend.policy.step_times import arm_of, predicted_us, prompts_us

# Predicted advantage that another arm needs, and plain decoding: where the two are alike, the user who asked for
# speculation has nothing from it, and whoever compares with plain decoding finds it no worse.
MIN_GAIN, PLAIN_GAIN = 1.05, 1.0
# What predictions are divided by. Speculation that was not seen on a level yet: its calls find caches colder than those
# of plain decoding do. Overlap: two models at once disturb each other.
UNSEEN_HANDICAP, OVERLAP_HANDICAP = 1.05, 1.1
FREE_TRIM = 1.005  # of a round's time, with what confidence takes to decide
HORIZON = 128  # tokens of a sequence that a choice of arms looks ahead
LEFT_SHARE = 0.5  # of the tokens that requests may still ask for, as an answer may end before
# Decisions in between cost next to nothing: a step of one sequence takes 2 ms, and Python that runs where a model has
# just emptied the caches takes three times as long as it does alone.
# Decisions, unless the batch changes by an eighth, the chosen arm is challenged or is not known yet.
WEIGH_EVERY, WEIGH_PLAIN_EVERY = 16, 32
PATIENCE = 8  # decisions for which another arm needs its advantage; then all are weighed again
LEARN_EVERY = 7  # steps of an arm that goes on; no factor of WEIGH_EVERY: steps behind a weighing count no more often
# In a step test few tokens: acceptance is learned from all such steps, or other texts are told late. And one request
# more or less changes what kind of requests they are.
FEW_SEQUENCES = 4
KIND_SHARE = 0.75  # of one kind of requests, from which on a batch is of that kind; in between it is what it was
ENOUGH_TESTS = 256  # of first draft tokens; until then every step teaches


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
        self._length_times = LengthTimes(max_draft_tokens)
        self.arm: Arm | None = None  # of the last step; probes aside
        self._challenger = SERIAL
        self._num_ahead: int | None = None  # decisions since the challenger went ahead; None: it is not
        self._promises: dict[Arm, Promise] = {}  # as last weighed
        self._plain_us, self._is_uniform_near = 0.0, False
        self._num_unweighed, self._weigh_again_after = 0, 0  # decisions
        self._weighed_size = self._context = self._context_to_come = 0
        # Draft tokens of each sequence in arms that trim none, since then, by level: a batch grows within few steps.
        self._lengths: dict[tuple[Arm, int], int] = {}
        self._decision: Decision | None = None  # for the batch that was weighed, until its size changes
        self._is_probing = False  # in the last decision
        self._is_known = False  # the chosen arm, when it was weighed
        self._arms_of_places: dict[Place, Arm] = {}  # as chosen last
        self._last_arm: Arm | None = None  # that was observed, probes included
        self._num_observed = self._num_alike = 0  # steps; of the same arm, in a row

    def decide(self, sequences: Sequence[RunningSequence], num_coming: int = 0) -> Decision:
        size = len(sequences) + num_coming  # for drafts that read a prompt in vain while a batch grows cost a lot
        self._num_unweighed += 1
        has_changed = not self._is_as_weighed(size)
        if len(sequences) <= FEW_SEQUENCES and sampled_share(sequences) != self._pricer.beliefs.sampled_share:
            has_changed = True
        if has_changed or self._num_unweighed >= self._weigh_again_after:
            self._look_again(sequences, size, has_changed=has_changed)
        assert self.arm is not None
        arm = self._prober.arm(self.arm)
        self._is_probing = arm != self.arm
        if self._is_probing:
            return self._probe(arm, sequences)
        if self._decision is None or len(self._decision.num_draft_tokens) != len(sequences):
            self._decision = self._run(arm, sequences)
        return self._decision

    def _is_as_weighed(self, size: int) -> bool:
        return 8 * abs(size - self._weighed_size) <= self._weighed_size

    def _level(self, size: int) -> int:
        """Of a step of so many sequences: the one that was weighed, unless the batch has yet to grow to it."""
        return self._corrections.place.level if self._is_as_weighed(size) else size.bit_length()

    def _look_again(self, sequences: Sequence[RunningSequence], size: int, *, has_changed: bool) -> None:
        """Weighs the arms for batches of `size`. has_changed: by so much that another level may be the right one."""
        self._pricer.beliefs.look_at(sequences)
        self._context = self._pricer.context(sequences)
        context = self._context_to_come = self._pricer.costs.batch_context([_to_come(each) for each in sequences])
        times = self._pricer.times(size, context, WHOLE)
        self._plain_us = times.verify_us(0, 0)
        self._promises = {arm: promise(self._pricer, arm, size, context) for arm in self._arms}
        self.arm = self._weigh(self._place_of(size, has_changed=has_changed), sequences)
        speeds = {arm: self._expected_speed(arm) for arm in self._arms}
        self._is_uniform_near, self._weighed_size = is_worth_a_look(speeds), size
        prices_us = probe_prices(self._pricer, sequences, self.arm, speeds, times)
        is_growing = not self._is_as_weighed(len(sequences))
        self._prober.consider(self.arm, self._num_unweighed, self._plain_us, prices_us, is_growing=is_growing)
        self._num_unweighed, self._decision, self._lengths = 0, None, {}
        self._is_known = self._knows_enough
        if self._num_ahead is not None or not self._is_known:
            self._weigh_again_after = PATIENCE
        else:
            self._weigh_again_after = WEIGH_PLAIN_EVERY if self.arm == PLAIN else WEIGH_EVERY

    def _place_of(self, size: int, *, has_changed: bool) -> Place:
        known, share = self._corrections.place, self._pricer.beliefs.sampled_share
        is_clear = share >= KIND_SHARE or share <= 1.0 - KIND_SHARE
        return Place(
            size.bit_length() if has_changed else known.level,
            is_sampled=share >= KIND_SHARE if is_clear else known.is_sampled,
        )

    def _run(self, arm: Arm, sequences: Sequence[RunningSequence]) -> Decision:
        """A step of the arm: the chosen one, or one that is probed in its place where that is not plain decoding."""
        pricer, size = self._pricer, len(sequences)
        if arm == PLAIN:
            return Decision([0] * size, prefills_draft=self.arm != PLAIN)
        assert arm.mode is not None
        cohort = size if arm.mode is not PipelineMode.PING_PONG else max(size // 2, 1)
        pruner = self._pruner(cohort, self._context, self._worth(arm), arm)
        if arm.mode is PipelineMode.RUN_AHEAD or not arm.is_trimmed:
            key = arm, size.bit_length()
            if key not in self._lengths:
                self._lengths[key] = self._length(arm, size)
            return Decision([self._lengths[key]] * size, arm.mode, arm.partition, pruner=pruner)
        rule = pricer.rule(pricer.times(cohort, self._context, arm.partition), self._worth(arm))
        return Decision([pricer.max_draft_tokens] * size, arm.mode, arm.partition, rule, pruner)

    def _length(self, arm: Arm, size: int) -> int:
        """Draft tokens of each sequence in an arm that trims none."""
        if arm == UNIFORM:
            speeds = self._pricer.uniform_speeds(self._pricer.times(size, self._context, WHOLE))
            return self._length_times.choose(self._level(size), speeds)
        length = self._promises[arm].num_draft_tokens
        assert length is not None
        return length

    def _probe(self, arm: Arm, sequences: Sequence[RunningSequence]) -> Decision:
        if self.arm != PLAIN or self._is_uniform_near:
            return self._run(arm, sequences)
        times = self._pricer.times(len(sequences), self._context, WHOLE)
        rule = self._pricer.rule(times, self._worth(arm)) if arm.is_trimmed else None
        return Decision(probed_lengths(sequences), trim=rule, prefills_draft=False)

    def _worth(self, arm: Arm) -> float:
        """What time is worth in a step of the arm: tokens per microsecond that it, or plain decoding in its place,
        promises. Not what another arm does, for it may not keep that."""
        return max(self._promises[arm].tokens_per_us, self._promises[PLAIN].tokens_per_us)

    def _weigh(self, place: Place, sequences: Sequence[RunningSequence]) -> Arm:
        """The arm that was chosen last in this place, unless a challenger has been ahead for long enough, or the draft
        has too much to catch up with."""
        has_moved, self._corrections.place = place != self._corrections.place, place
        speeds = {arm: self._expected_speed(arm) for arm in self._arms}
        gains = {arm: self._needed_gain(arm) for arm in self._arms}
        best = max(self._arms, key=lambda arm: speeds[arm] if gains[arm] < math.inf else 0.0)
        chosen = self._arms_of_places.get(place) if has_moved else self.arm
        if chosen is None:
            chosen = self._first_arm(place)
            if speeds[chosen] < WORTH_A_LOOK * speeds[PLAIN]:
                chosen = PLAIN
        is_ahead = best != chosen and speeds[best] >= gains[best] * speeds[chosen]
        num_ahead = self._num_ahead if best == self._challenger and not has_moved else None
        self._challenger, self._num_ahead = best, None
        if is_ahead:
            self._num_ahead = 0 if num_ahead is None else num_ahead + self._num_unweighed
            if self._num_ahead >= PATIENCE:
                self._num_ahead, chosen = None, best
        if self.arm == PLAIN and chosen != PLAIN:
            num_left = LEFT_SHARE * sum(sequence.num_remaining_tokens for sequence in sequences)
            gain_us = num_left * (1.0 / speeds[PLAIN] - 1.0 / speeds[chosen])
            if gain_us < catch_up_us(self._pricer, sequences):
                return PLAIN
        if has_moved or chosen != self.arm:
            self._arms_of_places[place] = chosen
        return chosen

    def _first_arm(self, place: Place) -> Arm:
        """What a place begins with. Trimming more than one has to beat what was seen at work, unless it is known to
        take next to no time."""
        uniform, trimmed = self._promises[UNIFORM].tokens_per_us, self._promises[SERIAL].tokens_per_us
        is_free = self._pricer.costs.is_measured and uniform <= FREE_TRIM * trimmed
        return SERIAL if is_free or place.level == 1 else UNIFORM

    def _needed_gain(self, arm: Arm) -> float:
        """By which the arm has to be ahead of the chosen one."""
        is_known = self.arm is not None and self._knows_enough
        if arm.partition != WHOLE and not is_known:
            return math.inf  # overlapped rounds have to beat what was seen at work
        if arm != PLAIN:  # nothing, to go back to what the place began with
            return 1.0 if arm == self._first_arm(self._corrections.place) and self.arm != PLAIN else MIN_GAIN
        # Before speculation is known on this level and of these texts, it gets the benefit that it begins with.
        return PLAIN_GAIN if is_known else 1.0 / WORTH_A_LOOK

    def _expected_speed(self, arm: Arm) -> float:
        """Promised tokens per microsecond, corrected by what is known of the arm."""
        corrections = self._corrections
        speed = self._promises[arm].tokens_per_us * corrections.yield_ratio(arm) / corrections.slowdown(arm)
        if arm != PLAIN:
            handicap = 1.0 if corrections.knows_here(arm) else UNSEEN_HANDICAP
            speed /= handicap + speed * self._pricer.draft_prompt_us
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
        return None if exit_ is None else EarlyExit((exit_,), self._pricer.beliefs.chances)

    def observe(self, record: StepRecord) -> None:
        self._num_observed += 1
        goes_on = not self._is_probing and self._last_arm == self.arm
        if self._is_known and goes_on and self._num_observed % LEARN_EVERY:
            if record.num_tokens.size <= FEW_SEQUENCES:
                self._pricer.beliefs.observe(record)
            return
        arm = arm_of(record)
        self._pricer.observe(record)
        reading_us = prompts_us(self._pricer, record, self._corrections.slowdown(arm))
        measured_us = record.step_us + record.drafting_us - reading_us
        emitted = float(record.acceptance.num_emitted.sum())
        if self._is_probing and self.arm is not None:
            spent_us = record.draft_prefill_us if self.arm == PLAIN else 0.0
            if self._is_as_weighed(record.num_tokens.size):  # else the chosen arm's speed is not that of this batch
                spent_us += measured_us - emitted / self._expected_speed(self.arm)
            self._prober.pay(spent_us)
        is_catching_up = bool(record.plan.draft_prefills)  # what the arm is worth is seen after it
        if is_catching_up and arm != self.arm:
            if self._is_probing:
                self._prober.prolong()
            return
        expected_us = predicted_us(self._pricer, record, arm)
        self._num_alike = self._num_alike + 1 if arm == self._last_arm else 0
        self._last_arm = arm
        if self._num_alike < COLD_STEPS or expected_us <= 0.0 or record.frontier.is_client is not None:
            return
        level = self._level(record.num_tokens.size)
        self._corrections.observe(arm, level, expected_us, measured_us, is_chosen=arm == self.arm)
        lengths = record.frontier.num_drafted
        if arm == UNIFORM and not record.plan.prefills and lengths.min() == lengths.max():
            self._length_times.observe(level, int(lengths[0]), expected_us, measured_us)
        if is_catching_up or not self._is_as_weighed(record.num_tokens.size):
            return
        if arm != PLAIN and (arm == self.arm or (self.arm != PLAIN and arm.mode is PipelineMode.SERIAL)):
            # Plain decoding yields what it promises; probes among plain rounds do not run as promised, those of
            # serial rounds among others do.
            promised_us = predicted_us(self._pricer, record, arm, self._context_to_come)
            promised = self._promises[arm].tokens_per_us * promised_us
            self._corrections.observe_yield(arm, record.num_tokens.size, emitted, promised)

    @property
    def _knows_enough(self) -> bool:
        """Of the chosen arm, to learn from every LEARN_EVERY-th step."""
        assert self.arm is not None
        return (self.arm == PLAIN or self._knows_acceptance) and self._corrections.is_settled(self.arm)

    @property
    def _knows_acceptance(self) -> bool:
        return self._pricer.beliefs.num_tests >= ENOUGH_TESTS


def _to_come(sequence: RunningSequence) -> float:
    """Mean tokens of the sequence over the time for which an arm is chosen: back from plain decoding is a long way."""
    return sequence.num_tokens + 0.5 * min(LEFT_SHARE * sequence.num_remaining_tokens, HORIZON)
