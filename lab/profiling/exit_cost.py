"""Measures what an exit itself costs: its scores in the graph, and reading them and taking rows out in the step.

The graph's part is a segment with and without scores, in turns; the rest is read from the phases of the real
engine, with a pruner that leaves two rows of every chain.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from faser_backend.config import EngineConfig
from faser_backend.device.runtime import ModelPair
from faser_backend.manifest import ModelEngine
from faser_backend.policy.calibration import MatchCalibration
from faser_backend.policy.cost_fit import fit_non_negative
from faser_backend.policy.early_exit import NUM_CANDIDATES, EarlyExit, ExitCalibration
from faser_backend.serving.runtimes import AnyRuntime
from lab.profiling.cases import Case, make_batch
from lab.profiling.chains import ProbePolicy
from lab.profiling.overhead import LOADS, MakeEngine, phases_of_steps, wait_for_calls

NUM_DRAFT_TOKENS = 4
CONTEXT_TOKENS = 64
HOST_PHASES = ("target_rows", "exit")
_LEAST_US = 0.1  # where a difference drowns in noise


class ExitSample(NamedTuple):
    """Medians at one load, per exit."""

    num_rows: int
    scores_us: float
    host_us: float


def measure_exits(
    runtime: AnyRuntime, models: ModelPair, make_engine: MakeEngine, *, is_quick: bool, seed: int
) -> tuple[float, float, list[ExitSample]]:
    """exit_us and exit_row_us of OverheadCost, and the samples behind them. For engines with exit layers."""
    rng = np.random.default_rng(seed)
    num_repeats = 9 if is_quick else 25
    scores_us = _scores_us(runtime, models.target, num_repeats, rng)
    host_us = _host_us(runtime, models.target, make_engine, num_repeats, rng)
    rows = [size * (NUM_DRAFT_TOKENS + 1) for size in LOADS]
    samples = [ExitSample(*sample) for sample in zip(rows, scores_us, host_us, strict=True)]
    total = np.maximum(np.array(scores_us) + np.array(host_us), _LEAST_US)
    exit_us, exit_row_us = fit_non_negative(np.column_stack([np.ones(len(rows)), rows]), total)
    return float(exit_us), float(exit_row_us), samples


def _scores_us(runtime: AnyRuntime, model: ModelEngine, num_repeats: int, rng: np.random.Generator) -> list[float]:
    """Per load, the mean over exits of what scores add to their segment."""
    block_size = runtime.kv_block_size
    num_rows = NUM_DRAFT_TOKENS + 1
    context = max(min(CONTEXT_TOKENS, model.spec.max_context - num_rows), 0)
    num_blocks = max(LOADS) * -(-(context + num_rows) // block_size)
    runner = runtime.open_runner(model, runtime.menu.whole, runtime.open_pool(model, num_blocks))
    added = []
    try:
        for size in LOADS:
            case = Case((num_rows,) * size, context, size * num_rows)
            batch = make_batch(case, model.spec.vocab_size, block_size, num_blocks, rng)
            candidates = rng.integers(0, model.spec.vocab_size, (case.num_rows, NUM_CANDIDATES))
            hidden, differences = None, []
            for segment in range(runner.num_segments):
                times = []
                for _ in range(num_repeats if segment in runner.exits else 0):
                    start = time.perf_counter_ns()
                    runner.run_segment(segment, batch, hidden)
                    runtime.synchronize()
                    middle = time.perf_counter_ns()
                    runner.run_segment_with_scores(segment, batch, hidden, candidates)
                    runtime.synchronize()
                    times.append(time.perf_counter_ns() - middle - (middle - start))
                if times:
                    differences.append(float(np.median(times)) / 1e3)
                every_row = np.arange(case.num_rows)
                hidden = runner.take_rows(runner.run_segment(segment, batch, hidden), every_row)  # a copy
            added.append(max(float(np.mean(differences)), 0.0))
    finally:
        runner.close()
    return added


def _host_us(
    runtime: AnyRuntime, model: ModelEngine, make_engine: MakeEngine, num_steps: int, rng: np.random.Generator
) -> list[float]:
    """Per load, what one exit adds to the phases of a step outside the model."""
    segment = min(i for i, each in enumerate(model.segments) if each.has_exit_scores)
    layer = model.segments[segment].last_layer
    # Chances of 0.5 whatever the margins: survival 0.5 and then 0.25, so that rows 0 and 1 stay.
    halving = ExitCalibration(segment, layer, 0.0, 0.0, 0.0, 0.3, 1.0, (0.0,), 1.0, 0.0)
    pruner = EarlyExit((halving,), MatchCalibration(None).curve)
    engine = make_engine(EngineConfig.from_options(policy=f"fixed:{NUM_DRAFT_TOKENS}"))
    wait_for_calls(engine, runtime)
    added = []
    try:
        for size in LOADS:
            medians = []
            for tried in (None, pruner):
                engine.stepper.scheduler.policy = ProbePolicy(NUM_DRAFT_TOKENS, tried)
                steps = phases_of_steps(engine, size, NUM_DRAFT_TOKENS, num_steps, rng)
                spent = [sum(step.get(name, 0) for name in HOST_PHASES) for step in steps]
                medians.append(float(np.median(spent)) / 1e3)
            added.append(max(medians[1] - medians[0], 0.0))
    finally:
        engine.close()
    return added
