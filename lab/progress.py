"""How far a command is, on stderr: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, TypeVar

T = TypeVar("T")
LINE_S = 10.0  # between two lines of the same part


def progress_bar(console: Any = None) -> Any:
    """rich's, for all commands; where nobody sees a bar, ProgressLines."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = console or Console(file=sys.stderr)
    if not console.is_terminal:
        return ProgressLines(console.file)
    columns = (TextColumn("{task.description:32}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    # Drawing competes with what is measured.
    return Progress(*columns, TimeRemainingColumn(), console=console, refresh_per_second=2)


class ProgressLines:
    """What commands use of rich's Progress: a line for each new part, and one every LINE_S while it goes on."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._totals: list[float] = []
        self._done: list[float] = []
        self._words: list[str] = []
        self._start_s = self._told_s = time.monotonic()

    def add_task(self, description: str, total: float) -> int:
        self._totals.append(total)
        self._done.append(0.0)
        self._words.append("")
        self.update(len(self._words) - 1, description=description)
        return len(self._words) - 1

    def update(
        self, task: int, *, description: str | None = None, completed: float | None = None, advance: float = 0.0
    ) -> None:
        self._done[task] = (self._done[task] if completed is None else completed) + advance
        is_new = description is not None and description != self._words[task]
        if description is not None:
            self._words[task] = description
        now_s = time.monotonic()
        if is_new or now_s - self._told_s >= LINE_S:
            self._told_s = now_s
            share = self._done[task] / self._totals[task] if self._totals[task] else 1.0
            print(f"{now_s - self._start_s:5.0f} s  {share:4.0%}  {self._words[task]}", file=self._file, flush=True)

    def advance(self, task: int, advance: float = 1.0) -> None:
        self.update(task, advance=advance)

    def track(self, items: Iterable[T], total: float, description: str) -> Iterator[T]:
        """The items, each one a step."""
        task = self.add_task(description, total=total)
        for item in items:
            yield item
            self.advance(task)

    def remove_task(self, task: int) -> None:
        """Lines stay."""

    def __enter__(self) -> ProgressLines:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing to take away."""
