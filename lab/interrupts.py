"""Ctrl-C and SIGTERM while something is measured: both end it alike, with whatever processes it started."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from faser_backend.core.errors import FaserError
from faser_backend.cpu.runner import LlvmRunner
from faser_backend.serving.processes import die_with_parent

LOOK_S = 1.0  # between two looks at whether all workers are there
J = TypeVar("J")
R = TypeVar("R")


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as SIGINT does, and neither within a call of kernels, whose other threads would
    wait at a barrier for ever. For the main thread; in others it changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    call = LlvmRunner._on_all_threads.__code__

    def at_return(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_code is call:
            sys.setprofile(None)
            raise KeyboardInterrupt

    def interrupt(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is call:
                sys.setprofile(at_return)
                return
            frame = frame.f_back
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def in_processes(work: Callable[[J], R], jobs: Sequence[J], num_workers: int) -> Iterator[R]:
    """Results of `work` on each job, in order. An error or an interrupt ends the processes in the middle of their work,
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
