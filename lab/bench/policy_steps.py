"""Scheduler and policy at work without models: the real step logic around answers that are drawn from a seed.

Mirrors pipeline/step.py and pipeline/draft.py, with a stopwatch around everything that a policy decides.
"""

from __future__ import annotations

import time
from collections import abc, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from faser_backend.core.decision import WHOLE, Decision, ExitView
from faser_backend.core.frontier import Acceptance, Frontier, Verification
from faser_backend.core.plan import InFlight, StepPlan
from faser_backend.core.record import StepRecord
from faser_backend.core.request import Request
from faser_backend.core.sequence import Sequence
from faser_backend.pipeline.commit import commit_tokens, round_counts
from faser_backend.pipeline.in_flight import join, merge, split, surviving
from faser_backend.pipeline.phases import without_bonus
from faser_backend.policy.block_manager import BlockManager
from faser_backend.policy.calibration import KINDS, MarginCounts
from faser_backend.policy.cost_model import DRAFT, TARGET, CallCost, CostModel, Curve, OverheadCost
from faser_backend.policy.early_exit import ExitCalibration
from faser_backend.policy.scheduler import Scheduler
from faser_backend.policy.speculation import Knowledge, SpeculationPolicy
from faser_backend.policy.trim import admit, chances, continues

PARTS = ("schedule", "decide", "trim", "exit", "observe")
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 100, 100
VOCAB_SIZE = 50_000


def example_knowledge() -> Knowledge:
    """A profile like the demo pair's on two cores: rounded figures, all of a policy's machinery has work."""
    no_keys = Curve(np.array([0.0, 1.0]), np.zeros(2))
    knots = np.array([0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0])

    def segment(fixed_us: float, row_us: float) -> CallCost:
        return CallCost(Curve.from_slopes(knots, fixed_us, np.full(knots.size, row_us)), no_keys, 1.0, 2.0, 0.01, 1.0)

    segments = {
        (TARGET, WHOLE): (segment(500.0, 30.0), segment(500.0, 30.0)),
        (DRAFT, WHOLE): (segment(150.0, 15.0),),
        (TARGET, "1/1"): (segment(550.0, 50.0), segment(550.0, 50.0)),
        (DRAFT, "1/1"): (segment(90.0, 15.0),),
    }
    costs = CostModel(segments, OverheadCost(200.0, 15.0, 8.0, 50.0, 8.0), np.zeros(1), is_measured=True)
    margins = np.random.default_rng(0).exponential(2.5, 4000)
    is_accepted = np.random.default_rng(1).random(4000) < match_chance(margins)
    exits = (
        ExitCalibration(
            segment=0,
            layer=3,
            bias=-1.0,
            chance_weight=0.8,
            margin_weight=0.6,
            threshold=0.1,
            retention=0.95,
            pruned_shares=(0.02, 0.05, 0.1, 0.1, 0.15),
            trimmed_retention=0.95,
            trimmed_pruned_share=0.05,
        ),
    )
    return Knowledge(costs, dict.fromkeys(KINDS, MarginCounts.of(margins, is_accepted)), exits)


def match_chance(margins: np.ndarray) -> np.ndarray:
    """How often the synthetic target accepts a draft token of this margin."""
    return 1.0 - 0.7 * np.exp(-0.55 * margins)


@dataclass
class Stopwatch:
    """Nanoseconds per part, summed over a step; one row of PARTS per step."""

    spent_ns: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    steps: list[list[int]] = field(default_factory=list)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter_ns()
        yield
        self.spent_ns[part] += time.perf_counter_ns() - start

    def end_step(self) -> None:
        self.spent_ns["schedule"] -= self.spent_ns["decide"]  # the scheduler asks the policy
        self.steps.append([self.spent_ns.pop(part, 0) for part in PARTS])


class TimedPolicy:
    """A policy whose decisions are timed where the scheduler asks for them."""

    def __init__(self, policy: SpeculationPolicy, watch: Stopwatch) -> None:
        self.is_drafting, self.partitions = policy.is_drafting, policy.partitions
        self.observe = policy.observe
        self._policy, self._watch = policy, watch

    def decide(self, sequences: abc.Sequence[Sequence], num_coming: int = 0) -> Decision:
        with self._watch("decide"):
            return self._policy.decide(sequences, num_coming)


class SyntheticEngine:
    """Steps as pipeline/step.py makes them, around models that answer at random."""

    def __init__(self, policy: SpeculationPolicy, costs: CostModel, batch: int, seed: int) -> None:
        self.watch = Stopwatch()
        self.rng = np.random.default_rng(seed)
        self.costs = costs
        context = NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS
        blocks = BlockManager(batch * (context // 16 + 2), 16, batch, context, can_reuse=False)
        timed = TimedPolicy(policy, self.watch)
        self.scheduler = Scheduler(blocks, timed, max_num_seqs=batch, max_prefill_tokens=256, never_evicts=False)
        self.in_flight = InFlight.empty()
        self._num_drafted = self._num_verified = 0
        for _ in range(batch):
            self._submit()

    @property
    def mean_drafted(self) -> float:
        """Draft tokens per verified sequence and step."""
        return self._num_drafted / max(self._num_verified, 1)

    def _submit(self) -> None:
        prompt = self.rng.integers(VOCAB_SIZE, size=NUM_PROMPT_TOKENS)
        self.scheduler.add(Sequence.from_request(Request("", prompt, NUM_OUTPUT_TOKENS), 0))

    def step(self) -> None:
        with self.watch("schedule"):
            plan = self.scheduler.schedule(self.in_flight)
        for chunk in plan.prefills:
            chunk.sequence.target_len = chunk.start + chunk.num_tokens
        ready, waiting = split(plan.in_flight, plan.decodes)
        ahead = InFlight.empty()
        if plan.drafts:
            frontier = without_bonus(ready, plan)
            behind, _ = split(InFlight(plan.decodes, frontier), plan.drafts)
            ahead = InFlight(plan.drafts, self._draft(plan.decision, plan.num_ahead_tokens, behind))
        else:
            empty = Frontier.empty(len(plan.decodes))
            frontier = merge(ready, self._draft(plan.decision, plan.num_draft_tokens, empty))
        if plan.decodes:
            acceptance = self._verify(plan, frontier)
            ahead = surviving(ahead, plan.decodes, frontier, acceptance)
        self.in_flight = join(waiting, ahead).present()
        self.watch.end_step()

    def _draft(self, decision: Decision, num_draft_tokens: list[int], behind: Frontier) -> Frontier:
        """As Proposer.propose with random tokens: trimming decides after each draft call who goes on."""
        wanted = np.array(num_draft_tokens, np.int64)
        size, width, trim = wanted.size, int(wanted.max(initial=0)), decision.trim
        margins = self.rng.exponential(2.5, (size, width)).astype(np.float32)
        num_drafted, survival = np.zeros(size, np.int64), np.ones(size)
        active = np.flatnonzero(wanted)
        if trim is not None and behind.margins is not None:
            is_token = np.arange(behind.margins.shape[1]) < behind.num_drafted[:, None]
            survival = np.where(is_token, chances(trim, behind.margins), 1.0).prod(axis=1)
        while active.size:
            column = int(num_drafted[active[0]])
            num_drafted[active] += 1
            is_open = wanted[active] > column + 1
            if trim is not None:
                with self.watch("trim"):
                    survival[active] *= chances(trim, margins[active, column])
                    if is_open.any():
                        is_open &= continues(trim, survival[active])
            active = active[is_open]
        width = int(num_drafted.max(initial=0))
        num_candidates = 0 if decision.pruner is None else decision.pruner.num_candidates
        candidates = self.rng.integers(VOCAB_SIZE, size=(size, width, num_candidates)) if num_candidates else None
        drafted = self.rng.integers(VOCAB_SIZE, size=(size, width))
        frontier = Frontier(drafted, num_drafted, num_drafted + 1, margins[:, :width], candidates)
        if trim is not None and width:
            with self.watch("trim"):
                frontier = replace(frontier, num_rows=admit(trim, frontier))
        return frontier

    def _verify(self, plan: StepPlan, frontier: Frontier) -> Acceptance:
        size, width = frontier.drafted.shape
        self._num_drafted += int(frontier.num_drafted.sum())
        self._num_verified += size
        num_kept, pruner = frontier.num_rows, plan.decision.pruner
        if pruner is not None and frontier.candidates is not None:
            for segment in sorted(pruner.exits):
                leads = self.rng.normal(2.0, 3.0, (size, width)).astype(np.float32)
                with self.watch("exit"):
                    num_kept = pruner.keep(ExitView(segment, leads, frontier, num_kept))
        margins = np.zeros((size, width)) if frontier.margins is None else frontier.margins
        passes = np.zeros((size, width + 1), np.bool_)
        passes[:, :-1] = self.rng.random((size, width)) < match_chance(margins)
        passes &= np.arange(width + 1) < np.minimum(frontier.num_drafted, num_kept)[:, None]
        num_accepted = passes.argmin(axis=1)
        tokens = self.rng.integers(VOCAB_SIZE, size=(size, width + 1))
        acceptance = Acceptance(tokens, num_accepted, np.minimum(num_accepted + 1, num_kept))
        cu_rows = np.concatenate([[0], np.cumsum(num_kept)])
        verification = Verification(np.zeros((0, 0), np.float32), cu_rows, num_kept, 0)
        record = self._record(plan, frontier, verification, acceptance)
        self._commit(plan, record)
        with self.watch("observe"):
            self.scheduler.policy.observe(record)
        return acceptance

    def _record(
        self, plan: StepPlan, frontier: Frontier, verification: Verification, acceptance: Acceptance
    ) -> StepRecord:
        num_tokens = np.array([sequence.num_tokens for sequence in plan.decodes])
        size, num_rows, context = len(plan.decodes), int(verification.num_kept.sum()), int(num_tokens.max())
        noise = float(np.exp(self.rng.normal(0.0, 0.1)))
        depth = int(frontier.num_drafted.max(initial=0))
        propose_us = noise * depth * float(self.costs.call_us(DRAFT, WHOLE, size, size, context))
        verify_us = noise * float(self.costs.call_us(TARGET, WHOLE, num_rows, size, context, max_rows=depth + 1))
        end_ns = int(1e3 * (propose_us + verify_us + float(self.costs.overhead.step(size, num_rows))))
        return StepRecord(plan, frontier, verification, acceptance, num_tokens, 0, end_ns, propose_us, verify_us, 0.0)

    def _commit(self, plan: StepPlan, record: StepRecord) -> None:
        counts = round_counts(record.frontier, record.verification, record.acceptance)
        for row, sequence in enumerate(plan.decodes):
            emitted = record.acceptance.tokens[row, : record.acceptance.num_emitted[row]].tolist()
            if commit_tokens(sequence, emitted, counts[row]) is not None:
                self.scheduler.remove(sequence)
                self._submit()
