"""Times calls of a pair on the partitions of its runtime, as a step makes them: drafting whole chains, verifying.

A call begins with the host that queues it and ends when the device has done it. Works on any runtime of the port.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from faser_backend.core.batch import RowBatch, SamplingRows
from faser_backend.core.decision import WHOLE
from faser_backend.core.ports import Lanes
from faser_backend.core.request import SamplingParams
from faser_backend.device.partition import split_name
from faser_backend.device.runtime import ModelPair
from faser_backend.pipeline.model_call import run_model
from faser_backend.pipeline.phases import Partition
from faser_backend.serving.partitions import open_partitions
from faser_backend.serving.runtimes import AnyRuntime
from lab.gpu.lent_runtime import LentRuntime
from lab.profiling.cases import Case, make_batch

Work = Callable[[], object]
WARMUPS = 2


@dataclass(frozen=True, slots=True, eq=False)
class PairCalls:
    """A pair on all partitions of a runtime, its pools filled and a slot of the sampler for each sequence."""

    runtime: LentRuntime
    models: ModelPair
    partitions: dict[str, Partition]
    num_blocks: int
    max_num_seqs: int
    sampler: Any
    rng: np.random.Generator

    @classmethod
    def open(cls, runtime: LentRuntime, models: ModelPair, max_num_seqs: int, stack: ExitStack, seed: int) -> PairCalls:
        """stack closes what is opened. Raises ConfigError."""
        runtime.bind_step_thread()
        num_blocks = max_num_seqs * -(-models.max_context // runtime.kv_block_size)
        sampler = runtime.open_sampler(models.vocab_size, max_num_seqs)
        rng = np.random.default_rng(seed)
        for slot in range(max_num_seqs):
            sampler.add(slot, SamplingParams(temperature=0.8, seed=slot), np.zeros(8, np.int64), 8, ())
        names = [split_name(*split) for split in runtime.splits]
        partitions, close = open_partitions(
            cast(AnyRuntime, runtime), models, sampler, num_blocks=num_blocks, names=names, is_drafting=True
        )
        stack.callback(close)
        for model in models.present:
            numbers = rng.standard_normal(model.spec.head_dim).astype(np.float32)
            runtime.fill_pool(runtime.open_pool(model, num_blocks), numbers)
        runtime.synchronize()
        return cls(runtime, models, partitions, num_blocks, max_num_seqs, sampler, rng)

    def release_slots(self) -> None:
        """Leaves the sampler to engines: no chains can be drafted afterwards."""
        for slot in range(self.max_num_seqs):
            self.sampler.remove(slot)

    def verify(self, partition: str, num_sequences: int, rows: int, context: int) -> Work:
        """One verification of `rows` rows each; what it returns is not read."""
        batch = self._batch(self.models.target, num_sequences, rows, context)
        target = self.partitions[partition].target
        return lambda: run_model(target, batch)

    def verify_segments(self, partition: str, num_sequences: int, rows: int, context: int) -> list[Work]:
        """The segments of one verification, to be run in order."""
        batch = self._batch(self.models.target, num_sequences, rows, context)
        target = self.partitions[partition].target
        hidden: list[Any] = [None] * (target.num_segments + 1)

        def segment_work(segment: int) -> Work:
            def run() -> None:  # all of it on the thread that measures, whose share graphs are captured on
                hidden[segment + 1] = target.run_segment(segment, batch, hidden[segment])

            return run

        return [segment_work(segment) for segment in range(target.num_segments)]

    def draft(self, partition: str, num_sequences: int, num_tokens: int, context: int) -> Work:
        """A chain of num_tokens each, tokens on the host at the end, as a frontier is."""
        place = self.partitions[partition]
        batch = self._batch(self.models.draft, num_sequences, 1, context)
        slots, lengths = np.arange(num_sequences), np.full(num_sequences, num_tokens)
        loop = place.draft_loop
        if loop is not None and loop.can_draft(slots):
            return lambda: loop.draft(batch, slots, lengths, 0)
        runner, drafted = place.draft, np.zeros((num_sequences, 1), np.int64)
        assert runner is not None
        positions, none = np.full(num_sequences, context + 1), np.zeros(num_sequences, np.int64)
        rows = SamplingRows(slots, positions, slots, none, drafted)

        def chain() -> None:
            for _ in range(num_tokens):
                self.sampler.sample_draft(run_model(runner, batch), rows, 0)

        return chain

    def exit(self, num_sequences: int, rows: int, context: int, num_candidates: int) -> tuple[Work, Work]:
        """The first segment alone, and with the scores of its exit, margins on the host and half of the rows left."""
        target = self.partitions[WHOLE].target
        batch = self._batch(self.models.target, num_sequences, rows, context)
        candidates = self.rng.integers(0, self.models.vocab_size, (batch.num_rows, num_candidates))
        sequence = np.repeat(np.arange(num_sequences), rows)
        num_drafted = np.tile(np.arange(rows), num_sequences)
        drawing = SamplingRows(
            sequence, context + 1 + num_drafted, sequence, num_drafted, np.zeros((num_sequences, rows), np.int64)
        )
        kept = np.arange(0, batch.num_rows, 2)

        def pruned() -> None:
            hidden, scores = target.run_segment_with_scores(0, batch, None, candidates)
            self.sampler.candidate_margins(scores, candidates, drawing, with_noise=True)
            target.take_rows(hidden, kept)

        return lambda: target.run_segment(0, batch, None), pruned

    def on_target(self, partition: str, work: Callable[[], Any]) -> Any:
        """Runs work where the target's calls of a partition are made."""
        lanes = self.partitions[partition].lanes
        return work() if lanes is None else lanes.on_target(work)  # pyright: ignore[reportAttributeAccessIssue]

    def on_draft(self, partition: str, work: Callable[[], Any]) -> Any:
        lanes = self.partitions[partition].lanes
        return work() if lanes is None else lanes.on_draft(work)  # pyright: ignore[reportAttributeAccessIssue]

    def timed(self, work: Work) -> float:
        """Microseconds, on the calling thread, until the device has done it."""
        start = time.perf_counter_ns()
        work()
        self.runtime.synchronize()
        return (time.perf_counter_ns() - start) / 1e3

    def times(self, works: Sequence[Work], repeats: int) -> np.ndarray:
        """[repeats, works] microseconds, in turns, after warming up: captures and buffers are not measured."""
        for work in works:
            for _ in range(WARMUPS):
                self.timed(work)
        return np.array([[self.timed(work) for work in works] for _ in range(repeats)])

    def company(self, partition: str, works: Sequence[Work], busy: Work, repeats: int, *, model: str) -> np.ndarray:
        """As `times`, for works of `model` ("target" or "draft"), while the other lane runs `busy` again and again."""
        lanes = self.partitions[partition].lanes
        assert lanes is not None, f"partition {partition} has no lanes"
        is_over = threading.Event()

        def measure() -> np.ndarray:
            try:
                return self.times(works, repeats)
            finally:
                is_over.set()

        def keep_busy() -> None:
            while not is_over.is_set():
                self.timed(busy)

        if model == "target":
            return lanes.run_both(measure, keep_busy)[0]
        return lanes.run_both(keep_busy, measure)[1]

    def lanes_us(self, lanes: Lanes, repeats: int) -> float:
        """Median microseconds in which both lanes run nothing at all."""
        return float(np.median([self.timed(lambda: lanes.run_both(_nothing, _nothing)) for _ in range(repeats)]))

    def _batch(self, model: Any, num_sequences: int, rows: int, context: int) -> RowBatch:
        case = Case((rows,) * num_sequences, context, num_sequences * rows)
        return make_batch(case, model.spec.vocab_size, self.runtime.kv_block_size, self.num_blocks, self.rng)


def _nothing() -> None:
    """The work of a lane that is only handed over."""
