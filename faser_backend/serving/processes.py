"""Finds child processes in /proc, and controls how this process ends: with its parent, or by SIGINT and SIGTERM."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

PARENT_POLL_S = 0.5  # between two checks of a model's process for its parent
_LIBC = ctypes.CDLL(None)  # opened here: after a fork, the loader's lock may be held
_PR_SET_PDEATHSIG = 1


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Lets the kernel send this process a signal, by default SIGKILL, when the *thread* that started it ends.

    This is one system call, so it may be used between fork and exec. It holds as long as the calling thread lives.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)


@contextmanager
def terminable() -> Iterator[None]:
    """Makes SIGINT and SIGTERM raise KeyboardInterrupt in the main thread; in other threads it has no effect.

    Within a call of CPU kernels the interrupt waits until the call returns. Otherwise the call's other threads would
    wait at a barrier for ever.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    from faser_backend.cpu.runner import LlvmRunner

    call = LlvmRunner._on_all_threads.__code__

    def at_return(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_code is call:
            sys.setprofile(None)
            raise KeyboardInterrupt

    def interrupt(_: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code is not call:
            frame = frame.f_back
        if frame is None:
            raise KeyboardInterrupt
        sys.setprofile(at_return)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def children(pid: int) -> list[int]:
    """Returns the running children of a process's main thread, which inherits those of threads that have ended."""
    return [child for child in map(int, _read(pid, f"task/{pid}/children").split()) if is_running(child)]


def is_running(pid: int) -> bool:
    """Returns whether the process runs; a zombie does not."""
    return _state(pid)[:1] not in ([], ["Z"], ["X"])


def ending(pid: int) -> str:
    """Returns the signal or status by which a process ended, empty once its parent has asked for it."""
    state = _state(pid)
    code = os.waitstatus_to_exitcode(int(state[-1])) if state[:1] == ["Z"] else None
    return "" if code is None else f" with status {code}" if code >= 0 else f" by {signal.Signals(-code).name}"


def arguments(pid: int) -> list[str]:
    """Returns the command line of a process, empty if it has ended."""
    return _read(pid, "cmdline").split("\0")[:-1]


def is_stopped(pid: int) -> bool:
    """Returns whether a signal such as SIGSTOP has stopped the process."""
    return _state(pid)[:1] == ["T"]


def cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds of a process and of its ended children; 0 if it has ended."""
    return sum(map(int, _state(pid)[11:15])) / os.sysconf("SC_CLK_TCK")


def _state(pid: int) -> list[str]:
    """Returns the words of /proc/PID/stat from the state on, none if it has ended."""
    return _read(pid, "stat").rpartition(")")[2].split()


def _read(pid: int, name: str) -> str:
    """Returns the text of /proc/PID/name, empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""
