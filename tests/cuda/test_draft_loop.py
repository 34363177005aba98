"""Chains drafted at once equal chains drafted token by token: the same frontiers, in every policy and mode."""

from dataclasses import replace

import numpy as np
import pytest

from faser_backend.core.batch import RowBatch, SamplingRows
from faser_backend.core.decision import PipelineMode
from faser_backend.core.frontier import Frontier
from faser_backend.core.plan import StepRecord
from faser_backend.core.ports import DraftTokens, Lanes, ModelRunner, Partition
from faser_backend.core.request import Request
from faser_backend.cpu.sampler import NumpySampler
from faser_backend.cuda.sampler import TorchSampler
from faser_backend.pipeline.propose import Proposal
from faser_backend.pipeline.rows import DecodeBatch, run_model, single_rows
from faser_backend.pipeline.step import StepRunner
from tests.pipeline.test_engine import alone, random_requests
from tests.support.fakes import CountingClock, SequentialLanes
from tests.support.forced_engine import LANES, POLICIES, Case, agrees, open_forced
from tests.support.forcing import ADMITS_ALL, ADMITS_NOTHING, Change, forced, random_everything, random_rule
from tests.support.harness import FakeEngine, drive

SERIAL, RUN_AHEAD, PING_PONG = PipelineMode
TRIMS = {
    "all": ADMITS_ALL,
    "nothing": ADMITS_NOTHING,
    **{f"random {seed}": random_rule(np.random.default_rng(seed)) for seed in range(2)},
}


class FakeLoop:
    """The definition of core.ports.DraftLoop: calls of a runner and a sampler, alternating."""

    def __init__(self, runner: ModelRunner, sampler: NumpySampler | TorchSampler) -> None:
        self._runner = runner
        self._sampler = sampler
        self.num_calls = 0

    def can_draft(self, slots: np.ndarray) -> bool:
        return not self._sampler.parameters.has_rules[slots].any()

    def draft(
        self, rows: RowBatch, slots: np.ndarray, num_draft_tokens: np.ndarray, num_candidates: int
    ) -> DraftTokens:
        self.num_calls += 1
        starts, tables = rows.context_lens + rows.rows_per_sequence, rows.block_tables
        size, width = slots.size, int(num_draft_tokens.max())
        # Meaningless entries hold values that would be noticed.
        tokens = np.full((size, width), -(10**6))
        margins = np.full((size, width), np.nan, np.float32)
        candidates = np.full((size, width, num_candidates), -(10**6))
        active = np.arange(size)
        for step in range(width):
            drawing = SamplingRows(slots[active], starts[active] + step, active, active * 0 + step, tokens)
            drawn = self._sampler.sample_draft(run_model(self._runner, rows), drawing, num_candidates)
            tokens[active, step], margins[active, step] = drawn.tokens, drawn.margins
            if drawn.candidates is not None:
                candidates[active, step] = drawn.candidates
            active = np.flatnonzero(num_draft_tokens > step + 1)
            rows = single_rows(tokens[active, step], starts[active] + step, tables[active])
        return DraftTokens(tokens, margins, candidates if num_candidates else None)


def add_loops(fake: FakeEngine) -> list[FakeLoop]:
    """Gives every partition a loop over its draft."""
    partitions, loops = fake.step_runner.partitions, []
    assert isinstance(partitions, dict) and isinstance(fake.step_runner.sampler, NumpySampler)
    for name, partition in partitions.items():
        if partition.draft is not None:
            loops.append(FakeLoop(partition.draft, fake.step_runner.sampler))
            partitions[name] = replace(partition, draft_loop=loops[-1])
    return loops


def never_cut(fake: FakeEngine) -> None:
    """Lets the host draft chains in full length where a loop would draft them."""
    proposer, sampler = fake.step_runner.proposer, fake.step_runner.sampler
    assert proposer is not None and isinstance(sampler, NumpySampler)
    propose = proposer.propose

    def in_full(partition: Partition, batch: DecodeBatch, proposal: Proposal) -> Frontier:
        slots = batch.slots[proposal.num_draft_tokens > 0]
        is_cut = sampler.parameters.has_rules[slots].any()
        return propose(partition, batch, proposal if is_cut else replace(proposal, trim=None))

    proposer.propose = in_full  # type: ignore[method-assign]


def recorded_frontiers(step_runner: StepRunner) -> list[tuple]:
    """Records every field of each step's frontier.

    Phase times no longer read the engine's clock: the number of laps differs, and policies may read the clock.
    """
    frontiers: list[tuple] = []

    def note(record: StepRecord) -> None:
        frontier = record.frontier
        arrays = (frontier.drafted, frontier.num_drafted, frontier.num_rows, frontier.margins, frontier.candidates)
        frontiers.append(tuple(None if array is None else array.copy() for array in arrays))

    step_runner.scheduler.max_gap_ms = 0.0  # how many prompt tokens a step reads depends on no clock
    step_runner.observers.append(note)
    step_runner.times._clock = step_runner.draft_times._clock = CountingClock()
    return frontiers


def assert_equal_frontiers(one: list[tuple], other: list[tuple]) -> None:
    assert len(one) == len(other)
    for step, (first, second) in enumerate(zip(one, other, strict=True)):
        for name, a, b in zip(
            ("drafted", "num_drafted", "num_rows", "margins", "candidates"), first, second, strict=True
        ):
            np.testing.assert_equal(a, b, err_msg=f"{name} of step {step}")


def mostly_plain(seed: int, count: int) -> list[Request]:
    """Draws plain requests and one with rules: while that runs in a batch, its chains are drafted in steps."""
    return [r for i, r in enumerate(random_requests(seed, count)) if i % 4 != 3 or i == 7]


@pytest.fixture(scope="module")
def case() -> Case:
    requests = mostly_plain(3, 16)
    return Case(requests, alone(requests))


def compare(case: Case, policy: str, change: Change, other_change: Change, lanes: Lanes | None = None, **options):
    """Runs both ways. change, other_change: equal changes, each with its own generator."""
    seen, num_loops = [], 0
    for with_loop, changed in ((False, change), (True, other_change)):
        fake = open_forced(policy, changed, lanes, **options)
        loops = add_loops(fake) if with_loop else []
        if not with_loop and fake.step_runner.proposer is not None:
            never_cut(fake)
        seen.append(recorded_frontiers(fake.step_runner))
        agrees(fake, case, 0)
        num_loops += sum(loop.num_calls for loop in loops)
    assert_equal_frontiers(*seen)
    return num_loops


@pytest.mark.parametrize("mode", PipelineMode)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_in_every_mode(case: Case, policy: str, mode: PipelineMode) -> None:
    num_blocks = (200, 30)[(list(POLICIES).index(policy) + list(PipelineMode).index(mode)) % 2]
    num_loops = compare(case, policy, forced(mode), forced(mode), num_blocks=num_blocks)
    # Adaptive ones decode plainly if they expect no gain; with answers this short they may not resume drafting.
    # Others draft with a loop before and after the request with rules runs, which is in most steps.
    least = 1 if policy in {"faser", "survival", "gp-lcb"} else 4
    assert num_loops == 0 if policy == "none" else num_loops > least


@pytest.mark.parametrize("mode", PipelineMode)
@pytest.mark.parametrize("trim", TRIMS)
def test_trim_rules_decide_about_rows_alone(case: Case, trim: str, mode: PipelineMode) -> None:
    change = forced(mode, trim=TRIMS[trim])
    assert compare(case, "fixed:6", change, change, num_blocks=60) > 10


@pytest.mark.parametrize("verifies_first", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_everything_may_change_at_every_step(case: Case, seed: int, verifies_first: bool) -> None:
    lanes = SequentialLanes(verifies_first=verifies_first)
    changes = random_everything(seed), random_everything(seed)
    assert compare(case, "fixed:4", *changes, lanes, num_blocks=(200, 40, 26)[seed % 3]) > 10


@pytest.mark.parametrize("seed", range(3))
def test_on_lanes_of_threads_tokens_are_those_of_plain_decoding(case: Case, seed: int) -> None:
    fake = open_forced("fixed:4", random_everything(seed), LANES["threads"](), num_blocks=40)
    loops = add_loops(fake)
    agrees(fake, case, seed)
    assert sum(loop.num_calls for loop in loops) > 10


def test_rejection_sampling_asks_no_loop() -> None:
    fake = open_forced("fixed:4", forced(SERIAL), uses_rejection=True)
    loops = add_loops(fake)
    drive(fake.engine, mostly_plain(0, 6))
    assert [loop.num_calls for loop in loops] == [0, 0]
    assert fake.engine.metrics().num_drafted > 20
