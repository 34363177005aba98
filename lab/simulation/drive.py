"""Runs a trace through a simulated engine and sums up what its requests and steps went through."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from faser_backend.core.errors import FaserError
from faser_backend.core.record import StepRecord
from faser_backend.core.request import Request, RequestOutput, RequestStats, SamplingParams
from lab.simulation.engine import SimEngine
from lab.simulation.trace import Trace

BATCH_BINS = (1, 8, 32, 128)  # first batch size of each bin


@dataclass
class StepSums:
    """Sums over verifications; an observer of the stepper."""

    num_steps: int = 0
    num_sequences: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_draft_rows: int = 0  # that entered a verification
    num_pruned: int = 0
    num_row_layers: int = 0
    step_us: float = 0.0
    overlap_us: float = 0.0
    batch_sizes: list[int] = field(default_factory=list)
    longest_drafts: list[int] = field(default_factory=list)

    def observe(self, record: StepRecord) -> None:
        size = record.num_tokens.size
        rows, kept = int(record.frontier.num_rows.sum()), int(record.verification.num_kept.sum())
        self.num_steps += 1
        self.num_sequences += size
        self.num_drafted += int(record.frontier.num_drafted.sum())
        self.num_accepted += int(record.acceptance.num_accepted.sum())
        self.num_draft_rows += rows - size
        self.num_pruned += rows - kept
        self.num_row_layers += record.verification.num_row_layers
        self.step_us += record.step_us
        self.overlap_us += record.overlap_us
        self.batch_sizes.append(size)
        self.longest_drafts.append(int(record.frontier.num_drafted.max(initial=0)))


@dataclass(frozen=True)
class Outcome:
    """Of N requests in the order of the trace, times in virtual seconds from the first arrival."""

    arrivals_s: np.ndarray  # [N]
    stats: list[RequestStats]
    start_ns: int
    end_ns: int
    steps: StepSums
    num_preemptions: int
    tokens: list[list[int]]

    def summary(self) -> dict[str, Any]:
        """Plain figures for tables and JSON."""
        first, last = (
            (np.array([getattr(stats, name) for stats in self.stats]) - self.start_ns) / 1e9
            for name in ("first_token_ns", "last_token_ns")
        )
        num_tokens = np.array([len(tokens) for tokens in self.tokens])
        makespan_s = (self.end_ns - self.start_ns) / 1e9
        per_token = (last - first)[num_tokens > 1] / (num_tokens[num_tokens > 1] - 1)
        steps = self.steps
        sizes = np.array(steps.batch_sizes)
        return {
            "num_requests": len(self.stats),
            "num_tokens": int(num_tokens.sum()),
            "makespan_s": makespan_s,
            "tokens_per_s": float(num_tokens.sum() / makespan_s),
            **_percentiles("ttft_ms", (first - self.arrivals_s) * 1e3),
            **_percentiles("tpot_ms", per_token * 1e3),
            **_percentiles("e2e_ms", (last - self.arrivals_s) * 1e3),
            "mean_accepted": steps.num_accepted / max(steps.num_sequences, 1),
            "mean_drafted": steps.num_drafted / max(steps.num_sequences, 1),
            "mean_longest_draft": float(np.mean(steps.longest_drafts)) if steps.longest_drafts else 0.0,
            "acceptance": steps.num_accepted / max(steps.num_drafted, 1),
            "row_layers_per_token": steps.num_row_layers / max(int(num_tokens.sum()), 1),
            "pruned_share": steps.num_pruned / max(steps.num_draft_rows, 1),
            "overlap_share": steps.overlap_us / max(steps.step_us, 1e-9),
            "mean_batch": float(sizes.mean()) if sizes.size else 0.0,
            "batch_shares": _shares(sizes),
            "num_steps": steps.num_steps,
            "num_preemptions": self.num_preemptions,
        }


def run_open_loop(sim: SimEngine, trace: Trace) -> Outcome:
    """Requests arrive at the trace's times, whatever the engine does. Raises FaserError where one fails."""
    run = _Run(sim, trace)
    arrivals_ns = run.start_ns + np.round(trace.arrivals_s * 1e9).astype(np.int64)
    waiting = deque(range(len(trace)))
    while waiting or sim.engine.has_work:
        if not sim.engine.has_work:
            sim.clock.move_to(max(sim.clock.now_ns(), int(arrivals_ns[waiting[0]])))
        while waiting and arrivals_ns[waiting[0]] <= sim.clock.now_ns():
            run.submit(waiting.popleft())
        run.step()
    return run.outcome(trace.arrivals_s)


def run_closed_loop(sim: SimEngine, trace: Trace, num_clients: int) -> Outcome:
    """num_clients requests in flight until all are answered; arrivals of the trace do not count."""
    run = _Run(sim, trace)
    waiting = deque(range(len(trace)))
    arrivals_s = np.zeros(len(trace))

    def submit_next() -> None:
        if waiting:
            arrivals_s[waiting[0]] = (sim.clock.now_ns() - run.start_ns) / 1e9
            run.submit(waiting.popleft())

    for _ in range(num_clients):
        submit_next()
    while sim.engine.has_work:
        run.step(on_end=submit_next)
    return run.outcome(arrivals_s)


class _Run:
    """Submits requests by index and collects their outputs."""

    def __init__(self, sim: SimEngine, trace: Trace) -> None:
        self._sim = sim
        self._trace = trace
        self._tokens: list[list[int]] = [[] for _ in range(len(trace))]
        self._stats: list[RequestStats] = [RequestStats() for _ in range(len(trace))]
        self._steps = StepSums()
        self.start_ns = sim.clock.now_ns()
        sim.observers.append(self._steps.observe)

    def submit(self, index: int) -> None:
        prompt = np.zeros(int(self._trace.num_prompt_tokens[index]), np.int64)
        sampling = SamplingParams(seed=index)
        request = Request(str(index), prompt, int(self._trace.num_output_tokens[index]), sampling)
        self._sim.engine.submit(request)

    def step(self, on_end: Callable[[], None] = lambda: None) -> None:
        for output in self._sim.engine.step():
            self._take(output)
            if output.is_final:
                on_end()

    def _take(self, output: RequestOutput) -> None:
        if output.error is not None:
            raise FaserError(f"request {output.request_id} failed in simulation: {output.error}")
        index = int(output.request_id)
        self._tokens[index] += output.token_ids
        if output.stats is not None:
            self._stats[index] = output.stats

    def outcome(self, arrivals_s: np.ndarray) -> Outcome:
        metrics = self._sim.engine.metrics()
        end_ns = max(stats.last_token_ns for stats in self._stats)
        return Outcome(
            arrivals_s, self._stats, self.start_ns, end_ns, self._steps, metrics.num_preemptions, self._tokens
        )


def _percentiles(name: str, values: np.ndarray) -> dict[str, float]:
    if not values.size:
        return {f"{name}_{which}": 0.0 for which in ("mean", "p50", "p99")}
    p50, p99 = np.percentile(values, [50, 99])
    return {f"{name}_mean": float(values.mean()), f"{name}_p50": float(p50), f"{name}_p99": float(p99)}


def _shares(sizes: np.ndarray) -> dict[str, float]:
    """Share of verifications by batch size."""
    edges = [*BATCH_BINS, np.inf]
    names = [f"{low}-{int(high) - 1}" for low, high in pairwise(edges[:-1])] + [f"{edges[-2]}+"]
    counts = [int(((sizes >= low) & (sizes < high)).sum()) for low, high in pairwise(edges)]
    return {name: count / max(sizes.size, 1) for name, count in zip(names, counts, strict=True)}
