"""Processes that train one head together: each learns from its own share of the batches, and every few steps all go on
from the average of their weights (local SGD, Stich 2019). Optimizers keep what each has seen itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from faser_backend.core.errors import FaserError

STEPS_APART = 8
PATIENCE = timedelta(minutes=30)  # with one that looks at held-out dialogues, or writes a checkpoint
JOIN_S = 30.0

T = TypeVar("T")


class Crew:
    """One process of `size`. That of rank 0 leads: it keeps checkpoints and looks at held-out dialogues."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def share(self, batches: list[T]) -> list[T]:
        """As many for each process; fewer than `size` are left over, and left out."""
        return batches[self.rank : len(batches) // self.size * self.size : self.size]

    @torch.no_grad()
    def average(self, parameters: Iterable[Tensor]) -> None:
        """Of all processes, which must come here alike. Raises RuntimeError where another one ended."""
        if self.size > 1:
            for parameter in parameters:
                dist.all_reduce(parameter)
                parameter.div_(self.size)


@contextmanager
def working_with(crew: Crew, work: Callable[[Crew], None]) -> Iterator[None]:
    """Around what the leader does: the others of its crew run `work`, which can be pickled, in processes of their own.

    Raises FaserError where one of them ends before its work.
    """
    if crew.size == 1:
        yield
        return
    with TemporaryDirectory(prefix="faser-crew-") as directory:
        meeting_point, context = Path(directory) / "store", get_context("spawn")
        ranks = range(1, crew.size)
        others = [
            context.Process(target=_work_beside, args=(work, Crew(rank, crew.size), meeting_point), daemon=True)
            for rank in ranks
        ]
        for other in others:
            other.start()
        try:
            _meet(crew, meeting_point, others)
            yield
            for other in others:
                other.join(JOIN_S)
        except RuntimeError:  # of a meeting to which another one did not come
            _check(others, patience_s=10.0)
            raise
        finally:
            for other in others:
                other.terminate()
            if dist.is_initialized():
                dist.destroy_process_group()


def _work_beside(work: Callable[[Crew], None], crew: Crew, meeting_point: Path) -> None:
    _meet(crew, meeting_point, [])
    work(crew)


def _meet(crew: Crew, meeting_point: Path, others: Sequence[BaseProcess]) -> None:
    store = FileStore(str(meeting_point), crew.size)
    store.set(f"here {crew.rank}", "")
    while not store.check([f"here {rank}" for rank in range(crew.size)]):
        _check(others)
        time.sleep(0.05)
    dist.init_process_group("gloo", store=store, rank=crew.rank, world_size=crew.size, timeout=PATIENCE)


def _check(others: Sequence[BaseProcess], patience_s: float = 0.0) -> None:
    for other in others:
        other.join(patience_s)
        if other.exitcode:
            raise FaserError(f"a process that trained beside this one ended with status {other.exitcode}: see above")
