"""What TensorRT is doing while it builds, and how a build is stopped.

TensorRT calls a monitor from threads of its own and cannot be left by an exception: whatever goes wrong in
a callback is kept, the build is asked to stop, and the error is raised once it has.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeVar

Result = TypeVar("Result")


class BuildMonitor:
    """`monitor` goes to TensorRT; `run` builds on another thread, so that an interrupt reaches this one."""

    def __init__(self, module: Any, report: Callable[[str], None]) -> None:
        """report: called with the phase and its progress, e.g. "Tactic selection 3/8"."""
        self.monitor = _make_monitor(module, self)
        self._report = report
        self._num_steps: dict[str, int] = {}
        self._lock = Lock()
        self._error: BaseException | None = None

    def start(self, phase: str, num_steps: int) -> None:
        self._num_steps[phase] = num_steps
        self._tell(phase)

    def step(self, phase: str, step: int) -> bool:
        """Whether to go on."""
        self._tell(f"{phase} {min(step + 1, self._num_steps[phase])}/{self._num_steps[phase]}")
        return self._error is None

    def run(self, build: Callable[[], Result]) -> Result:
        """The result of `build`. An interrupt or an error of `report` stops TensorRT first and is raised then."""
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

    def _tell(self, text: str) -> None:
        if self._error is None:
            try:
                self._report(text)
            except BaseException as error:  # raised by `run`, on the caller's thread
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error


def _make_monitor(module: Any, owner: BuildMonitor) -> Any:
    """An IProgressMonitor of this module: the base class is known only once it is imported."""

    class Monitor(module.IProgressMonitor):
        def __init__(self) -> None:
            module.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            owner.start(phase_name, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return owner.step(phase_name, step)

        def phase_finish(self, phase_name: str) -> None:
            """The next start tells more."""

    return Monitor()
