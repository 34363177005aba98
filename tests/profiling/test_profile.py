"""`faser profile` on a tiny engine: its cases, what it stores, what a server reads back, and what it refuses."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faser_backend.core.decision import WHOLE
from faser_backend.core.errors import ConfigError, ManifestError
from faser_backend.cpu.runner import LlvmRunner
from faser_backend.device.partition import core_partitions
from faser_backend.engines.build import build_engines
from faser_backend.manifest import EngineManifest
from faser_backend.policy.calibration import KINDS
from faser_backend.policy.cost_model import DRAFT, TARGET
from faser_backend.profiling import profile as profile_module
from faser_backend.profiling.cases import (
    MAX_CALL_ROWS,
    MAX_SEQUENCES,
    MIN_CASES,
    NUM_RANDOM,
    Case,
    choose_cases,
    make_batch,
)
from faser_backend.profiling.measure import TimedRunner, chain_case, is_chain, shares_of
from faser_backend.profiling.profile import WALL, profile_engine, run_profile
from faser_backend.serving.loading import reporting_to
from faser_backend.serving.profile_store import (
    PROFILE_FILE,
    Fingerprint,
    Profile,
    key_columns,
    load_knowledge,
    load_profile,
)
from tests.support.brief_profile import BRIEF
from tests.support.tiny_models import build_with_draft, write_checkpoint

MAX_CONTEXT = 128


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_with_draft(tmp_path_factory.mktemp("profile"), exit_layers=(1,))


@pytest.fixture(scope="module")
def profiled(engine: Path) -> tuple[Path, Profile]:
    """The engine with a profile of very few sweeps, and the profile."""
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch, reporting_to(told.append):
        patch.setattr(profile_module, "QUICK", BRIEF)
        before = os.sched_getaffinity(0)
        profile = profile_engine(engine, is_quick=True)
        assert os.sched_getaffinity(0) == before, "measuring pins threads of its own only"
    shares = [int(line[:3]) for line in told if line[3:4] == "%"]
    assert shares == sorted(shares) and shares[-1] == 100 and len(shares) > 5
    profile.save(engine)
    return engine, profile


@pytest.fixture
def copied(profiled: tuple[Path, Profile], tmp_path: Path) -> Path:
    return Path(shutil.copytree(profiled[0], tmp_path / "engine"))


def load(directory: Path) -> Profile:
    return load_profile(directory, EngineManifest.load(directory))


def test_a_profile_covers_every_model_partition_and_segment(profiled: tuple[Path, Profile]) -> None:
    directory, profile = profiled
    model = load_knowledge(directory, EngineManifest.load(directory)).costs
    menu = core_partitions()
    splits = [f"{len(draft.cores)}/{len(target.cores)}" for draft, target in menu.splits]
    assert model.is_measured and model.partitions == (WHOLE, *splits)
    assert len(model.segments[TARGET, WHOLE]) == 2 and len(model.segments[DRAFT, WHOLE]) == 1
    for partition in model.partitions:
        for name in (TARGET, DRAFT):
            assert float(model.call_us(name, partition, 1, 1, 16)) > 0
    assert np.isfinite(profile.spread)
    assert min(model.overhead.step(1, 1), model.overhead.draft_call(1) + model.overhead.draft_round(1)) > 0
    assert 0 < model.overhead.exit(1) <= model.overhead.exit(160)


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_slow_machine_tries_no_large_batches(engine: Path, monkeypatch: pytest.MonkeyPatch, *, is_slow: bool) -> None:
    loads, call_rows = set[int](), set[int]()
    run_steps, time_call = profile_module.phases_of_steps, TimedRunner.time

    def steps(engine: Any, load: int, *rest: Any) -> list[dict[str, int]]:
        loads.add(load)
        return [step | {WALL: 10**9} if is_slow else step for step in run_steps(engine, load, *rest)]

    def call(runner: TimedRunner, batch: Any, num_calls: int) -> np.ndarray:
        call_rows.add(batch.num_rows)
        return time_call(runner, batch, num_calls)

    monkeypatch.setattr(profile_module, "QUICK", replace(BRIEF, calls_s=0.001 if is_slow else 60.0))
    monkeypatch.setattr(profile_module, "phases_of_steps", steps)
    monkeypatch.setattr(TimedRunner, "time", call)
    profile = profile_engine(engine, is_quick=True, budget_s=40.0)
    assert loads == ({1, 8} if is_slow else {1, 8, 32})
    assert any("the budget allowed" in text for text in profile.warnings) == is_slow
    assert (max(call_rows) < 100) == is_slow


def test_beside_a_program_that_never_rests_a_profile_warns(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every repeat of a call is equally slow then, so their spread says nothing."""
    monkeypatch.setattr(profile_module, "QUICK", BRIEF)
    monkeypatch.setattr(profile_module, "BUSY_SPREAD", np.inf)
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        profile = profile_engine(engine, is_quick=True)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert [text.partition(",")[0] for text in profile.warnings] == ["the machine was busy"]


def test_an_interrupt_closes_runners_behind_their_last_call(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of a closed runner waits for ever for the threads that would help it."""
    events: list[str] = []
    time_call, close = TimedRunner.time, LlvmRunner.close

    def call(runner: TimedRunner, batch: Any, num_calls: int) -> np.ndarray:
        events.append("call")
        if events.count("call") == 20:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.2)
        return time_call(runner, batch, num_calls)

    def closed(runner: LlvmRunner) -> None:
        events.append("close")
        close(runner)

    monkeypatch.setattr(profile_module, "QUICK", BRIEF)
    monkeypatch.setattr(TimedRunner, "time", call)
    monkeypatch.setattr(LlvmRunner, "close", closed)
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            profile_engine(engine, is_quick=True)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert events.count("call") < 30
    assert "call" not in events[events.index("close", events.index("call")) :]


def test_what_was_saved_is_read_back(profiled: tuple[Path, Profile]) -> None:
    directory, profile = profiled
    again = load(directory)
    for key, costs in profile.costs.items():
        for found, cost in zip(again.costs[key], costs, strict=True):
            np.testing.assert_equal(asdict(found), asdict(cost))
    assert again.spread == profile.spread and again.fingerprint == profile.fingerprint
    assert again.overhead == profile.overhead and again.warnings == profile.warnings
    assert sorted(path.name for path in directory.iterdir() if path.name.startswith(".")) == []


def test_a_server_reads_what_calibration_found(profiled: tuple[Path, Profile]) -> None:
    directory, profile = profiled
    calibration, again = profile.calibration, load(directory).calibration
    assert again.exits == calibration.exits
    assert again.num_fitted == calibration.num_fitted and again.source == calibration.source
    known = load_knowledge(directory, EngineManifest.load(directory))
    assert known.costs.is_measured and set(known.margins) == set(KINDS)
    assert sum(counts.tested.sum() for counts in known.margins.values()) == calibration.num_fitted > 0
    for kind, counts in known.margins.items():
        stored = calibration.margins[kind]
        assert (counts.tested == stored.tested).all() and (counts.accepted == stored.accepted).all()
    assert [each.layer for each in known.exits] == [1], "the draft of this test is neither always right nor never"


def test_the_command_writes_the_file_and_prints_a_line_per_model_and_partition(
    profiled: tuple[Path, Profile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, profile = profiled
    copy = Path(shutil.copytree(directory, tmp_path / "engine", ignore=shutil.ignore_patterns(PROFILE_FILE)))
    monkeypatch.setattr(profile_module, "profile_engine", lambda *args, **options: profile)
    run_profile(copy, is_quick=True)
    assert load(copy).spread == profile.spread
    lines = capsys.readouterr().out.splitlines()
    for key in profile.costs:
        assert any(tuple(line.split()[:2]) == key for line in lines)
    assert any("us outside calls" in line for line in lines)
    assert any(line.startswith("exit after layer") for line in lines) == bool(profile.calibration.exits)


def test_without_a_profile_the_default_works(engine: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(engine, tmp_path / "engine", ignore=shutil.ignore_patterns(PROFILE_FILE)))
    manifest = EngineManifest.load(directory)
    model = load_knowledge(directory, manifest).costs
    assert not model.is_measured and model.partitions == (WHOLE,) and len(model.segments[TARGET, WHOLE]) == 2
    known = load_knowledge(directory, manifest)
    assert known.margins == {} and known.exits == ()
    with pytest.raises(ConfigError, match="faser profile"):
        load_profile(directory, manifest)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"device": {"cpu": "another processor"}}, "cpu another processor"),
        ({"device": {"num_cores": 4096}}, "num_cores 4096"),
        ({"device": {"llvmlite": "0.1"}}, "llvmlite 0.1"),
        ({"device": {"gpu": "H100"}}, "gpu H100 instead of unknown; cpu unknown instead of "),
        ({"device": {"exit_layers": "2"}}, "exit_layers 2 instead of 1"),
        ({"faser": "0.0.1"}, "faser 0.0.1"),
        ({"files": {"target.safetensors": "0" * 64}}, "target.safetensors"),
    ],
)
def test_a_profile_of_something_else_is_refused(copied: Path, change: dict[str, Any], named: str) -> None:
    profile = load(copied)
    replace(profile, fingerprint=replace(profile.fingerprint, **change)).save(copied)
    for read in (load_profile, load_knowledge):
        with pytest.raises(ConfigError, match=named) as caught:
            read(copied, EngineManifest.load(copied))
        assert f"faser profile {copied}" in str(caught.value)


def test_a_rebuilt_engine_makes_its_profile_stale(copied: Path, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "other", seed=5)
    build_engines(source, source, tmp_path / "rebuilt", exit_layers=(1,), kv_block_size=4)
    shutil.copy(copied / PROFILE_FILE, tmp_path / "rebuilt")
    with pytest.raises(ConfigError, match="other engine files"):
        load(tmp_path / "rebuilt")
    halved = replace(EngineManifest.load(copied), kv_cache_dtype="fp16")
    with pytest.raises(ConfigError, match="measured with kv_cache_dtype fp32 instead of fp16; run `faser profile"):
        load_profile(copied, halved)


def test_a_changed_profile_is_refused(copied: Path) -> None:
    path = copied / PROFILE_FILE
    text = path.read_text()
    numbers = list(re.finditer(r"\d\.\d+", text))
    assert len(numbers) > 100
    for number in numbers[:: len(numbers) // 10]:
        place = text.index(".", number.start()) + 1  # the last of 17 digits may change nothing
        path.write_text(text[:place] + ("2" if text[place] == "1" else "1") + text[place + 1 :])
        with pytest.raises(
            ConfigError, match=f"profile.json: changed since it was measured; run `faser profile {copied}"
        ):
            load(copied)
    for other, version in ((text.replace('"format_version": ', '"format_version": 9'), "96"), ("[1, 2]", "None")):
        path.write_text(other)
        with pytest.raises(ConfigError, match=f"format_version = {version}: this version reads 6; run `faser profile"):
            load(copied)


@pytest.mark.parametrize("content", ["", '{"format_version": 1, "costs": ', "\x00\x01"])
def test_a_file_that_is_no_profile_is_refused(copied: Path, content: str) -> None:
    (copied / PROFILE_FILE).write_text(content)
    with pytest.raises(ConfigError, match="not readable as a profile"):
        load(copied)


def test_profiling_what_is_no_engine_says_so(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"manifest\.json: missing"):
        profile_engine(tmp_path)


def test_key_columns_cover_the_tokens_and_fingerprints_name_weights(engine: Path) -> None:
    widths, files = key_columns(EngineManifest.load(engine)), Fingerprint.here(EngineManifest.load(engine)).files
    assert widths.shape == (MAX_CONTEXT + 1,)
    assert (widths >= np.arange(MAX_CONTEXT + 1)).all() and (np.diff(widths) >= 0).all()
    assert "tokenizer.json" not in files and any(name.endswith(".safetensors") for name in files)


@pytest.mark.parametrize(
    ("model", "max_context", "share"), [(TARGET, 16, 1.0), (TARGET, 128, 0.5), (DRAFT, 16, 0.01), (DRAFT, 2048, 1.0)]
)
def test_cases_stay_within_what_an_engine_can_run(model: str, max_context: int, share: float) -> None:
    cases = choose_cases(model, max_context, np.random.default_rng(0), share)
    for case in cases:
        assert case.num_tokens <= max_context and case.context >= 0 and min(case.counts) >= 1
        assert len(case.counts) <= MAX_SEQUENCES and case.num_rows <= MAX_CALL_ROWS
        assert case.num_logit_rows in (0, len(case.counts), case.num_rows)
    assert len(cases) >= MIN_CASES and (share < 1.0 or len(cases) >= NUM_RANDOM)


def test_batches_hold_their_case_even_where_the_pool_is_smaller() -> None:
    case = Case((2, 1, 5), 9, 3)
    batch = make_batch(case, 97, 4, 5, np.random.default_rng(0))
    assert batch.rows_per_sequence.tolist() == [2, 1, 5] and batch.context_lens.tolist() == [9, 9, 9]
    assert batch.block_tables.shape == (3, 4) and batch.block_tables.max() < 5
    assert batch.logit_rows.tolist() == [1, 2, 7]


def test_one_core_is_measured_whole_and_more_as_splits_in_company() -> None:
    assert [share.partition for share in shares_of(core_partitions((0,)))] == [WHOLE, WHOLE]
    shares = shares_of(core_partitions((0, 1, 2, 3)))
    assert [(s.model, s.partition, s.part.size) for s in shares[2:4]] == [(TARGET, "1/3", 3), (DRAFT, "1/3", 1)]
    for share in shares[2:]:
        assert share.company is not None and not set(share.company.cores) & set(share.part.cores)


def test_a_batch_has_blocks_for_the_chain_behind_it() -> None:
    """And the chain ends where the model's context does."""
    case = chain_case(Case((1, 1), 126, 2), 4, 128)
    assert case == Case((1, 1), 124, 2)
    batch = make_batch(case, 97, 4, 80, np.random.default_rng(0), room=4)
    assert batch.block_tables.shape == (2, 33) and batch.context_lens.tolist() == [124, 124]
    assert is_chain(case.counts, case.num_logit_rows)
    assert not is_chain((1, 2), 2) and not is_chain((1, 1), 0)
