"""Single calls under a stopwatch: a call has ended when the device is done with it, not when it is queued.

Where the device drafts whole chains by itself, a draft sample is such a chain: calls in turn, each waited for, would
cost what no step pays.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from faser_backend.core.batch import RowBatch
from faser_backend.core.ports import DraftLoop, ModelRunner
from faser_backend.core.request import Sampling
from faser_backend.device.runtime import OpenRunner
from faser_backend.profiling.cases import MAX_SEQUENCES, Case
from faser_backend.serving.runtimes import AnyRuntime


@dataclass(frozen=True, slots=True)
class TimedRunner:
    """A runner whose calls can be timed. loop: of a draft, for chains."""

    runtime: AnyRuntime
    runner: OpenRunner
    loop: DraftLoop | None = None

    def time(self, batch: RowBatch, num_calls: int) -> np.ndarray:
        """Microseconds of each segment, [num_segments]: the mean over num_calls whole passes in a row, no exit
        asked; over num_calls tokens of a chain where the loop can draft behind the batch."""
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
        """Per token. A head joins features once a chain, which a call of that alone tells, waited for; more than half
        of a chain it cannot be."""
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
        """Calls of the batch for so long, at least one."""
        until = time.perf_counter() + wanted_us / 1e6
        while True:
            self.time(batch, 1)
            if time.perf_counter() >= until:
                return


def is_chain(counts: np.ndarray | tuple[int, ...], num_logit_rows: int) -> bool:
    """Whether a call is like those of a chain: one row of each sequence, with logits."""
    return max(counts) == 1 and num_logit_rows == len(counts)


def chain_case(case: Case, num_tokens: int, max_context: int) -> Case:
    """The case with a context that leaves room for num_tokens more."""
    return Case(case.counts, max(min(case.context, max_context - num_tokens), 0), case.num_logit_rows, case.is_held_out)


def open_loop(runtime: AnyRuntime, runner: OpenRunner, num_tokens: int) -> DraftLoop | None:
    """The draft's loop, where it has one, with slots that sample at temperature 1."""
    sampler = runtime.open_sampler(runner.vocab_size, MAX_SEQUENCES)
    loop = runtime.open_draft_loop(runner, sampler)
    if loop is not None:
        for slot in range(MAX_SEQUENCES):
            sampler.add(slot, Sampling(temperature=1.0, seed=slot), np.zeros(num_tokens, np.int64), 1, ())
    return loop


class WaitingRunner:
    """A runner whose calls return when they are done, so that the phases of a step show where its time goes.

    Without it the time of a GPU's model calls would show where their results are first read.
    """

    def __init__(self, runner: ModelRunner, runtime: AnyRuntime) -> None:
        self._runner, self._runtime = runner, runtime

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._runner, name)
        if name not in ("run_segment", "run_segment_with_scores", "run_layer"):
            return found

        def run(*arguments: Any) -> Any:
            outputs = found(*arguments)
            self._runtime.synchronize()
            return outputs

        return run
