"""The processes below one process, as Linux shows them in /proc; and how one ends with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

PARENT_POLL_S = 0.5  # between two looks of a model's process at its parent
_LIBC = ctypes.CDLL(None)  # opened here: after a fork, the loader's lock may be held
_PR_SET_PDEATHSIG = 1


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """From now on the kernel sends this process a signal, by default one that kills it whatever it is at, when the
    *thread* that started it ends. One system call: it may stand between fork and exec. It lasts as long as the thread
    that calls it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)


def is_child_of_main_thread(parent: int) -> bool:
    """Tells whether this process now belongs to the main thread of its parent, which ends no sooner than that does. A
    thread's children pass to the main thread when it ends."""
    try:
        return str(os.getpid()) in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """Returns the processes that pid started and that still run."""
    return [child for child, parent in _parents().items() if parent == pid]


def is_running(pid: int) -> bool:
    """Tells whether the process is there; one that has ended and that nobody has waited for is not."""
    return _parent(pid) is not None


def arguments(pid: int) -> list[str]:
    """Returns its command line, empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def is_stopped(pid: int) -> bool:
    """Tells whether a signal has stopped the process, as SIGSTOP does."""
    return _state(pid)[:1] == ["T"]


def cpu_seconds(pid: int) -> float:
    """Returns the processor time of it and of its children that have ended (compilers), 0 where it has ended."""
    ticks = _state(pid)[11:15]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def started_s(pid: int) -> float:
    """Returns when it was started, as time.time() counts; infinity where it has ended."""
    ticks = _state(pid)[19:20]
    booted_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted_s + int(ticks[0]) / os.sysconf("SC_CLK_TCK") if ticks else float("inf")


def running(program: str) -> list[int]:
    """Returns the processes whose command line begins with a file of this name."""
    return [pid for pid in _parents() if Path((arguments(pid) or [""])[0]).name == program]


def _parents() -> dict[int, int]:
    found = {int(folder.name): _parent(int(folder.name)) for folder in Path("/proc").glob("[0-9]*")}
    return {pid: parent for pid, parent in found.items() if parent is not None}


def _parent(pid: int) -> int | None:
    state = _state(pid)
    return None if not state or state[0] in "ZX" else int(state[1])


def _state(pid: int) -> list[str]:
    """Returns the words of /proc/PID/stat from the state on, none where it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
