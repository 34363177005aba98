"""Reports the progress of a TensorRT build, and stops a build.

TensorRT calls a monitor from a thread of its choice, and an exception must not pass through it. An error in a callback
is kept, the build is stopped, and then the error is raised.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from time import monotonic
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")

MAX_DEPTH = 2  # of nested phases; deeper ones take milliseconds
MIN_INTERVAL_S = 0.1  # between two reports of steps: phases have hundreds


class _Phase(NamedTuple):
    depth: int  # 0 for the whole build
    num_steps: int


class BuildMonitor:
    """A monitor of a build. `monitor` is passed to TensorRT; `run` builds on another thread, for interrupts."""

    def __init__(self, module: Any, report: Callable[[str], None]) -> None:
        """report: called with the phase and its progress, e.g. "Computing profile costs 3/15"."""
        self.monitor = _make_monitor(module, self)
        self._report = report
        self._phases: dict[str, _Phase] = {}
        self._last_report_s = 0.0
        self._lock = Lock()
        self._error: BaseException | None = None

    def start(self, phase: str, parent: str | None, num_steps: int) -> None:
        depth = self._phases[parent].depth + 1 if parent in self._phases else 0
        self._phases[phase] = _Phase(depth, num_steps)
        if depth <= MAX_DEPTH:
            self._report_line(phase)

    def step(self, phase: str, step: int) -> bool:
        """Returns whether to continue."""
        depth, num_steps = self._phases[phase]
        if depth <= MAX_DEPTH and monotonic() - self._last_report_s >= MIN_INTERVAL_S:
            self._report_line(f"{phase} {step + 1}/{num_steps}")
        return self._error is None

    def run(self, build: Callable[[], Result]) -> Result:
        """Returns the result of `build`. An interrupt or an error of `report` stops TensorRT, and is then raised."""
        with ThreadPoolExecutor(1) as executor:
            future = executor.submit(build)
            try:
                future.exception()  # waits
            except KeyboardInterrupt as interrupt:
                self._fail(interrupt)
                future.exception()
        if self._error is not None:
            raise self._error
        return future.result()

    def _report_line(self, text: str) -> None:
        self._last_report_s = monotonic()
        if self._error is None:
            try:
                self._report(text)
            except BaseException as error:  # raised by `run`, on the caller's thread
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error


def _make_monitor(module: Any, owner: BuildMonitor) -> Any:
    """Makes an IProgressMonitor of this module. Its base class exists only once the module is imported."""

    class Monitor(module.IProgressMonitor):
        def __init__(self) -> None:
            module.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            owner.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return owner.step(phase_name, step)

        def phase_finish(self, phase_name: str) -> None:
            """Reports nothing: the next start does."""

    return Monitor()
