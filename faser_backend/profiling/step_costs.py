"""Measures what a step costs outside its model calls, with the real engine on random prompts (`OverheadCost`).

Plain steps show scheduling, packing, sampling and commit, and the time of drafting beyond its predicted calls (caches
are full of the target's data at the first call of a round)."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import WHOLE
from faser_backend.core.request import Request, Sampling
from faser_backend.pipeline.engine import Engine
from faser_backend.pipeline.timing import MODEL_PHASES
from faser_backend.policy.cost_model import DRAFT, CostModel, OverheadCost
from faser_backend.profiling.calibration import MakeEngine, ProbePolicy
from faser_backend.profiling.cases import Effort
from faser_backend.profiling.cost_fit import fit_overhead
from faser_backend.profiling.measure import WaitingRunner
from faser_backend.serving.runtimes import AnyRuntime

LOADS = (1, 8, 32)  # sequences
LENGTHS = (1, 3, 6)  # draft tokens of each sequence in plain steps
# Deciding which chains go on, per draft call and sequence: assumed, as in the virtual worlds; policies correct it.
TRIM = {"trim_us": 15.0, "trim_sequence_us": 3.0}
DRAFT_PHASES, DRAFT_CALLS = ("draft_rows", "draft_sample", "draft_lookup"), "draft_model"
PROMPT_TOKENS = 8
LANE_REPEATS = 200
QUICK = 0.25  # quantile of the times of a kind of step
WALL = "wall"


class StepMeter:
    """Times steps of the real engine in one thread, sampling at temperature 1.

    Plain steps are collected in several visits during a profile: a shared machine can be slow for seconds, which the
    quick steps of all visits leave out. With medians, other work made the first draft call of a round seem 7 ms slow.
    """

    def __init__(self, runtime: AnyRuntime, make_engine: MakeEngine, effort: Effort, seed: int) -> None:
        self._runtime = runtime
        self._make_engine = make_engine
        self._effort = effort
        self._rng = np.random.default_rng(seed)
        self._times: dict[tuple[int, int], list[tuple[float, float]]] = {}  # by draft tokens and sequences

    def visit(self) -> None:
        """Runs some steps of each kind, on one engine: on a GPU, opening one takes seconds."""
        with closing(self._make_engine(EngineConfig.from_options(policy=f"fixed:{max(LENGTHS)}"))) as engine:
            wait_for_calls(engine, self._runtime)
            for num_draft_tokens in LENGTHS:
                engine.step_runner.scheduler.policy = ProbePolicy(num_draft_tokens)
                for num_sequences in LOADS:
                    phases = phases_of_steps(engine, num_sequences, num_draft_tokens, self._effort.num_steps, self._rng)
                    self._times.setdefault((num_draft_tokens, num_sequences), []).extend(map(_outside, phases))

    def overhead(self, calls: CostModel) -> OverheadCost:
        """Fits the visits' times. calls: predicts the time of draft calls."""
        found = [
            (size, length, *np.quantile(times, QUICK, axis=0), length * self._draft_call_us(calls, size))
            for (length, size), times in self._times.items()
            if times  # a short context may not hold one
        ]
        return fit_overhead(*np.array(found).T)

    def lanes(self) -> dict[str, float]:
        """Measures the field of OverheadCost for lanes: median time of two empty jobs. {}: there is no split."""
        if not self._runtime.menu.splits:
            return {}
        with closing(self._runtime.open_lanes(*self._runtime.menu.splits[0])) as lanes:
            times = [self._timed_us(lanes.run_both, lambda: None, lambda: None) for _ in range(LANE_REPEATS)]
        return {"lanes_us": float(np.median(times))}

    def _draft_call_us(self, calls: CostModel, num_sequences: int) -> float:
        if (DRAFT, WHOLE) not in calls.segments:
            return 0.0
        context = PROMPT_TOKENS + self._effort.num_steps
        return float(calls.call_us(DRAFT, WHOLE, num_sequences, num_sequences, context, num_logit_rows=num_sequences))

    def _timed_us(self, work: Callable[..., object], *arguments: Any) -> float:
        start = time.perf_counter_ns()
        work(*arguments)
        self._runtime.synchronize()
        return (time.perf_counter_ns() - start) / 1e3


def wait_for_calls(engine: Engine, runtime: AnyRuntime) -> None:
    """Makes the phases of model calls end when the device has finished them."""
    engine.step_runner.partitions = {
        name: replace(
            partition,
            target=WaitingRunner(partition.target, runtime),
            draft=None if partition.draft is None else WaitingRunner(partition.draft, runtime),
        )
        for name, partition in engine.step_runner.partitions.items()
    }


def phases_of_steps(
    engine: Engine, num_sequences: int, num_draft_tokens: int, num_steps: int, rng: np.random.Generator
) -> list[dict[str, int]]:
    """Returns nanoseconds per phase, and of the whole step as WALL, of num_steps steps in which all sequences decode.

    A short context gives fewer steps. The requests are cancelled afterwards.
    """
    limits = engine.limits
    max_tokens = min((num_steps + 4) * (num_draft_tokens + 1), limits.max_context - PROMPT_TOKENS)
    for index in range(num_sequences):
        sampling = Sampling(temperature=1.0, seed=index)
        prompt = rng.integers(0, limits.vocab_size, PROMPT_TOKENS)
        engine.submit(Request(f"profile-{index}", prompt, max_tokens, sampling))
    steps: list[dict[str, int]] = []
    while len(steps) < num_steps:
        before = engine.metrics().phase_times_ns
        start = time.perf_counter_ns()
        outputs = engine.step()
        wall_ns = time.perf_counter_ns() - start
        after = engine.metrics()
        if after.num_running < num_sequences or any(output.is_final for output in outputs):
            if not engine.has_work:
                break
            continue
        spent = {name: ns - before.get(name, 0) for name, ns in after.phase_times_ns.items()}
        if not after.num_context_tokens and len(outputs) == num_sequences:
            steps.append(spent | {WALL: wall_ns})
    for index in range(num_sequences):
        engine.cancel(f"profile-{index}")
    while engine.has_work:
        engine.step()
    return steps


def _outside(spent: dict[str, int]) -> tuple[float, float]:
    """Returns microseconds of a step outside model calls and drafting, and of drafting with its calls."""
    model_ns = sum(spent.get(name, 0) for name in MODEL_PHASES)
    around_ns = sum(spent.get(name, 0) for name in DRAFT_PHASES)
    return (spent[WALL] - model_ns - around_ns) / 1e3, (around_ns + spent.get(DRAFT_CALLS, 0)) / 1e3
