"""The commands that measure, as processes and in this one: interrupts, budgets, estimates and output that cannot be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from faser_backend.serving.processes import children, is_running

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lines = [f"2023-11-16 18:{i // 60:02}:{i % 60:02}.0,400,200" for i in range(3000)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    return path


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "faser_backend.cli", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def ignores_interrupts(pid: int) -> bool:
    """As workers do from when they can work, and the process that tracks resources for them."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.split("SigIgn:")[1].split()[0], 16) >> (signal.SIGINT - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda each: each.name)
def test_whatever_ends_a_simulation_ends_its_workers(number: int, trace: Path, tmp_path: Path):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core: no workers")
    output = tmp_path / "out"
    options = ("--hardware", "h100", "--pair", "qwen3-32b/0.6b", "--trace", trace, "--requests", 3000)
    process = start("simulate", *options, "--output", output)
    try:
        deadline = time.monotonic() + 30
        while len(workers := children(process.pid)) < 3 or not all(map(ignores_interrupts, workers)):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=10)
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0 and "Traceback" not in errors
    deadline = time.monotonic() + 5
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [worker for worker in workers if is_running(worker)] == []
    assert list(output.iterdir()) == []


@pytest.mark.parametrize("command", ["simulate", "bench"])
def test_an_output_that_cannot_be_written_is_told_first(run, trace: Path, command: str):
    options = ("--hardware", "h100", "--pair", "qwen3-32b/0.6b", "--trace", trace) if command == "simulate" else ()
    for output, reason in (("/proc/none", "cannot be written to"), (trace / "below", f"{trace}: File exists")):
        status, out, err = run(command, *options, "--output", output)
        assert (status, out) == (1, "") and err.count("\n") == 1
        assert err.startswith("error: --output = ") and reason in err
