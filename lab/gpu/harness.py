"""Runs the parts of a check one after another, each in a child process that can be killed.

A part that raises, hangs or kills its process is recorded and leaves nothing on the device; what it had saved is kept.
The child is this module as a program: it runs one part and leaves the result in a file. All that is printed goes to
standard error.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from faser_backend.lab.places import ROOT

SOFT_SHARE = 0.85  # of its limit, after which a part should stop by itself; at the limit it is killed
LEAST_SHARE = 0.25  # of its limit, below which a part is not started
LEAST_LIMIT_S = 20.0  # for any budget: importing the libraries takes seconds
EXIT_S = 15.0
LAST_LINES = 12  # of a traceback, in the results

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a check. run: "module:function", called in the child with a Context; it returns a dict for JSON, of
    which no row may have is_right False. limit_s: with the full budget. needs_gpu: without a GPU the part is skipped.
    """

    name: str
    title: str
    run: str
    limit_s: float
    needs_gpu: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """The options that every part is given."""

    device: str = "cuda"
    is_tiny: bool = False
    seed: int = 0
    checkpoint: str = ""  # a directory to serve


@dataclass(frozen=True, slots=True)
class Context(Setting):
    """The argument of a part."""

    end_s: float = float("inf")  # of the monotonic clock, by which a part should stop
    save: Callable[[Result], None] = lambda result: None  # keeps a partial result in case the part does not end

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def time_left_s(self) -> float:
        return self.end_s - time.monotonic()


@dataclass(slots=True)
class Outcome:
    """The outcome of a part. status: done, failed, timed out, died, skipped."""

    title: str
    status: str
    seconds: float = 0.0
    limit_s: float = 0.0
    result: Result = field(default_factory=dict)
    error: str = ""


def run_parts(
    parts: Sequence[Part], setting: Setting, budget_s: float, scale: float, record: Callable[[str, Outcome], None]
) -> None:
    """Runs all parts in order within budget_s; `record` gets every outcome. scale: of the parts' limits."""
    end_s = time.monotonic() + budget_s
    for part in parts:
        record(part.name, _run(part, setting, scale, end_s))


def _run(part: Part, setting: Setting, scale: float, end_s: float) -> Outcome:
    wanted = max(part.limit_s * scale, min(part.limit_s, LEAST_LIMIT_S))
    limit = min(wanted, end_s - time.monotonic())
    if part.needs_gpu and setting.device != "cuda":
        return Outcome(part.title, "skipped", error="needs a GPU")
    if limit < LEAST_SHARE * wanted:
        return Outcome(part.title, "skipped", error=f"out of budget: {max(limit, 0.0):.0f} of {wanted:.0f} s left")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faser-check-") as folder:
        found = Path(folder, "found.json")
        job = {"run": part.run, "setting": asdict(setting), "soft_limit_s": SOFT_SHARE * limit, "found": str(found)}
        code = _run_child(job, limit)
        left: dict[str, Any] = json.loads(found.read_text()) if found.exists() else {"status": "partial"}
    outcome = Outcome(part.title, limit_s=round(limit, 1), seconds=round(time.monotonic() - start, 2), **left)
    if outcome.status == "partial" and code is None:
        outcome.status, outcome.error = "timed out", "did not end within its limit and was killed"
    elif outcome.status == "partial":
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        outcome.status, outcome.error = "died", f"its process ended: {how}"
    return outcome


def _run_child(job: dict[str, Any], limit_s: float) -> int | None:
    """Runs a child to its end. Returns its exit code, or None if it had to be killed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    # More hardware queues than streams, so that no stream waits behind another's; read when CUDA starts.
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    command = [sys.executable, "-m", "faser_backend.lab.gpu.harness", json.dumps(job)]
    child = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
    )
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(limit_s)
        return None
    finally:  # the child and its own children
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that hangs in the driver cannot be killed
            child.wait(EXIT_S)


def main() -> None:
    job = json.loads(sys.argv[1])
    found = Path(job["found"])

    def leave(status: str, result: Result, error: str = "") -> None:
        """Writes the result file. numpy's numbers become plain ones; the rename makes the file appear complete."""
        partial = found.with_suffix(".partial")
        content = {"status": status, "result": result, "error": error}
        partial.write_text(json.dumps(content, default=lambda value: value.item()))
        os.replace(partial, found)

    end_s = time.monotonic() + job["soft_limit_s"]
    context = Context(**job["setting"], end_s=end_s, save=lambda result: leave("partial", result))
    module, _, function = job["run"].partition(":")
    try:
        result = getattr(importlib.import_module(module), function)(context)
        rows = [row for rows in result.values() if isinstance(rows, list) for row in rows if isinstance(row, dict)]
        wrong = [str(row) for row in rows if not row.get("is_right", True)]
        leave("failed" if wrong else "done", result, "\n".join(wrong))
    except Exception:
        saved = json.loads(found.read_text())["result"] if found.exists() else {}
        leave("failed", saved, "\n".join(traceback.format_exc().strip().splitlines()[-LAST_LINES:]))


if __name__ == "__main__":
    main()
