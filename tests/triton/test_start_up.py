"""A start verifies weights once or by time stamp, has time for 64 GB, and warms up without traces."""

import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from faser_backend import manifest as manifest_module
from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import ConfigError, FaserError, ManifestError, RequestError, UnavailableError
from faser_backend.core.request import Limits
from faser_backend.engines.build import build_engines
from faser_backend.manifest import EngineManifest
from faser_backend.places import MODEL_REPO
from faser_backend.serving import runtimes
from faser_backend.serving.compose import build_engine, warm_up, warm_up_batches
from faser_backend.serving.loading import CHECKING, LOADING_FILE, PhaseDisplay, log, written_phases
from faser_backend.serving.parameters import START_TIMEOUT_S, ServingOptions
from faser_backend.triton.engine_host import EngineHost
from faser_backend.triton.launch import check_engine
from tests.support.harness import drive, open_fake, request
from tests.support.tiny_models import write_checkpoint

NUM_BYTES = 64 * 10**9
LATER_S = {"compile": 90.0, "capture": 60.0, "warm up": 60.0}  # allowances: 30 kernels, 200 graphs, 13 batches


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = write_checkpoint(tmp_path_factory.mktemp("source"))
    build_engines(source, None, directory := tmp_path_factory.mktemp("engines") / "engine")
    return directory


@pytest.fixture
def engine(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "engine")  # keeps time stamps


class Loaded(Exception):
    """The engine's process has read its weights."""


class Disk:
    """Counts the bytes that a start hashes and loads, instead of reading them."""

    def __init__(self, engine: Path, patch: pytest.MonkeyPatch) -> None:
        self.num_bytes: Counter[str] = Counter()
        self.engine, manifest = engine, EngineManifest.load(engine)
        weights = engine / manifest.target.files[0].name
        os.truncate(weights, NUM_BYTES)  # a hole
        large = replace(manifest.target.files[0], num_bytes=NUM_BYTES, mtime_ns=weights.stat().st_mtime_ns)
        segments = tuple(replace(segment, file=large) for segment in manifest.target.segments)
        replace(manifest, target=replace(manifest.target, weights=large, segments=segments)).save(engine)
        hashes = {file.name: file.sha256 for file in manifest.files}

        def hash_file(path: Path, report: Callable[[int], None] = lambda num_bytes: None) -> str:
            report(path.stat().st_size)
            self.num_bytes["verify"] += path.stat().st_size if path == weights else 0
            return hashes[path.name]

        def load(*_: object, **__: object) -> None:
            self.num_bytes["load"] += NUM_BYTES
            raise Loaded

        patch.setattr(manifest_module, "file_sha256", hash_file)
        patch.setattr(runtimes, "LlvmRuntime", load)

    def start(self, verify: str) -> None:
        """Runs what reads files in the processes of `faser serve`: the launcher and the engine."""
        config = EngineConfig.from_options(verify=verify)
        check_engine(self.engine, config)
        with pytest.raises(Loaded):
            EngineHost(ServingOptions(engine_dir=self.engine), config, MagicMock())

    def seconds(self, bytes_per_s: float) -> dict[str, float]:
        return {phase: self.num_bytes[phase] / bytes_per_s for phase in ("verify", "load")} | LATER_S


@pytest.mark.parametrize(("verify", "verify_s"), [("quick", 0.0), ("full", 6.4)])
def test_a_start_of_64_gb_hashes_once_or_not_at_all(verify: str, verify_s: float, engine: Path, monkeypatch) -> None:
    disk = Disk(engine, monkeypatch)
    disk.start(verify)
    seconds = disk.seconds(10e9)
    assert (seconds["verify"], seconds["load"]) == (verify_s, 6.4)
    assert sum(seconds.values()) <= 225.0 and sum(disk.seconds(1e9).values()) <= START_TIMEOUT_S
    EngineManifest.load(engine).verify_weights(engine, is_full=True)  # control: another process that hashes is seen
    assert disk.seconds(10e9)["verify"] == verify_s + 6.4


def test_quick_hashes_only_files_whose_time_stamp_changed(engine: Path) -> None:
    manifest = EngineManifest.load(engine)
    path, reports = engine / manifest.target.files[0].name, []

    def verify(*, is_full: bool = False) -> list[tuple[int, int]]:
        reports.clear()
        manifest.verify_weights(engine, is_full=is_full, report=lambda *report: reports.append(report))
        return reports

    size = manifest.target.files[0].num_bytes
    assert verify() == [] and verify(is_full=True) == [(size, size)]
    os.utime(path)  # as after a copy
    assert verify() == [(size, size)]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ManifestError, match="changed since it was built: sha256"):
        verify()
    os.utime(path, ns=(0, manifest.target.files[0].mtime_ns))
    assert verify() == []  # the limit of quick, and why there is full
    with pytest.raises(ManifestError, match="changed since it was built: sha256"):
        verify(is_full=True)


def test_the_launcher_prints_each_phase_and_some_of_its_progress(tmp_path: Path) -> None:
    told: list[str] = []
    steps = [f"{CHECKING}: {done} of 3 GB" for done in range(3)]
    for detail_s, shown in ((60.0, [steps[0], "warming up"]), (0.0, [*steps, "warming up"])):
        display = PhaseDisplay(told.append, detail_s)
        for step in (*steps, steps[-1], "warming up"):
            display.begin(step)
        assert told == shown
        told.clear()
    with written_phases(tmp_path):
        for _ in range(2):
            log.info("to nobody, unless the launcher has made the file")
            (file := tmp_path / LOADING_FILE).touch()
    assert file.read_text().count("\n") == 1


@pytest.fixture
def model_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", MagicMock())
    from faser_backend.triton import model

    return model


def test_answers_that_shared_memory_does_not_hold_are_refused(model_module: Any, monkeypatch) -> None:
    monkeypatch.setattr(model_module.shutil, "disk_usage", lambda _: MagicMock(free=3 << 20))
    responder = model_module.TritonResponder(request := MagicMock())
    with pytest.raises(UnavailableError, match="4 MiB exceed"):
        responder.send([("logits", np.zeros(4 << 20, np.int8))], is_final=True)
    responder.send([("logits", np.zeros(3 << 20, np.int8))], is_final=True)
    assert request.get_response_sender().send.call_count == 1


def test_a_text_model_waits_for_an_engine_that_loads_longer(model_module: Any, monkeypatch, tmp_path) -> None:
    assert model_module.launch_folder({"model_repository": "./ensemble"}) == Path.cwd().parent
    socket, frontend = tmp_path / "socket", MagicMock()
    monkeypatch.setattr(model_module, "socket_id", lambda path: (1,) if path.exists() else ())

    class Waiting(model_module.TextModel):
        def __init__(self) -> None:
            self._socket, self._socket_id, self._failure, self._serving = socket, (), "not yet", threading.Lock()
            self._is_ready, self._is_closing = threading.Event(), threading.Event()

        def _connect(self) -> Any:
            if not socket.exists():
                raise UnavailableError("no engine answers")
            self._is_closing.set()
            return frontend

        def run(self) -> None:
            follower = threading.Thread(target=self._follow_engine)
            follower.start()
            assert self._is_ready.wait(5) and self._failure == "no engine answers"
            socket.touch()
            follower.join(5)
            assert not follower.is_alive() and self._failure is None and self._frontend is frontend

    Waiting().run()


@pytest.mark.parametrize(("num_blocks", "max_context"), [(25, 400), (100, 1024)])
def test_a_context_that_memory_does_not_hold_is_clipped(num_blocks: int, max_context: int, tmp_path, caplog) -> None:
    source = write_checkpoint(tmp_path / "source", max_position_embeddings=1024)
    build_engines(source, None, tmp_path / "engine")
    with closing(build_engine(tmp_path / "engine", EngineConfig(num_kv_blocks=num_blocks))) as engine:
        assert engine.limits.max_context == max_context
        assert ("1024 tokens do not fit; requests are limited to the 400 tokens" in caplog.text) == (num_blocks == 25)
        assert ("--num-kv-blocks" in caplog.text) == (num_blocks == 25)
        full = request("full", [5] * (max_context - 2), 2)
        assert len(drive(engine, [full]).tokens["full"]) == 2  # it is served, and one token more is refused
        with pytest.raises(RequestError, match=str(max_context)):
            engine.submit(request("more", [5] * (max_context - 1), 2))
    with pytest.raises(ConfigError, match="num_kv_blocks = 15: one context of 256 tokens needs at least 16 blocks"):
        build_engine(tmp_path / "engine", EngineConfig(num_kv_blocks=15))


@pytest.mark.parametrize("path", sorted(MODEL_REPO.parent.glob("model_repo*/*/1/model.py")), ids=lambda p: p.parts[-3])
def test_models_import_from_pythonpath_which_tritons_interpreter_ignores(path: Path, tmp_path: Path) -> None:
    package = tmp_path / "faser_backend" / "triton"
    package.mkdir(parents=True)
    names = ("EngineModel", "TextModel", "PreprocessingModel", "PostprocessingModel", "LlmApiModel")
    (package / "model.py").write_text("\n".join(f"{name} = 'of PYTHONPATH'" for name in names))
    code = f"import runpy; print(runpy.run_path({str(path)!r})['TritonPythonModel'])"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    assert subprocess.check_output([sys.executable, "-I", "-c", code], env=environment, text=True) == "of PYTHONPATH\n"


def test_batches_grow_to_the_most_that_may_run_and_fit_the_context():
    batches = list(warm_up_batches(Limits(vocab_size=50, max_context=20), 12, 256))
    assert [len(batch) for batch in batches] == [1, 1, 1, 2, 2, 4, 4, 8, 8, 12, 12]
    for batch in batches:
        for each in batch:
            each.validate(Limits(50, 20))
            assert each.prompt_ids.max() < 50


def test_leaves_an_engine_as_it_was():
    engine = open_fake("fixed:2").engine
    seen = []
    engine.step_runner.observers.append(seen.append)
    observers = engine.step_runner.observers[:]
    warm_up(engine, max_num_seqs=4, max_prefill_tokens=8)
    assert not seen, "policies and listeners hear nothing of it"
    assert engine.step_runner.observers == observers
    metrics = engine.metrics()
    assert (metrics.num_steps, metrics.num_emitted) == (0, 0)
    assert not engine.has_work
    engine.check_integrity()


def test_a_step_that_fails_is_told():
    fake = open_fake("none")
    fake.targets[0].fails_at_call = 3
    with pytest.raises(FaserError, match="warm-up with 1 requests: the step of this request failed"):
        warm_up(fake.engine, max_num_seqs=1, max_prefill_tokens=8)
