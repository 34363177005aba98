"""The controller in virtual time: it stops where speculation does not pay, comes back, and does not flap."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from faser_backend.config import EngineConfig
from faser_backend.core.decision import WHOLE, PipelineMode
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence
from faser_backend.policy.arms import PLAIN, SERIAL, UNIFORM, Arm, Place, promise
from faser_backend.policy.corrections import Corrections
from faser_backend.policy.cost_model import DRAFT, TARGET, CallCost, CostModel, Curve, OverheadCost
from faser_backend.policy.faser import PATIENCE, WEIGH_EVERY, Faser
from faser_backend.policy.knowledge import Knowledge
from faser_backend.policy.pricing import Pricer
from faser_backend.policy.probing import PROBE_STEPS, Prober
from faser_backend.policy.speculation import MAX_ADAPTIVE_TOKENS
from lab.simulation.acceptance import demo_process
from lab.simulation.engine import World, build_sim_engine, run_open_loop
from lab.traces import Trace
from tests.harness import request

OVERHEAD = OverheadCost(50.0, 2.0, 1.0, 10.0, 1.0, 50.0, 1.0, 40.0, trim_us=15.0, trim_sequence_us=3.0)


def call(fixed_us: float, row_us: float) -> CallCost:
    start = np.zeros(1)
    return CallCost(Curve.from_slopes(start, fixed_us, np.array([row_us])), Curve.from_slopes(start, 0.0, np.zeros(1)))


def costs(draft_us: float, target_us: float, row_us: float, split: tuple[float, float] | None = None) -> CostModel:
    """split: (draft_us, target_us) on the partition 1/1, where there is one."""
    segments = {(TARGET, WHOLE): (call(target_us, row_us),), (DRAFT, WHOLE): (call(draft_us, 1.0),)}
    if split is not None:
        segments |= {(TARGET, "1/1"): (call(split[1], row_us),), (DRAFT, "1/1"): (call(split[0], 1.0),)}
    return CostModel(segments, OVERHEAD, np.zeros(1), is_measured=True, is_padded=False)


MEMORY_BOUND = costs(100.0, 2000.0, 5.0)
COMPUTE_BOUND = costs(2000.0, 100.0, 400.0)
SLOW_DRAFT = costs(900.0, 1000.0, 40.0)  # what is told to be SLOW_DRAFT_BELIEVED
SLOW_DRAFT_BELIEVED = costs(50.0, 1000.0, 40.0)


def tokens_per_us(
    truth: CostModel,
    policy: str | Faser,
    num_requests: int = 8,
    observer=None,
    *,
    acceptance: float = 0.7,
    num_tokens: int = 300,
) -> float:
    """Output tokens per virtual microsecond of num_requests at once, num_tokens each."""
    process = demo_process("sampled").at_level(acceptance)
    world = World("test", truth, process, (4,), (1,), (), 16384, 2048, ())
    config = EngineConfig.from_options(policy=policy if isinstance(policy, str) else "faser", max_queue_size=0)
    chosen = None if isinstance(policy, str) else policy
    sim = build_sim_engine(world, config, seed=0, max_output_tokens=num_tokens, policy=chosen)
    if observer is not None:
        sim.observers.append(observer)
    lengths = np.full(num_requests, 4), np.full(num_requests, num_tokens)
    outcome = run_open_loop(sim, Trace(np.zeros(num_requests), *lengths, "made up"))
    return num_tokens * num_requests / (outcome.seconds * 1e6)


def knowledge_of(model: CostModel) -> Knowledge:
    return World("test", model, demo_process("sampled"), (4,), (1,), (), 16384, 512, ()).knowledge()


def knowing(model: CostModel) -> Faser:
    return Faser(knowledge_of(model), MAX_ADAPTIVE_TOKENS)


@pytest.mark.parametrize("num_requests", [1, 8, 32])
@pytest.mark.parametrize("truth", [MEMORY_BOUND, COMPUTE_BOUND], ids=["memory-bound", "compute-bound"])
def test_never_below_plain_decoding(truth: CostModel, num_requests: int):
    assert tokens_per_us(truth, "faser", num_requests) > 0.98 * tokens_per_us(truth, "none", num_requests)


@pytest.mark.parametrize("num_requests", [1, 8])
def test_is_as_good_as_the_best_fixed_length_where_rows_are_cheap(num_requests: int):
    """In 600 tokens each, of which a hundredth goes to probes and a few steps to first looks."""
    speed = partial(tokens_per_us, MEMORY_BOUND, num_requests=num_requests, num_tokens=600)
    best = max(speed(f"fixed:{length}") for length in (1, 2, 4, 8))
    assert speed("faser") > (1.0 if num_requests == 1 else 0.97) * best


def test_stops_where_the_profile_was_wrong_about_the_draft():
    plain = tokens_per_us(SLOW_DRAFT, "none")
    trusting = tokens_per_us(SLOW_DRAFT, "fixed:8")
    assert trusting < 0.8 * plain, "else there is nothing to find out"
    assert tokens_per_us(SLOW_DRAFT, knowing(SLOW_DRAFT_BELIEVED)) > 0.9 * plain


def test_probes_while_it_decodes_plainly():
    drafted: list[int] = []

    def listen(record: StepRecord) -> None:
        drafted.append(int(record.frontier.num_drafted.max()))

    tokens_per_us(costs(100.0, 100.0, 100.0), "faser", 16, observer=listen, num_tokens=1200)
    late = drafted[len(drafted) // 4 :]
    assert 0 < np.count_nonzero(late) < 0.05 * len(late)


def test_speculation_survives_slow_first_steps():
    """Before acceptance is known: whoever stops then needs hundreds of steps to come back."""

    class Disturbed(Faser):
        num_steps = 0

        def observe(self, record: StepRecord) -> None:
            self.num_steps += 1
            if self.num_steps <= 48 and record.frontier.num_drafted.any():
                record = replace(record, end_ns=record.end_ns + (record.end_ns - record.start_ns) // 3)
            super().observe(record)

    has_drafted: list[bool] = []
    model = costs(500.0, 1000.0, 100.0)  # by its promise speculation is 1.09 times as fast as plain decoding
    policy = Disturbed(knowledge_of(model), MAX_ADAPTIVE_TOKENS)
    note = lambda record: has_drafted.append(bool(record.frontier.num_drafted.any()))  # noqa: E731
    tokens_per_us(model, policy, 1, observer=note, acceptance=0.9)
    assert np.mean(has_drafted) > 0.9


def test_one_request_is_told_of_other_texts_soon():
    """What was learned of easy texts, 2,000 tokens of them, does not draft on for ever."""
    model = costs(300.0, 1000.0, 60.0)
    policy = knowing(model)
    drafted: list[int] = []
    note = lambda record: drafted.append(int(record.frontier.num_drafted.max()))  # noqa: E731
    tokens_per_us(model, policy, 1, acceptance=0.95, num_tokens=2000, observer=note)
    easy = float(np.mean(drafted[-200:]))
    drafted.clear()
    tokens_per_us(model, policy, 1, acceptance=0.5, num_tokens=1500, observer=note)
    late = float(np.mean(drafted[-200:]))
    fresh = list[int]()
    note_fresh = lambda record: fresh.append(int(record.frontier.num_drafted.max()))  # noqa: E731
    tokens_per_us(model, knowing(model), 1, acceptance=0.5, num_tokens=1500, observer=note_fresh)
    assert easy > 2 * np.mean(fresh[-200:]) + 1, "else there is nothing to forget"
    assert late < np.mean(fresh[-200:]) + 1


def test_looks_back_at_the_arm_that_was_deposed():
    corrections = Corrections()
    corrections.place = Place(1, is_sampled=False)
    prober = Prober(corrections)
    prices = {PLAIN: 1e9, UNIFORM: 900.0, SERIAL: 50.0}  # of 1000 for as many plain steps

    def run(chosen: Arm, num_steps: int) -> list[Arm]:
        arms = []
        for _ in range(num_steps):
            others = {arm: us for arm, us in prices.items() if arm != chosen}
            prober.consider(chosen, 1, 100.0, others)
            arms.append(prober.arm(chosen))
            corrections.observe(arms[-1], 1, 100.0, 100.0, is_chosen=arms[-1] == chosen)
            if arms[-1] != chosen:
                prober.pay(1e6)  # so that nothing is left for a probe that is not urgent
        return arms

    corrections.observe(PLAIN, 1, 100.0, 100.0, is_chosen=False)
    run(UNIFORM, 300)
    arms = run(SERIAL, 300)
    first = arms.index(UNIFORM)
    assert 16 <= first <= 48, "once the new arm is known"
    assert arms[first : first + PROBE_STEPS] == [UNIFORM] * PROBE_STEPS
    assert set(arms[first + PROBE_STEPS :]) == {SERIAL}, "once"


def test_changes_over_only_after_patience_and_not_back_and_forth():
    arms: list[Arm | None] = []
    policy = knowing(costs(300.0, 1000.0, 150.0))  # plain and serial are nearly alike

    def listen(record: StepRecord) -> None:
        arms.append(policy.arm)

    tokens_per_us(costs(300.0, 1000.0, 150.0), policy, 4, observer=listen)
    changes = sum(before != after for before, after in itertools.pairwise(arms))
    assert changes <= len(arms) / (4 * (PATIENCE + WEIGH_EVERY))


def test_overlaps_where_the_split_is_as_fast_as_the_whole():
    free_split = costs(375.0, 1000.0, 25.0, split=(375.0, 1000.0))
    modes: list[PipelineMode] = []
    note_mode = lambda record: modes.append(record.plan.decision.mode)  # noqa: E731
    faser = tokens_per_us(free_split, "faser", 8, observer=note_mode, acceptance=0.9)
    assert set(modes) & {PipelineMode.PING_PONG, PipelineMode.RUN_AHEAD}
    assert set(modes[:24]) == {PipelineMode.SERIAL}, "overlapped before serial rounds are known"
    assert faser > tokens_per_us(free_split, "survival", 8, acceptance=0.9)


def test_stays_serial_where_the_split_is_slow():
    slow_split = costs(100.0, 2000.0, 5.0, split=(200.0, 8000.0))
    modes = set[PipelineMode]()
    tokens_per_us(slow_split, "faser", 8, observer=lambda record: modes.add(record.plan.decision.mode))
    assert modes == {PipelineMode.SERIAL}


def test_serial_promise_is_the_best_uniform_round_by_hand():
    pricer = Pricer(Knowledge(MEMORY_BOUND), MAX_ADAPTIVE_TOKENS)
    chance = pricer.beliefs.curve.mean_chance
    for arm, deciding_us in ((UNIFORM, 0.0), (SERIAL, 15.0 + 3.0 * 4)):
        by_hand = []
        for length in range(1, MAX_ADAPTIVE_TOKENS + 1):
            rows = 4 * (length + 1)
            drafting_us = length * (100.0 + 1.0 * 4 + 10.0 + 1.0 * 4 + deciding_us)
            us = 2000.0 + 5.0 * rows + 50.0 + 2.0 * 4 + 1.0 * rows + drafting_us
            by_hand.append(4 * sum(chance**kept for kept in range(length + 1)) / us)
        assert promise(pricer, arm, 4, 32).tokens_per_us == pytest.approx(max(by_hand))
    assert promise(pricer, PLAIN, 4, 32).tokens_per_us == pytest.approx(4 / (2000.0 + 20.0 + 50.0 + 8.0 + 4.0))


def test_corrections_learn_a_ratio_and_pass_it_on_to_what_never_ran():
    corrections = Corrections()
    corrections.place = Place(3, is_sampled=False)
    for _ in range(300):
        corrections.observe(SERIAL, 3, 100.0, 150.0, is_chosen=False)
    assert corrections.slowdown(SERIAL) == pytest.approx(1.5, rel=0.01)
    assert corrections.slowdown(PLAIN) == pytest.approx(1.5, rel=0.01)
    corrections.observe(PLAIN, 3, 100.0, 1e9, is_chosen=False)  # one step that the machine lost
    assert corrections.slowdown(PLAIN) <= 2.0 * 1.51


def test_what_one_step_lost_does_not_stick_to_a_level():
    corrections = Corrections()
    for _ in range(100):
        corrections.observe(UNIFORM, 3, 100.0, 100.0, is_chosen=False)
    corrections.observe(UNIFORM, 5, 100.0, 1e9, is_chosen=False)
    corrections.place = Place(5, is_sampled=False)
    assert corrections.knows_here(UNIFORM)
    assert corrections.slowdown(UNIFORM) < 1.2


def test_a_growing_batch_is_weighed_at_the_size_that_it_will_have():
    one = [Sequence.from_request(request("one", [1, 2, 3], 20), 0)]
    alone, joined = knowing(MEMORY_BOUND), knowing(MEMORY_BOUND)
    alone.decide(one)
    decision = joined.decide(one, num_coming=7)
    assert len(decision.num_draft_tokens) == 1
    assert (alone.arm, joined.arm) == (SERIAL, UNIFORM), "one is trimmed at once, more begin with uniform rounds"


def test_does_not_catch_up_for_answers_that_are_nearly_over():
    """Speculation is ahead for one sequence, but its draft has a thousand tokens to read and two are left to emit."""
    slow_to_read = costs(300.0, 1000.0, 25.0)
    slow_to_read.segments[DRAFT, WHOLE] = (call(300.0, 50.0),)
    chosen = []
    for num_left in (2, 1000):
        policy = knowing(slow_to_read)
        policy.arm = PLAIN
        sequence = Sequence.from_request(request("long", [1] * 1000, num_left), 0)
        sequence.target_len = 999
        policy.decide([sequence])
        chosen.append(policy.arm)
    assert chosen == [PLAIN, SERIAL]
