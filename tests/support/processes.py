"""Finds and ends processes that tests started, and waits for what they do."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from faser_backend.serving import processes


def children(words: str, parent: int | None = None) -> list[int]:
    """Returns children of this process, or of `parent`, whose command line holds the words."""
    return [pid for pid in processes.children(parent or os.getpid()) if words in " ".join(processes.arguments(pid))]


def kill_children(words: str) -> None:
    pids = children(words)
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert still_running(pids) == []


def still_running(pids: list[int], timeout_s: float = 5.0) -> list[int]:
    """Waits until the processes have ended, and returns those that have not by then."""
    deadline_s = time.monotonic() + timeout_s
    while (left := [pid for pid in pids if processes.is_running(pid)]) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return left


def wait_until(is_so: Callable[[], Any], what: object = "", timeout_s: float = 20.0) -> Any:
    """Returns what the condition returns as soon as it is true. what: the failure otherwise."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := is_so()):
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)
    return found
