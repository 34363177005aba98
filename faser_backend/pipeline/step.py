"""One step of the engine: schedule, prefill, propose, verify, accept, commit.

This is the page to read first. What is in flight is passed along as values: a plan becomes a
frontier, its verification, an acceptance, and then outputs. Runners and sampler are given.
"""

from __future__ import annotations

from faser_backend.core.plan import Acceptance, Frontier, StepPlan, Verification
from faser_backend.core.ports import Clock, ModelRunner, Sampler
from faser_backend.core.request import RequestOutput
from faser_backend.core.sequence import Sequence
from faser_backend.pipeline.commit import commit_tokens, final_output
from faser_backend.pipeline.draft import Proposer
from faser_backend.pipeline.model_call import run_model
from faser_backend.pipeline.rows import DecodeBatch, token_range_rows
from faser_backend.pipeline.timing import PhaseTimes
from faser_backend.pipeline.verify import accept, emitted_log_probs, verify
from faser_backend.policy.scheduler import Scheduler


class Stepper:
    """Runs plans on a target, an optional draft and a sampler. Not thread-safe: one step at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        target: ModelRunner,
        draft: ModelRunner | None,
        sampler: Sampler,
        clock: Clock,
        *,
        uses_rejection: bool,
    ) -> None:
        self.scheduler = scheduler
        self.target = target
        self.sampler = sampler
        self.clock = clock
        self.times = PhaseTimes(clock)
        self.proposer = None
        if draft is not None:
            tables = scheduler.blocks.block_tables
            self.proposer = Proposer(draft, sampler, self.times, tables, keeps_probs=uses_rejection)
        self.num_accepted = 0  # draft tokens since the start, without bonus

    def plan(self) -> StepPlan:
        """Decides the step and moves sampler state along with the slots."""
        self.times.start()
        plan = self.scheduler.schedule()
        for _, slot in plan.preempted:
            self.sampler.remove(slot)
        for sequence in plan.admitted:
            sequence.stats.first_scheduled_ns = sequence.stats.first_scheduled_ns or self.clock.now_ns()
            request = sequence.request
            tokens = sequence.token_ids[: sequence.num_tokens]
            self.sampler.add(sequence.slot, request.sampling, tokens, sequence.num_prompt_tokens, request.end_ids)
        self.times.lap("schedule")
        return plan

    def run(self, plan: StepPlan) -> list[RequestOutput]:
        if plan.prefills:
            self._prefill(plan)
        if not plan.decodes:
            return []
        batch = DecodeBatch(plan.decodes, self.scheduler.blocks.block_tables)
        frontier = self._propose(batch, plan)
        verification = verify(self.target, self.times, batch, frontier)
        acceptance = accept(self.sampler, batch, frontier, verification)
        self.times.lap("accept")
        return self._commit(batch, frontier, verification, acceptance)

    def _prefill(self, plan: StepPlan) -> None:
        """Prompt chunks, through the target and, where the request drafts, through the draft."""
        tables = self.scheduler.blocks.block_tables
        sequences = [chunk.sequence for chunk in plan.prefills]
        stops = [chunk.start + chunk.num_tokens for chunk in plan.prefills]
        slots = [sequence.slot for sequence in sequences]
        starts = [chunk.start for chunk in plan.prefills]
        rows = token_range_rows(sequences, starts, stops, tables[slots], with_logits=False)
        self.times.lap("prefill_rows")
        run_model(self.target, rows)
        self.times.lap("prefill_model")
        if self.proposer is not None:
            drafting = [i for i, sequence in enumerate(sequences) if sequence.request.max_draft_tokens != 0]
            self.proposer.prefill([sequences[i] for i in drafting], [stops[i] for i in drafting])
        for sequence, stop in zip(sequences, stops, strict=True):
            sequence.target_len = stop
            self.scheduler.blocks.publish(sequence.slot, sequence.token_ids, stop, sequence.draft_len)
        self.times.lap("commit")

    def _propose(self, batch: DecodeBatch, plan: StepPlan) -> Frontier:
        if self.proposer is None or not any(plan.num_draft_tokens):
            return Frontier.empty(len(batch))
        return self.proposer.propose(batch, plan.num_draft_tokens)

    def _commit(
        self, batch: DecodeBatch, frontier: Frontier, verification: Verification, acceptance: Acceptance
    ) -> list[RequestOutput]:
        """Tokens enter their sequences; a finished sequence gives back slot and blocks at once."""
        outputs = []
        blocks = self.scheduler.blocks
        now = self.clock.now_ns()
        emitted = acceptance.tokens.tolist()
        counts = acceptance.num_emitted.tolist()
        drafted = frontier.num_drafted.tolist()
        accepted = acceptance.num_accepted.tolist()
        self.num_accepted += sum(accepted)
        for index, sequence in enumerate(batch.sequences):
            tokens = emitted[index][: counts[index]]
            log_probs = None
            if sequence.request.wants_log_probs:
                log_probs = emitted_log_probs(self.sampler, verification, acceptance, index).tolist()
            finish = commit_tokens(sequence, tokens, drafted[index], accepted[index])
            stats = sequence.stats
            stats.first_token_ns = stats.first_token_ns or now
            stats.last_token_ns = now
            blocks.publish(sequence.slot, sequence.token_ids, sequence.target_len, sequence.draft_len)
            if finish is not None:
                output = final_output(sequence, finish, tokens)
                self.release(sequence)
            else:
                self.sampler.append(sequence.slot, tokens)
                blocks.truncate(sequence.slot, sequence.num_tokens)
                output = RequestOutput(sequence.request.request_id, tokens)
            if log_probs is not None:
                output.log_probs = log_probs[: len(tokens)]
            outputs.append(output)
        self.times.lap("commit")
        return outputs

    def release(self, sequence: Sequence) -> None:
        """Takes a sequence out of the engine, whatever state it is in."""
        if sequence.slot >= 0:
            sequence.stats.num_allocated_blocks = self.scheduler.blocks.num_blocks_of(sequence.slot)
            self.sampler.remove(sequence.slot)
        self.scheduler.remove(sequence)
