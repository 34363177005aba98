"""Times real model calls on the partitions of this machine, and fits costs to them.

All calls of a partition are interleaved in random order, sweep after sweep, and the median over sweeps is
kept: what disturbs the machine for a while touches few samples of each call. A split's shares are timed
while the other model works on the other share. A call has ended when the device is done with it.

Calls are timed as they are used. A draft sample is a run of calls, on the whole machine after a target call, which
leaves little of the draft in the caches; a first call in between is not timed, for what it takes more is found by
profiling/step_costs.py. A target sample follows calls of its own shape, as step follows step,
and where it verifies drafted rows a draft call comes in between. Timed right after a large call instead, one row took
twice as long as it does in plain decoding (1387 us, 675 us after 8 calls), and speculation looked better than it is.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from faser_backend.core.batch import RowBatch
from faser_backend.core.decision import WHOLE
from faser_backend.device.partition import ComputePartition, PartitionMenu, split_name
from faser_backend.device.runtime import KvStorage, ModelPair, OpenRunner
from faser_backend.manifest import ModelEngine
from faser_backend.policy.cost_model import DRAFT, TARGET, CallCost, CostModel
from faser_backend.profiling.cases import Case, make_batch
from faser_backend.profiling.cost_fit import CallShapes, fit_call_cost, mean_absolute_percentage_error
from faser_backend.profiling.timed_calls import TimedRunner, chain_case, is_chain, open_loop
from faser_backend.serving.profile_store import FitError
from faser_backend.serving.runtimes import AnyRuntime

MAX_POOL_BYTES = 512 << 20
CALLS_PER_GROUP = 48  # interleaved together: fewer than the call shapes that a runner keeps
MIN_CASES = 6  # of a group, measured whatever they cost, to fit and held out each
DRAFT_RUN = 4  # a draft sample is the mean of so many calls in a row
TARGET_WARM_US = 4000.0  # a target sample follows calls of its own shape for so long

Progress = Callable[[float], None]  # is told the share that is done, in [0, 1]
Work = Callable[[], None]


class Share(NamedTuple):
    """A model on its part of a partition; `company` is the other model's part, where both run at once."""

    model: str
    partition: str
    part: Any  # a ComputePartition of the runtime's: cores or SMs
    company: Any | None

    @property
    def other_model(self) -> str:
        return TARGET if self.model == DRAFT else DRAFT


@dataclass(frozen=True, slots=True)
class Sampled:
    """One case: median microseconds of each segment, and what else its whole calls showed."""

    case: Case
    segment_us: tuple[float, ...]
    spread: float  # distance between the quartiles, as a share of the median


def shares_of(menu: PartitionMenu[Any], *, has_draft: bool = True) -> list[Share]:
    """Everything to measure: both models on the whole machine, then on each split; a target alone on the whole."""
    if not has_draft:
        return [Share(TARGET, WHOLE, menu.whole, None)]
    shares = [Share(model, WHOLE, menu.whole, None) for model in (TARGET, DRAFT)]
    for draft, target in menu.splits:
        name = split_name(draft, target)
        shares += [Share(TARGET, name, target, draft), Share(DRAFT, name, draft, target)]
    return shares


class Bench:
    """Pools and batches of a pair of models, shared by all partitions of its runtime."""

    def __init__(
        self, runtime: AnyRuntime, models: ModelPair, cases: dict[str, list[Case]], *, max_sweeps: int, seed: int
    ) -> None:
        self._runtime = runtime
        self._max_sweeps = max_sweeps
        self._models: dict[str, ModelEngine] = dict(zip((TARGET, DRAFT), models.present, strict=False))
        self._max_context = models.max_context
        self._rng = np.random.default_rng(seed)
        runtime.bind_step_thread()
        self._pools = {model: self._filled_pool(model, cases[model]) for model in cases}
        if models.draft is not None and models.draft.spec.reads_target:
            self._pools[DRAFT].keep_features(models.target.spec)
        runtime.synchronize()  # before other threads read them
        self._cases = cases

    def measure(self, share: Share, budget_s: float, progress: Progress) -> list[Sampled]:
        """Medians of the model's cases over about budget_s seconds or max_sweeps sweeps, 3 at least; most of those
        that are too dear for the budget are left out."""
        with _bound_thread(share.part) as on_share, ExitStack() as opened:
            runner = on_share.submit(self._open_timed, share.model, share.part, opened).result()
            before: Work = _nothing
            if share.company is None and share.other_model in self._models:
                before = on_share.submit(self._other_work, share.other_model, share.part, opened).result()
            with self._company(share):
                return on_share.submit(self._sweep, share.model, runner, before, budget_s, progress).result()

    def _sweep(
        self, model: str, runner: TimedRunner, before: Work, budget_s: float, progress: Progress
    ) -> list[Sampled]:
        """before: a call of the other model, untimed, where the two take turns on the same cores."""
        cases = [self._cases[model][i] for i in self._rng.permutation(len(self._cases[model]))]
        sampled = []
        for first in range(0, len(cases), CALLS_PER_GROUP):
            group = cases[first : first + CALLS_PER_GROUP]
            sampled += self._sweep_group(model, runner, before, group, budget_s * len(group) / len(cases))
            progress((first + len(group)) / len(cases))
        return sampled

    def _sweep_group(
        self, model: str, runner: TimedRunner, before: Work, group: list[Case], budget_s: float
    ) -> list[Sampled]:
        num_calls = DRAFT_RUN if model == DRAFT else 1
        calls = self._calls(model, runner, group)
        num_first = 1 if runner.loop is None else num_calls  # a chain's length is part of its shape
        deadline = time.perf_counter() + budget_s
        for _ in range(2):  # a runner makes the buffers of a shape, and captures a GPU's graph at the second call
            for _, batch in calls:
                runner.time(batch, num_first)
        warm = np.array([runner.time(batch, num_first).sum() for _, batch in calls])
        cheap_first = warm.argsort()
        sample_us = warm * num_calls + (np.maximum(warm, TARGET_WARM_US) if model == TARGET else 0.0)
        is_affordable = np.cumsum(sample_us[cheap_first]) * 3 <= budget_s * 1e6
        is_held_out = np.array([calls[index][0].is_held_out for index in cheap_first])
        for kind in (is_held_out, ~is_held_out):  # a fit needs some of both
            is_affordable[np.flatnonzero(kind)[:MIN_CASES]] = True
        kept = cheap_first[is_affordable]
        samples: dict[int, list[np.ndarray]] = {int(index): [] for index in kept}
        for sweep in range(self._max_sweeps):
            if sweep >= 3 and time.perf_counter() > deadline:
                break
            for index in self._rng.permutation(kept):
                case, batch = calls[index]
                if model == TARGET:
                    runner.warm_up(batch, TARGET_WARM_US)
                if model == DRAFT or case.num_logit_rows > len(case.counts):  # drafted rows are verified
                    before()
                if model == DRAFT and runner.loop is None:
                    runner.time(batch, 1)  # what a round's first call takes more, profiling/step_costs.py finds
                samples[int(index)].append(runner.time(batch, num_calls))
        return [_summary(calls[index][0], np.array(times)) for index, times in samples.items()]

    def _calls(self, model: str, runner: TimedRunner, group: list[Case]) -> list[tuple[Case, RowBatch]]:
        """Each case with its batch; where chains are drafted at once, with room for the chain behind it."""
        calls = []
        for case in group:
            room = 0
            if runner.loop is not None and is_chain(case.counts, case.num_logit_rows):
                room = DRAFT_RUN
                case = chain_case(case, room, self._max_context)  # noqa: PLW2901
            calls.append((case, self._batch(model, case, room)))
        return calls

    def _batch(self, model: str, case: Case, room: int = 0) -> RowBatch:
        pool, vocab_size = self._pools[model], self._models[model].spec.vocab_size
        return make_batch(case, vocab_size, pool.kv_block_size, pool.num_blocks, self._rng, room=room)

    def _open_timed(self, model: str, share: ComputePartition, opened: ExitStack) -> TimedRunner:
        runner = self._open(model, share, opened)
        loop = open_loop(self._runtime, runner, self._max_context) if model == DRAFT else None
        return TimedRunner(self._runtime, runner, loop)

    def _open(self, model: str, share: ComputePartition, opened: ExitStack) -> OpenRunner:
        runner = self._runtime.open_runner(self._models[model], share, self._pools[model])
        opened.callback(runner.close)
        return runner

    def _filled_pool(self, model: str, cases: list[Case]) -> KvStorage:
        """Blocks for the largest case, or for as much of it as MAX_POOL_BYTES hold."""
        spec, block_size = self._models[model].spec, self._runtime.kv_block_size
        num_needed = max(len(case.counts) * -(-case.num_tokens // block_size) for case in cases)
        num_fitting = max(MAX_POOL_BYTES // self._runtime.bytes_per_block(spec), 1)
        pool = self._runtime.open_pool(self._models[model], min(num_needed, num_fitting))
        self._runtime.fill_pool(pool, self._rng.standard_normal(spec.head_dim).astype(np.float32))
        return pool

    def _other_work(self, model: str, share: ComputePartition, opened: ExitStack) -> Work:
        """Opens a runner; each call of the result runs one call of middling size on it, in turn."""
        runner = TimedRunner(self._runtime, self._open(model, share, opened))
        cases = sorted(self._cases[model], key=lambda case: case.num_rows * case.num_tokens)
        middling = cases[len(cases) // 4 : 3 * len(cases) // 4 : 4] or cases
        batches = itertools.cycle([self._batch(model, case) for case in middling])

        def work() -> None:
            runner.time(next(batches), 1)

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

        with _bound_thread(share.company) as on_share, ExitStack() as opened:
            work = on_share.submit(self._other_work, share.other_model, share.company, opened).result()
            working = on_share.submit(keep_busy, work)
            try:
                yield
            finally:
                is_over.set()
                working.result()


@contextmanager
def _bound_thread(share: ComputePartition) -> Iterator[ThreadPoolExecutor]:
    """A thread on this share; threads that a runner starts from it stay there too."""
    with ThreadPoolExecutor(1, "profile", initializer=share.bind_current_thread) as executor:
        yield executor


def _summary(case: Case, times: np.ndarray) -> Sampled:
    """times: [num_sweeps, num_segments] microseconds."""
    low, middle, high = np.percentile(times.sum(axis=1), (25, 50, 75))
    return Sampled(case, tuple(np.median(times, axis=0).tolist()), float((high - low) / middle))


def _nothing() -> None:
    """Runs before a sample where nothing else has to."""


def fit_segments(points: list[Sampled], widths: np.ndarray, *, pads: bool) -> tuple[CallCost, ...]:
    """A cost per segment from the points that are not held out. pads: see CostModel.is_padded."""
    fitted = [point for point in points if not point.case.is_held_out]
    shapes = shapes_of([point.case for point in fitted], widths, pads=pads)
    times = np.array([point.segment_us for point in fitted])
    return tuple(fit_call_cost(shapes, times[:, segment]) for segment in range(times.shape[1]))


def fit_error(model: CostModel, share: Share, points: list[Sampled]) -> FitError:
    """Errors of whole calls, all segments together, on the fitted and on the held-out points."""
    cases = [point.case for point in points]
    predicted = model.call_us(
        share.model,
        share.partition,
        np.array([case.num_rows for case in cases]),
        np.array([len(case.counts) for case in cases]),
        np.array([case.context for case in cases]),
        max_rows=np.array([max(case.counts) for case in cases]),
        num_logit_rows=np.array([case.num_logit_rows for case in cases]),
    )
    measured = np.array([sum(point.segment_us) for point in points])
    is_held_out = np.array([case.is_held_out for case in cases])
    fitted, held_out = (
        mean_absolute_percentage_error(predicted[of], measured[of]) for of in (~is_held_out, is_held_out)
    )
    num_held_out = int(is_held_out.sum())
    spread = float(np.median([point.spread for point in points]) * 100.0)
    return FitError(share.model, share.partition, len(cases) - num_held_out, num_held_out, fitted, held_out, spread)


def shapes_of(cases: list[Case], widths: np.ndarray, *, pads: bool) -> CallShapes:
    rows = [(case.num_rows, len(case.counts), max(case.counts), case.num_logit_rows) for case in cases]
    num_rows, num_sequences, max_rows, num_logit_rows = np.array(rows, np.float64).T
    if not pads:  # as CostModel.call_us has it: on average, a sequence reads its context and its own rows
        max_rows = num_rows / num_sequences
    num_tokens = np.array([case.context for case in cases]) + max_rows
    return CallShapes(num_rows, num_sequences, max_rows, widths[num_tokens.astype(np.int64)], num_logit_rows)
