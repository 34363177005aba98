"""Continuous batching: which sequences run in the next step, and with how many draft tokens.

Owns the waiting queue, the running list and the slots; is given a block manager and a policy.
Decodes come first, then admissions, then prefill chunks in what is left of the token budget.
"""

from __future__ import annotations

from collections import deque

from faser_backend.core.plan import PrefillChunk, StepPlan
from faser_backend.core.sequence import Sequence
from faser_backend.policy.block_manager import BlockManager
from faser_backend.policy.speculative_length import SpeculativeLength


class Scheduler:
    """Running sequences stay in order of admission; the newest is preempted first.

    No deadlock: the pools hold at least one sequence of full length, so the oldest always runs.
    """

    def __init__(
        self,
        blocks: BlockManager,
        length_policy: SpeculativeLength,
        *,
        max_num_seqs: int,
        max_prefill_tokens: int,
        never_evicts: bool,
    ) -> None:
        self.blocks = blocks
        self.length_policy = length_policy
        self.max_num_seqs = max_num_seqs
        self.max_prefill_tokens = max_prefill_tokens
        self.never_evicts = never_evicts
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, finished or cancelled, and gives back what it holds."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._give_back(sequence)

    def schedule(self) -> StepPlan:
        plan = StepPlan()
        self._plan_decodes(plan)
        if not plan.preempted:
            self._admit(plan)
        self._plan_prefills(plan)
        return plan

    def _plan_decodes(self, plan: StepPlan) -> None:
        ready = [sequence for sequence in self.running if sequence.is_ready]
        if not ready:
            return
        for sequence, wanted in zip(ready, self.length_policy.choose(ready), strict=True):
            if sequence.slot < 0:  # preempted for an older sequence of this step
                continue
            cap = sequence.request.max_draft_tokens
            usable = sequence.num_remaining_tokens - 1 if cap is None else min(cap, sequence.num_remaining_tokens - 1)
            granted = self._grow(sequence, min(wanted, usable), plan)
            if granted is not None:
                plan.decodes.append(sequence)
                plan.num_draft_tokens.append(granted)

    def _grow(self, sequence: Sequence, num_draft_tokens: int, plan: StepPlan) -> int | None:
        """Blocks for anchor and drafts: first without drafts, then at the cost of the newest."""
        while not self.blocks.grow(sequence.slot, sequence.num_tokens + num_draft_tokens):
            if num_draft_tokens:
                num_draft_tokens = 0
                continue
            victim = self.running.pop()
            plan.preempted.append((victim, victim.slot))
            self._give_back(victim)
            victim.target_len = victim.draft_len = 0
            victim.stats.num_preemptions += 1
            self.waiting.appendleft(victim)
            if victim is sequence:
                return None
        return num_draft_tokens

    def _give_back(self, sequence: Sequence) -> None:
        self.blocks.free(sequence.slot)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def _admit(self, plan: StepPlan) -> None:
        while self.waiting and self._free_slots:
            sequence = self.waiting[0]
            match = self.blocks.match(sequence.token_ids, sequence.num_tokens)
            if not self._has_room(sequence, self.blocks.num_needed_blocks(match, sequence.num_tokens)):
                return
            self.waiting.popleft()
            sequence.slot = self._free_slots.pop()
            self.blocks.admit(sequence.slot, match, sequence.token_ids, sequence.num_tokens)
            sequence.target_len, sequence.draft_len = match.num_target_tokens, match.num_draft_tokens
            stats = sequence.stats
            stats.num_reused_tokens += match.num_target_tokens
            stats.num_reused_blocks += len(match.blocks)
            plan.num_reused_blocks += len(match.blocks)
            self.running.append(sequence)
            plan.admitted.append(sequence)

    def _has_room(self, sequence: Sequence, num_needed: int) -> bool:
        if not self.never_evicts:
            # One spare block per running sequence, so that an admission is not undone a step later.
            return num_needed + len(self.running) <= self.blocks.num_free_blocks
        reserved = sum(self.blocks.num_blocks_for(other.token_ids.size) for other in self.running)
        return reserved + self.blocks.num_blocks_for(sequence.token_ids.size) <= self.blocks.num_blocks

    def _plan_prefills(self, plan: StepPlan) -> None:
        budget = self.max_prefill_tokens
        for sequence in self.running:
            missing = sequence.num_prefill_tokens
            if missing and budget:
                num_tokens = min(missing, budget)
                plan.prefills.append(PrefillChunk(sequence, sequence.target_len, num_tokens))
                budget -= num_tokens

    def check_integrity(self) -> None:
        self.blocks.check_integrity()
        slots = [sequence.slot for sequence in self.running]
        assert sorted(slots + self._free_slots) == list(range(self.max_num_seqs))
        assert all(sequence.slot == -1 for sequence in self.waiting)
        held = sum(self.blocks.num_blocks_of(slot) for slot in self._free_slots)
        assert held == 0, "a free slot holds blocks"
        for sequence in self.running:
            sequence.check_integrity()
            assert self.blocks.num_blocks_of(sequence.slot) * self.blocks.block_size >= sequence.target_len
