"""Makes the launch folder of one `faser serve`, drains engines by files in it, and removes what killed servers left.

A file requests the drain, because Python in a model's process runs no signal handler while Triton's stub waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from faser_backend.core.errors import ConfigError
from faser_backend.files import FileError, check_room

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

    def clear_shared_memory(self) -> None:
        """Removes the shared memory that a killed server left."""
        _remove_regions(self.path.name)

    def remove(self) -> None:
        """Removes the folder and its shared memory. A second call does nothing."""
        self.clear_shared_memory()
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
                _remove_regions(folder.name)
                shutil.rmtree(folder, ignore_errors=True)


def _remove_regions(name: str) -> None:
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
