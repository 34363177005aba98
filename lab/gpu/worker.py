"""The child's side of harness.py: runs one part after another and tells what they came to.

Events leave through what was standard output; everything that is printed goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

LAST_LINES = 12  # of a traceback, in the results

Result = dict[str, Any]


@dataclass(slots=True)
class Context:
    """What a part gets. results: of the parts before it, by name, as far as they came."""

    device: str
    is_tiny: bool
    seed: int
    end_s: float  # of the monotonic clock: a part should stop by then
    results: Mapping[str, Result] = field(default_factory=dict)
    save: Callable[[Result], None] = lambda result: None  # what is known so far, should the part not end

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def time_left_s(self) -> float:
        return self.end_s - time.monotonic()

    def has_time(self, needed_s: float = 0.0) -> bool:
        return self.time_left_s > needed_s

    def result_of(self, part: str) -> Result:
        """Of an earlier part; empty where it was not run or came to nothing."""
        return self.results.get(part, {})


def main() -> None:
    with os.fdopen(os.dup(1), "w") as events:
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        _tell(events, _encoded({"event": "ready"}))
        for line in sys.stdin:
            _tell(events, _run(json.loads(line), events))


def _run(job: dict[str, Any], events: TextIO) -> str:
    """The last event of a job."""
    context = Context(
        **job["setting"],
        end_s=time.monotonic() + job["soft_limit_s"],
        results=job["results"],
        save=lambda result: _tell(events, _encoded({"event": "partial", "result": result})),
    )
    module, _, function = job["run"].partition(":")
    try:
        return _encoded({"event": "done", "result": getattr(importlib.import_module(module), function)(context)})
    except Exception:
        lines = traceback.format_exc().strip().splitlines()
        return _encoded({"event": "failed", "error": "\n".join(lines[-LAST_LINES:])})


def _encoded(event: dict[str, Any]) -> str:
    """Numbers of numpy become plain ones; anything else that JSON cannot hold is an error of the part."""
    return json.dumps(event, default=lambda value: value.item())


def _tell(events: TextIO, event: str) -> None:
    events.write(event + "\n")
    events.flush()


if __name__ == "__main__":
    main()
