"""Processes that this one has started, found and ended as somebody from outside would."""

from __future__ import annotations

import os
import signal
import time

from faser_backend.serving import processes


def children(words: str, parent: int | None = None) -> list[int]:
    """Processes of this one, or of `parent`, whose command line holds the words."""
    return [pid for pid in processes.children(parent or os.getpid()) if words in " ".join(processes.arguments(pid))]


def kill_children(words: str) -> None:
    pids = children(words)
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until_gone(pids)


def wait_until_gone(pids: list[int], timeout_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while any(map(processes.is_running, pids)):
        assert time.monotonic() < deadline_s, f"still running: {pids}"
        time.sleep(0.02)
