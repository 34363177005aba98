"""Runs the parts of a check one after another, each in a child process that can be killed.

A part that raises, hangs or takes its process down is recorded and costs nobody else anything: the next part gets a
fresh child. Whatever a part has saved by then is kept. Knows nothing of GPUs or of what parts measure; the child's
side is worker.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lab.places import ROOT

SOFT_SHARE = 0.85  # of its limit, after which a part should stop by itself; at the limit it is killed
LEAST_SHARE = 0.25  # of its limit, below which a part is not begun
LEAST_LIMIT_S = 20.0  # however small the budget: importing the libraries takes seconds
START_S = 60.0  # a child may take so long to start: importing torch from a cold disk is slow
EXIT_S = 15.0

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """run: "module:function", called in the child with a worker.Context; it returns a dict for JSON.

    limit_s: of a run with the full budget. needs_gpu: without one the part is not run. is_fresh: begins in a new
    child, for what earlier parts left on the device would disturb it.
    """

    name: str
    title: str
    run: str
    limit_s: float
    needs_gpu: bool = False
    is_fresh: bool = False


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


Record = Callable[[str, Outcome], None]


class Harness:
    """Runs parts within `budget_s` seconds; `record` is told of every outcome, and of partial ones on the way."""

    def __init__(self, setting: Setting, budget_s: float, full_budget_s: float, record: Record) -> None:
        self._setting = setting
        self._end_s = time.monotonic() + budget_s
        self._scale = budget_s / full_budget_s
        self._record = record
        self._child: Child | None = None
        self._results: dict[str, dict[str, Any]] = {}

    def run(self, parts: Sequence[Part]) -> None:
        """All parts, in order. Leaves no child behind, whatever happens."""
        try:
            for part in parts:
                outcome = self._run(part)
                self._results[part.name] = outcome.result
                self._record(part.name, outcome)
        finally:
            self._drop_child()

    def _run(self, part: Part) -> Outcome:
        wanted = max(part.limit_s * self._scale, min(part.limit_s, LEAST_LIMIT_S))
        limit = min(wanted, self._end_s - time.monotonic())
        if part.needs_gpu and self._setting.device != "cuda":
            return Outcome(part.title, "skipped", error="needs a GPU")
        if limit < LEAST_SHARE * wanted:
            return Outcome(part.title, "skipped", error=f"out of budget: {max(limit, 0.0):.0f} of {wanted:.0f} s left")
        if part.is_fresh:
            self._drop_child()
        start = time.monotonic()
        outcome = Outcome(part.title, "running", limit_s=round(limit, 1))
        if self._child is None:
            self._child = Child()
            if self._child.next_event(start + START_S) is None:
                outcome.status, outcome.error = self._child.verdict()
                self._drop_child()
                return outcome
            start = time.monotonic()
        self._child.send(
            {
                "run": part.run,
                "setting": asdict(self._setting),
                "soft_limit_s": SOFT_SHARE * limit,
                "results": self._results,
            }
        )
        self._follow(part, self._child, outcome, start + limit)
        outcome.seconds = round(time.monotonic() - start, 2)
        if outcome.status != "done":  # an error of the device outlasts the call that met it
            self._drop_child()
        return outcome

    def _follow(self, part: Part, child: Child, outcome: Outcome, end_s: float) -> None:
        """Reads the child's events until the part has ended, one way or another."""
        while True:
            event = child.next_event(end_s)
            if event is None:
                outcome.status, outcome.error = child.verdict()
                return
            outcome.result = event.get("result", outcome.result)
            if event["event"] != "partial":
                outcome.status, outcome.error = event["event"], event.get("error", "")
                return
            self._record(part.name, outcome)

    def _drop_child(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


class Child:
    """A worker process: jobs go in as lines of JSON, events come out the same way."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        # More hardware queues than streams, so that no stream waits behind another's; read when CUDA starts.
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lab.gpu.worker"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._is_busy = True  # until it says that it is ready
        self._events: queue.Queue[Event | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, job: dict[str, Any]) -> None:
        """A child that has died is noticed when its events are read."""
        assert self._process.stdin is not None
        self._is_busy = True
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()

    def next_event(self, end_s: float) -> Event | None:
        """None where none came until end_s of the monotonic clock, or none will ever come."""
        try:
            event = self._events.get(timeout=max(0.0, end_s - time.monotonic()))
        except queue.Empty:
            return None
        self._is_busy = event is None or event["event"] == "partial"
        return event

    def verdict(self) -> tuple[str, str]:
        """Why there was no event: status and error."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)  # a pipe closes a moment before its process has ended
        code = self._process.returncode
        if code is None:
            return "timed out", "did not end within its limit and was killed"
        return "died", f"its process ended: {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"

    def close(self) -> None:
        """Lets an idle child end, kills a busy one, and whatever they started."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.0 if self._is_busy else EXIT_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the driver cannot even be killed
            self._process.wait(EXIT_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._events.put(json.loads(line))
        self._events.put(None)
