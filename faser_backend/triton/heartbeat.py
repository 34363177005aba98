"""Signs of life: loops of the server's processes leave them in passing, `faser serve` watches whether they still come.

A process that is stopped, or a loop that waits for ever, looks alive from outside: its requests would wait as long.
The signs lie in memory that processes share, so that no disk can hold a loop up.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from faser_backend.serving.processes import cpu_seconds, is_stopped
from faser_backend.triton.launch_folder import PREFIX, SHARED_MEMORY

_log = logging.getLogger(__name__)
MAX_LOOK_S = 1.0  # that one look may add to a silence: whoever watches may itself have been stopped, with all the rest
BUSY_SHARE = 0.1  # of one core, from which a process computes
BUSY_FACTOR = 20  # times the limit that a process may compute without a sign: a first, long step, a compilation
_COUNT = struct.Struct("Q")
_numbers = itertools.count()


class Heartbeat:
    """The signs of one loop, from its first one to `close`.

    launch_folder: of `faser serve`. In a server that was started otherwise nobody watches, and no sign is left.
    """

    def __init__(self, launch_folder: Path) -> None:
        name = launch_folder.name
        is_watched = name.startswith(PREFIX)
        self._path = SHARED_MEMORY / f"{name}-beat-{os.getpid()}-{next(_numbers)}" if is_watched else None
        self._memory: mmap.mmap | None = None
        self._count = 0

    def beat(self) -> None:
        """Called by the loop in every round, idle ones too."""
        if self._memory is None:
            if self._path is None:
                return
            self._open(self._path)
        self._count += 1
        if self._memory is not None:
            _COUNT.pack_into(self._memory, 0, self._count)

    def _open(self, path: Path) -> None:
        # Not before the first sign: until then an engine may load for minutes.
        try:
            with path.open("xb+", buffering=0) as file:
                file.write(bytes(_COUNT.size))  # takes the memory now: later a full /dev/shm would kill the process
                self._memory = mmap.mmap(file.fileno(), _COUNT.size)
        except OSError as error:
            _log.warning("no signs of life are left, nobody can tell whether this process hangs: %s", error)
            self._path = None

    def close(self) -> None:
        """From now on nobody waits for a sign. Called once the loop has ended."""
        path, self._path, self._memory = self._path, None, None
        if path is not None:
            path.unlink(missing_ok=True)


@dataclass(slots=True)
class _Sign:
    pid: int
    value: object  # another one is progress
    cpu_s: float  # of the process at the last progress
    silent_s: float = 0.0


class HangWatch:
    """Tells which processes have been silent for too long: a loop in them left no sign, or they are stopped."""

    def __init__(self, name: str, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """name: of the launch folder. limit_s: a process that computes meanwhile has BUSY_FACTOR times as long."""
        self._name, self._limit_s, self._clock = name, limit_s, clock
        self._signs: dict[object, _Sign] = {}
        self._looked_s = clock()

    def hung(self, pids: Iterable[int]) -> dict[int, float]:
        """Returns those of these processes that hang, and for how many seconds. To be asked every second or so."""
        now_s = self._clock()
        passed_s, self._looked_s = min(now_s - self._looked_s, MAX_LOOK_S), now_s
        before, self._signs = self._signs, {}
        for key, pid, value in self._look(set(pids), now_s):
            sign = before.get(key)
            if sign is None or sign.value != value:
                sign = _Sign(pid, value, cpu_seconds(pid))
            else:
                sign.silent_s += passed_s
            self._signs[key] = sign
        return {sign.pid: sign.silent_s for sign in self._signs.values() if self._is_too_long(sign)}

    def _look(self, pids: set[int], now_s: float) -> Iterator[tuple[object, int, object]]:
        for pid in pids:
            yield pid, pid, None if is_stopped(pid) else now_s
        for path in SHARED_MEMORY.glob(f"{self._name}-beat-*"):
            pid = int(path.name.split("-")[-2])
            with contextlib.suppress(OSError):  # its loop has ended meanwhile
                if pid in pids:
                    yield path, pid, path.read_bytes()

    def _is_too_long(self, sign: _Sign) -> bool:
        if not 0 < self._limit_s < sign.silent_s:
            return False
        is_computing = cpu_seconds(sign.pid) - sign.cpu_s > BUSY_SHARE * sign.silent_s
        return not is_computing or sign.silent_s > BUSY_FACTOR * self._limit_s
