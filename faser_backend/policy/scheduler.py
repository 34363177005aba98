"""Continuous batching: which sequences are verified in the next step, which draft, which prefill.

The scheduler owns the waiting queue, the running list and the request slots. It asks the policy for a decision and
turns it into a `StepPlan`: decodes, then admissions, then as many prompt tokens as running requests can wait for, short
prompts first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate

from faser_backend.core.decision import MAX_VERIFIED_ROWS, Decision, PipelineMode
from faser_backend.core.plan import InFlight, PrefillChunk, StepPlan, StepRecord
from faser_backend.core.sequence import Sequence
from faser_backend.policy.block_manager import BlockManager
from faser_backend.policy.speculation import MAX_DRAFT_LAG, MAX_DRAFT_TOKENS, SpeculationPolicy

FIRST_ROWS = 64  # of prompts beside decodes, before their time is known
ENOUGH_ROWS = 0.25  # of max_prefill_tokens: so many cost little more in a step of their own
PREFILL_HORIZON_STEPS = 32  # that policies plan for a growing batch; an answer of 100 tokens takes 25 to 100 steps


@dataclass(eq=False)
class Scheduler:
    """Running sequences stay in order of admission; the newest is preempted first.

    No deadlock: the pools hold at least one sequence of full length, so the oldest always runs.
    max_draft_lag: tokens that the draft may read when it drafts; a sequence that lags more catches up first.
    """

    blocks: BlockManager
    policy: SpeculationPolicy
    _: KW_ONLY
    max_num_seqs: int
    max_prefill_tokens: int
    max_gap_ms: float = 0.0  # 0: no limit
    never_evicts: bool
    max_draft_lag: int = MAX_DRAFT_LAG

    def __post_init__(self) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._prompt_rows = float(min(FIRST_ROWS, self.max_prefill_tokens))
        self._num_read = 0  # prompt tokens of all sequences since the start
        self._due = [0] * self.max_num_seqs  # by slot: see _reading
        self._prefills_draft = False  # as last decided; until then the draft may turn out to rest
        self._free_slots = list(range(self.max_num_seqs - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a finished or cancelled sequence and returns its slot and blocks."""
        (self.waiting if sequence.slot < 0 else self.running).remove(sequence)
        if sequence.slot >= 0:
            self._give_back(sequence)

    def schedule(self, in_flight: InFlight, max_logit_rows: int | None = None) -> StepPlan:
        """Plans a step. in_flight: drafts of earlier steps, without those of sequences that have left. max_logit_rows:
        the target's limit per sequence."""
        ready = [sequence for sequence in self.running if sequence.is_ready]
        # A draft that rests does not read the prompts of a new wave either.
        decision = Decision([], prefills_draft=self._prefills_draft)
        if ready:
            waiting = accumulate(each.num_prefill_tokens for each in self._reading())
            is_soon = [total <= PREFILL_HORIZON_STEPS * self._num_prompt_rows for total in waiting]
            decision = self.policy.decide(ready, sum(is_soon))
            self._prefills_draft = decision.prefills_draft
        plan = StepPlan(decision, in_flight)
        self._plan_decodes(plan, ready, max_logit_rows or MAX_VERIFIED_ROWS)
        plan.sort_decodes()
        if not plan.preempted:
            self._admit(plan)
        self._plan_prefills(plan)
        plan.draft_prefills = [chunk for chunk in plan.draft_prefills if chunk.sequence.slot >= 0]
        plan.in_flight = in_flight.present()
        return plan

    def reserve(self, sequence: Sequence, num_draft_tokens: int) -> bool:
        """Allocates blocks for a client's tokens. Returns False, allocating nothing, if it could force a preemption."""
        blocks, num_tokens = self.blocks, sequence.num_tokens + num_draft_tokens
        num_new = blocks.num_blocks_for(num_tokens) - blocks.num_blocks_of(sequence.slot)
        if num_new > 0 and not self.never_evicts and num_new + len(self.running) > blocks.num_free_blocks:
            return False
        return blocks.grow(sequence.slot, num_tokens)

    def _reading(self) -> list[Sequence]:
        """Returns the sequences whose prompts are read, in that order: short prompts first. A prompt of n tokens is due
        once n tokens of any prompts were read after its admission, so later ones do not overtake it for ever."""
        return sorted((each for each in self.running if each.num_prefill_tokens), key=lambda each: self._due[each.slot])

    def _plan_decodes(self, plan: StepPlan, ready: list[Sequence], max_rows: int) -> None:
        longest = min(MAX_DRAFT_TOKENS, max_rows - 1, MAX_VERIFIED_ROWS // max(len(self.running), 1) - 1)
        in_flight = dict(zip(plan.in_flight.sequences, plan.in_flight.frontier.num_drafted.tolist(), strict=True))
        mode = plan.decision.mode
        # In ping-pong half of the sequences are verified while the others draft. If a cohort has grown too large, its
        # newest sequences wait for a step.
        most_ready = -(-len(ready) // 2) if mode is PipelineMode.PING_PONG else len(ready)
        for sequence, chosen in zip(ready, plan.decision.num_draft_tokens, strict=True):
            if sequence.slot < 0:  # preempted for an older sequence of this step
                continue
            num_ready = in_flight.get(sequence, 0)
            cap = sequence.request.max_draft_tokens
            usable = sequence.num_remaining_tokens - num_ready - 1
            wanted = max(0, min(chosen, longest, usable if cap is None else min(cap, usable)))
            if wanted and not self._catch_up(plan, sequence):
                wanted = 0
            if mode is PipelineMode.SERIAL:
                self._plan_decode(plan, sequence, 0 if num_ready else wanted, num_ready)
            elif wanted and sequence not in in_flight:  # an empty chain in flight is verified, not drafted again
                self._plan_draft(plan, sequence, wanted, 0)
            elif not num_ready or most_ready:
                most_ready -= num_ready > 0
                self._plan_decode(plan, sequence, 0, num_ready)
                # The draft has not read a client's chain, so it cannot extend it.
                can_run_ahead = mode is PipelineMode.RUN_AHEAD and num_ready and not sequence.client_draft
                if can_run_ahead and wanted and sequence.slot >= 0:
                    self._plan_draft(plan, sequence, wanted, num_ready)

    def _catch_up(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Plans the draft's reading of missed tokens. Returns False if the step's budget is too small."""
        lag = sequence.num_tokens - sequence.draft_len
        if lag <= self.max_draft_lag:
            return True
        budget = self._num_prompt_rows - sum(chunk.num_tokens for chunk in plan.draft_prefills)
        if num_tokens := min(lag - 1, budget):  # the last token is fed when it drafts
            plan.draft_prefills.append(PrefillChunk(sequence, sequence.draft_len, num_tokens))
        return num_tokens == lag - 1

    def _plan_decode(self, plan: StepPlan, sequence: Sequence, num_draft_tokens: int, num_ready: int) -> None:
        """Plans the verification of the anchor, the drafts in flight, and the drafts of this step."""
        num_tokens = sequence.num_tokens + num_ready
        if not self.blocks.grow(sequence.slot, num_tokens + num_draft_tokens):
            num_draft_tokens = 0
            if not self._make_room(plan, sequence, num_tokens):
                return
        plan.decodes.append(sequence)
        plan.num_draft_tokens.append(num_draft_tokens)

    def _plan_draft(self, plan: StepPlan, sequence: Sequence, num_ahead_tokens: int, num_ready: int) -> None:
        """Plans drafting for a later step. If blocks are short, the sequence decodes plainly."""
        if self.blocks.grow(sequence.slot, sequence.num_tokens + num_ready + num_ahead_tokens):
            plan.drafts.append(sequence)
            plan.num_ahead_tokens.append(num_ahead_tokens)
        elif not num_ready:
            self._plan_decode(plan, sequence, 0, 0)

    def _make_room(self, plan: StepPlan, sequence: Sequence, num_tokens: int) -> bool:
        """Allocates blocks for num_tokens, preempting the newest sequences. Returns False if this one was preempted."""
        while not self.blocks.grow(sequence.slot, num_tokens):
            victim = self.running.pop()
            plan.preempted.append((victim, victim.slot))
            self._give_back(victim)
            victim.target_len = victim.draft_len = 0
            victim.stats.num_preemptions += 1
            self.waiting.appendleft(victim)
            if victim is sequence:
                return False
        return True

    def _give_back(self, sequence: Sequence) -> None:
        self.blocks.free(sequence.slot)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def _admit(self, plan: StepPlan) -> None:
        while self.waiting and self._free_slots:
            sequence = self.waiting[0]
            num_tokens = 0 if sequence.owes_context_logits else sequence.num_tokens  # 0: every position is run
            match = self.blocks.match(sequence.token_ids, num_tokens, sequence.digests)
            if not self._has_room(sequence, self.blocks.num_needed_blocks(match, sequence.num_tokens)):
                return
            self.waiting.popleft()
            sequence.slot = self._free_slots.pop()
            self.blocks.admit(sequence.slot, match, sequence.num_tokens)
            sequence.target_len, sequence.draft_len = match.num_target_tokens, match.num_draft_tokens
            self._due[sequence.slot] = self._num_read + sequence.num_prefill_tokens
            stats = sequence.stats
            if not stats.num_preemptions:  # else they may be its own
                stats.num_reused_tokens += match.num_target_tokens
                stats.num_reused_blocks += len(match.blocks)
            plan.num_reused_blocks += len(match.blocks)
            self.running.append(sequence)
            plan.admitted.append(sequence)
            if sequence.is_ready and not sequence.client_draft:  # its prompt is reused, or a single token
                self._plan_decode(plan, sequence, 0, 0)

    def _has_room(self, sequence: Sequence, num_needed: int) -> bool:
        if not self.never_evicts:
            # One spare block per running sequence, so that an admission is not undone a step later.
            return num_needed + len(self.running) <= self.blocks.num_free_blocks
        reserved = sum(self.blocks.num_blocks_for(other.token_ids.size) for other in self.running)
        return reserved + self.blocks.num_blocks_for(sequence.token_ids.size) <= self.blocks.num_blocks

    def observe(self, record: StepRecord) -> None:
        """Lets the policy learn, and how many prompt tokens a step may read: running sequences wait max_gap_ms."""
        self.policy.observe(record)
        num_rows = sum(chunk.num_tokens for chunk in record.plan.prefills)
        num_steps = 2 if record.plan.decision.mode is PipelineMode.PING_PONG else 1  # per token of a sequence
        share = self.max_gap_ms * 1e3 / (num_steps * max(record.step_us, 1.0))
        if num_rows >= self._num_prompt_rows or (num_rows and share < 1.0):
            most = max(num_rows * share, 0.5 * self._prompt_rows, self.blocks.block_size)
            self._prompt_rows = min(most, self.max_prefill_tokens)

    @property
    def _num_prompt_rows(self) -> int:
        """How many prompt tokens a step may read beside decodes: a KV block or more, so prompts advance."""
        return int(self._prompt_rows) if self.max_gap_ms else self.max_prefill_tokens

    def _plan_prefills(self, plan: StepPlan) -> None:
        budget = self._num_prompt_rows if plan.decodes or plan.drafts else self.max_prefill_tokens
        kept_back = budget - self.max_prefill_tokens * ENOUGH_ROWS  # prompts that end here wait for the whole step
        for sequence in self._reading():
            if budget > kept_back and (num_tokens := min(sequence.num_prefill_tokens, budget)):
                plan.prefills.append(PrefillChunk(sequence, sequence.target_len, num_tokens))
                budget -= num_tokens
                self._num_read += num_tokens
                if num_tokens == sequence.num_prefill_tokens and not sequence.client_draft:  # its end gives a token
                    self._plan_decode(plan, sequence, 0, 0)

    def check_integrity(self) -> None:
        self.blocks.check_integrity()
        slots = [sequence.slot for sequence in self.running]
        assert sorted(slots + self._free_slots) == list(range(self.max_num_seqs))
        assert all(sequence.slot == -1 for sequence in self.waiting)
        assert not any(map(self.blocks.num_blocks_of, self._free_slots)), "a free slot holds blocks"
        for sequence in self.running:
            sequence.check_integrity()
            assert self.blocks.num_blocks_of(sequence.slot) * self.blocks.block_size >= sequence.target_len
