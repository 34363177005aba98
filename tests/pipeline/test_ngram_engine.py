"""N-grams in place of a draft model: engine directories, options, costs, and tokens that stay those of the target."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import WHOLE
from faser_backend.core.errors import ConfigError
from faser_backend.engines.build import build_engines
from faser_backend.engines.checkpoint import CheckpointError
from faser_backend.lab.contestants import simulated_contestants
from faser_backend.lab.simulation.worlds import profile_world
from faser_backend.manifest import EngineManifest
from faser_backend.pipeline.draft import ModelProposer
from faser_backend.pipeline.joint import JointProposer
from faser_backend.pipeline.ngram import NgramProposer
from faser_backend.policy.calibration import KINDS, MarginCounts
from faser_backend.policy.cost_model import DRAFT, TARGET, OverheadCost
from faser_backend.profiling import profile as profiling
from faser_backend.profiling.profile import profile_engine
from faser_backend.serving import compose
from faser_backend.serving.compose import build_engine, serving_knowledge
from faser_backend.serving.profile_store import load_profile, with_ngrams
from faser_backend.triton.launch import check_engine
from tests.pipeline.test_engine import random_requests
from tests.support.brief_profile import BRIEF
from tests.support.forced_engine import POLICIES
from tests.support.harness import drive, guessed, request
from tests.support.serving_pair import write_pair


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine directory without one."""
    home = tmp_path_factory.mktemp("alone")
    build_engines(write_pair(home / "pair") / "target", None, home / "engine")
    return home / "engine"


def config(policy: str = "fixed:4", **options: object) -> EngineConfig:
    return EngineConfig.from_options(policy=policy, max_num_seqs=4, num_threads=1, **options)


# -- engine directories ----------------------------------------------------------------------------------


def test_a_target_alone_is_built_and_loaded(alone: Path, engine_dir: Path):
    manifest = EngineManifest.load(alone)
    assert manifest.draft is None and json.loads((alone / "manifest.json").read_text())["draft"] is None
    assert not list(alone.glob("draft.*"))
    assert {file.name for file in manifest.files} <= {path.name for path in alone.iterdir()}
    assert manifest.target.spec == EngineManifest.load(engine_dir).target.spec


def test_exit_layers_need_a_draft_model(alone: Path, tmp_path: Path):
    target = alone.parent / "pair" / "target"
    with pytest.raises(CheckpointError, match=r"exit_layers = \[1\]: early exits need a draft model"):
        build_engines(target, None, tmp_path / "engine", exit_layers=(1,))
    with pytest.raises(CheckpointError, match=r"max_context = 9999: must lie in \[1, 2048\].* of target = 2048$"):
        build_engines(target, None, tmp_path / "engine", max_context=9999)
    assert not (tmp_path / "engine").exists()


# -- who drafts ------------------------------------------------------------------------------------------


def test_who_drafts_is_a_matter_of_directory_and_option(alone: Path, engine_dir: Path):
    for directory, draft, expected in (
        (alone, "auto", NgramProposer),
        (alone, "ngram", NgramProposer),
        (engine_dir, "auto", ModelProposer),
        (engine_dir, "model", ModelProposer),
        (engine_dir, "ngram", NgramProposer),
        (engine_dir, "model+ngram", JointProposer),
    ):
        engine = build_engine(directory, config(draft=draft, pipeline="run_ahead"))
        assert type(engine.step_runner.proposer) is expected
        has_model = expected is not NgramProposer
        assert (engine.step_runner.partitions[WHOLE].draft is not None) == has_model
        assert has_model or set(engine.step_runner.partitions) == {WHOLE}, "there is nothing to overlap"
        engine.close()
    plain = build_engine(alone, config("none"))
    assert plain.step_runner.proposer is None
    plain.close()


@pytest.mark.parametrize(
    ("directory", "options", "message"),
    [
        ("alone", {"draft": "model"}, "draft = 'model': the engine directory has no draft model"),
        ("alone", {"draft": "model+ngram"}, r"draft = 'model\+ngram': the engine directory has no draft model"),
        ("alone", {"early_exit": "on"}, "early_exit = 'on': an exit scores the candidates of a draft model"),
        ("engine_dir", {"draft": "model+ngram", "early_exit": "on"}, "n-gram chains have no exits; use 'auto'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    request: pytest.FixtureRequest, directory: str, options: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message):
        build_engine(request.getfixturevalue(directory), config(**options))
    with pytest.raises(ConfigError, match=message):
        check_engine(request.getfixturevalue(directory), config(**options))


def test_options_out_of_range():
    with pytest.raises(ConfigError, match=r"'eagle': Input should be 'auto', 'model', 'ngram' or 'model\+ngram'"):
        EngineConfig.from_options(draft="eagle")
    assert EngineConfig.from_parameters({"draft": "model+ngram"}).draft == "model+ngram"


def test_a_simulated_ladder_says_that_it_leaves_n_grams_out():
    contestants, missing = simulated_contestants(None)
    assert {"faser", "faser (no exit)"} <= {contestant.name for contestant in contestants}
    assert all("draft" not in contestant.options for contestant in contestants)
    assert [line.rpartition(":")[0] for line in missing] == [
        f"{policy} ({draft})" for draft in ("n-grams", "model+ngram") for policy in ("fixed:4", "faser")
    ]


def test_simulation_needs_a_pair(alone: Path):
    with pytest.raises(ConfigError, match="has no draft model"):
        profile_world(alone, 4)


# -- costs -----------------------------------------------------------------------------------------------


def test_policies_see_that_drafting_costs_next_to_nothing(alone: Path, engine_dir: Path):
    for directory in (alone, engine_dir):
        costs = serving_knowledge(directory, EngineManifest.load(directory), config(draft="ngram")).costs
        assert costs.partitions == (WHOLE,) and not costs.is_measured
    demo = guessed().costs
    costs, call = with_ngrams(demo), (WHOLE, 8, 8, 400)
    draft_us, model_us = (each.call_us(DRAFT, *call) + each.overhead.draft_call(8) for each in (costs, demo))
    assert 0 < draft_us < 0.05 * model_us
    assert costs.call_us(TARGET, *call) == demo.call_us(TARGET, *call)


def test_what_was_measured_of_a_draft_model_is_not_used(engine_dir: Path, monkeypatch: pytest.MonkeyPatch):
    """Its margins mean something else; its target's costs hold."""
    manifest = EngineManifest.load(engine_dir)
    guessed = serving_knowledge(engine_dir, manifest, config())
    measured = replace(
        guessed.costs,
        is_measured=True,
        overhead=OverheadCost(1.0, 2.0, 3.0, 400.0, 50.0, trim_us=60.0, trim_sequence_us=7.0),
    )
    known = replace(guessed, costs=measured, margins=dict.fromkeys(KINDS, MarginCounts(np.ones(14), np.ones(14))))
    monkeypatch.setattr(compose, "load_knowledge", lambda *_: known)
    used = serving_knowledge(engine_dir, manifest, config())
    assert (used.costs, used.margins, used.exits) == (known.costs, known.margins, known.exits)
    seen = serving_knowledge(engine_dir, manifest, config(draft="ngram"))
    assert seen.margins == {} and seen.exits == () and seen.costs.is_measured
    assert seen.costs.overhead == OverheadCost(1.0, 2.0, 3.0, 0.0, 0.0)
    target = (TARGET, WHOLE, 8, 8, 100)
    assert seen.costs.call_us(*target) == measured.call_us(*target)


def test_a_target_alone_is_profiled(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(profiling, "QUICK", BRIEF)
    profile = profile_engine(alone, is_quick=True)
    around = profile.overhead
    assert set(profile.costs) == {(TARGET, WHOLE)} and around.draft_call(8) + around.draft_round(8) > 0
    assert all(profile.calibration.margins[kind].tested.sum() > 0 for kind in KINDS)
    profile.save(alone)
    try:
        manifest = EngineManifest.load(alone)
        assert set(load_profile(alone, manifest).costs) == {(TARGET, WHOLE)}
        knowledge = serving_knowledge(alone, manifest, config())
        assert knowledge.costs.is_measured and knowledge.costs.partitions == (WHOLE,)
        assert set(knowledge.margins) == set(KINDS), "these are of n-grams"
    finally:
        (alone / "profile.json").unlink()


# -- tokens ----------------------------------------------------------------------------------------------


def test_tokens_are_those_of_plain_decoding(alone: Path, engine_dir: Path):
    """Greedy and sampled, with penalties and all, in batches that come and go."""
    requests = [*random_requests(7, 10), request("copies", [7, 8, 9, 10] * 5, 40)]
    plain = build_engine(engine_dir, config("none"))
    expected = drive(plain, requests).tokens
    plain.close()
    num_accepted = 0
    for policy in POLICIES:
        for directory, draft in ((alone, "auto"), (engine_dir, "ngram"), (engine_dir, "model+ngram")):
            engine = build_engine(directory, config(policy, draft=draft))
            assert drive(engine, requests, seed=3).tokens == expected, (policy, draft)
            num_accepted += engine.metrics().num_accepted
            engine.close()
    assert num_accepted > 100
