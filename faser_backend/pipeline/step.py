"""One step of the engine: schedule, propose, verify and read prompts, accept, commit.

Read this page first. Work in flight is passed along as values: a plan becomes a frontier (draft tokens), its
verification (the target's logits), an acceptance (emitted tokens) and then outputs. Drafts that a later step verifies
leave the step as `InFlight` and enter the next one. The constructor takes the device: models by partition, the sampler
and the proposer, which drafts.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from faser_backend.core.decision import WHOLE
from faser_backend.core.errors import Failure
from faser_backend.core.frontier import Acceptance, Frontier, Verification
from faser_backend.core.plan import InFlight, StepPlan, StepRecord
from faser_backend.core.ports import Behind, Clock, Partition, PhaseTimes, Sampler, run_behind
from faser_backend.core.request import EngineOutput, FinishReason
from faser_backend.core.sequence import Sequence
from faser_backend.pipeline.commit import add_extras, commit_tokens, final_output, round_counts
from faser_backend.pipeline.in_flight import join, merge, split, surviving, with_client_drafts, without_bonus
from faser_backend.pipeline.prefill import Prefiller
from faser_backend.pipeline.propose import Proposal, Proposer
from faser_backend.pipeline.rows import DecodeBatch
from faser_backend.pipeline.trim import admit, admit_by_price
from faser_backend.pipeline.verify import Verifier
from faser_backend.policy.scheduler import Scheduler

Result = TypeVar("Result")
MIN_FORCED_TOKENS = 2  # that a grammar must force before they replace the draft model's tokens in a step


class Span(NamedTuple):
    """When a phase ran, in nanoseconds of the engine's clock."""

    start_ns: int = 0
    end_ns: int = 0

    @property
    def us(self) -> float:
        return (self.end_ns - self.start_ns) / 1e3

    def overlap_us(self, other: Span) -> float:
        return max(0, min(self.end_ns, other.end_ns) - max(self.start_ns, other.start_ns)) / 1e3


class StepPhases(NamedTuple):
    """Results of drafting and verification in one step. verified is None if there was nothing to verify."""

    frontier: Frontier  # the verified draft tokens
    verified: tuple[Verification, Acceptance] | None
    ahead: InFlight  # drafted for later steps
    proposing: Span = Span()
    verifying: Span = Span()


@dataclass(eq=False)
class StepRunner:
    """Runs plans on the partitions of a device. Not thread-safe: one step at a time."""

    scheduler: Scheduler
    partitions: Mapping[str, Partition]  # by name; WHOLE is one of them
    sampler: Sampler
    clock: Clock
    proposer: Proposer | None  # None: every step decodes plainly
    behind: Behind | None = None  # where the policy learns, see device/runtime.py

    def __post_init__(self) -> None:
        self.times = PhaseTimes(self.clock)  # on the step thread and the target's lane
        self.draft_times = PhaseTimes(self.clock) if self.proposer is None else self.proposer.times
        self.prefiller = Prefiller(self.scheduler.blocks, self.sampler, self.clock, self.times, self.proposer)
        self.verifier = Verifier(self.sampler, self.times)
        self.observers: list[Callable[[StepRecord], None]] = [self._teach]
        self._lessons: Behind = deque()

    @property
    def phase_times_ns(self) -> dict[str, int]:
        """Nanoseconds per phase since the start, summed over both lanes."""
        return dict(Counter(self.times.total_ns) + Counter(self.draft_times.total_ns))

    def plan(self, in_flight: InFlight) -> StepPlan:
        """Decides the step: the scheduler asks the policy. Sampler state follows the request slots."""
        self.times.start()
        max_logit_rows = self.partitions[WHOLE].target.max_logit_rows
        plan = self.scheduler.schedule(with_client_drafts(in_flight, self.scheduler, max_logit_rows), max_logit_rows)
        for sequence, slot in plan.preempted:
            self.sampler.remove(slot)
            self._forget_drafts(sequence)
        for sequence in plan.admitted:
            sequence.stats.first_scheduled_ns = sequence.stats.first_scheduled_ns or self.clock.now_ns()
            request = sequence.request
            tokens = sequence.token_ids[: sequence.num_tokens]
            self.sampler.add(sequence.slot, request.sampling, tokens, sequence.num_prompt_tokens, request.end_ids)
            self._draft_forced(sequence)
        if self.behind is not None:
            self.behind.append(partial(run_behind, self._lessons))
        self.times.lap("schedule")
        return plan

    def run(self, plan: StepPlan) -> tuple[list[EngineOutput], InFlight]:
        """Runs a plan. Returns the emitted tokens, and the drafts for later steps."""
        start_ns = self.clock.now_ns()
        whole = self.partitions[WHOLE]
        draft_prefill_us = self.prefiller.read_by_draft(whole, plan.draft_prefills)
        prompts = self.prefiller.read(whole.target, plan)
        batch = DecodeBatch(plan.decodes, self.scheduler.blocks.block_tables, prompts)
        ready, waiting = split(plan.in_flight, batch.sequences)
        run_phases = self._run_overlapped if plan.drafts else self._run_serial
        phases = run_phases(plan, batch, ready)
        draft_prefill_us += self.prefiller.finish(whole, plan)
        if phases.verified is None:
            outputs = self._end_failed()
            return outputs, join(waiting, phases.ahead).present()
        verification, acceptance = phases.verified
        in_flight = join(waiting, surviving(phases.ahead, batch.sequences, phases.frontier, acceptance))
        # Planned lengths, not drafted ones: else the tokens of a chain could decide whether it is preempted.
        planned = dict(zip(plan.drafts, plan.num_ahead_tokens, strict=True))
        num_ahead = {sequence: planned.get(sequence, 0) for sequence in in_flight.sequences}
        outputs = self._commit(batch, phases.frontier, verification, acceptance, num_ahead) + self._end_failed()
        record = StepRecord(
            plan=plan,
            frontier=phases.frontier,
            verification=verification,
            acceptance=acceptance,
            num_tokens=batch.num_tokens,
            start_ns=start_ns,
            end_ns=self.clock.now_ns(),
            propose_us=phases.proposing.us,
            verify_us=phases.verifying.us,
            overlap_us=phases.verifying.overlap_us(phases.proposing),
            num_mixed_rows=0 if prompts is None else prompts.num_rows - prompts.logit_rows.size,
            draft_prefill_us=draft_prefill_us,
            ahead=phases.ahead,
        )
        for observe in self.observers:
            observe(record)
        self.times.lap("observe")
        return outputs, in_flight.present()

    def _teach(self, record: StepRecord) -> None:
        """Lets the policy learn, once a GPU has its next call; not from a step of newly read sequences alone."""
        if record.plan.decision.num_draft_tokens:
            self._lessons.append(partial(self.scheduler.observe, record))
        if self.behind is None:
            run_behind(self._lessons)

    def _run_serial(self, plan: StepPlan, batch: DecodeBatch, ready: Frontier) -> StepPhases:
        """Drafts for the sequences without drafts in flight, then verifies all sequences and reads prompts."""
        if not plan.decodes:
            return StepPhases(ready, None, InFlight.empty())

        def propose() -> Frontier:
            drafted = self._propose(plan, batch, plan.num_draft_tokens, Frontier.empty(len(batch)))
            self.times.start()
            return merge(ready, drafted)

        frontier, proposing = self._timed(propose)
        verified, verifying = self._timed(lambda: self._verify(plan, batch, frontier))
        return StepPhases(frontier, verified, InFlight.empty(), proposing, verifying)

    def _run_overlapped(self, plan: StepPlan, batch: DecodeBatch, ready: Frontier) -> StepPhases:
        """Verifies the drafts in flight while the draft model works for later steps, each on its share of the device.

        Both phases read committed tokens only, and write KV positions that the other phase does not touch.
        """
        frontier = without_bonus(ready, plan)
        drafting = DecodeBatch(plan.drafts, self.scheduler.blocks.block_tables)
        behind, _ = split(InFlight(plan.decodes, frontier), plan.drafts)

        def propose() -> InFlight:
            return InFlight(plan.drafts, self._propose(plan, drafting, plan.num_ahead_tokens, behind))

        if not plan.decodes:  # nothing to verify yet
            ahead, proposing = self._timed(propose)
            self.times.start()
            return StepPhases(ready, None, ahead, proposing)
        lanes = self.partitions[plan.decision.partition].lanes
        assert lanes is not None, f"partition {plan.decision.partition} has no lanes to overlap on"
        (verified, verifying), (ahead, proposing) = lanes.run_both(
            lambda: self._timed(lambda: self._verify(plan, batch, frontier)), lambda: self._timed(propose)
        )
        self.times.lap("wait")
        return StepPhases(frontier, verified, ahead, proposing, verifying)

    def _timed(self, phase: Callable[[], Result]) -> tuple[Result, Span]:
        """Runs a phase and measures it. It ends with tokens on the host, so the span includes queued device work."""
        start_ns = self.clock.now_ns()
        result = phase()
        return result, Span(start_ns, self.clock.now_ns())

    def _propose(self, plan: StepPlan, batch: DecodeBatch, num_draft_tokens: list[int], behind: Frontier) -> Frontier:
        if self.proposer is None or not any(num_draft_tokens):
            return Frontier.empty(len(batch))
        decision, lengths = plan.decision, np.array(num_draft_tokens, np.int64)
        num_candidates = 0 if decision.pruner is None else decision.pruner.num_candidates
        proposal = Proposal(lengths, behind, decision.trim, num_candidates)
        frontier = self.proposer.propose(self.partitions[decision.partition], batch, proposal)
        if decision.trim is None:
            return frontier
        # Rejection sampling must not judge a row by later draft tokens.
        admitted = admit if frontier.draft_probs is None else admit_by_price
        return replace(frontier, num_rows=admitted(decision.trim, frontier, batch.slots))

    def _verify(self, plan: StepPlan, batch: DecodeBatch, frontier: Frontier) -> tuple[Verification, Acceptance]:
        target = self.partitions[plan.decision.partition].target
        verification = self.verifier.verify(target, batch, frontier, plan.decision.pruner)
        acceptance = self.verifier.accept(batch, frontier, verification)
        self.times.lap("accept")
        return verification, acceptance

    def _commit(
        self,
        batch: DecodeBatch,
        frontier: Frontier,
        verification: Verification,
        acceptance: Acceptance,
        num_ahead: Mapping[Sequence, int],
    ) -> list[EngineOutput]:
        """Appends the tokens to their sequences. A finished sequence returns its slot and blocks at once; a failed one
        emits nothing.

        num_ahead: positions past its tokens for which a sequence keeps blocks.
        """
        outputs = []
        blocks, now = self.scheduler.blocks, self.clock.now_ns()
        emitted, num_emitted = acceptance.tokens.tolist(), acceptance.num_emitted.tolist()
        counts = round_counts(frontier, verification, acceptance)
        for index, sequence in enumerate(batch.sequences):
            if self._failure_of(sequence) is not None:
                continue
            tokens = emitted[index][: num_emitted[index]]
            output = EngineOutput(sequence.request.request_id, tokens)
            try:
                add_extras(output, sequence, self.sampler, verification, index)
                finish = commit_tokens(sequence, tokens, counts[index])  # cuts tokens, those of the output, at a stop
            except Exception as error:
                sequence.fail("request", error)
                continue
            stats = sequence.stats
            stats.first_token_ns = stats.first_token_ns or now
            stats.last_token_ns = now
            blocks.publish(sequence.slot, sequence.token_ids, sequence.target_len, sequence.draft_len)
            if finish is not None:
                output.finish_reason, output.stats = finish, stats
                self.release(sequence)
            else:
                self.sampler.append(sequence.slot, tokens)
                self._draft_forced(sequence)
                if self._failure_of(sequence) is not None:
                    continue
                blocks.truncate(sequence.slot, sequence.num_tokens + num_ahead.get(sequence, 0))
                if sequence.request.wants_stats:  # a copy: the sequence goes on counting
                    output.stats = replace(stats, num_allocated_blocks=blocks.num_blocks_of(sequence.slot))
            if output.log_probs is not None:
                del output.log_probs[len(tokens) :]
            if output.generation_logits is not None:
                output.generation_logits = output.generation_logits[: len(tokens)]
            outputs.append(output)
        self.times.lap("commit")
        return outputs

    def _draft_forced(self, sequence: Sequence) -> None:
        """Drafts the tokens that a grammar forces, without a model call, as if the client had sent them."""
        if self.proposer is None or sequence.request.sampling.grammar is None:
            return
        most = sequence.num_remaining_tokens - 1
        if sequence.request.max_draft_tokens is not None:
            most = min(most, sequence.request.max_draft_tokens)
        if len(forced := self.sampler.forced(sequence.slot)[:most]) >= MIN_FORCED_TOKENS:
            sequence.client_draft = tuple(forced)

    def _failure_of(self, sequence: Sequence) -> Failure | None:
        """Returns the failure that ends this sequence alone, if there is one."""
        return sequence.failure or self.sampler.failures.get(sequence.slot)

    def _end_failed(self) -> list[EngineOutput]:
        outputs = []
        for sequence in self.scheduler.running.copy():
            if (failure := self._failure_of(sequence)) is not None:
                self.release(sequence)
                outputs.append(final_output(sequence, FinishReason.ERROR, error=failure))
        return outputs

    def release(self, sequence: Sequence) -> None:
        """Removes a sequence from the engine, in any state."""
        if sequence.slot >= 0:
            sequence.stats.num_allocated_blocks = self.scheduler.blocks.num_blocks_of(sequence.slot)
            self.sampler.remove(sequence.slot)
        self._forget_drafts(sequence)
        self.scheduler.remove(sequence)

    def _forget_drafts(self, sequence: Sequence) -> None:
        if self.proposer is not None:
            self.proposer.forget(sequence)
