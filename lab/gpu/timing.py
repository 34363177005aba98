"""Times work on a device: events on a GPU, the host's clock on a CPU; medians, and contestants that take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch

Work = Callable[[], object]
WARMUPS = 2


class Timing(NamedTuple):
    """Microseconds over the repeats."""

    median_us: float
    low_us: float  # quartiles
    high_us: float

    @classmethod
    def of(cls, samples_us: np.ndarray) -> Timing:
        low, middle, high = np.percentile(samples_us, (25, 50, 75))
        return cls(float(middle), float(low), float(high))

    @property
    def spread(self) -> float:
        """Distance between the quartiles, as a share of the median."""
        return (self.high_us - self.low_us) / self.median_us if self.median_us else 0.0


def sample_us(device: str, work: Work) -> float:
    """One run of queued work, on the current stream. Ends when the device has done it."""
    if device != "cuda":
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def take_turns(device: str, works: Mapping[str, Work], repeats: int) -> dict[str, Timing]:
    """Every work once per repeat, in an order that is drawn anew each time."""
    rng = np.random.default_rng(0)
    names = list(works)
    for name in names:
        for _ in range(WARMUPS):
            works[name]()
    synchronize(device)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats):
        for index in rng.permutation(len(names)):
            samples[names[index]].append(sample_us(device, works[names[index]]))
    return {name: Timing.of(np.array(values)) for name, values in samples.items()}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def as_graph(device: str, work: Work) -> Work:
    """The work as a captured graph, so that launches cost the host nothing; itself where there are no graphs."""
    if device != "cuda":
        return work
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles and allocates before the capture
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
