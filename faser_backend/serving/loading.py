"""Reports the phases of loading a model through the logger `faser.loading`, and shows them on a terminal.

The reports are below the level of warnings, so programs that import this package print nothing.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

CHECKING = "checking the engine's files"
LOADING_FILE = "faser-loading"  # in a server's launch folder: the phases and warnings of its engine, by line
DETAIL_S = 10.0  # between two lines on one phase
log = logging.getLogger("faser.loading")


class PhaseDisplay:
    """Prints a line per phase: on a terminal with its duration, elsewhere with its start time."""

    def __init__(self, log_line: Callable[[str], None] | None = None, detail_s: float = DETAIL_S) -> None:
        """log_line: receives the lines instead, without times. detail_s: time between two lines on one phase."""
        self._start_s, self.now, self._log_line = time.monotonic(), "", log_line
        self._shown_s, self._detail_s = self._start_s, detail_s
        columns = SpinnerColumn(finished_text=" "), TimeElapsedColumn(), TextColumn("{task.description}")
        console = Console(stderr=True)
        self._live = Progress(*columns, console=console) if console.is_terminal and log_line is None else None
        if self._live is not None:
            self._live.start()

    def begin(self, what: str) -> None:
        """Begins a phase, "name" or "name: progress", and ends the one before. Of one name, only progress is shown."""
        is_same = what.partition(": ")[0] == self.now.partition(": ")[0]
        if what == self.now or (is_same and self._live is None and time.monotonic() - self._shown_s < self._detail_s):
            return
        self.now, self._shown_s = what, time.monotonic()
        if self._live is not None and is_same:
            self._live.update(self._live.tasks[-1].id, description=escape(what))
            return
        self._finish()
        if self._live is not None:
            self._live.add_task(escape(what), total=1)
        elif self._log_line is not None:
            self._log_line(what)
        else:
            print(f"{time.monotonic() - self._start_s:5.1f} s  {what}", file=sys.stderr, flush=True)

    def end(self) -> None:
        self._finish()
        if self._live is not None:
            self._live.stop()

    def _finish(self) -> None:
        if self._live is not None and self._live.tasks:
            self._live.update(self._live.tasks[-1].id, completed=1)


def size_text(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


@contextmanager
def reporting_to(call: Callable[[str], None], lowest: int = logging.INFO) -> Iterator[None]:
    """Passes this process's phases and warnings about loading to `call` too. lowest: the lowest level passed on."""
    handler, level = logging.Handler(lowest), log.level
    handler.emit = lambda record: call(record.getMessage())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


@contextmanager
def shown_phases(log_line: Callable[[str], None] | None = None, *, in_pipes: bool = True) -> Iterator[PhaseDisplay]:
    """Shows the phases of this process. in_pipes: without a terminal too; otherwise only warnings are shown then."""
    phases, log.propagate = PhaseDisplay(log_line), False
    try:
        with reporting_to(phases.begin, logging.INFO if in_pipes or sys.stderr.isatty() else logging.WARNING):
            yield phases
    finally:
        log.propagate = True
        phases.end()


@contextmanager
def written_phases(folder: Path) -> Iterator[None]:
    """Writes the phases and warnings of this process to the launch folder of its `faser serve`."""

    def write(what: str) -> None:
        if (folder / LOADING_FILE).exists():  # no other server has one
            with suppress(OSError), (folder / LOADING_FILE).open("ab") as file:  # a full disk: the phase is not shown
                file.write(f"{what}\n".encode(errors="surrogateescape"))

    with reporting_to(write):
        yield
