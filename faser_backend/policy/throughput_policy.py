"""The controller: one price decides about every draft token, every row, every exit, every mode.

The price is what the batch earns at its best: the most tokens per time of all candidates (policy/candidates.py), as far
as the cost model, corrected by what was measured, can say. A draft token is drafted, a row verified, an exit used,
phases overlapped, if and only if the tokens that it adds are worth more than its time at that price. Plain decoding is
a candidate like the others. A hundredth of the time is saved up for explorations of what was not chosen. `survival` is
this rule without overlap and early exit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from faser_backend.core.decision import WHOLE, Decision, PipelineMode, Score, TrimRule
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.calibration import AcceptanceModel, MarginCurve, sampled_share
from faser_backend.policy.candidates import (
    ChainMeans,
    ChainTable,
    ChainYield,
    mixed,
    plain_score,
    round_score,
    run_ahead_score,
)
from faser_backend.policy.cost_model import DRAFT, TARGET
from faser_backend.policy.early_exit import EarlyExit, VerifyBatch, best_exit
from faser_backend.policy.speculation import Knowledge
from faser_backend.policy.times import BatchTimes, BatchTimesCache, TimeErrors

HYSTERESIS = 1.03  # predicted gain that a change of the mode needs
WEIGH_EVERY, RENEW_EVERY = 16, 4  # decisions between two choices of the mode, and between two trim rules
# Share of the batch that comes or goes before the mode is chosen anew at once. Plain steps do not depend on what was
# weighed: in a burst, where the batch changes with every step, planning stays out of the way of those who wait.
DRAFTING_CHANGE, PLAIN_CHANGE = 1 / 8, 1.0
REFITS, MOST_TABLES = 4, 8  # of a curve, after which chains are reckoned with anew; tables of chains that are kept
# Steps of which one is learned from, once so many tests and steps of the same kind were: learning takes 0.1 ms.
LEARN_EVERY, MANY_TESTS, MANY_STEPS = 8, 256, 32
OPTIMISM = 0.7  # about calls of sizes that were not seen, without a profile; see TimeErrors
LEFT_SHARE = 0.5  # of the tokens that requests may still ask for, as an answer may end before
CHUNK = 256  # tokens of a prompt that the draft reads at a time, for their price

EXPLORED_SHARE = 0.01  # of the time
EXPLORED_STEPS, COLD_STEPS = 6, 2  # of an exploration that count, after steps that find the caches cold
FAR_BEHIND = 0.5  # share of a step's time that an exploration loses, from which on it has to be saved for
DRAFTING_PART = 8  # one request in so many drafts in an exploration among plain rounds


class Exploration(NamedTuple):
    """Some steps of what was not chosen, so that the choice may be revised."""

    other: Score
    is_new: bool  # nothing is known of it: explored at once, shortly, where it is cheap
    extra_us: float  # that a step of it takes more than what is chosen, for the same tokens
    once_us: float = 0.0  # before the first of its steps

    @property
    def price_us(self) -> float:
        return (EXPLORED_STEPS + COLD_STEPS) * max(self.extra_us, 0.02 * self.other.step_us) + self.once_us

    @property
    def is_free(self) -> bool:
        """Whether nothing has to be saved for it."""
        return self.is_new and self.extra_us < FAR_BEHIND * self.other.step_us and self.once_us < float("inf")


class Explorer:
    """Saves up for explorations; at most one runs at a time."""

    def __init__(self) -> None:
        self.current: Score | None = None
        self._num_left = 0  # steps
        self._saved_us = 0.0
        self._turn = 0

    def observe(self, record: StepRecord) -> None:
        """Counts a step of an exploration, or saves for the next one. While the draft only catches up nothing is
        seen."""
        if self.current is None:
            self._saved_us += EXPLORED_SHARE * record.step_us
        elif record.frontier.num_drafted.any() or not record.plan.draft_prefills:
            self._num_left -= 1

    def end_if_done(self) -> bool:
        """Whether an exploration ended just now: what was seen is to be weighed at once."""
        if self.current is None or self._num_left > 0:
            return False
        self.current = None
        return True

    def consider(self, kinds: list[Exploration]) -> None:
        """Begins one if enough was saved for it: what is new and cheap at once, the others in turn."""
        chosen = next((each for each in kinds if each.is_free), kinds[self._turn % len(kinds)])
        if self._saved_us >= chosen.price_us or chosen.is_free:
            self._saved_us = min(self._saved_us - chosen.price_us, chosen.price_us)
            self.current, self._num_left = chosen.other, COLD_STEPS + (1 if chosen.is_new else EXPLORED_STEPS)
            self._turn += 1


class PromptTokens:
    """How many tokens of prompts are read for each token that is emitted."""

    _MEMORY, _PRIOR = 20_000.0, 2000.0  # tokens emitted: when a server starts it reads many and has emitted nothing

    def __init__(self) -> None:
        self._num_read, self._num_emitted = 0.0, self._PRIOR

    def observe(self, record: StepRecord) -> None:
        num_emitted = float(record.acceptance.num_emitted.sum())
        fade = max(1.0 - num_emitted / self._MEMORY, 0.0)
        self._num_read = fade * self._num_read + sum(chunk.num_tokens for chunk in record.plan.prefills)
        self._num_emitted = fade * self._num_emitted + num_emitted

    @property
    def per_emitted(self) -> float:
        return self._num_read / self._num_emitted


class ThroughputPolicy:
    """Chooses among plain, serial and, with_modes, overlapped rounds and early exits."""

    is_drafting = True

    def __init__(self, knowledge: Knowledge, max_draft_tokens: int, *, with_modes: bool) -> None:
        self.costs = knowledge.costs
        self.partitions = knowledge.costs.partitions if with_modes else (WHOLE,)
        self._exits = knowledge.exits if with_modes else ()
        self._most = max_draft_tokens
        self._acceptance = AcceptanceModel(knowledge.margins)
        self._errors = TimeErrors(0.0 if self.costs.is_measured else OPTIMISM)
        self._yield = ChainYield()
        self._prompts = PromptTokens()
        self._times = BatchTimesCache(self.costs, max_draft_tokens)
        chunk_us = self.costs.call_us(DRAFT, WHOLE, CHUNK, 1, CHUNK, max_rows=CHUNK, num_logit_rows=0)
        self._draft_read_us = float(chunk_us) / CHUNK  # of a token of a prompt
        self._corrected_times: dict[tuple[int, str], BatchTimes] = {}  # since the last weighing
        self._tables: dict[tuple[float, ...], ChainTable] = {}
        self.chosen: Score | None = None  # explorations aside
        self._scores: tuple[Score, ...] = ()
        self._price = 0.0  # tokens per microsecond
        self._weighed: tuple[int, float] = (0, 0.0)  # sequences, share of sampled ones
        self._num_decided = 0  # since the last weighing
        self._explorer = Explorer()
        self._was_drafting = self._has_decoded_plainly = False
        self._num_observed = 0  # steps
        self._num_alike = 0  # steps since plain and speculative decoding changed over
        self._decision: Decision | None = None  # that holds on, for these sequences
        self._decided_for: Sequence[RunningSequence] = []

    # -- deciding -------------------------------------------------------------------------------

    def decide(self, sequences: Sequence[RunningSequence], num_prefilling: int = 0) -> Decision:
        size, share = len(sequences) + num_prefilling, sampled_share(sequences)
        weighed_size, weighed_share = self._weighed
        self._num_decided += 1
        if self._explorer.end_if_done():
            self._num_decided = WEIGH_EVERY
        is_plain = self.chosen is not None and self.chosen.mode is None
        most_change = PLAIN_CHANGE if is_plain else DRAFTING_CHANGE
        has_changed = abs(size - weighed_size) > most_change * weighed_size or abs(share - weighed_share) > 0.25
        if has_changed or self._num_decided >= WEIGH_EVERY:
            self._weigh(sequences, size, share)
        assert self.chosen is not None
        decision = self._decision
        if decision is None or self._decided_for != sequences:
            score = self._explorer.current or self.chosen
            reason = "best" if score is self.chosen else "exploration"
            decision = self._decision_for(score, sequences)
            decision = replace(decision, tokens_per_us=self._price, scores=self._scores, reason=reason)
            self._decided_for = list(sequences)
        elif decision.trim is not None and self._num_decided % RENEW_EVERY == 0:
            decision = replace(decision, trim=replace(decision.trim, offsets=self._offsets_by_slot(sequences)))
        self._decision = decision
        return decision

    def _weigh(self, sequences: Sequence[RunningSequence], size: int, share: float) -> None:
        """Scores every candidate for a batch of `size` and chooses one."""
        self._weighed, self._num_decided, self._decision = (size, share), 0, None
        self._corrected_times.clear()
        chains = self._chains(share, self._acceptance.offsets(sequences))
        context = self._context(sequences)
        self._scores = tuple(self._score_all(size, context, chains))
        best = max(self._scores, key=self._speed)
        kind = None if self.chosen is None else (self.chosen.mode, self.chosen.partition)
        now = next((each for each in self._scores if (each.mode, each.partition) == kind), best)  # as weighed now
        if self._speed(best) > HYSTERESIS * self._speed(now):
            is_resting = now.mode is None  # the draft has to catch up first
            now = best if not is_resting or self._is_worth_catching_up(sequences, best) else now
        self.chosen = now
        self._price = self._speed(best)
        self._consider_exploring(sequences, context)

    def _score_all(self, size: int, context: int, chains: ChainMeans) -> list[Score]:
        times, ratios = self._corrected(size, context, WHOLE), self._yield.ratios
        scores = [plain_score(times), round_score(PipelineMode.SERIAL, times, chains, ratios)]
        for split in self.partitions:
            if split == WHOLE:
                continue
            if size > 1:
                cohort = self._corrected(size // 2, context, split)
                scores.append(round_score(PipelineMode.PING_PONG, cohort, chains, ratios))
            scores.append(run_ahead_score(self._corrected(size, context, split), chains, ratios))
        return scores

    def _speed(self, score: Score) -> float:
        """Tokens per microsecond, with what the draft's reading of prompts takes."""
        if score.mode is None:
            return score.tokens_per_us
        return 1.0 / (1.0 / score.tokens_per_us + self._prompts.per_emitted * self._draft_read_us)

    def _is_worth_catching_up(self, sequences: Sequence[RunningSequence], best: Score) -> bool:
        """Whether the rest of the answers repays what the draft has to read before it can draft again."""
        num_left = LEFT_SHARE * sum(each.num_remaining_tokens for each in sequences)
        gain_us = num_left * (1.0 / self._speed(self._scores[0]) - 1.0 / self._speed(best))
        return gain_us > self._catch_up_us(sequences)

    def _catch_up_us(self, sequences: Sequence[RunningSequence]) -> float:
        """Time for the draft to read what it has missed of those that may draft; infinity where none may."""
        lags = [each.num_tokens - each.draft_len for each in sequences if each.request.max_draft_tokens != 0]
        if not lags:
            return float("inf")
        return float(self.costs.call_us(DRAFT, WHOLE, sum(lags), len(lags), self._context(sequences)))

    def _consider_exploring(self, sequences: Sequence[RunningSequence], context: int) -> None:
        """While decoding plainly drafting may be explored; while drafting plain decoding and chains of twice the
        length, in turn."""
        chosen, (plain, serial, *_) = self.chosen, self._scores
        if self._explorer.current is not None or chosen is None:
            return
        times = self._corrected(len(sequences), context, WHOLE)
        if chosen.mode is None:  # some requests draft
            lengths = np.array(_some_lengths(sequences, serial.num_draft_tokens))
            extra_us = times.chains_us(lengths) + times.step_us(int(lengths.sum())) - times.step_us(0)
            drafting = [each for each, length in zip(sequences, lengths, strict=True) if length]
            is_new = not self._errors.knows(DRAFT, WHOLE)
            kinds = [Exploration(serial, is_new, extra_us, self._catch_up_us(drafting))]
        else:  # what plain decoding loses is the tokens that the same time would have brought
            lost_us = plain.step_us * (1.0 - self._speed(plain) / self._speed(chosen))
            kinds = [Exploration(plain, not self._has_decoded_plainly, lost_us)]
            if chosen.mode is PipelineMode.SERIAL:
                length = min(2 * chosen.num_draft_tokens, self._most)
                us = times.step_us(times.size * length) + times.chains_us(np.full(times.size, length))
                longer = chosen._replace(num_draft_tokens=length, floor=0.0)
                kinds.append(Exploration(longer, False, us - chosen.step_us))
        self._explorer.consider(kinds)

    def _decision_for(self, score: Score, sequences: Sequence[RunningSequence]) -> Decision:
        """A step of that kind for these sequences."""
        assert self.chosen is not None
        size = len(sequences)
        if score.mode is None:
            return Decision([0] * size, prefills_draft=self.chosen.mode is not None)
        cohort = max(size // 2, 1) if score.mode is PipelineMode.PING_PONG else size
        offsets, curve = self._offsets_by_slot(sequences), self._acceptance.curve(sampled_share(sequences))
        context = self._context(sequences)
        lengths, trim = [score.num_draft_tokens] * size, None
        if self.chosen.mode is None:  # an exploration among plain rounds
            lengths = _some_lengths(sequences, score.num_draft_tokens)
        elif score.floor > 0.0:
            lengths = [self._most] * size
            trim = self._rule(self._corrected(cohort, context, score.partition), score, curve, offsets)
        pruner = self._pruner(score, cohort, context, curve, offsets)
        return Decision(lengths, score.mode, score.partition, trim, pruner)

    def _offsets_by_slot(self, sequences: Sequence[RunningSequence]) -> np.ndarray:
        slots = [each.slot for each in sequences]
        offsets = np.zeros(1 + max(slots))
        offsets[slots] = self._acceptance.offsets(sequences)
        return offsets

    def _rule(self, times: BatchTimes, score: Score, curve: MarginCurve, offsets: np.ndarray) -> TrimRule:
        usual = min(max(round(score.num_rows), 1), times.verify_us.size - 1)
        return TrimRule(
            margin_knots=MarginCurve.margin_knots,
            match_logits=self._acceptance.match_logits(self._weighed[1]),
            margin_shares=curve.margin_shares,
            offsets=offsets,
            verify_us=times.verify_us,
            draft_us=times.draft_us + times.trim_us,  # a chain that goes on is decided on again
            tokens_per_us=self._price,
            draft_round_us=times.draft_round_us,
            row_price=self._price * float(times.verify_us[usual] - times.verify_us[0]) / usual,
        )

    def _pruner(
        self, score: Score, size: int, context: int, curve: MarginCurve, offsets: np.ndarray
    ) -> EarlyExit | None:
        """The exit that saves most at the price, if one does."""
        batch = VerifyBatch(
            size,
            size + round(score.num_rows),
            context,
            max(score.num_tokens - size, 0.0),
            self._price,
            is_trimmed=score.floor > 0.0,
            partition=score.partition,
        )
        found = best_exit(self.costs, self._exits, batch)
        return None if found is None else EarlyExit((found,), curve, offsets)

    def _context(self, sequences: Sequence[RunningSequence]) -> int:
        return self.costs.batch_context([each.num_tokens for each in sequences])

    def _corrected(self, size: int, context: int, partition: str) -> BatchTimes:
        """Predicted times as they turned out to be when candidates were weighed last."""
        key = size, partition
        if key not in self._corrected_times:
            self._corrected_times[key] = self._times.of(size, context, partition).corrected(self._errors)
        return self._corrected_times[key]

    def _chains(self, share: float, offsets: np.ndarray) -> ChainMeans:
        """Means of the chains of all sources for requests of these offsets [B]."""
        shares = enumerate(self._acceptance.source_shares.tolist())
        return mixed([(each, self._chain_table(share, source).of(offsets)) for source, each in shares if each])

    def _chain_table(self, share: float, source: int) -> ChainTable:
        """The table of such chains in such a batch; kept until the curves have changed a few times."""
        key = source, round(share, 2), *(version // REFITS for version in self._acceptance.version)
        if key not in self._tables:
            if len(self._tables) > MOST_TABLES:
                self._tables.clear()
            self._tables[key] = ChainTable(self._acceptance.curve(share, source), self._most)
        return self._tables[key]

    # -- learning -------------------------------------------------------------------------------

    def observe(self, record: StepRecord) -> None:
        self._num_observed += 1
        self._prompts.observe(record)
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
        is_first = not self._errors.knows(DRAFT if has_drafted else TARGET, decision.partition)
        if (self._num_alike < COLD_STEPS and not is_first) or record.has_clients:
            return
        knows_who = not plan.drafts or not self._acceptance.has_look_ups
        self._errors.observe_step(record, self._times, knows_who=knows_who)
        if is_first:  # what was believed until now may be far off
            self._num_decided = WEIGH_EVERY
        score = self.chosen
        if score is None or is_exploring or plan.draft_prefills:
            return
        is_as_predicted = score.mode is decision.mode and record.num_tokens.size == self._weighed[0]
        if has_drafted and is_as_predicted and decision.mode is not PipelineMode.RUN_AHEAD:
            self._yield.observe(record, score)


def _some_lengths(sequences: Sequence[RunningSequence], num_draft_tokens: int) -> list[int]:
    """Returns the draft tokens [B] of an exploration among plain rounds: a few requests draft, those whose draft has
    the least to catch up with, for all of them could cost more than it shows."""
    able = [index for index, each in enumerate(sequences) if each.request.max_draft_tokens != 0]
    able.sort(key=lambda index: sequences[index].num_tokens - sequences[index].draft_len)
    lengths = [0] * len(sequences)
    for index in able[: max(len(sequences) // DRAFTING_PART, 1)]:
        lengths[index] = num_draft_tokens
    return lengths
