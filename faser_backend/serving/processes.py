"""The processes below one process, as Linux shows them in /proc, and one that ends with its parent."""

from __future__ import annotations

import ctypes
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Has the kernel send this process a signal as soon as the thread that started it has ended."""
    # One system call, no lock and no allocation: it may run between fork and exec.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def children(pid: int) -> list[int]:
    """Returns the processes that pid started and that still run."""
    return [child for child, parent in _parents().items() if parent == pid]


def is_running(pid: int) -> bool:
    """Tells whether the process is there; one that has ended and that nobody has waited for is not."""
    return _parent(Path(f"/proc/{pid}")) is not None


def arguments(pid: int) -> list[str]:
    """Returns its command line, empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def _parents() -> dict[int, int]:
    found = {int(folder.name): _parent(folder) for folder in Path("/proc").glob("[0-9]*")}
    return {pid: parent for pid, parent in found.items() if parent is not None}


def _parent(folder: Path) -> int | None:
    try:
        state, parent, *_ = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):  # it ended meanwhile
        return None
    return None if state in "ZX" else int(parent)
