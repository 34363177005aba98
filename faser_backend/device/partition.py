"""Compute partitions: shares of a device (cores of a CPU, SMs of a GPU) that runners compute on, and menus of splits.

This module has the CPU's partitions. A partition is a value; the owner of a thread binds the thread to it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


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
        ...


Share = TypeVar("Share", bound=ComputePartition)


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
    if not cores or len(set(cores)) != len(cores):
        raise ValueError(f"cores = {cores}: must name at least one core, each once")
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
