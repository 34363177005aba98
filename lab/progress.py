"""Progress of a command on stderr: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID, TimeElapsedColumn

LINE_S = 10.0  # between two lines about the same part


def progress_bar() -> Progress:
    """Returns the progress display of all commands: a bar on a terminal, otherwise ProgressLines."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        return ProgressLines(console)
    columns = (TimeElapsedColumn(), *Progress.get_default_columns())  # drawing takes time from what is measured
    return Progress(*columns, console=console, refresh_per_second=2)


class ProgressLines(Progress):
    """Progress as text: a line for each new part, and one every LINE_S while it lasts."""

    def __init__(self, console: Console) -> None:
        super().__init__(console=console, disable=True)
        self._start_s = self._printed_s = time.monotonic()

    def add_task(self, description: str, *arguments: Any, **fields: Any) -> TaskID:
        task = super().add_task(description, *arguments, **fields)
        self._print(task)
        return task

    def update(self, task_id: TaskID, *, description: str | None = None, **fields: Any) -> None:
        is_new = description not in (None, self._tasks[task_id].description)
        super().update(task_id, description=description, **fields)
        if is_new or time.monotonic() - self._printed_s >= LINE_S:
            self._print(task_id)

    def advance(self, task_id: TaskID, advance: float = 1.0) -> None:
        self.update(task_id, advance=advance)

    def _print(self, task_id: TaskID) -> None:
        self._printed_s, task = time.monotonic(), self._tasks[task_id]
        line = f"{self._printed_s - self._start_s:5.0f} s  {task.percentage:3.0f}%  {task.description}"
        print(line, file=self.console.file, flush=True)
