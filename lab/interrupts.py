"""Ctrl-C and SIGTERM while something is measured: both end it alike, with whatever processes it started."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from faser_backend.core.errors import FaserError
from faser_backend.serving.processes import die_with_parent

LOOK_S = 1.0  # between two looks at whether all workers are there
J = TypeVar("J")
R = TypeVar("R")


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as SIGINT does. For the main thread; in others it changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def in_processes(work: Callable[[J], R], jobs: Sequence[J], num_workers: int) -> Iterator[R]:
    """What `work` makes of each job, in order. An error or an interrupt ends the processes in the middle of their work,
    and none outlives this one. Raises FaserError where somebody else ended one.
    """
    others = set(multiprocessing.active_children())
    # ProcessPoolExecutor cannot end work that has begun.
    with multiprocessing.get_context("spawn").Pool(num_workers, _follow_parent, (os.getpid(),)) as pool:
        workers = set(multiprocessing.active_children()) - others
        results = pool.imap(work, jobs)
        for _ in jobs:
            while True:
                try:
                    yield results.next(timeout=LOOK_S)
                    break
                except multiprocessing.TimeoutError:
                    if not all(worker.is_alive() for worker in workers):
                        raise FaserError("a process that worked on this was killed; is there enough memory?") from None


def _follow_parent(pid: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent ends its workers
    die_with_parent(signal.SIGKILL)
    if os.getppid() != pid:  # it was quicker
        os._exit(1)
