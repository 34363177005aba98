"""The commands that measure, as processes and in this one: interrupts, budgets, estimates and output that cannot be."""

import contextlib
import json
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from faser_backend.core.errors import ConfigError, FaserError
from faser_backend.cpu.runner import Helper, LlvmRunner
from faser_backend.lab.bench.command import run_bench
from faser_backend.lab.bench.measure import Ladder
from faser_backend.lab.command_options import BenchOptions
from faser_backend.lab.contestants import Sizing
from faser_backend.manifest import EngineManifest
from faser_backend.places import DEMO_PAIR
from faser_backend.profiling import profile as profile_module
from faser_backend.profiling.profile import run_profile
from faser_backend.serving.processes import terminable
from faser_backend.serving.profile_store import load_profile
from tests.lab.test_replay import write_trace
from tests.support.brief_profile import BRIEF
from tests.support.serving_pair import build_pair


@pytest.mark.parametrize("command", ["simulate", "bench"])
def test_an_output_that_cannot_be_written_is_told_first(run, tmp_path: Path, command: str):
    trace = write_trace(tmp_path / "trace.csv", 0.01, [(400, 200)])
    options = ("--hardware", "h100", "--pair", "qwen3-32b/0.6b", "--trace", trace) if command == "simulate" else ()
    for output, reason in (("/proc/none", "cannot be written to"), (trace / "below", f"{trace}: File exists")):
        status, out, err = run(command, *options, "--output", output)
        assert (status, out) == (1, "") and err.count("\n") == 1
        assert err.startswith("error: --output = ") and reason in err


TINY = Sizing(2, 0.01, 1, 0.1, 6, (0.0, 0.8), bursty_ablations=False)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> BenchOptions:
    home = tmp_path_factory.mktemp("lab")
    prompts = home / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"def f{i}(x):\n    return x"}) + "\n" for i in range(5)))
    return BenchOptions(output=home / "out", engine_dir=build_pair(home), policies="none,fixed:2", prompts=prompts)


def test_an_interrupt_within_a_call_of_kernels_waits_for_its_end():
    """The other thread would wait at the barrier for ever, and so would a close of the runner."""
    barrier = threading.Barrier(2)

    class Interrupted(Helper):
        def start(self, *work: Any) -> None:
            super().start(*work)
            while not barrier.n_waiting:
                time.sleep(0.001)
            signal.raise_signal(signal.SIGINT)

    for scope, is_whole in ((terminable, True), (contextlib.nullcontext, False)):
        runner = SimpleNamespace(_helpers=[Interrupted()])
        with pytest.raises(KeyboardInterrupt), scope():
            LlvmRunner._on_all_threads(runner, lambda: barrier.wait(9), [(), ()])  # type: ignore[arg-type]
        assert (barrier.n_waiting == 0) == is_whole
    barrier.abort()


@pytest.mark.parametrize("arguments", [("build", "--target", DEMO_PAIR / "target"), ("profile",)], ids=lambda a: a[0])
def test_an_interrupted_command_says_so_in_one_line(
    arguments: tuple, run, options: BenchOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupted(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("faser_backend.engines.build.open_pair", interrupted)
    monkeypatch.setattr(profile_module, "open_runtime", interrupted)
    rest = (options.engine_dir,) if arguments == ("profile",) else ("--output", tmp_path / "out")
    status, out, err = run(*arguments, *rest)
    assert (status, out) == (130, "") and re.fullmatch(r"interrupted(: .* is unchanged)?", err.splitlines()[-1])
    assert "Traceback" not in err and not (tmp_path / "out").exists()


def test_an_interrupted_or_failed_benchmark_writes_the_loads_that_it_has(
    options: BenchOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    measured, loads = Ladder._measure, []

    def interrupted(self: Ladder, *arguments: Any) -> None:
        loads.append(arguments[0])
        if len(loads) == num_whole + 1:
            if why == "failed":
                raise FaserError("no memory")
            signal.raise_signal(signal.SIGTERM)
        measured(self, *arguments)

    monkeypatch.setattr(Ladder, "_measure", interrupted)
    held, lost = "the files hold what was measured until then", "0 is unchanged"
    for num_whole, why, message in ((1, "failed", "no memory"), (0, "", lost), (2, "was interrupted", held)):
        output = tmp_path / str(num_whole)
        loads.clear()
        with pytest.raises((KeyboardInterrupt, FaserError), match=message):
            run_bench(options.model_copy(update={"output": output}), TINY, command="faser bench --test")
        if not num_whole:
            assert not [*output.iterdir()]
            continue
        bench = json.loads((output / "bench.json").read_text())
        assert len({row["load"] for row in bench["rows"]}) == num_whole and not bench["meta"]["is_whole"]
        assert f"The run {why}" in (output / "report.html").read_text() and (output / "timeline.json").exists()
    told = capsys.readouterr().err
    assert re.search(r"3 engines; memory: about 0\.\d GiB, [\d.]+ GiB are available\n", told)
    assert re.search(r"time: about \d+ s, answers of 6 tokens\n", told)
    assert re.search(r"^ +\d+ s +\d+%  low, T=0$", told, re.MULTILINE), "a line per part where nobody sees a bar"


def test_a_budget_leaves_out_what_it_has_no_time_for_and_says_so(options: BenchOptions, tmp_path: Path, capsys):
    run_bench(options.model_copy(update={"output": tmp_path, "budget_s": 0.001}), TINY, command="faser bench --test")
    bench = json.loads((tmp_path / "bench.json").read_text())
    assert {(row["load"], row["temperature"]) for row in bench["rows"]} == {("low", 0.0)}
    left_out = [text for text in bench["meta"]["missing"] if "the time budget was spent" in text]
    assert len(left_out) == 7 + 4 and bench["meta"]["repeats"] == 1  # loads and timelines
    told = capsys.readouterr()
    assert all(f"- left out: {text}\n" in told.out for text in left_out) and "| policy" in told.out
    reduced = "The time budget reduced what is measured: repeats 1 instead of 2, "
    assert reduced in told.err and f"- {reduced}" in told.out and "|" not in told.err


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_module, "QUICK", BRIEF)


@pytest.mark.usefixtures("quick")
def test_a_profile_within_a_budget_says_what_it_does(options: BenchOptions, tmp_path: Path, capsys):
    assert options.engine_dir is not None
    directory = Path(shutil.copytree(options.engine_dir, tmp_path / "engine"))
    run_profile(directory, is_quick=True, budget_s=0.01)
    told = capsys.readouterr().err
    assert re.search(r"time: about \d+ s for 10% of a profile.s calls\n", told)
    assert re.search(r"^ +[\d.]+ s +\d+%  target on whole$", told, re.MULTILINE)
    assert load_profile(directory, EngineManifest.load(directory)).costs
    with pytest.raises(ConfigError, match="--budget-s = 0: must be above 0"):
        run_profile(directory, is_quick=True, budget_s=0.0)
