"""A runtime whose pools, runners and lanes are opened once and lent to every engine that is assembled on it.

Contestants of a ladder take turns on one device: so weights, KV pools and captured graphs are there once. Lanes are
watched on the way: by the device's own events, when each phase of an overlapped step began and ended. With planted
outcomes, samplers and draft loops hand on planted tokens. Everything else is the wrapped runtime's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from lab.gpu.planted import PlantedDraftLoop, PlantedSampler
from lab.simulation.acceptance import Outcomes

Verified = TypeVar("Verified")
Proposed = TypeVar("Proposed")


class LentRuntime:
    """device.runtime.Runtime around a real one. Engines may close what they were lent, at the very end."""

    def __init__(self, real: Any, *, outcomes: Outcomes | None = None) -> None:
        self._real = real
        self.outcomes = outcomes
        self._opened: dict[tuple[Any, ...], Any] = {}
        self._real_samplers: dict[int, Any] = {}  # by the one that was handed out
        self.lanes: list[WatchedLanes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def open_pool(self, model: Any, num_blocks: int) -> Any:
        return self._once(("pool", id(model), num_blocks), lambda: self._real.open_pool(model, num_blocks))

    def open_runner(self, model: Any, share: Any, pool: Any) -> Any:
        key = ("runner", id(model), id(share), id(pool))
        return self._once(key, lambda: self._real.open_runner(model, share, pool))

    def open_lanes(self, draft: Any, target: Any) -> WatchedLanes:
        def open_watched() -> WatchedLanes:
            self.lanes.append(WatchedLanes(self._real.open_lanes(draft, target)))
            return self.lanes[-1]

        return self._once(("lanes", id(draft), id(target)), open_watched)

    def open_sampler(self, vocab_size: int, max_num_seqs: int) -> Any:
        return self._once(("sampler", vocab_size, max_num_seqs), lambda: self._sampler(vocab_size, max_num_seqs))

    def open_draft_loop(self, runner: Any, sampler: Any) -> Any:
        def open_planted() -> Any:
            loop = self._real.open_draft_loop(runner, self._real_samplers[id(sampler)])
            return loop if loop is None or self.outcomes is None else PlantedDraftLoop(loop, self.outcomes)

        return self._once(("loop", id(runner)), open_planted)

    def _sampler(self, vocab_size: int, max_num_seqs: int) -> Any:
        real = self._real.open_sampler(vocab_size, max_num_seqs)
        lent = real if self.outcomes is None else PlantedSampler(real, self.outcomes)
        self._real_samplers[id(lent)] = real
        return lent

    def _once(self, key: tuple[Any, ...], open_: Callable[[], Any]) -> Any:
        if key not in self._opened:
            self._opened[key] = open_()
        return self._opened[key]


class WatchedLanes:
    """core.ports.Lanes, and the spans of both phases of every run, in microseconds from one origin."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self._is_cuda = torch.cuda.is_available()
        self.forget()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def forget(self) -> None:
        """Begins anew."""
        self._origin = self._mark()
        self._marks: list[tuple[Any, ...]] = []  # verify's begin and end, propose's begin and end

    def run_both(self, verify: Callable[[], Verified], propose: Callable[[], Proposed]) -> tuple[Verified, Proposed]:
        marks: list[Any] = [None] * 4

        def watched(work: Callable[[], Any], first: int) -> Callable[[], Any]:
            def run() -> Any:
                marks[first] = self._mark()
                try:
                    return work()
                finally:
                    marks[first + 1] = self._mark()

            return run

        result = self._real.run_both(watched(verify, 0), watched(propose, 2))
        self._marks.append(tuple(marks))
        return result

    def spans_us(self) -> np.ndarray:
        """[n, 2, 2]: of each run, begin and end of verification and of drafting. Waits for the device."""
        if self._is_cuda:
            torch.cuda.synchronize()
        return np.array([[self._us(mark) for mark in marks] for marks in self._marks]).reshape(-1, 2, 2)

    def _mark(self) -> Any:
        """On the current stream of the calling thread, or of the host's clock."""
        if not self._is_cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _us(self, mark: Any) -> float:
        return self._origin.elapsed_time(mark) * 1e3 if self._is_cuda else (mark - self._origin) / 1e3


def overlap_figures(spans: np.ndarray) -> dict[str, float]:
    """Of spans [n, 2, 2]: time both phases ran, over the time either ran and over the shorter phases' time."""
    if not len(spans):
        return {"num_overlapped": 0, "overlap_of_either": 0.0, "overlap_of_shorter": 0.0}
    lengths = spans[:, :, 1] - spans[:, :, 0]  # [n, 2]
    both = np.maximum(spans[:, :, 1].min(axis=1) - spans[:, :, 0].max(axis=1), 0.0)
    either = lengths.sum(axis=1) - both
    return {
        "num_overlapped": len(spans),
        "overlap_of_either": float(both.sum() / either.sum()),
        "overlap_of_shorter": float(both.sum() / lengths.min(axis=1).sum()),
    }
