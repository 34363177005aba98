"""Processes that this one has started, found and ended as somebody from outside would."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from faser_backend.serving.processes import is_running


def children(words: str, parent: int | None = None) -> list[int]:
    """Processes of this one, or of `parent`, whose command line holds the words."""
    found = []
    for tasks in Path(f"/proc/{parent or os.getpid()}/task").glob("*/children"):
        for child in map(int, tasks.read_text().split()):
            if words in Path(f"/proc/{child}/cmdline").read_bytes().decode().replace("\0", " "):
                found.append(child)
    return found


def kill_children(words: str) -> None:
    pids = children(words)
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until_gone(pids)


def wait_until_gone(pids: list[int], timeout_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline_s, f"still running: {pids}"
        time.sleep(0.02)
