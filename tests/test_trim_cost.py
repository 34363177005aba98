"""What deciding by confidence takes: measured with the real engine, kept in the profile, charged by policies."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engines.build import build_engines
from faser_backend.config import EngineConfig
from faser_backend.core.decision import WHOLE, PipelineMode
from faser_backend.core.frontier import Frontier
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence
from faser_backend.manifest import EngineManifest
from faser_backend.pipeline.engine import Engine
from faser_backend.policy.arms import SERIAL, UNIFORM, Arm, promise
from faser_backend.policy.beliefs import KINDS
from faser_backend.policy.calibration import MARGIN_KNOTS, MarginCounts
from faser_backend.policy.cost_model import DRAFT, TARGET, CallCost, CostModel, Curve, OverheadCost
from faser_backend.policy.knowledge import Knowledge
from faser_backend.policy.pricing import BatchTimes, Pricer
from faser_backend.policy.speculation import MAX_ADAPTIVE_TOKENS
from faser_backend.policy.step_times import arm_of, predicted_us
from faser_backend.policy.survival import Survival
from faser_backend.policy.trim import admit, continues
from faser_backend.serving.compose import build_engine
from faser_backend.serving.profile_calibration import Calibration
from faser_backend.serving.profile_store import PROFILE_FILE, Fingerprint, Profile, load_cost_model, load_profile
from lab.profiling import trim_cost
from lab.profiling.overhead import LOADS
from lab.profiling.tables import overhead_line
from lab.profiling.trim_cost import LENGTHS, STOPS_NOTHING, measure_trim, records_of_steps
from lab.simulation.acceptance import demo_process
from lab.simulation.engine import World, build_sim_engine, run_open_loop
from lab.traces import Trace
from tests.forcing import rule as rule_of
from tests.harness import request
from tests.tiny_models import write_checkpoint, write_draft

# -- measuring -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trim_cost")
    source = write_checkpoint(root / "source")
    build_engines(source, write_draft(source, root / "draft"), root / "engine", kv_block_size=4)
    return root / "engine"


@pytest.mark.parametrize("size", [1, 5])
def test_the_rule_stops_no_chain_and_leaves_out_no_row(size: int) -> None:
    assert continues(STOPS_NOTHING, np.ones(size)).all()
    rng = np.random.default_rng(size)
    counts = rng.integers(1, 9, size)
    margins = rng.uniform(-1.0, 20.0, (size, int(counts.max()))).astype(np.float32)
    frontier = Frontier(np.zeros(margins.shape, np.int64), counts, counts + 1, margins)
    assert (admit(STOPS_NOTHING, frontier) == counts + 1).all()


def test_steps_draft_the_full_length_every_second_one_trimmed(engine_dir: Path) -> None:
    engine = build_engine(engine_dir, EngineConfig.from_options(policy="fixed:6"))
    try:
        records = records_of_steps(engine, 5, 6, 10, np.random.default_rng(0))
        assert len(engine.stepper.observers) == 2, "the policy and the metrics"
    finally:
        engine.close()
    assert len(records) >= 10
    is_trimmed = [record.plan.decision.trim is not None for record in records]
    assert all(before != after for before, after in itertools.pairwise(is_trimmed))
    for record in records:
        assert record.frontier.num_drafted.tolist() == [6] * 5 and record.frontier.num_rows.tolist() == [7] * 5
        assert record.propose_us > 0


def test_a_rule_that_stops_chains_would_be_found_out(engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trim_cost, "STOPS_NOTHING", rule_of([0.5, 0.6], [1.0, 1.0], draft_us=1.0, price=10.0))
    engine = build_engine(engine_dir, EngineConfig.from_options(policy="fixed:3"))
    try:
        records = records_of_steps(engine, 2, 3, 6, np.random.default_rng(0))
    finally:
        engine.close()
    assert records and all(record.plan.decision.trim is None for record in records)


def test_every_load_is_measured_and_the_engine_closed(engine_dir: Path) -> None:
    closed = []

    def make_engine(config: EngineConfig) -> Engine:
        engine = build_engine(engine_dir, config)
        close = engine.close
        engine.close = lambda: closed.append(close())  # type: ignore[method-assign]
        return engine

    trim_us, trim_sequence_us, samples = measure_trim(make_engine, is_quick=True, seed=0)
    assert {(each.num_draft_tokens, each.num_sequences) for each in samples} == {(k, b) for k in LENGTHS for b in LOADS}
    assert all(each.untrimmed_us > 0 and each.trimmed_us > 0 for each in samples)
    assert trim_us >= 0 and trim_sequence_us >= 0 and closed == [None]


def test_the_added_time_is_what_neighbours_differ_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that gets slower all the while, and loses a step to something else."""

    def records(engine: object, size: int, length: int, num_steps: int, rng: object) -> list[SimpleNamespace]:
        found = []
        for index in range(num_steps):
            is_trimmed = index % 2 == 1
            us = 500.0 + 10.0 * (index // 2) + is_trimmed * length * (30.0 + 2.0 * size)
            decision = SimpleNamespace(trim=STOPS_NOTHING if is_trimmed else None)
            found.append(SimpleNamespace(plan=SimpleNamespace(decision=decision), propose_us=us))
        found[3].propose_us = 1e6
        return found

    monkeypatch.setattr(trim_cost, "records_of_steps", records)
    idle: Any = SimpleNamespace(close=lambda: None)
    trim_us, trim_sequence_us, _ = measure_trim(lambda config: idle, is_quick=True, seed=0)
    assert (trim_us, trim_sequence_us) == pytest.approx((30.0, 2.0), rel=1e-3)


# -- the profile ---------------------------------------------------------------------------------------

FREE = OverheadCost(50.0, 2.0, 1.0, 10.0, 1.0, 50.0, 1.0, 40.0)
DEAR = replace(FREE, trim_us=300.0, trim_sequence_us=20.0)
BY_HAND = np.array([320.0, 340.0, 360.0, 380.0])  # of DEAR, for 1..4 chains


def call(fixed_us: float, row_us: float) -> CallCost:
    start = np.zeros(1)
    return CallCost(Curve.from_slopes(start, fixed_us, np.array([row_us])), Curve.from_slopes(start, 0.0, np.zeros(1)))


def test_a_profile_keeps_it_and_one_from_before_loads(engine_dir: Path, tmp_path: Path) -> None:
    manifest = EngineManifest.load(engine_dir)
    costs = {(TARGET, WHOLE): (call(100.0, 1.0),), (DRAFT, WHOLE): (call(10.0, 1.0),)}
    counts = MarginCounts(np.ones(MARGIN_KNOTS.size), np.ones(MARGIN_KNOTS.size))
    calibration = Calibration("made up", 0.95, 1, 1, dict.fromkeys(KINDS, counts), (), ())
    point = {"num_sequences": 1, "num_draft_tokens": 3, "untrimmed_us": 5.0, "trimmed_us": 6.0}
    fingerprint = Fingerprint.here(manifest)
    Profile(fingerprint, "today", costs, DEAR, (), [], [], [point], [], calibration).save(tmp_path)
    read = load_profile(tmp_path, manifest)
    assert read.overhead == DEAR and read.trim_points == [point]
    assert load_cost_model(tmp_path, manifest).overhead.trim_call(4) == 380.0

    fields = json.loads((tmp_path / PROFILE_FILE).read_text())
    del fields["trim_points"], fields["overhead"]["trim_us"], fields["overhead"]["trim_sequence_us"]
    (tmp_path / PROFILE_FILE).write_text(json.dumps(fields))
    before = load_profile(tmp_path, manifest)
    assert before.overhead == FREE and before.trim_points == [] and before.overhead.trim_call(4) == 0.0


def test_the_line_of_overheads_shows_it() -> None:
    assert "; 300 us more a trimmed draft call + 20.0 us a sequence;" in overhead_line(DEAR, has_exits=False)


# -- policies ------------------------------------------------------------------------------------------


def costs_of(overhead: OverheadCost) -> CostModel:
    segments = {(TARGET, WHOLE): (call(2000.0, 5.0),), (DRAFT, WHOLE): (call(100.0, 1.0),)}
    segments |= {(TARGET, "1/1"): (call(900.0, 5.0),), (DRAFT, "1/1"): (call(400.0, 1.0),)}
    return CostModel(segments, overhead, np.zeros(1), is_measured=True, is_padded=False)


def pricer_of(overhead: OverheadCost) -> Pricer:
    return Pricer(Knowledge(costs_of(overhead)), MAX_ADAPTIVE_TOKENS)


def times_of(overhead: OverheadCost, size: int = 4) -> BatchTimes:
    return pricer_of(overhead).times(size, 32, WHOLE)


def test_chains_that_were_trimmed_took_longer_by_every_call() -> None:
    times, lengths = times_of(DEAR), np.array([3, 1, 0, 2])
    added = times.chains_us(lengths, is_trimmed=True) - times.chains_us(lengths, is_trimmed=False)
    assert added == pytest.approx(BY_HAND[3 - 1] + BY_HAND[2 - 1] + BY_HAND[1 - 1])
    assert times.chains_us(lengths, is_trimmed=False) == times_of(FREE).chains_us(lengths, is_trimmed=True)
    assert times.chains_us(np.zeros(4, np.int64), is_trimmed=True) == 0.0


def test_going_on_has_to_earn_the_decision_too() -> None:
    free, dear = (pricer_of(overhead) for overhead in (FREE, DEAR))
    rules = [pricer.rule(pricer.times(4, 32, WHOLE), tokens_per_us=4 / 2000.0) for pricer in (free, dear)]
    np.testing.assert_allclose(rules[1].draft_us[1:] - rules[0].draft_us[1:], BY_HAND)
    survival = np.full(4, 0.3)
    assert continues(rules[0], survival).all() and not continues(rules[1], survival).any()


def test_the_best_uniform_round_is_kept_apart_for_trimmed_and_untrimmed() -> None:
    pricer = pricer_of(DEAR)
    times, rates = pricer.times(4, 32, WHOLE), pricer.beliefs._rates[0]

    def fresh(*, is_trimmed: bool) -> tuple[float, int]:
        us = times.uniform_target_us + times.uniform_overhead_us + times.draft_round_us
        us = us + times.lengths * (float(times.draft_us[4]) + (380.0 if is_trimmed else 0.0))
        speeds = 4 * pricer.uniform_tokens / us
        return float(speeds.max()), int(speeds.argmax()) + 1

    for _ in range(2):
        for is_trimmed in (False, True, True, False):
            assert pricer.best_uniform(times, is_trimmed=is_trimmed) == pytest.approx(fresh(is_trimmed=is_trimmed))
        rates.survival = rates.survival**3
        assert pricer.best_uniform(times, is_trimmed=True) != pytest.approx(fresh(is_trimmed=True)), "kept"
        rates.version += 1
    assert fresh(is_trimmed=True) < fresh(is_trimmed=False)


def test_arms_whose_chains_confidence_trims_promise_less() -> None:
    free, dear = (
        {arm: promise(pricer_of(overhead), arm, 8, 32).tokens_per_us for arm in (UNIFORM, SERIAL, *overlapped())}
        for overhead in (FREE, DEAR)
    )
    ping_pong, run_ahead = overlapped()
    assert free[SERIAL] == free[UNIFORM] == dear[UNIFORM] and free[run_ahead] == dear[run_ahead]
    assert dear[SERIAL] < free[SERIAL] and dear[ping_pong] < free[ping_pong]


def overlapped() -> tuple[Arm, Arm]:
    return Arm(PipelineMode.PING_PONG, "1/1"), Arm(PipelineMode.RUN_AHEAD, "1/1")


def simulate(overhead: OverheadCost, observe: Callable[[StepRecord], None]) -> None:
    """`survival` in a world that takes what it is told."""
    costs = costs_of(overhead)
    world = World("test", costs, demo_process("sampled"), (4,), (1,), (), 16384, 2048, ())
    policy = Survival(replace(world.knowledge(), costs=costs), MAX_ADAPTIVE_TOKENS)
    sim = build_sim_engine(
        world, EngineConfig.from_options(policy="survival"), seed=0, max_output_tokens=80, policy=policy
    )
    sim.observers.append(observe)
    run_open_loop(sim, Trace(np.zeros(4), np.full(4, 4), np.full(4, 80), "made up"))


def test_survival_prices_time_by_what_trimmed_rounds_promise() -> None:
    sequences = [Sequence.from_request(request(str(index), [1, 2, 3], 20), 0) for index in range(4)]
    policy = Survival(Knowledge(costs_of(DEAR)), MAX_ADAPTIVE_TOKENS)
    trim = policy.decide(sequences).trim
    assert trim is not None
    best_speed, _ = pricer_of(DEAR).best_uniform(times_of(DEAR), is_trimmed=True)
    assert trim.tokens_per_us == best_speed


def test_survival_drafts_shorter_where_deciding_is_dear() -> None:
    def mean_length(overhead: OverheadCost) -> float:
        lengths: list[float] = []
        simulate(overhead, lambda record: lengths.append(float(record.frontier.num_drafted.mean())))
        return float(np.mean(lengths))

    assert 0 < mean_length(DEAR) < 0.8 * mean_length(FREE)


def test_what_trimmed_steps_take_is_predicted() -> None:
    records: list[StepRecord] = []
    simulate(DEAR, records.append)
    pricer, num_trimmed = pricer_of(DEAR), 0
    for record in records:
        if record.plan.prefills or not record.frontier.num_drafted.any():
            continue
        # Where a chain was accepted whole, the draft reads a token more than is predicted, at a microsecond.
        assert predicted_us(pricer, record, arm_of(record)) == pytest.approx(record.step_us, abs=4.1)
        untrimmed = replace(record, plan=replace(record.plan, decision=replace(record.plan.decision, trim=None)))
        added = predicted_us(pricer, record, arm_of(record)) - predicted_us(pricer, untrimmed, arm_of(record))
        active = np.count_nonzero(record.frontier.num_drafted > np.arange(MAX_ADAPTIVE_TOKENS)[:, None], axis=1)
        assert added == pytest.approx(float(BY_HAND[active[active > 0] - 1].sum()))
        num_trimmed += 1
    assert num_trimmed > 10
