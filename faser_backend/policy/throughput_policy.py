"""The policies `faser` and `survival`: they run what yields most tokens per time.

Every WEIGH_EVERY decisions the policy predicts tokens and time of a step for each candidate (policy/candidates.py):
plain decoding, serial drafting and overlapped ways. It chooses the best one, whose throughput, in tokens
per microsecond, is the *price*: it turns the time of a draft call, a row or an exit into the tokens that the same time
could have produced. A draft token is drafted, a row verified and an exit used if and only if the tokens that it adds
exceed its time at that price. A hundredth of the time pays for explorations: some steps of a way that was not chosen,
so that the predictions about it stay true.

A decision reads forward: chances of acceptance (policy/calibration.py), times (policy/cost_model.py), scores of the
candidates, then the `Decision`. `survival` is the same policy without overlap and early exit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from faser_backend.core.decision import WHOLE, Decision, PipelineMode, Score, TrimRule
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.calibration import AcceptanceModel, Chances, MarginCurve
from faser_backend.policy.candidates import ChainTables, ChainYield, VerifyBatch, best_exit, scores_of
from faser_backend.policy.cost_model import DRAFT, TARGET, BatchTimes, BatchTimesCache, TimeErrors
from faser_backend.policy.early_exit import EarlyExit
from faser_backend.policy.speculation import Knowledge

HYSTERESIS = 1.03  # predicted gain that a change of the mode needs
WEIGH_EVERY, RENEW_EVERY = 16, 4  # decisions between two choices of the mode, and between two trim rules
# Share of the batch that joins or leaves before the mode is chosen again at once. A plain step does not depend on what
# was weighed: in a burst, when the batch changes at every step, weighing must not delay the requests that wait.
DRAFTING_CHANGE, PLAIN_CHANGE = 1 / 8, 1.0
# Learning takes 0.1 ms. After so many tests and so many similar steps, one step in LEARN_EVERY is learned from.
LEARN_EVERY, MANY_TESTS, MANY_STEPS = 8, 256, 32
OPTIMISM = 0.7  # about calls of sizes that were not seen, without a profile; see TimeErrors
PROMPT_MEMORY, PROMPT_PRIOR = 20_000.0, 2000.0  # emitted tokens; a server first reads prompts and emits nothing
CHUNK = 256  # tokens of a prompt that the draft reads at a time
LEFT_SHARE = 0.5  # expected share of the tokens that requests may still emit, because answers end early

EXPLORED_SHARE = 0.01  # of the time
EXPLORED_STEPS, COLD_STEPS = 6, 2  # steps of an exploration that count, after steps that find the caches cold
EXPENSIVE = 0.5  # share of a step's time; an exploration that loses more has to be saved for
DRAFTING_PART = 8  # one request in so many drafts in an exploration among plain rounds


class Exploration(NamedTuple):
    """Some steps of a candidate that was not chosen, so that the choice may be revised."""

    other: Score
    is_new: bool  # never run: explored at once, for fewer steps, if it is cheap
    extra_us: float  # time that a step of it loses against the chosen candidate, at equal tokens
    once_us: float = 0.0  # time before the first of its steps

    @property
    def cost_us(self) -> float:
        return (EXPLORED_STEPS + COLD_STEPS) * max(self.extra_us, 0.02 * self.other.step_us) + self.once_us

    @property
    def is_free(self) -> bool:
        """Whether nothing has to be saved for it."""
        return self.is_new and self.extra_us < EXPENSIVE * self.other.step_us and self.once_us < float("inf")


class Explorer:
    """Saves time for explorations. At most one runs at a time."""

    def __init__(self) -> None:
        self.current: Score | None = None
        self._num_left = 0  # steps
        self._saved_us = 0.0
        self._num_begun = 0

    def observe(self, record: StepRecord) -> None:
        """Counts a step of the exploration, or saves for the next one. A step in which the draft only catches up does
        not count."""
        if self.current is None:
            self._saved_us += EXPLORED_SHARE * record.step_us
        elif record.frontier.num_drafted.any() or not record.plan.draft_prefills:
            self._num_left -= 1

    def end_if_done(self) -> bool:
        """Returns True if an exploration has just ended, whose result is to be weighed at once."""
        if self.current is None or self._num_left > 0:
            return False
        self.current = None
        return True

    def consider(self, explorations: list[Exploration]) -> None:
        """Begins one if enough was saved: a new and cheap one at once, the others in rotation."""
        chosen = next(
            (each for each in explorations if each.is_free), explorations[self._num_begun % len(explorations)]
        )
        if self._saved_us >= chosen.cost_us or chosen.is_free:
            self._saved_us = min(self._saved_us - chosen.cost_us, chosen.cost_us)
            self.current, self._num_left = chosen.other, COLD_STEPS + (1 if chosen.is_new else EXPLORED_STEPS)
            self._num_begun += 1


class ThroughputPolicy:
    """Chooses the candidate of most tokens per time. with_modes: overlapped rounds and early exits are candidates."""

    is_drafting = True

    def __init__(self, knowledge: Knowledge, max_draft_tokens: int, *, with_modes: bool) -> None:
        self.costs = knowledge.costs
        self.partitions = knowledge.costs.partitions if with_modes else (WHOLE,)
        self._exits = knowledge.exits if with_modes else ()
        self._max_draft_tokens = max_draft_tokens
        self._acceptance = AcceptanceModel(knowledge.margins)
        self._errors = TimeErrors(0.0 if self.costs.is_measured else OPTIMISM)
        self._yield = ChainYield()
        self._predicted = BatchTimesCache(self.costs, max_draft_tokens)
        self._tables = ChainTables(max_draft_tokens)
        chunk_us = self.costs.call_us(DRAFT, WHOLE, CHUNK, 1, CHUNK, max_rows=CHUNK, num_logit_rows=0)
        self._draft_read_us = float(chunk_us) / CHUNK  # per token of a prompt
        self._num_read, self._num_emitted = 0.0, PROMPT_PRIOR  # tokens of prompts, and of answers; older ones faded
        self._times: dict[tuple[int, str], BatchTimes] = {}  # corrected, by size and partition; since the last weighing
        self.chosen: Score | None = None  # explorations aside
        self._scores: tuple[Score, ...] = ()
        self._price = 0.0  # tokens per microsecond
        self._weighed_size = 0
        self._num_decided = 0  # since the last weighing
        self._explorer = Explorer()
        self._was_drafting = self._has_decoded_plainly = False
        self._num_observed = 0  # steps
        self._num_alike = 0  # steps since the last change between plain and speculative decoding
        self._decision: Decision | None = None  # repeated while the sequences stay the same
        self._decided_for: Sequence[RunningSequence] = []

    # -- deciding -------------------------------------------------------------------------------

    def decide(self, sequences: Sequence[RunningSequence], num_prefilling: int = 0) -> Decision:
        size = len(sequences) + num_prefilling
        self._num_decided += 1
        if self._explorer.end_if_done():
            self._num_decided = WEIGH_EVERY
        is_plain = self.chosen is not None and self.chosen.mode is None
        has_changed = (
            abs(size - self._weighed_size) > (PLAIN_CHANGE if is_plain else DRAFTING_CHANGE) * self._weighed_size
        )
        if has_changed or self._num_decided >= WEIGH_EVERY:
            self._decision = self._weigh(sequences, size)
        elif self._decision is None or self._decided_for != sequences:
            self._decision = self._new_decision(sequences, self._acceptance.read(sequences))
        elif self._decision.trim is not None and self._num_decided % RENEW_EVERY == 0:
            offsets = _by_slot(sequences, self._acceptance.offsets(sequences))
            self._decision = replace(self._decision, trim=replace(self._decision.trim, offsets=offsets))
        return self._decision

    def _weigh(self, sequences: Sequence[RunningSequence], size: int) -> Decision:
        """Scores every candidate for a batch of `size`, chooses one and returns a step of it."""
        chances = self._acceptance.read(sequences)
        self._weighed_size, self._num_decided = size, 0
        keys = list(dict.fromkeys([(size, WHOLE), (len(sequences), WHOLE)]))
        for split in self.partitions:
            if split != WHOLE:
                keys += [(size // 2, split), (size, split)] if size > 1 else [(size, split)]
        self._times = self._predicted.corrected(keys, _num_tokens(sequences), self._errors)
        self._scores = scores_of(self._times, size, self._tables.means(chances), self._yield)
        best = max(self._scores, key=self._speed)
        kind = None if self.chosen is None else (self.chosen.mode, self.chosen.partition)
        now = next((each for each in self._scores if (each.mode, each.partition) == kind), best)  # as weighed now
        if self._speed(best) > HYSTERESIS * self._speed(now):
            is_resting = now.mode is None  # the draft has to catch up first
            now = best if not is_resting or self._is_worth_catching_up(sequences, best) else now
        self.chosen = now
        self._price = self._speed(best)
        if self._explorer.current is None:
            self._consider_exploring(sequences, now)
        return self._new_decision(sequences, chances)

    def _speed(self, score: Score) -> float:
        """Returns tokens per microsecond; the time in which the draft reads prompts is included."""
        us = score.step_us / score.num_tokens
        return 1.0 / (us if score.mode is None else us + self._num_read / self._num_emitted * self._draft_read_us)

    def _is_worth_catching_up(self, sequences: Sequence[RunningSequence], best: Score) -> bool:
        """Whether the rest of the answers repays what the draft has to read before it can draft again."""
        num_left = LEFT_SHARE * sum(each.num_remaining_tokens for each in sequences)
        gain_us = num_left * (1.0 / self._speed(self._scores[0]) - 1.0 / self._speed(best))
        return gain_us > self._catch_up_us(sequences)

    def _catch_up_us(self, sequences: Sequence[RunningSequence]) -> float:
        """Returns the time in which the draft reads what it has missed; infinity if no request may draft."""
        lags = [each.num_tokens - each.draft_len for each in sequences if each.request.max_draft_tokens != 0]
        if not lags:
            return float("inf")
        context = self.costs.batch_context(_num_tokens(sequences))
        return float(self.costs.call_us(DRAFT, WHOLE, sum(lags), len(lags), context))

    def _consider_exploring(self, sequences: Sequence[RunningSequence], chosen: Score) -> None:
        """Explores drafting while decoding plainly; else plain decoding and chains of twice the length, in rotation."""
        plain, serial, *_ = self._scores
        size = len(sequences)
        times = self._times[size, WHOLE]
        if chosen.mode is None:  # some requests draft
            length, drafting = serial.num_draft_tokens, _some_drafting(sequences)
            extra_us = _extra_us(times, length, len(drafting)) if drafting else 0.0
            is_new = (DRAFT, WHOLE) not in self._errors.known
            catch_up_us = self._catch_up_us([sequences[index] for index in drafting])
            explorations = [Exploration(serial, is_new, extra_us, catch_up_us)]
        else:  # plain decoding loses the tokens that the same time would have brought
            lost_us = plain.step_us * (1.0 - self._speed(plain) / self._speed(chosen))
            explorations = [Exploration(plain, not self._has_decoded_plainly, lost_us)]
            if chosen.mode is PipelineMode.SERIAL:
                length = min(2 * chosen.num_draft_tokens, self._max_draft_tokens)
                us = float(times.verify_us[0]) + _extra_us(times, length, size)
                longer = chosen._replace(num_draft_tokens=length, floor=0.0)
                explorations.append(Exploration(longer, False, us - chosen.step_us))
        self._explorer.consider(explorations)

    def _new_decision(self, sequences: Sequence[RunningSequence], chances: Chances) -> Decision:
        """Returns a step of the chosen candidate, or of the exploration, for these sequences."""
        self._decided_for = list(sequences)
        score = self._explorer.current or self.chosen
        assert score is not None and self.chosen is not None
        size, reason = len(sequences), "best" if score is self.chosen else "exploration"
        why = {"tokens_per_us": self._price, "scores": self._scores, "reason": reason}
        if score.mode is None:
            return Decision([0] * size, prefills_draft=self.chosen.mode is not None, **why)
        offsets = _by_slot(sequences, chances.offsets)
        lengths, trim = [score.num_draft_tokens] * size, None
        cohort = max(size // 2, 1) if score.mode is PipelineMode.PING_PONG else size
        if self.chosen.mode is None:  # an exploration among plain rounds
            drafting = set(_some_drafting(sequences))
            lengths = [score.num_draft_tokens * (index in drafting) for index in range(size)]
        elif score.floor > 0.0:
            lengths = [self._max_draft_tokens] * size
            trim = self._rule(cohort, sequences, score, chances, offsets)
        pruner = self._pruner(score, cohort, sequences, chances.curves[0], offsets) if self._exits else None
        return Decision(lengths, score.mode, score.partition, trim, pruner, **why)

    def _rule(
        self, size: int, sequences: Sequence[RunningSequence], score: Score, chances: Chances, offsets: np.ndarray
    ) -> TrimRule:
        key = size, score.partition
        if key not in self._times:
            self._times |= self._predicted.corrected([key], _num_tokens(sequences), self._errors)
        times = self._times[key]
        usual = min(max(round(score.num_rows), 1), times.verify_us.size - 1)
        return TrimRule(
            margin_knots=MarginCurve.margin_knots,
            match_logits=chances.match_logits,
            margin_shares=chances.curves[0].margin_shares,
            offsets=offsets,
            verify_us=times.verify_us,
            draft_us=times.draft_us + times.trim_us,  # whether a chain goes on is decided after every call
            tokens_per_us=self._price,
            draft_round_us=times.draft_round_us,
            row_price=self._price * float(times.verify_us[usual] - times.verify_us[0]) / usual,
        )

    def _pruner(
        self, score: Score, size: int, sequences: Sequence[RunningSequence], curve: MarginCurve, offsets: np.ndarray
    ) -> EarlyExit | None:
        """Returns the exit that saves most at the price, if one does."""
        batch = VerifyBatch(
            size,
            size + round(score.num_rows),
            self.costs.batch_context(_num_tokens(sequences)),
            max(score.num_tokens - size, 0.0),
            self._price,
            is_trimmed=score.floor > 0.0,
            partition=score.partition,
        )
        found = best_exit(self.costs, self._exits, batch)
        return None if found is None else EarlyExit((found,), curve, offsets)

    # -- learning -------------------------------------------------------------------------------

    def observe(self, record: StepRecord) -> None:
        self._num_observed += 1
        num_emitted = float(record.acceptance.num_emitted.sum())
        fade = max(1.0 - num_emitted / PROMPT_MEMORY, 0.0)
        self._num_read = fade * self._num_read + sum(chunk.num_tokens for chunk in record.plan.prefills)
        self._num_emitted = fade * self._num_emitted + num_emitted
        self._explorer.observe(record)
        plan, decision = record.plan, record.plan.decision
        has_drafted = bool(record.frontier.num_drafted.any()) or bool(plan.drafts)
        self._num_alike = self._num_alike + 1 if has_drafted == self._was_drafting else 0
        self._was_drafting = has_drafted
        self._has_decoded_plainly |= not has_drafted
        knows_chances = not has_drafted or self._acceptance.num_tests >= MANY_TESTS
        is_exploring = self._explorer.current is not None
        is_settled = knows_chances and self._num_alike >= MANY_STEPS and not is_exploring
        if is_settled and self._num_observed % LEARN_EVERY:
            return
        self._acceptance.observe(record)
        is_first = (DRAFT if has_drafted else TARGET, decision.partition) not in self._errors.known
        if (self._num_alike < COLD_STEPS and not is_first) or record.has_clients:
            return
        knows_who = not plan.drafts or not self._acceptance.has_look_ups
        self._errors.observe_step(record, self._predicted, knows_who=knows_who)
        if is_first:  # predictions were guesses until now
            self._num_decided = WEIGH_EVERY
        score = self.chosen
        if score is None or is_exploring or plan.draft_prefills:
            return
        is_as_predicted = score.mode is decision.mode and record.num_tokens.size == self._weighed_size
        if has_drafted and is_as_predicted and decision.mode is not PipelineMode.RUN_AHEAD:
            self._yield.observe(record, score)


def _num_tokens(sequences: Sequence[RunningSequence]) -> list[int]:
    return [each.num_tokens for each in sequences]


def _by_slot(sequences: Sequence[RunningSequence], offsets: np.ndarray) -> np.ndarray:
    slots = [each.slot for each in sequences]
    by_slot = np.zeros(1 + max(slots))
    by_slot[slots] = offsets
    return by_slot


def _extra_us(times: BatchTimes, length: int, num_drafting: int) -> float:
    """Returns the time that chains of one length add to a plain step."""
    num_rows = min(length * num_drafting, times.verify_us.size - 1)
    draft_us = length * times.draft_us[num_drafting] + times.draft_round_us
    return float(times.verify_us[num_rows] - times.verify_us[0] + draft_us)


def _some_drafting(sequences: Sequence[RunningSequence]) -> list[int]:
    """Returns the indices of the requests that draft in an exploration among plain rounds: the few whose draft lags
    least, because all requests could cost more than the exploration reveals."""
    able = [index for index, each in enumerate(sequences) if each.request.max_draft_tokens != 0]
    able.sort(key=lambda index: sequences[index].num_tokens - sequences[index].draft_len)
    return able[: max(len(sequences) // DRAFTING_PART, 1)]
