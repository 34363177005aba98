"""Time of deciding by confidence: measured with the real engine, kept in the profile, charged by policies."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import WHOLE
from faser_backend.core.frontier import Frontier
from faser_backend.engines.build import build_engines
from faser_backend.manifest import EngineManifest
from faser_backend.pipeline.engine import Engine
from faser_backend.pipeline.trim import admit, continues
from faser_backend.policy.calibration import KINDS, MARGIN_KNOTS, MarginCounts
from faser_backend.policy.cost_model import DRAFT, TARGET, CallCost, Curve, OverheadCost
from faser_backend.profiling import step_costs
from faser_backend.profiling.step_costs import STOPS_NOTHING, StepMeter, records_of_steps
from faser_backend.serving.compose import build_engine
from faser_backend.serving.profile_store import (
    PROFILE_FILE,
    Calibration,
    Fingerprint,
    Profile,
    load_cost_model,
    load_profile,
)
from tests.support.brief_profile import BRIEF
from tests.support.forcing import rule as rule_of
from tests.support.tiny_models import write_checkpoint, write_draft

NO_RUNTIME: Any = None  # which trimming asks nothing

# -- measuring -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trim_cost")
    source = write_checkpoint(root / "source")
    build_engines(source, write_draft(source, root / "draft"), root / "engine", kv_block_size=4)
    return root / "engine"


@pytest.mark.parametrize("size", [1, 5])
def test_the_rule_stops_no_chain_and_leaves_out_no_row(size: int) -> None:
    assert continues(STOPS_NOTHING, np.ones(size), np.arange(size)).all()
    rng = np.random.default_rng(size)
    counts = rng.integers(1, 9, size)
    margins = rng.uniform(-1.0, 20.0, (size, int(counts.max()))).astype(np.float32)
    frontier = Frontier(np.zeros(margins.shape, np.int64), counts, counts + 1, margins)
    assert (admit(STOPS_NOTHING, frontier, np.arange(size)) == counts + 1).all()


def test_steps_draft_the_full_length_every_second_one_trimmed(engine_dir: Path) -> None:
    engine = build_engine(engine_dir, EngineConfig.from_options(policy="fixed:6"))
    try:
        records = records_of_steps(engine, 5, 6, 10, np.random.default_rng(0))
        assert len(engine.step_runner.observers) == 2, "the policy and the metrics"
    finally:
        engine.close()
    assert len(records) >= 10
    is_trimmed = [record.plan.decision.trim is not None for record in records]
    assert all(before != after for before, after in itertools.pairwise(is_trimmed))
    for record in records:
        assert record.frontier.num_drafted.tolist() == [6] * 5 and record.frontier.num_rows.tolist() == [7] * 5
        assert record.propose_us > 0


def test_a_rule_that_stops_chains_would_be_found_out(engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_costs, "STOPS_NOTHING", rule_of([0.5, 0.6], [1.0, 1.0], draft_us=1.0, price=10.0))
    engine = build_engine(engine_dir, EngineConfig.from_options(policy="fixed:3"))
    try:
        records = records_of_steps(engine, 2, 3, 6, np.random.default_rng(0))
    finally:
        engine.close()
    assert records and all(record.plan.decision.trim is None for record in records)


def test_every_load_is_measured_and_the_engine_closed(engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    def make_engine(config: EngineConfig) -> Engine:
        engine = build_engine(engine_dir, config)
        close = engine.close
        engine.close = lambda: closed.append(close())  # type: ignore[method-assign]
        return engine

    loads = []
    measured = step_costs.records_of_steps

    def noted(engine: Engine, num_sequences: int, num_draft_tokens: int, *rest: Any) -> Any:
        loads.append((num_draft_tokens, num_sequences))
        return measured(engine, num_sequences, num_draft_tokens, *rest)

    monkeypatch.setattr(step_costs, "records_of_steps", noted)
    found = StepMeter(NO_RUNTIME, make_engine, BRIEF, 0).trim()
    assert loads == list(itertools.product(step_costs.TRIM_LENGTHS, step_costs.LOADS))
    assert min(found.values()) >= 0 and closed == [None]


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

    monkeypatch.setattr(step_costs, "records_of_steps", records)
    idle: Any = SimpleNamespace(close=lambda: None)
    found = StepMeter(NO_RUNTIME, lambda config: idle, replace(BRIEF, num_trim_steps=24), 0).trim()
    assert found == pytest.approx({"trim_us": 30.0, "trim_sequence_us": 2.0}, rel=1e-3)


# -- the profile ---------------------------------------------------------------------------------------

FREE = OverheadCost(50.0, 2.0, 1.0, 10.0, 1.0, 50.0, 1.0, 40.0)
DEAR = replace(FREE, trim_us=300.0, trim_sequence_us=20.0)


def call(fixed_us: float, row_us: float) -> CallCost:
    start = np.zeros(1)
    return CallCost(Curve.from_slopes(start, fixed_us, np.array([row_us])), Curve.from_slopes(start, 0.0, np.zeros(1)))


def test_a_profile_keeps_it_and_one_from_before_loads(engine_dir: Path, tmp_path: Path) -> None:
    manifest = EngineManifest.load(engine_dir)
    costs = {(TARGET, WHOLE): (call(100.0, 1.0),), (DRAFT, WHOLE): (call(10.0, 1.0),)}
    counts = MarginCounts(np.ones(MARGIN_KNOTS.size), np.ones(MARGIN_KNOTS.size))
    calibration = Calibration("made up", 1, 1, dict.fromkeys(KINDS, counts), (), ())
    Profile(Fingerprint.here(manifest), "today", costs, DEAR, (), calibration).save(tmp_path)
    assert load_profile(tmp_path, manifest).overhead == DEAR
    assert load_cost_model(tmp_path, manifest).overhead.trim_call(4) == 380.0

    fields = json.loads((tmp_path / PROFILE_FILE).read_text())
    del fields["overhead"]["trim_us"], fields["overhead"]["trim_sequence_us"]
    (tmp_path / PROFILE_FILE).write_text(json.dumps(fields))
    before = load_profile(tmp_path, manifest)
    assert before.overhead == FREE and before.overhead.trim_call(4) == 0.0
