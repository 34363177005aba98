"""`faser profile` on an engine of runtime torch: other devices are measured, identified and read back as CPUs are."""

import logging
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import WHOLE
from faser_backend.core.errors import ConfigError
from faser_backend.cuda.draft_loop import TorchDraftLoop
from faser_backend.device.runtime import ModelPair
from faser_backend.engines.build import build_engines
from faser_backend.manifest import EngineManifest
from faser_backend.policy.cost_model import DRAFT, TARGET
from faser_backend.profiling import calibration
from faser_backend.profiling import profile as profile_module
from faser_backend.profiling.cases import Case, choose_cases, make_batch
from faser_backend.profiling.measure import DRAFT_RUN, Bench, Share, TimedRunner, open_loop
from faser_backend.profiling.profile import profile_engine, wait_for_calls
from faser_backend.runtime_spec import RUNTIMES
from faser_backend.serving.compose import build_engine
from faser_backend.serving.profile_store import PROFILE_FILE, key_columns, load_knowledge, load_profile
from faser_backend.serving.runtimes import AnyRuntime, open_runtime
from tests.support.brief_profile import BRIEF
from tests.support.eagle3_models import NUM_TARGET_LAYERS, write_head
from tests.support.tiny_models import build_with_draft, write_checkpoint

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_with_draft(tmp_path_factory.mktemp("profile_torch"), runtime="torch", exit_layers=(1,))


def few_cases(model: str, max_context: int, rng: np.random.Generator, share: float) -> list[Case]:
    """Small ones of every kind: kernels' references are slow."""
    cases = sorted(choose_cases(model, max_context, rng), key=lambda case: case.num_rows)
    return cases[:24:4]


def test_costs_are_those_of_this_device(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_module, "choose_cases", few_cases)
    monkeypatch.setattr(calibration, "TOKENS_EACH", 6)
    monkeypatch.setattr(profile_module, "QUICK", replace(BRIEF, num_requests=4, loads=(1, 4)))
    profile = profile_engine(engine, is_quick=True)
    assert profile.fingerprint.device["torch"] == version("torch") and "numba" not in profile.fingerprint.device
    profile.save(engine)
    manifest = EngineManifest.load(engine)
    costs = load_knowledge(engine, manifest).costs
    assert costs.is_measured and WHOLE in costs.partitions
    for partition in costs.partitions:
        assert all(float(costs.call_us(model, partition, 1, 1, 16)) > 0 for model in (TARGET, DRAFT))

    older = replace(profile.fingerprint, device=profile.fingerprint.device | {"torch": "0.1"})
    replace(profile, fingerprint=older).save(engine)
    with pytest.raises(ConfigError, match=r"measured with torch 0\.1 instead of"):
        load_profile(engine, manifest)
    (engine / PROFILE_FILE).unlink()


@pytest.fixture
def runtime(engine: Path, caplog: pytest.LogCaptureFixture) -> AnyRuntime:
    caplog.set_level(logging.ERROR)  # that there is no GPU is known
    return open_runtime(engine, EngineManifest.load(engine), EngineConfig())


def test_a_draft_sample_is_a_chain_where_the_device_drafts_chains(engine: Path, runtime: AnyRuntime) -> None:
    model = EngineManifest.load(engine).draft
    runner = runtime.open_runner(model, runtime.menu.whole, runtime.open_pool(model, 16))
    loop = open_loop(runtime, runner, 64)
    assert loop is not None
    timed, lengths = TimedRunner(runtime, runner, loop), []
    draft = loop.draft
    loop.draft = lambda *arguments: (lengths.append(arguments[2].tolist()), draft(*arguments))[1]  # type: ignore[method-assign]
    for case, expected in ((Case((1, 1, 1), 8, 3), [[4, 4, 4]]), (Case((2, 1), 8, 2), []), (Case((1, 1), 8, 0), [])):
        lengths.clear()
        batch = make_batch(case, 97, 4, 16, np.random.default_rng(0), room=4)
        assert (timed.time(batch, 4) > 0).all() and lengths == expected
    runner.close()


def test_chains_of_a_head_are_measured_on_features_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_checkpoint(tmp_path / "source", num_hidden_layers=NUM_TARGET_LAYERS)
    head = write_head(tmp_path / "head")
    manifest = build_engines(source, head, tmp_path / "engine", runtime="torch", kv_block_size=4)
    runtime = open_runtime(tmp_path / "engine", manifest, EngineConfig())
    cases = [Case((1, 1, 1), 8, 3), Case((2, 1), 8, 2), Case((9,), 0, 0)]
    models, both = ModelPair(manifest.target, manifest.draft), dict.fromkeys((TARGET, DRAFT), cases)
    bench = Bench(runtime, models, both, max_sweeps=3, seed=0)
    lengths: list[list[int]] = []
    draft = TorchDraftLoop.draft

    def noted(loop: TorchDraftLoop, *arguments: Any) -> Any:
        lengths.append(arguments[2].tolist())
        return draft(loop, *arguments)

    monkeypatch.setattr(TorchDraftLoop, "draft", noted)
    measured = bench.measure(Share(DRAFT, WHOLE, runtime.menu.whole, None), 0.1)
    assert len(lengths) >= 3 and {tuple(each) for each in lengths} == {(DRAFT_RUN,) * 3}
    assert len(measured) == 3 and all(len(each.segment_us) == 2 and min(each.segment_us) > 0 for each in measured)


def test_model_calls_of_a_profiled_step_are_waited_for(engine: Path, runtime: AnyRuntime) -> None:
    order: list[str] = []

    class Runner:
        num_segments, num_layers, exits, vocab_size = 1, (1,), frozenset[int](), 97
        max_logit_rows = 16

        def run_segment(self, *arguments: Any) -> str:
            order.append("queued")
            return "logits"

    built = build_engine(engine, EngineConfig.from_options(policy="none", num_kv_blocks=64))
    runner: Any = Runner()
    built.step_runner.partitions = {WHOLE: replace(built.step_runner.partitions[WHOLE], target=runner)}
    runtime.synchronize = lambda: order.append("done")  # type: ignore[method-assign]
    wait_for_calls(built, runtime)
    rows: Any = None
    assert built.step_runner.partitions[WHOLE].target.run_segment(0, rows, None) == "logits"
    assert order == ["queued", "done"] and built.step_runner.partitions[WHOLE].draft is None


def test_columns_of_keys_by_runtime(engine: Path) -> None:
    """Kernels of ours read the blocks that there are; RTX gathers what the table is wide."""
    manifest = EngineManifest.load(engine)
    long = replace(manifest.target, spec=replace(manifest.target.spec, max_context=300))
    of_runtimes = (replace(manifest, target=long, draft=None, kv_block_size=16, runtime=name) for name in RUNTIMES)
    found = {each.runtime: tuple(key_columns(each)[[1, 16, 17, 129, 300]]) for each in of_runtimes}
    assert found.pop("tensorrt_rtx") == (128, 128, 128, 256, 512)
    assert set(found.values()) == {(16, 16, 32, 144, 304)}
    widths = key_columns(manifest)
    assert widths[5] == 8 and (np.diff(widths) >= 0).all()
