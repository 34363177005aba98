"""Fixtures that several files share."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from faser_backend.cli.main import main

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # before any test loads ONNX Runtime, whose release 1.31 sends usage data
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # Shells start background processes like this, and children inherit it: tests that press Ctrl-C would hang.
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The slowest files, slowest first: parallel workers begin with them, so that none is left for the end.
SLOW_FILES = [
    "runner", "eagle3_drafting", "endings", "kernels_compile", "kernels", "conformance", "examples", "abuse",
    "products", "attention", "bench", "isolation", "operating", "templates", "output_distribution", "block_drafting",
    "smollm2", "bfloat16_units", "wheel", "exactness", "experts", "openai", "model_source", "demo_pair",
    "tensorrt_build", "engine", "cli", "tensorrt_plugin", "mixed_calls", "heartbeat", "torch_blocks", "compare",
]  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # else pytest-xdist begins with the files of the most tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {f"test_{name}": index for index, name in enumerate(SLOW_FILES)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


def pytest_collection_finish() -> None:
    """Lets collections of garbage, which tests ask for, pass over the modules that are loaded by then."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _signals_stay_as_they_are() -> Iterator[None]:
    """Restores signal handlers, which commands change."""
    before = {number: signal.getsignal(number) for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def every_model_is_worth_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("faser_backend.cpu.weights.ONE_THREAD_BYTES", 0)


@pytest.fixture(scope="session")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds a pair with random weights. Tests must not write to it."""
    from tests.support.serving_pair import build_pair  # rarely needed, slow to load

    return build_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs `faser ARGUMENTS`; returns status, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["faser", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run
