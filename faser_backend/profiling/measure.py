"""Times real model calls on the partitions of this machine, and fits costs to them.

Sweeps run all cases of a partition, the first from few rows to many, the others in random order. A case's time is its
median over the sweeps, so a short disturbance changes few samples. A share of a split is timed while the other model
works on the other share. A call ends when the device has finished it.

Caches are as they are in serving. A draft sample is a run of calls behind a target call; its first call is not timed,
because profile.py measures the extra time of first calls. A target sample follows calls of its own shape, with a
draft call in between if it verifies drafted rows: behind a large call one row takes twice as long as in plain decoding.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from faser_backend.core.batch import RowBatch
from faser_backend.core.decision import WHOLE
from faser_backend.core.ports import DraftLoop, ModelRunner
from faser_backend.core.request import Sampling
from faser_backend.device.partition import ComputePartition, PartitionMenu, split_name
from faser_backend.device.runtime import KvStorage, ModelPair, OpenRunner
from faser_backend.manifest import ModelEngine
from faser_backend.policy.cost_model import DRAFT, TARGET, CallCost
from faser_backend.profiling.cases import MAX_SEQUENCES, Case, make_batch
from faser_backend.profiling.cost_fit import CallShapes, fit_call_cost
from faser_backend.serving.runtimes import AnyRuntime

MAX_POOL_BYTES = 512 << 20
CALLS_PER_GROUP = 48  # interleaved together: fewer than the call shapes that a runner caches
MIN_GROUP_CASES = 12  # that are measured whatever they cost, up to twice a budget
FEWEST_GROUP_CASES = 4  # that are measured in any case
DRAFT_RUN = 4  # consecutive calls of a draft sample, which is their mean
TARGET_WARM_US = 4000.0  # of calls of its own shape, before a target sample
Work = Callable[[], object]


class Share(NamedTuple):
    """A model on its part of a partition. `company` is the other model's part if both run at once."""

    model: str
    partition: str
    part: Any  # a ComputePartition of the runtime's: cores or SMs
    company: Any | None

    @property
    def other_model(self) -> str:
        return TARGET if self.model == DRAFT else DRAFT


@dataclass(frozen=True, slots=True)
class Sampled:
    """A measured case: median microseconds of each segment."""

    case: Case
    segment_us: tuple[float, ...]
    spread: float  # of whole calls: interquartile range / median

    @staticmethod
    def of(case: Case, times: np.ndarray) -> Sampled:
        """times: microseconds [num_sweeps, num_segments]."""
        low, middle, high = np.percentile(times.sum(axis=1), (25, 50, 75))
        return Sampled(case, tuple(np.median(times, axis=0).tolist()), float((high - low) / middle))


def shares_of(menu: PartitionMenu[Any], *, has_draft: bool = True) -> list[Share]:
    """Returns what to measure: both models on the whole machine and on each split, or a target alone on the whole."""
    if not has_draft:
        return [Share(TARGET, WHOLE, menu.whole, None)]
    shares = [Share(model, WHOLE, menu.whole, None) for model in (TARGET, DRAFT)]
    for draft, target in menu.splits:
        name = split_name(draft, target)
        shares += [Share(TARGET, name, target, draft), Share(DRAFT, name, draft, target)]
    return shares


@dataclass(frozen=True, slots=True)
class TimedRunner:
    """A runner with a stopwatch. loop: the draft's, if the device drafts whole chains."""

    runtime: AnyRuntime
    runner: OpenRunner
    loop: DraftLoop | None = None

    def time(self, batch: RowBatch, num_calls: int) -> np.ndarray:
        """Returns microseconds of each segment, [num_segments]: the mean of num_calls consecutive calls.

        If the loop can draft behind the batch, the mean is over the num_calls tokens of a chain: calls that are waited
        for one by one would add time that no step pays.
        """
        if self.loop is not None and is_chain(batch.rows_per_sequence, batch.logit_rows.shape[0]):
            return self._time_chain(self.loop, batch, num_calls)
        total_ns = np.zeros(self.runner.num_segments)
        for _ in range(num_calls):
            hidden = None
            for segment in range(self.runner.num_segments):
                start = time.perf_counter_ns()
                hidden = self.runner.run_segment(segment, batch, hidden)
                self.runtime.synchronize()
                total_ns[segment] += time.perf_counter_ns() - start
        return total_ns / (1e3 * num_calls)

    def _time_chain(self, loop: DraftLoop, batch: RowBatch, num_tokens: int) -> np.ndarray:
        """Returns microseconds per token of each segment. The first segment of a head, which joins features, runs once
        a chain; a call of it alone is subtracted, but never more than half of the chain."""
        lengths = np.full(batch.num_sequences, num_tokens)
        start = time.perf_counter_ns()
        loop.draft(batch, np.arange(batch.num_sequences), lengths, 0)
        drafted = time.perf_counter_ns()
        if self.runner.num_segments == 1:
            return np.array([drafted - start]) / (1e3 * num_tokens)
        self.runner.run_segment(0, batch, None)
        self.runtime.synchronize()
        join_ns = min(time.perf_counter_ns() - drafted, (drafted - start) / 2)
        return np.array([join_ns, drafted - start - join_ns]) / (1e3 * num_tokens)

    def warm_up(self, batch: RowBatch, wanted_us: float) -> None:
        """Calls the batch for wanted_us microseconds, at least once."""
        until = time.perf_counter() + wanted_us / 1e6
        self.time(batch, 1)
        while time.perf_counter() < until:
            self.time(batch, 1)


def is_chain(counts: np.ndarray | tuple[int, ...], num_logit_rows: int) -> bool:
    """Returns whether a call has one row of each sequence, with logits, as the calls of a chain have."""
    return max(counts) == 1 and num_logit_rows == len(counts)


def chain_case(case: Case, num_tokens: int, max_context: int) -> Case:
    """Returns the case with a context that leaves room for num_tokens more."""
    return Case(case.counts, max(min(case.context, max_context - num_tokens), 0), case.num_logit_rows)


def open_loop(runtime: AnyRuntime, runner: OpenRunner, num_tokens: int) -> DraftLoop | None:
    """Opens the draft's loop, with request slots that sample at temperature 1. None: the runtime has no such loop."""
    sampler = runtime.open_sampler(runner.vocab_size, MAX_SEQUENCES)
    loop = runtime.open_draft_loop(runner, sampler)
    if loop is not None:
        for slot in range(MAX_SEQUENCES):
            sampler.add(slot, Sampling(temperature=1.0, seed=slot), np.zeros(num_tokens, np.int64), 1, ())
    return loop


class WaitingRunner:
    """A runner whose calls return when the device has finished them: else a GPU's time would count in the phase that
    first reads their results."""

    def __init__(self, runner: ModelRunner, runtime: AnyRuntime) -> None:
        self._runner, self._runtime = runner, runtime

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._runner, name)
        if name not in ("run_segment", "run_segment_with_scores", "run_layer", "run_block", "biased"):
            return found

        def run(*arguments: Any) -> Any:
            outputs = found(*arguments)
            self._runtime.synchronize()
            return outputs

        return run


class Bench:
    """The KV pools and the cases of a pair of models, used on all partitions of a runtime."""

    def __init__(
        self, runtime: AnyRuntime, models: ModelPair, cases: dict[str, list[Case]], *, max_sweeps: int, seed: int
    ) -> None:
        self._runtime, self._max_sweeps = runtime, max_sweeps
        self._swept_s = self._waited_s = 0.0
        self.is_bounded = False  # after twice a partition's time, leaves out calls beyond the fewest that can be fitted
        self.is_cut = False  # it has left out some
        self._models: dict[str, ModelEngine] = dict(zip((TARGET, DRAFT), models.present, strict=False))
        self._max_context, self._cases = models.max_context, cases
        self._rng = np.random.default_rng(seed)
        runtime.bind_step_thread()
        self._pools = {model: self._filled_pool(model) for model in cases}
        if models.draft is not None and models.draft.spec.reads_target:
            self._pools[DRAFT].keep_features(models.target.spec)
        runtime.synchronize()  # before other threads read them

    def measure(self, share: Share, budget_s: float) -> list[Sampled]:
        """Measures cases, from few rows to many, for about budget_s seconds or max_sweeps sweeps, at least 3."""
        with _bound_thread(share.part) as on_share, ExitStack() as opened:
            runner = on_share.submit(self._open, share.model, share.part, opened, share.model == DRAFT).result()
            before: Work = lambda: None  # noqa: E731
            if share.company is None and share.other_model in self._models:
                before = on_share.submit(self._other_work, share.other_model, share.part, opened).result()
            self._is_over = False
            with self._company(share), self._counted_waits():
                sweep = on_share.submit(self._sweep, share.model, runner, before, budget_s)
                try:
                    return sweep.result()
                finally:  # if interrupted, before the runners close: without helper threads a call would never end
                    self._is_over = True
                    wait([sweep])

    @property
    def waiting_share(self) -> float:
        """The share of measuring time that the most delayed thread was ready to run, but had no core."""
        return self._waited_s / max(self._swept_s, 1e-9)

    @contextmanager
    def _counted_waits(self) -> Iterator[None]:
        start, before = time.perf_counter(), _waited_ns()
        yield
        self._waited_s += max(ns - before.get(thread, 0) for thread, ns in _waited_ns().items()) / 1e9
        self._swept_s += time.perf_counter() - start

    def _sweep(self, model: str, runner: TimedRunner, before: Work, budget_s: float) -> list[Sampled]:
        """before: an untimed call of the other model, if the two alternate on the same cores."""
        cases = [self._cases[model][i] for i in self._rng.permutation(len(self._cases[model]))]
        sampled = []
        for first in range(0, len(cases), CALLS_PER_GROUP):
            group = cases[first : first + CALLS_PER_GROUP]
            sampled += self._sweep_group(model, runner, before, group, budget_s * len(group) / len(cases))
        return sampled

    def _sweep_group(
        self, model: str, runner: TimedRunner, before: Work, group: list[Case], budget_s: float
    ) -> list[Sampled]:
        num_calls = DRAFT_RUN if model == DRAFT else 1
        group = sorted(group, key=lambda case: (case.num_rows, case.num_tokens))
        # The first few already differ in rows and in contexts, because a budget may end behind them.
        group[:MIN_GROUP_CASES] = [case for first in range(3) for case in group[first:MIN_GROUP_CASES:3]]
        calls = self._calls(model, runner, group)
        num_first = 1 if runner.loop is None else num_calls  # a chain's length is part of its shape
        deadline, spent_s, samples = time.perf_counter() + budget_s, 0.0, list[list[np.ndarray]]()

        def sample(case: Case, batch: RowBatch) -> np.ndarray:
            if self._is_over:
                raise KeyboardInterrupt
            if model == TARGET:
                runner.warm_up(batch, TARGET_WARM_US)
            if model == DRAFT or case.num_logit_rows > len(case.counts):  # drafted rows are verified
                before()
            if model == DRAFT and runner.loop is None:
                runner.time(batch, 1)  # profile.py measures a first call's extra time
            return runner.time(batch, num_calls)

        for case, batch in calls:
            if len(samples) >= MIN_GROUP_CASES and 3 * spent_s > budget_s:
                break
            is_late = self.is_bounded and time.perf_counter() > deadline + budget_s
            if is_late and len(samples) >= FEWEST_GROUP_CASES:
                self.is_cut = True
                break
            for _ in range(2):  # the first call allocates the shape's buffers; on a GPU the second captures its graph
                runner.time(batch, num_first)
            start = time.perf_counter()
            samples.append([sample(case, batch)])
            spent_s += time.perf_counter() - start
        for sweep in range(1, self._max_sweeps):
            late_s = time.perf_counter() - deadline
            if late_s > 0.0 and (sweep >= 3 or (self.is_bounded and late_s > budget_s)):
                break
            for index in self._rng.permutation(len(samples)):
                samples[index].append(sample(*calls[index]))
        return [Sampled.of(case, np.array(times)) for (case, _), times in zip(calls, samples, strict=False)]

    def _calls(self, model: str, runner: TimedRunner, group: list[Case]) -> list[tuple[Case, RowBatch]]:
        """Returns each case with its batch, with room for a chain behind it if the device drafts chains."""
        calls = []
        for case in group:
            room = DRAFT_RUN * (runner.loop is not None and is_chain(case.counts, case.num_logit_rows))
            fitting = chain_case(case, room, self._max_context)
            calls.append((fitting, self._batch(model, fitting, room)))
        return calls

    def _batch(self, model: str, case: Case, room: int = 0) -> RowBatch:
        pool, vocab_size = self._pools[model], self._models[model].spec.vocab_size
        return make_batch(case, vocab_size, pool.kv_block_size, pool.num_blocks, self._rng, room=room)

    def _open(self, model: str, share: ComputePartition, opened: ExitStack, has_loop: bool) -> TimedRunner:
        runner = self._runtime.open_runner(self._models[model], share, self._pools[model])
        opened.callback(runner.close)
        loop = open_loop(self._runtime, runner, self._max_context) if has_loop else None
        return TimedRunner(self._runtime, runner, loop)

    def _filled_pool(self, model: str) -> KvStorage:
        """Opens a pool for the largest case, of at most MAX_POOL_BYTES, and writes all of it."""
        spec, block_size = self._models[model].spec, self._runtime.kv_block_size
        num_needed = max(len(case.counts) * -(-case.num_tokens // block_size) for case in self._cases[model])
        num_fitting = max(MAX_POOL_BYTES // self._runtime.bytes_per_block(spec), 1)
        pool = self._runtime.open_pool(self._models[model], min(num_needed, num_fitting))
        self._runtime.fill_pool(pool, self._rng.standard_normal(spec.head_dim).astype(np.float32))
        return pool

    def _other_work(self, model: str, share: ComputePartition, opened: ExitStack) -> Work:
        """Opens a runner and returns a function that makes one call of medium size on it, another each time."""
        runner = self._open(model, share, opened, False)
        cases = sorted(self._cases[model], key=lambda case: case.num_rows * case.num_tokens)
        medium = cases[len(cases) // 4 : 3 * len(cases) // 4 : 4] or cases
        batches = itertools.cycle([self._batch(model, case) for case in medium])
        return lambda: runner.time(next(batches), 1)

    @contextmanager
    def _company(self, share: Share) -> Iterator[None]:
        """Keeps the other model busy on the other share of a split, from a thread of its own."""
        if share.company is None:
            yield
            return
        is_over = threading.Event()

        def keep_busy(work: Work) -> None:
            while not is_over.is_set():
                work()

        with _bound_thread(share.company) as on_share, ExitStack() as opened:
            work = on_share.submit(self._other_work, share.other_model, share.company, opened).result()
            working = on_share.submit(keep_busy, work)
            try:
                yield
            finally:
                is_over.set()
                working.result()


def _waited_ns() -> dict[str, int]:
    """Returns how long each thread of this process was ready to run, but had no core. Zeros: the kernel has no count.

    A program that never rests shares a core evenly, which makes every repeat of a call equally slow.
    """
    waited = {"": 0}
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            waited[thread.name] = int((thread / "schedstat").read_text().split()[1])
    return waited


@contextmanager
def _bound_thread(share: ComputePartition) -> Iterator[ThreadPoolExecutor]:
    """Yields a thread that is bound to this share, as are the threads that a runner starts from it."""
    with ThreadPoolExecutor(1, "profile", initializer=share.bind_current_thread) as executor:
        yield executor


def fit_segments(points: list[Sampled], widths: np.ndarray, *, pads: bool) -> tuple[CallCost, ...]:
    """Fits a cost per segment. pads: see CostModel.is_padded."""
    shapes = shapes_of([point.case for point in points], widths, pads=pads)
    times = np.array([point.segment_us for point in points])
    return tuple(fit_call_cost(shapes, times[:, segment]) for segment in range(times.shape[1]))


def shapes_of(cases: list[Case], widths: np.ndarray, *, pads: bool) -> CallShapes:
    rows = [(case.num_rows, len(case.counts), max(case.counts), case.num_logit_rows) for case in cases]
    num_rows, num_sequences, max_rows, num_logit_rows = np.array(rows, np.float64).T
    max_rows = max_rows if pads else num_rows / num_sequences  # without, their mean, as in CostModel.call_us
    num_tokens = np.array([case.context for case in cases]) + max_rows
    return CallShapes(num_rows, num_sequences, max_rows, widths[num_tokens.astype(np.int64)], num_logit_rows)
