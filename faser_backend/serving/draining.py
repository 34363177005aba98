"""How `faser serve` has an engine drained: by files in its launch folder, since a signal reaches no Python in a model's
process while Triton's stub waits."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

DRAIN_FILE = "faser-drain"  # made by whoever asks
POLL_S = 0.1


def drained_file(folder: Path, pid: int) -> Path:
    """What the engine of this process makes once it has answered all. There are two while one replaces another."""
    return folder / f"faser-drained-{pid}"


def drain_when_asked(folder: Path, drain: Callable[[], None]) -> None:
    """Waits to be asked, calls drain, which returns once all has been answered, and tells so. Never raises."""
    while not (folder / DRAIN_FILE).exists():
        time.sleep(POLL_S)
    drain()
    with contextlib.suppress(OSError):  # a full disk: whoever asked waits for as long as answers may take
        drained_file(folder, os.getpid()).touch()
