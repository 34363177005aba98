"""The child's side of harness.py: runs one part and leaves what it came to in a file.

Everything that is printed goes to standard error.
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
from pathlib import Path
from typing import Any

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


def main() -> None:
    job, found = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    results: Result = {}

    def leave(status: str, error: str = "") -> None:
        """Numbers of numpy become plain ones; anything else that JSON cannot hold is an error of the part. The rename
        makes the file appear whole."""
        partial = found.with_suffix(".partial")
        content = {"status": status, "result": results, "error": error}
        partial.write_text(json.dumps(content, default=lambda value: value.item()))
        os.replace(partial, found)

    def save(result: Result) -> None:
        nonlocal results
        results = result
        leave("partial")

    end_s = time.monotonic() + job["soft_limit_s"]
    context = Context(**job["setting"], end_s=end_s, results=job["results"], save=save)
    module, _, function = job["run"].partition(":")
    try:
        save(getattr(importlib.import_module(module), function)(context))
        leave("done")
    except Exception:
        error = "\n".join(traceback.format_exc().strip().splitlines()[-LAST_LINES:])
        saved = json.loads(found.read_text())["result"] if found.exists() else {}
        results = saved
        leave("failed", error)


if __name__ == "__main__":
    main()
