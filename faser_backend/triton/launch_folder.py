"""The launch folder of one `faser serve`, and the heartbeats of its processes in shared memory.

Engines are drained by files in the folder, because Python in a model's process runs no signal handler while Triton's
stub waits. A later start removes what killed servers left.

Heartbeats find hung processes: loops count, and `faser serve` watches the counters. A stopped process, or a loop that
waits for ever, looks alive from outside while its requests hang. Counters lie in shared memory, so no disk can delay a
loop.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import mmap
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from faser_backend.core.errors import ConfigError
from faser_backend.files import FileError, check_room
from faser_backend.serving.processes import cpu_seconds, is_stopped

PREFIX = "faser-serve-"  # of the folder and of its server's shared memory
SHARED_MEMORY = Path("/dev/shm")
MIN_BYTES = 1 << 20  # free space for configurations, links and the start of a log
LOCK_FILE = "owner"  # locked as long as its `faser serve` runs
DRAIN_FILE = "faser-drain"  # its existence asks for a drain
POLL_S = 0.1


class LaunchFolder:
    """A new temporary folder. Raises ConfigError if it cannot be made or has too little room."""

    def __init__(self) -> None:
        remedy = "set TMPDIR to a folder with room"
        try:
            parent = Path(tempfile.gettempdir())
            _remove_leftovers(parent)
            check_room(parent, MIN_BYTES, "a server's launch folder")
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            # Locked before it has its name, as another server may remove a folder whose lock is free.
            fresh = self.path / f"{LOCK_FILE}.new"
            self._lock = os.open(fresh, os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            fresh.replace(self.path / LOCK_FILE)
        except FileError as error:
            raise ConfigError(f"{error}; {remedy}") from None
        except OSError as error:
            raise ConfigError(f"no temporary folder: {error.strerror}; {remedy}") from None

    def remove(self) -> None:
        """Removes the folder and its shared memory. A second call does nothing."""
        clear_shared_memory(self.path.name)
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


def _remove_leftovers(parent: Path) -> None:
    """Removes the folders and shared memory of this user's servers whose `faser serve` was killed."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # locked: its owner runs; no lock file: unknown
            if folder.lstat().st_uid != os.geteuid():
                continue
            with (folder / LOCK_FILE).open("rb+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                clear_shared_memory(folder.name)
                shutil.rmtree(folder, ignore_errors=True)


def clear_shared_memory(name: str) -> None:
    """Removes the shared memory that a killed server left. name: of its launch folder."""
    for region in SHARED_MEMORY.glob(f"{name}*"):
        with contextlib.suppress(OSError):
            region.unlink()


def drained_file(folder: Path, pid: int) -> Path:
    """Returns the file that an engine's process makes once drained. Two processes exist during a reload."""
    return folder / f"faser-drained-{pid}"


def drain_when_asked(folder: Path, drain: Callable[[], None]) -> None:
    """Waits for DRAIN_FILE, calls drain, and makes the drained file once it returns. Never raises."""
    while not (folder / DRAIN_FILE).exists():
        time.sleep(POLL_S)
    drain()
    with contextlib.suppress(OSError):  # a full disk: the asking process waits until its time limit
        drained_file(folder, os.getpid()).touch()


# -- heartbeats -------------------------------------------------------------------------------------------------------
_log = logging.getLogger(__name__)
MAX_CHECK_S = 1.0  # of silence that one check may add: the watching process may itself have been stopped
BUSY_SHARE = 0.1  # of one core: a process above it is busy
BUSY_FACTOR = 20  # multiplies the limit of a busy process, for a first, long step or a compilation
_COUNT = struct.Struct("Q")
_numbers = itertools.count()


class Heartbeat:
    """The heartbeat of one loop, from its first beat to `close`.

    launch_folder: of `faser serve`. A server that was started otherwise is not watched, and beats do nothing.
    """

    def __init__(self, launch_folder: Path) -> None:
        name = launch_folder.name
        is_watched = name.startswith(PREFIX)
        self._path = SHARED_MEMORY / f"{name}-beat-{os.getpid()}-{next(_numbers)}" if is_watched else None
        self._memory: mmap.mmap | None = None
        self._count = 0

    def beat(self) -> None:
        """Counts one iteration of the loop. Called in idle ones too."""
        if self._memory is None:
            if self._path is None:
                return
            self._open(self._path)
        self._count += 1
        if self._memory is not None:
            _COUNT.pack_into(self._memory, 0, self._count)

    def _open(self, path: Path) -> None:
        # Opened with the first beat, as an engine may load for minutes before.
        try:
            with path.open("xb+", buffering=0) as file:
                file.write(bytes(_COUNT.size))  # allocates now: a later write to a full /dev/shm is fatal
                self._memory = mmap.mmap(file.fileno(), _COUNT.size)
        except OSError as error:
            _log.warning("no heartbeat, so a hang of this process will not be noticed: %s", error)
            self._path = None

    def close(self) -> None:
        """Ends the watch. Call once the loop has ended."""
        path, self._path, self._memory = self._path, None, None
        if path is not None:
            path.unlink(missing_ok=True)


@dataclass(slots=True)
class _Sign:
    pid: int
    value: object  # a change is progress
    cpu_s: float  # of the process at the last progress
    silent_s: float = 0.0


class HangWatch:
    """Finds processes without progress: a loop in them has no heartbeat, or they are stopped."""

    def __init__(self, name: str, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """name: of the launch folder. limit_s: without progress; busy processes have BUSY_FACTOR times as long."""
        self._name, self._limit_s, self._clock = name, limit_s, clock
        self._signs: dict[object, _Sign] = {}
        self._checked_s = clock()

    def hung(self, pids: Iterable[int]) -> dict[int, float]:
        """Returns the hung processes among pids, and for how many seconds. Call about once a second."""
        now_s = self._clock()
        passed_s, self._checked_s = min(now_s - self._checked_s, MAX_CHECK_S), now_s
        before, self._signs = self._signs, {}
        for key, pid, value in self._observe(set(pids), now_s):
            sign = before.get(key)
            if sign is None or sign.value != value:
                sign = _Sign(pid, value, cpu_seconds(pid))
            else:
                sign.silent_s += passed_s
            self._signs[key] = sign
        return {sign.pid: sign.silent_s for sign in self._signs.values() if self._is_too_long(sign)}

    def _observe(self, pids: set[int], now_s: float) -> Iterator[tuple[object, int, object]]:
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
