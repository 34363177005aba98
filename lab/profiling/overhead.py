"""Measures what a step costs around its model calls, by running the real engine on random prompts.

And what drafting takes beyond its calls as predicted: the first call of a round finds caches full of the target's data.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from faser_backend.config import EngineConfig
from faser_backend.core.decision import WHOLE
from faser_backend.core.request import Request, SamplingParams
from faser_backend.pipeline.engine import Engine
from faser_backend.pipeline.timing import MODEL_PHASES
from faser_backend.policy.cost_fit import fit_overhead
from faser_backend.policy.cost_model import DRAFT, CostModel, OverheadCost
from faser_backend.serving.runtimes import AnyRuntime
from lab.profiling.timed_calls import WaitingRunner

LOADS = (1, 8, 32)  # sequences
LENGTHS = (1, 3, 6)  # draft tokens of each
DRAFT_PHASES, DRAFT_CALLS = ("draft_rows", "draft_sample", "draft_lookup"), "draft_model"
PROMPT_TOKENS = 8
LANE_REPEATS = 200
WALL = "wall"

MakeEngine = Callable[[EngineConfig], Engine]  # on the runtime that is profiled; its caller closes the engine


class StepSample(NamedTuple):
    """Medians over the steps of one load."""

    num_sequences: int
    num_draft_tokens: int  # of each sequence
    step_us: float  # outside the model calls and drafting
    draft_us: float  # of drafting: calls, packing and sampling
    predicted_calls_us: float  # what the cost of calls says of them


class StepTimes:
    """Steps of the real engine, sampling at temperature 1, in one thread, with 1, 3 and 6 drafted tokens per request.

    Collected in several visits over the course of a profile: a shared machine is slow for some seconds at a time, and
    medians leave out a visit that was. Trimming, exits and lanes are measured elsewhere.
    """

    def __init__(self, runtime: AnyRuntime, make_engine: MakeEngine, *, is_quick: bool, seed: int) -> None:
        self._runtime = runtime
        self._make_engine = make_engine
        self._num_steps = 4 if is_quick else 8  # of a visit
        self._rng = np.random.default_rng(seed)
        self._times: dict[tuple[int, int], list[tuple[float, float]]] = {}  # by draft tokens and sequences

    def visit(self) -> None:
        """Runs some steps of each kind."""
        for num_draft_tokens in LENGTHS:
            engine = self._make_engine(EngineConfig.from_options(policy=f"fixed:{num_draft_tokens}"))
            wait_for_calls(engine, self._runtime)
            try:
                for num_sequences in LOADS:
                    phases = phases_of_steps(engine, num_sequences, num_draft_tokens, self._num_steps, self._rng)
                    self._times.setdefault((num_draft_tokens, num_sequences), []).extend(map(_outside, phases))
            finally:
                engine.close()

    def fit(self, calls: CostModel) -> tuple[OverheadCost, list[StepSample]]:
        """calls: whose costs of draft calls are known. What is measured elsewhere has its default in the result."""
        samples = []
        for (num_draft_tokens, num_sequences), times in self._times.items():
            if not times:  # a short context may not hold one
                continue
            step_us, draft_us = np.median(np.array(times), axis=0)
            predicted_us = num_draft_tokens * self._predicted_us(calls, num_sequences)
            samples.append(StepSample(num_sequences, num_draft_tokens, step_us, draft_us, predicted_us))
        return fit_overhead(*np.array(samples, np.float64).T), samples

    def _predicted_us(self, calls: CostModel, num_sequences: int) -> float:
        """Of one draft call."""
        if (DRAFT, WHOLE) not in calls.segments:
            return 0.0
        context = PROMPT_TOKENS + self._num_steps
        return float(calls.call_us(DRAFT, WHOLE, num_sequences, num_sequences, context, num_logit_rows=num_sequences))


def wait_for_calls(engine: Engine, runtime: AnyRuntime) -> None:
    """From now on the phases of model calls end when the device is done with them."""
    engine.stepper.partitions = {
        name: replace(
            partition,
            target=WaitingRunner(partition.target, runtime),
            draft=None if partition.draft is None else WaitingRunner(partition.draft, runtime),
        )
        for name, partition in engine.stepper.partitions.items()
    }


def measure_lanes(runtime: AnyRuntime) -> float | None:
    """Median microseconds in which the lanes of a split run nothing at all; None where there is no split."""
    if not runtime.menu.splits:
        return None
    lanes = runtime.open_lanes(*runtime.menu.splits[0])
    try:
        times = []
        for _ in range(LANE_REPEATS):
            start = time.perf_counter_ns()
            lanes.run_both(_nothing, _nothing)
            times.append(time.perf_counter_ns() - start)
    finally:
        lanes.close()
    return float(np.median(times)) / 1e3


def phases_of_steps(
    engine: Engine, num_sequences: int, num_draft_tokens: int, num_steps: int, rng: np.random.Generator
) -> list[dict[str, int]]:
    """Nanoseconds per phase, and of the whole under WALL, of num_steps steps in which all sequences decode and
    none ends; fewer steps where the context is short. Then cancels them."""
    limits = engine.limits
    max_tokens = min((num_steps + 4) * (num_draft_tokens + 1), limits.max_context - PROMPT_TOKENS)
    for index in range(num_sequences):
        sampling = SamplingParams(temperature=1.0, seed=index)
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
        if not spent.get("prefill_model", 0) and len(outputs) == num_sequences:
            steps.append(spent | {WALL: wall_ns})
    for index in range(num_sequences):
        engine.cancel(f"profile-{index}")
    while engine.has_work:
        engine.step()
    return steps


def _outside(spent: dict[str, int]) -> tuple[float, float]:
    """Microseconds of a step outside the model calls and drafting, and of drafting with its calls."""
    model_ns = sum(spent.get(name, 0) for name in MODEL_PHASES)
    around_ns = sum(spent.get(name, 0) for name in DRAFT_PHASES)
    return (spent[WALL] - model_ns - around_ns) / 1e3, (around_ns + spent.get(DRAFT_CALLS, 0)) / 1e3


def _nothing() -> None:
    """The work of a lane that is only handed over."""
