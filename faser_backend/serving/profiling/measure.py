"""Times real model calls on the partitions of this machine.

All calls of a partition are interleaved in random order, sweep after sweep, and the median over sweeps is
kept: what disturbs the machine for a while touches few samples of each call. A split's shares are timed
while the other model works on the other share.

Calls are timed as they are used. A draft sample on the whole machine is a run of calls right after a target call,
which leaves little of the draft in the caches. A target sample follows calls of its own shape, as step follows step,
and where it verifies drafted rows a draft call comes in between. Timed right after a large call instead, one row took
twice as long as it does in plain decoding (1387 us, 675 us after 8 calls), and speculation looked better than it is.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from faser_backend.core.batch import RowBatch
from faser_backend.core.decision import WHOLE
from faser_backend.device.kv_pool import KvPool
from faser_backend.device.onnx_runtime import OrtRunner
from faser_backend.device.partition import CorePartition, PartitionMenu
from faser_backend.manifest import EngineManifest, ModelEngine
from faser_backend.policy.cost_model import DRAFT, TARGET
from faser_backend.serving.profiling.cases import Case, make_batch

MAX_POOL_BYTES = 512 << 20
CALLS_PER_GROUP = 48  # interleaved together: fewer than the call shapes that a runner keeps
DRAFT_RUN = 4  # a draft sample is the mean of so many calls in a row
TARGET_WARM_US = 4000.0  # a target sample follows calls of its own shape for so long

Progress = Callable[[float], None]  # is told the share that is done, in [0, 1]
Work = Callable[[], None]


class Effort(NamedTuple):
    """How long a share is measured: about budget_s seconds or max_sweeps sweeps, but 3 sweeps at least."""

    budget_s: float
    max_sweeps: int


class Share(NamedTuple):
    """A model on its part of a partition; `company` is the other model's part, where both run at once."""

    model: str
    partition: str
    cores: CorePartition
    company: CorePartition | None

    @property
    def other_model(self) -> str:
        return TARGET if self.model == DRAFT else DRAFT


@dataclass(frozen=True, slots=True)
class Sampled:
    """One case: median microseconds of each segment, and what else its whole calls showed."""

    case: Case
    segment_us: tuple[float, ...]
    spread: float  # distance between the quartiles, as a share of the median
    first_us: float  # the first call, which makes the buffers of the shape


def shares_of(menu: PartitionMenu) -> list[Share]:
    """Everything to measure: both models on the whole machine, then on each split."""
    shares = [Share(model, WHOLE, menu.whole, None) for model in (TARGET, DRAFT)]
    for draft, target in menu.splits:
        name = f"{draft.size}/{target.size}"
        shares += [Share(TARGET, name, target, draft), Share(DRAFT, name, draft, target)]
    return shares


class Bench:
    """Pools and batches of an engine directory, shared by all partitions. Frees nothing until it goes."""

    def __init__(self, engine_dir: Path, manifest: EngineManifest, cases: dict[str, list[Case]], seed: int) -> None:
        self._engine_dir = engine_dir
        self._models: dict[str, ModelEngine] = {TARGET: manifest.target, DRAFT: manifest.draft}
        self._rng = np.random.default_rng(seed)
        self._pools = {model: self._filled_pool(model, cases[model], manifest.kv_block_size) for model in cases}
        self._cases = cases

    def measure(self, share: Share, effort: Effort, progress: Progress) -> list[Sampled]:
        """Medians of the model's cases; cases that are too dear for the budget are left out."""
        with _pinned_thread(share.cores) as on_cores:
            runner = on_cores.submit(self._open, share.model, share.cores).result()
            before: Work = _nothing
            if share.company is None:
                before = on_cores.submit(self._other_work, share.other_model, share.cores).result()
            with self._company(share):
                return on_cores.submit(self._sweep, share.model, runner, before, effort, progress).result()

    def _sweep(self, model: str, runner: OrtRunner, before: Work, effort: Effort, progress: Progress) -> list[Sampled]:
        cases = [self._cases[model][i] for i in self._rng.permutation(len(self._cases[model]))]
        groups = [cases[i : i + CALLS_PER_GROUP] for i in range(0, len(cases), CALLS_PER_GROUP)]
        sampled = []
        for index, group in enumerate(groups):
            share_of_effort = effort._replace(budget_s=effort.budget_s * len(group) / len(cases))
            sampled += self._sweep_group(model, runner, before, group, share_of_effort)
            progress((index + 1) / len(groups))
        return sampled

    def _sweep_group(
        self, model: str, runner: OrtRunner, before: Work, group: list[Case], effort: Effort
    ) -> list[Sampled]:
        """before: a call of the other model, untimed, where the two take turns on the same cores."""
        num_calls = DRAFT_RUN if model == DRAFT else 1
        calls = [(case, self._batch(model, case)) for case in group]
        deadline = time.perf_counter() + effort.budget_s
        first_us = [float(_timed_run(runner, batch, 1).sum()) for _, batch in calls]
        warm = np.array([_timed_run(runner, batch, 1).sum() for _, batch in calls])
        cheap_first = warm.argsort()
        sample_us = warm * num_calls + (np.maximum(warm, TARGET_WARM_US) if model == TARGET else 0.0)
        is_affordable = np.cumsum(sample_us[cheap_first]) * 3 <= effort.budget_s * 1e6
        is_affordable[:8] = True
        kept = cheap_first[is_affordable]
        samples: dict[int, list[np.ndarray]] = {int(index): [] for index in kept}
        for sweep in range(effort.max_sweeps):
            if sweep >= 3 and time.perf_counter() > deadline:
                break
            for index in self._rng.permutation(kept):
                case, batch = calls[index]
                if model == TARGET:
                    _warm_up(runner, batch)
                if model == DRAFT or case.num_logit_rows > len(case.counts):  # drafted rows are verified
                    before()
                samples[int(index)].append(_timed_run(runner, batch, num_calls))
        return [_summary(calls[index][0], np.array(times), first_us[index]) for index, times in samples.items()]

    def _batch(self, model: str, case: Case) -> RowBatch:
        pool = self._pools[model]
        return make_batch(case, self._models[model].spec.vocab_size, pool.kv_block_size, pool.num_blocks, self._rng)

    def _open(self, model: str, cores: CorePartition) -> OrtRunner:
        pool = self._pools[model]
        return OrtRunner(self._models[model], self._engine_dir, pool.num_blocks, pool.kv_block_size, cores, pool=pool)

    def _filled_pool(self, model: str, cases: list[Case], block_size: int) -> KvPool:
        """A pool with numbers in it: pages that were never written would all be one page in the cache."""
        spec = self._models[model].spec
        num_needed = max(len(case.counts) * -(-case.num_tokens // block_size) for case in cases)
        num_fitting = max(MAX_POOL_BYTES // KvPool.bytes_per_block(spec, block_size), 1)
        pool = KvPool(spec, min(num_needed, num_fitting), block_size)
        pool.storage[:] = self._rng.standard_normal(spec.head_dim).astype(np.float32)
        return pool

    def _other_work(self, model: str, cores: CorePartition) -> Work:
        """Opens a runner; each call of the result runs one call of middling size on it, in turn."""
        runner = self._open(model, cores)
        cases = sorted(self._cases[model], key=lambda case: case.num_rows * case.num_tokens)
        middling = cases[len(cases) // 4 : 3 * len(cases) // 4 : 4] or cases
        batches = itertools.cycle([self._batch(model, case) for case in middling])

        def work() -> None:
            _timed_run(runner, next(batches), 1)

        return work

    @contextmanager
    def _company(self, share: Share) -> Iterator[None]:
        """Keeps the other model busy on the other share of a split."""
        if share.company is None:
            yield
            return
        is_over = threading.Event()

        def keep_busy(work: Work) -> None:
            while not is_over.is_set():
                work()

        with _pinned_thread(share.company) as on_cores:
            work = on_cores.submit(self._other_work, share.other_model, share.company).result()
            working = on_cores.submit(keep_busy, work)
            try:
                yield
            finally:
                is_over.set()
                working.result()


@contextmanager
def _pinned_thread(cores: CorePartition) -> Iterator[ThreadPoolExecutor]:
    """A thread on these cores; threads that a runner starts from it stay there too."""
    with ThreadPoolExecutor(1, "profile", initializer=cores.bind_current_thread) as executor:
        yield executor


def _summary(case: Case, times: np.ndarray, first_us: float) -> Sampled:
    """times: [num_sweeps, num_segments] microseconds."""
    low, middle, high = np.percentile(times.sum(axis=1), (25, 50, 75))
    return Sampled(case, tuple(np.median(times, axis=0).tolist()), float((high - low) / middle), first_us)


def _warm_up(runner: OrtRunner, batch: RowBatch) -> None:
    until = time.perf_counter() + TARGET_WARM_US / 1e6
    while True:
        _timed_run(runner, batch, 1)
        if time.perf_counter() >= until:
            return


def _nothing() -> None:
    """What runs before a sample where nothing has to."""


def _timed_run(runner: OrtRunner, batch: RowBatch, num_calls: int) -> np.ndarray:
    """Microseconds of each segment, [num_segments]: the mean over num_calls whole passes in a row, no exit asked."""
    total_ns = np.zeros(runner.num_segments)
    for _ in range(num_calls):
        hidden = None
        for segment in range(runner.num_segments):
            start = time.perf_counter_ns()
            hidden = runner.run_segment(segment, batch, hidden)
            total_ns[segment] += time.perf_counter_ns() - start
    return total_ns / (1e3 * num_calls)
