"""The policies `faser` and `survival`: they run what yields most tokens per time.

At intervals the policy weighs: it predicts tokens and time of a step for each candidate (policy/candidates.py), which
are plain decoding, serial drafting and overlapped ways, and chooses the best one. Its throughput, in tokens per
microsecond, is the *price*: it turns the time of a draft call, a row or an exit into the tokens that the same time
could have produced. A draft token is drafted, a row verified and an exit used if and only if the tokens that it adds
exceed its time at that price. Between two weighings a step repeats the choice. The interval doubles while the choice
stays the same, and the steps that are learned from become rarer with it.

A decision reads forward: chances of acceptance (policy/calibration.py), times (policy/cost_model.py), scores of the
candidates, then the `Decision`. What was not chosen is explored now and then. `survival` is the same policy without
overlap and early exit, `goodput` also without trimming: it drafts one length for the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from faser_backend.core.config import MAX_NUM_SEQS
from faser_backend.core.decision import WHOLE, Decision, PipelineMode, Score, TrimRule
from faser_backend.core.plan import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy import candidates
from faser_backend.policy.calibration import AcceptanceModel, MarginCurve
from faser_backend.policy.cost_model import DRAFT, READ_ROWS, TARGET, BatchTimes, BatchTimesCache, TimeErrors
from faser_backend.policy.early_exit import EarlyExit, best_exit
from faser_backend.policy.speculation import MAX_ADAPTIVE_TOKENS, Knowledge

# Decisions between two weighings, which take 0.4 ms: the interval doubles while the choice stays the same.
MIN_INTERVAL, MAX_INTERVAL = 4, 64
# Learning from a step takes 0.3 ms. Once the choice stays the same one step in so many is learned from, or in so much
# time if steps are short. Learned from every step, drafting seemed 4 % slower than it is, maybe for cold caches.
LEARN_EVERY, EXPLORED_LEARN_EVERY, LEARN_SPAN_US = 8, 4, 40_000.0
PROBE_TOKENS, PROBE_TESTS = 4, 16  # that a step drafts, one per request at least, until so many were tested
MANY_TESTS = 256  # of draft tokens; until then the interval does not grow while drafting, and drafting gets a bonus
BONUS = 0.08  # share of its speed, without tests; it fades. Once the draft rests, trying again costs its catching up
# The mode is chosen again at once if more than this share of the batch, and of a drafting one more than one request,
# joins or leaves. In a burst, when the batch changes at every step, weighing must not delay the requests that wait.
DRAFTING_CHANGE, PLAIN_CHANGE = 1 / 8, 1.0
OPTIMISM = 0.7  # about calls of sizes that were not seen, without a profile; see TimeErrors
# Guesses: the share of answers that end before their limit, and their tokens; how much an answer that ended moves both.
EARLY_SHARE, USUAL_ANSWER, ANSWER_SHARE = 0.5, 128.0, 0.1


class ThroughputPolicy:
    """Chooses the candidate of most tokens per time, overlap and exits (with_modes) and trimmed chains among them."""

    is_drafting = True

    def __init__(self, knowledge: Knowledge, *, with_modes: bool, with_trimming: bool = True) -> None:
        self.costs = knowledge.costs
        self.partitions = knowledge.costs.partitions if with_modes else (WHOLE,)
        self._exits = knowledge.exits if with_modes else ()
        self._floors = slice(None if with_trimming else 1)
        self._acceptance = AcceptanceModel(knowledge.margins)
        self._errors = TimeErrors(0.0 if self.costs.is_measured else OPTIMISM)
        self._yield = candidates.ChainYield()
        self._predicted = BatchTimesCache(self.costs, MAX_ADAPTIVE_TOKENS)
        self._reading_us = 0.0  # of the draft, per emitted token
        self._early_share, self._mean_answer = EARLY_SHARE, USUAL_ANSWER
        self._weighed = self._ready = list[RunningSequence]()  # the last; those that were decided about
        self._times: dict[tuple[int, str], BatchTimes] = {}  # corrected, by size and partition, as last weighed
        self.chosen: Score | None = None  # explorations aside
        self._scores: tuple[Score, ...] = ()
        self._price = 0.0  # tokens per microsecond
        self._weighed_size = self._context = 0  # sequences; tokens of each
        self._most_change = 0.0  # of the batch, before it is weighed again at once
        self._num_decided = self._num_prefilling = 0  # since the last weighing; as last decided about
        self._is_waiting = False  # for requests whose drafts have less to catch up with
        self._explorer = candidates.Explorer()
        self._was_drafting = self._has_decoded_plainly = self._has_read = False
        self._interval, self._learn_every = MIN_INTERVAL, 1
        self._num_observed = self._num_alike = 0  # steps; since drafting began or ended
        self._decision: Decision | None = None  # repeated while the sequences stay the same
        self._decided_for: Sequence[RunningSequence] = ()

    # -- deciding -------------------------------------------------------------------------------

    def decide(self, sequences: Sequence[RunningSequence], num_prefilling: int = 0) -> Decision:
        size = len(sequences) + num_prefilling
        self._num_decided += 1
        self._ready, self._num_prefilling = list(sequences), num_prefilling
        has_changed = self._decided_for != sequences
        is_due = abs(size - self._weighed_size) > self._most_change or (self._is_waiting and has_changed)
        if is_due or self._decision is None:
            self._decision = self._weigh(sequences, size)
        elif has_changed:
            self._decision = self._new_decision(sequences)
        return self._decision

    def _weigh(self, sequences: Sequence[RunningSequence], size: int) -> Decision:
        """Scores every candidate for a batch of `size`, chooses one and returns a step of it."""
        num_decided, self._weighed_size, self._num_decided = self._num_decided, size, 0
        self._context, self._times = self.costs.batch_context([each.num_tokens for each in sequences]), {}
        halves = [size // 2, size] if size > 1 else [1]
        splits = [self._times_of(half, name) for name in self.partitions if name != WHOLE for half in halves]
        num_left = self._weigh_reading(sequences)
        means = candidates.batch_means(self._acceptance, self._acceptance.offsets(sequences))
        chains = candidates.ChainMeans(*(of[self._floors] for of in means))
        self._scores = candidates.scores_of(self._times_of(size, WHOLE), splits, chains, self._yield.ratios)
        bonus = 1.0 + BONUS * self.costs.is_measured * max(1.0 - self._acceptance.num_tests / MANY_TESTS, 0.0)
        plain, drafting = self._scores[0], max(self._scores[1:], key=self._speed)
        now = drafting if bonus * self._speed(drafting) > self._speed(plain) else plain
        before = self.chosen or now
        gain_us = num_left * (1.0 / self._speed(plain) - 1.0 / self._speed(now))
        # A draft that rested has to catch up first. If these requests do not repay that, others may.
        self._is_waiting = before.mode is None and now.mode is not None and gain_us < self._catch_up_us(sequences)
        now = plain if self._is_waiting else now
        has_changed = (before.mode, before.partition) != (now.mode, now.partition)
        # Where chains are trimmed, the longest length does not matter.
        is_fixed = 0.0 in (before.floor, now.floor)
        if has_changed or (is_fixed and abs(before.num_draft_tokens - now.num_draft_tokens) > 1):
            self._interval = MIN_INTERVAL
        elif num_decided >= self._interval and (now.mode is None or self._acceptance.num_tests >= MANY_TESTS):
            self._interval = min(2 * self._interval, MAX_INTERVAL)
        usual = max(round(LEARN_SPAN_US / now.step_us), LEARN_EVERY)
        self._learn_every = max(min(self._interval // 2, usual), 1)
        if now.mode is None:
            self._yield.fade()
        self._most_change = size * PLAIN_CHANGE if now.mode is None else max(size * DRAFTING_CHANGE, 1.0)
        self.chosen, self._price = now, self._speed(now)
        if has_changed or self._explorer.current is None:
            self._explorer.current = None
            self._consider_exploring(sequences, now)
        return self._new_decision(sequences)

    def _times_of(self, size: int, partition: str) -> BatchTimes:
        """Returns the predicted times of a batch, corrected once between two weighings."""
        key = size, partition
        if key not in self._times:
            self._times[key] = self._predicted.of(size, self._context, partition).corrected(self._errors)
        return self._times[key]

    def _speed(self, score: Score) -> float:
        """Returns tokens per microsecond; the time in which the draft reads is included."""
        us = score.step_us / score.num_tokens
        return 1.0 / (us if score.mode is None else us + self._reading_us)

    def _weigh_reading(self, sequences: Sequence[RunningSequence]) -> float:
        """Divides the draft's time of reading prompts by the answers' tokens. Returns the tokens that will come yet."""
        for ended in (each for each in self._weighed if each.slot < 0 and each.num_output_tokens):
            is_early = ended.num_remaining_tokens > 0
            self._early_share += ANSWER_SHARE * (is_early - self._early_share)
            self._mean_answer += ANSWER_SHARE * is_early * (ended.num_output_tokens - self._mean_answer)
        self._weighed, limits = list(sequences), [each.num_remaining_tokens for each in sequences]
        num_left = sum(limit - self._early_share * max(limit - self._mean_answer, 0.0) for limit in limits)
        num_emitted = num_left + sum(each.num_output_tokens for each in sequences)
        num_prompt = sum(max(each.num_prompt_tokens - each.stats.num_reused_tokens, 0) for each in sequences)
        self._reading_us = self._read_us * num_prompt / num_emitted
        return num_left

    @property
    def _read_us(self) -> float:
        """Predicted time in which the draft reads a token of a prompt."""
        us = self.costs.call_us(DRAFT, WHOLE, READ_ROWS, 1, READ_ROWS, num_logit_rows=0) / READ_ROWS
        return float(us * self._errors.ratios(DRAFT, WHOLE, np.log2(READ_ROWS)))

    def _catch_up_us(self, sequences: Sequence[RunningSequence]) -> float:
        """Returns the time in which the draft reads what it has missed; infinity if no request may draft."""
        lags = [each.num_tokens - each.draft_len for each in sequences if each.request.max_draft_tokens != 0]
        return sum(lags) * self._read_us if lags else math.inf

    def _consider_exploring(self, sequences: Sequence[RunningSequence], chosen: Score) -> None:
        """Explores drafting while decoding plainly, and plain decoding while drafting."""
        plain, serial, *_ = self._scores
        if chosen.mode is None:  # some requests draft
            drafting = candidates.some_drafting(sequences, self._weighed_size)
            times = self._times_of(len(sequences), WHOLE)
            length = serial.num_draft_tokens
            rows_us = times.verify_us[length * len(drafting)] - times.verify_us[0]
            more_us = float(rows_us + length * times.draft_us[len(drafting)]) + times.draft_round_us
            catch_up_us = self._catch_up_us([sequences[index] for index in drafting])
            self._explorer.consider(serial, is_new=not self._acceptance.num_tests, lost_us=more_us, once_us=catch_up_us)
        else:  # plain decoding loses the tokens that the same time would have brought
            lost_us = plain.step_us * (1.0 - self._speed(plain) / self._speed(chosen))
            self._explorer.consider(plain, is_new=not self._has_decoded_plainly, lost_us=lost_us)

    def _new_decision(self, sequences: Sequence[RunningSequence]) -> Decision:
        """Returns a step of the chosen candidate, or of the exploration, for these sequences."""
        self._decided_for = list(sequences)
        score = self._explorer.current or self.chosen
        assert score is not None and self.chosen is not None
        size, reason = len(sequences), "best" if score is self.chosen else "exploration"
        rests = self.chosen.mode is None  # a draft that rests reads what it missed when it is asked
        why = {"tokens_per_us": self._price, "scores": self._scores, "reason": reason, "prefills_draft": not rests}
        if score.mode is None:
            return Decision([0] * size, **why)
        offsets = np.zeros(MAX_NUM_SEQS)  # by slot, also of those whose prompts the step reads
        offsets[[each.slot for each in sequences]] = self._acceptance.offsets(sequences)
        is_new = self._acceptance.num_tests < PROBE_TESTS  # nobody knows yet whether anything is accepted
        longest = max(PROBE_TOKENS // size, 1) if is_new else MAX_ADAPTIVE_TOKENS
        lengths, trim = [min(score.num_draft_tokens, longest)] * size, None
        cohort = max(size // 2, 1) if score.mode is PipelineMode.PING_PONG else size
        if rests:  # an exploration among plain rounds
            drafting = set(candidates.some_drafting(sequences, self._weighed_size))
            lengths = [lengths[0] * (index in drafting) for index in range(size)]
        elif score.floor > 0.0:
            lengths = lengths if self.costs.drafts_at_once else [longest] * size
            trim = self._rule(cohort, score, offsets)
        found = best_exit(self.costs, self._exits, score, cohort, self._context)
        pruner = EarlyExit((found,), self._acceptance.curves[0], offsets) if found is not None else None
        return Decision(lengths, score.mode, score.partition, trim, pruner, **why)

    def _rule(self, size: int, score: Score, offsets: np.ndarray) -> TrimRule:
        times, curves = self._times_of(size, score.partition), self._acceptance.curves
        logits = [curve.match_logits for curve in curves]
        usual = min(max(round(score.num_rows), 1), times.verify_us.size - 1)
        return TrimRule(
            margin_knots=MarginCurve.margin_knots,
            match_logits=np.stack(logits) if len(curves) > 1 else logits[0],
            margin_shares=curves[0].margin_shares,
            offsets=offsets,
            verify_us=times.verify_us,
            draft_us=times.draft_us + times.trim_us,  # whether a chain goes on is decided after every call
            tokens_per_us=self._price,
            draft_round_us=times.draft_round_us,
            row_price=self._price * max(float(times.verify_us[usual] - times.verify_us[0]), 0.0) / usual,
        )

    # -- learning -------------------------------------------------------------------------------

    def observe(self, record: StepRecord) -> None:
        has_drafted = record.frontier.drafted.shape[1] > 0 or bool(record.plan.drafts)
        self._explorer.observe(record, has_drafted=has_drafted)
        self._num_observed += 1
        self._num_alike = self._num_alike + 1 if has_drafted == self._was_drafting else 0
        self._was_drafting = has_drafted
        every = self._learn_every if self._explorer.current is None else EXPLORED_LEARN_EVERY
        if self._num_observed % every == 0:
            self._learn(record, has_drafted=has_drafted)
        self._has_read = record.draft_prefill_us > 0.0
        if self._has_read and not (self.costs.drafts_at_once or record.has_clients):
            self._errors.observe_draft_reading(record, self.costs)
        ready = [each for each in self._ready if each.slot >= 0]  # weighed here, a GPU need not wait for it
        if ready and (self._explorer.end_if_done() or self._num_decided >= self._interval):
            self._decision = self._weigh(ready, len(ready) + self._num_prefilling)

    def _learn(self, record: StepRecord, *, has_drafted: bool) -> None:
        """Learns chances, times and the yield of chains from a step."""
        self._has_decoded_plainly |= not has_drafted
        decision = record.plan.decision
        if has_drafted:
            self._acceptance.observe(record)
            self._decided_for = ()  # the offsets of requests have changed
        is_known = (DRAFT if has_drafted else TARGET, decision.partition) in self._errors.known
        is_first = not is_known and not self.costs.is_measured
        if (self._num_alike < candidates.COLD_STEPS and not is_first) or record.has_clients:
            return
        knows_who = not record.plan.drafts or not self._acceptance.has_look_ups
        # On a GPU the draft reads prompts of this step and of the one before while the host waits for its tokens.
        is_reading = self.costs.drafts_at_once and (self._has_read or record.draft_prefill_us > 0.0)
        self._errors.observe_step(record, self._predicted, learns_draft=knows_who and not is_reading)
        if is_first:  # predictions were guesses until now
            self._num_decided = MAX_INTERVAL
        score = self.chosen
        if not has_drafted or score is None or self._explorer.current is not None or record.plan.draft_prefills:
            return
        num_cohorts = 2 if score.mode is PipelineMode.PING_PONG else 1
        sizes = {len(decision.num_draft_tokens) // num_cohorts, self._weighed_size // num_cohorts}
        if score.mode is decision.mode is not PipelineMode.RUN_AHEAD and sizes == {record.num_tokens.size}:
            self._yield.observe(record, score)  # the step has read no prompt to its end
