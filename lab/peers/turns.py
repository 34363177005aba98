"""A peer's processes as one group, which stands still while others have their turn.

Threads of some libraries spin while they wait, which would take cores from whoever is measured.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from faser_backend.serving.processes import die_with_parent
from lab.bench.servers import STOP_TIMEOUT_S

# What Popen takes so that a process leads a group. It ends with this process, even while it stands still.
OWN_GROUP: dict[str, Any] = {"process_group": 0, "preexec_fn": die_with_parent}


@contextmanager
def turn(leader: subprocess.Popen[Any]) -> Iterator[None]:
    """The group runs within, and stands still afterwards."""
    _signal(leader, signal.SIGCONT)
    try:
        yield
    finally:
        _signal(leader, signal.SIGSTOP)


def stop(leader: subprocess.Popen[Any]) -> None:
    """Ends the leader, gently if it can be, then whatever it left behind."""
    _signal(leader, signal.SIGCONT)
    leader.terminate()
    try:
        leader.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        _signal(leader, signal.SIGKILL)
        leader.wait()


def _signal(leader: subprocess.Popen[Any], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # all of it has ended
        os.killpg(leader.pid, number)
