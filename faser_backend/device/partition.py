"""Compute partitions: shares of a device (cores of a CPU, SMs of a GPU) that runners compute on, and menus of splits.

This module has the CPU's partitions. A partition is a value; the owner of a thread binds the thread to it.

`ThreadLanes` is one lasting thread for each model on its share of the device; it implements core.ports.Lanes. Both
phases of an overlapped step run on these threads, and the calling thread waits. It is not pinned, so a phase that ran
there could be scheduled on the other's cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from faser_backend.core.errors import ConfigError
from faser_backend.core.ports import Proposed, Verified


class ComputePartition(Protocol):
    """A share of a device."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int:
        """Cores or SMs."""
        ...

    def bind_current_thread(self) -> None:
        """Binds the calling thread's further work to this share."""


Share = TypeVar("Share", bound=ComputePartition)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class CorePartition:
    """Cores, by number, that one runner computes on."""

    name: str
    cores: tuple[int, ...]

    def __str__(self) -> str:
        return f"cores {self.cores}"

    @property
    def size(self) -> int:
        return len(self.cores)

    def bind_current_thread(self) -> None:
        """Keeps the calling thread (and threads it starts later) on these cores."""
        os.sched_setaffinity(0, self.cores)


@dataclass(frozen=True, slots=True)
class PartitionMenu(Generic[Share]):
    """The shares that a device offers: all of it for serial phases, and disjoint draft/target pairs."""

    whole: Share
    splits: tuple[tuple[Share, Share], ...]  # (draft, target), smallest draft share first
    note: str


def core_partitions(cores: tuple[int, ...] | None = None) -> PartitionMenu[CorePartition]:
    """Returns the menu over `cores`, by default those that this process may use.

    The draft gets 1, 2, 4, ... cores, at most half. One core cannot be split; `note` gives the reason.
    """
    if cores is None:
        cores = tuple(sorted(os.sched_getaffinity(0)))
    whole = CorePartition("whole", cores)
    if len(cores) == 1:
        return PartitionMenu(whole, (), "1 core: draft and target run in turn, nothing can overlap")
    splits = tuple(
        (CorePartition("draft", cores[:size]), CorePartition("target", cores[size:]))
        for size in draft_sizes(len(cores))
    )
    return PartitionMenu(
        whole, splits, f"{len(cores)} cores: in turn on all, or split {', '.join(split_name(*s) for s in splits)}"
    )


def draft_sizes(count: int) -> list[int]:
    """Returns the draft's part of `count` in each split: 1, 2, 4, ..., at most half."""
    return [1 << power for power in range(count.bit_length()) if 2 << power <= count]


def split_name(draft: ComputePartition, target: ComputePartition) -> str:
    """Returns the name of a split: "draft share/target share", in cores or SMs."""
    return f"{draft.size}/{target.size}"


class ThreadLanes:
    """A thread bound to the draft's share and one bound to the target's; each runs its work in order."""

    def __init__(self, draft: ComputePartition, target: ComputePartition) -> None:
        """Starts and binds both threads. Raises ConfigError if this process may not use a share."""
        self._draft = _bound_executor(draft)
        try:
            self._target = _bound_executor(target)
        except ConfigError:
            self._draft.shutdown()
            raise

    def on_draft(self, work: Callable[[], Result]) -> Result:
        """Runs `work` on the draft's thread and waits. Threads that it starts, as a runner's, stay on its cores."""
        return self._draft.submit(work).result()

    def on_target(self, work: Callable[[], Result]) -> Result:
        """Runs `work` on the target's thread and waits."""
        return self._target.submit(work).result()

    def run_both(self, verify: Callable[[], Verified], propose: Callable[[], Proposed]) -> tuple[Verified, Proposed]:
        """See core.ports.Lanes. Waits for both even if one fails; the target's error takes precedence."""
        verifying = self._target.submit(verify)  # first, because it usually takes longer
        proposing = self._draft.submit(propose)
        proposing.exception()  # waits for it, whatever the target does
        return verifying.result(), proposing.result()

    def close(self) -> None:
        """Waits for running work and ends both threads. May be called again."""
        self._target.shutdown()
        self._draft.shutdown()


def _bound_executor(partition: ComputePartition) -> ThreadPoolExecutor:
    executor = ThreadPoolExecutor(1, f"{partition.name}-lane")
    try:  # not as the executor's initializer, whose errors are only logged
        executor.submit(partition.bind_current_thread).result()
    except (OSError, RuntimeError) as error:  # OSError for cores, RuntimeError for a GPU
        executor.shutdown()
        raise ConfigError(f"partition {partition.name}: {partition} cannot be used ({error})") from error
    return executor
