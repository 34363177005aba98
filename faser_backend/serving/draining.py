"""How `faser serve` has an engine drained: by files in its launch folder, since a signal reaches no Python in a model's
process while Triton's stub waits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

DRAIN_FILE = "faser-drain"  # made by whoever asks
DRAINED_FILE = "faser-drained"  # made once all has been answered
POLL_S = 0.1


def drain_when_asked(folder: Path, drain: Callable[[], None]) -> None:
    """Waits to be asked, calls drain, which returns once all has been answered, and tells so. Never raises."""
    while not (folder / DRAIN_FILE).exists():
        time.sleep(POLL_S)
    drain()
    with contextlib.suppress(OSError):  # a full disk: whoever asked waits for as long as answers may take
        (folder / DRAINED_FILE).touch()
