"""Runs the parts of a check one after another, each in a child process of its own that can be killed.

A part that raises, hangs or takes its process down is recorded and costs nobody else anything, and leaves nothing on
the device. Whatever it has saved by then is kept. Knows nothing of GPUs or of what parts measure; the child's side is
worker.py, which leaves what it finds in a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lab.places import ROOT

SOFT_SHARE = 0.85  # of its limit, after which a part should stop by itself; at the limit it is killed
LEAST_SHARE = 0.25  # of its limit, below which a part is not begun
LEAST_LIMIT_S = 20.0  # however small the budget: importing the libraries takes seconds
EXIT_S = 15.0


@dataclass(frozen=True, slots=True)
class Part:
    """run: "module:function", called in the child with a worker.Context; it returns a dict for JSON.

    limit_s: of a run with the full budget. needs_gpu: without one the part is not run.
    """

    name: str
    title: str
    run: str
    limit_s: float
    needs_gpu: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """What every part is told."""

    device: str = "cuda"
    is_tiny: bool = False
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """status: done, failed, timed out, died, skipped."""

    title: str
    status: str
    seconds: float = 0.0
    limit_s: float = 0.0
    result: dict[str, Any] = field(default_factory=dict)
    error: str = ""


class Harness:
    """Runs parts within `budget_s` seconds; `record` is told of every outcome."""

    def __init__(
        self, setting: Setting, budget_s: float, full_budget_s: float, record: Callable[[str, Outcome], None]
    ) -> None:
        self._setting = setting
        self._end_s = time.monotonic() + budget_s
        self._scale = budget_s / full_budget_s
        self._record = record
        self._results: dict[str, dict[str, Any]] = {}

    def run(self, parts: Sequence[Part]) -> None:
        """All parts, in order. Leaves no child behind, whatever happens."""
        for part in parts:
            outcome = self._run(part)
            self._results[part.name] = outcome.result
            self._record(part.name, outcome)

    def _run(self, part: Part) -> Outcome:
        wanted = max(part.limit_s * self._scale, min(part.limit_s, LEAST_LIMIT_S))
        limit = min(wanted, self._end_s - time.monotonic())
        if part.needs_gpu and self._setting.device != "cuda":
            return Outcome(part.title, "skipped", error="needs a GPU")
        if limit < LEAST_SHARE * wanted:
            return Outcome(part.title, "skipped", error=f"out of budget: {max(limit, 0.0):.0f} of {wanted:.0f} s left")
        job = {"run": part.run, "setting": asdict(self._setting), "soft_limit_s": SOFT_SHARE * limit}
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="faser-check-") as folder:
            outcome = _run_child(Path(folder), job | {"results": self._results}, limit)
        outcome.title, outcome.limit_s = part.title, round(limit, 1)
        outcome.seconds = round(time.monotonic() - start, 2)
        return outcome


def _run_child(folder: Path, job: dict[str, Any], limit_s: float) -> Outcome:
    """What the job came to; the child ends before this returns."""
    job_file, found_file = folder / "job.json", folder / "found.json"
    job_file.write_text(json.dumps(job))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    # More hardware queues than streams, so that no stream waits behind another's; read when CUDA starts.
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    command = [sys.executable, "-m", "lab.gpu.worker", str(job_file), str(found_file)]
    child = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
    )
    code = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = child.wait(limit_s)
    finally:  # it, and whatever it started
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the driver cannot even be killed
            child.wait(EXIT_S)
    found: dict[str, Any] = json.loads(found_file.read_text()) if found_file.exists() else {"status": "partial"}
    outcome = Outcome("", **found)
    if outcome.status == "partial" and code is None:
        outcome.status, outcome.error = "timed out", "did not end within its limit and was killed"
    elif outcome.status == "partial":
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        outcome.status, outcome.error = "died", f"its process ended: {how}"
    return outcome
