"""Measures what a step costs around its model calls, with the real engine on random prompts: OverheadCost of a profile.

Plain steps tell scheduling, packing, sampling and commit, and what drafting takes beyond its calls as predicted (the
first call of a round finds caches full of the target's data). Every second step trims, or asks an exit, where those are
measured: both kinds of steps make the same calls, in the same company.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import WHOLE, TrimRule
from faser_backend.core.record import StepRecord
from faser_backend.core.request import Request, Sampling
from faser_backend.manifest import ModelEngine
from faser_backend.pipeline.engine import Engine
from faser_backend.pipeline.timing import MODEL_PHASES
from faser_backend.policy.calibration import MarginCurve, MatchCalibration
from faser_backend.policy.cost_model import DRAFT, CostModel, OverheadCost
from faser_backend.policy.early_exit import NUM_CANDIDATES, EarlyExit, ExitCalibration
from faser_backend.profiling.cases import Case, make_batch
from faser_backend.profiling.chains import MakeEngine, ProbePolicy
from faser_backend.profiling.cost_fit import fit_non_negative, fit_overhead, fit_trim
from faser_backend.profiling.effort import Effort
from faser_backend.profiling.timed_calls import WaitingRunner
from faser_backend.serving.runtimes import AnyRuntime

LOADS = (1, 8, 32)  # sequences
LENGTHS = (1, 3, 6)  # draft tokens of each, in plain steps
TRIM_LENGTHS = (3, 6)  # in steps of which every second one trims
EXIT_LENGTH = 4
DRAFT_PHASES, DRAFT_CALLS = ("draft_rows", "draft_sample", "draft_lookup"), "draft_model"
EXIT_PHASES = ("target_rows", "exit")
PROMPT_TOKENS, EXIT_CONTEXT_TOKENS = 8, 64
LANE_REPEATS = 200
WALL = "wall"
_LEAST_US = 0.1  # where a difference drowns in noise

_KNOTS = MarginCurve.margin_knots  # as many as served rules have
# All is certain and time is worth nothing.
STOPS_NOTHING = TrimRule(
    margin_knots=_KNOTS,
    match_logits=np.full(_KNOTS.size, 40.0),
    offsets=np.zeros(1),
    margin_shares=np.full(_KNOTS.size, 1.0 / _KNOTS.size),
    verify_us=np.ones(2),
    draft_us=np.zeros(2),
    tokens_per_us=0.0,
    row_price=0.0,
)


class StepMeter:
    """Times steps of the real engine, sampling at temperature 1, in one thread.

    Plain steps are collected in several visits over the course of a profile: a shared machine is slow for some seconds
    at a time, and medians leave out a visit that was.
    """

    def __init__(self, runtime: AnyRuntime, make_engine: MakeEngine, effort: Effort, seed: int) -> None:
        self._runtime = runtime
        self._make_engine = make_engine
        self._effort = effort
        self._rng = np.random.default_rng(seed)
        self._times: dict[tuple[int, int], list[tuple[float, float]]] = {}  # by draft tokens and sequences

    def visit(self) -> None:
        """Runs some steps of each kind."""
        for num_draft_tokens in LENGTHS:
            engine = self._make_engine(EngineConfig.from_options(policy=f"fixed:{num_draft_tokens}"))
            wait_for_calls(engine, self._runtime)
            try:
                for num_sequences in LOADS:
                    phases = phases_of_steps(engine, num_sequences, num_draft_tokens, self._effort.num_steps, self._rng)
                    self._times.setdefault((num_draft_tokens, num_sequences), []).extend(map(_outside, phases))
            finally:
                engine.close()

    def overhead(self, calls: CostModel) -> OverheadCost:
        """Fits what the visits found. calls: whose costs of draft calls are known."""
        found = [
            (size, length, *np.median(np.array(times), axis=0), length * self._draft_call_us(calls, size))
            for (length, size), times in self._times.items()
            if times  # a short context may not hold one
        ]
        return fit_overhead(*np.array(found).T)

    def trim(self) -> dict[str, float]:
        """Fields of OverheadCost: what deciding takes, after every draft call which chains go on and in the end which
        rows to verify. For engines with a draft model: n-grams heed no rule.

        A device that drafts whole chains by itself knows no rule; there it is what cutting them afterwards takes.
        """
        num_steps, found = self._effort.num_trim_steps, []
        engine = self._make_engine(EngineConfig.from_options(policy=f"fixed:{max(TRIM_LENGTHS)}"))
        try:
            for length in TRIM_LENGTHS:
                for size in LOADS:
                    records = records_of_steps(engine, size, length, num_steps, self._rng)
                    plain, trimmed = (
                        np.array([r.propose_us for r in records if (r.plan.decision.trim is not None) == is_trimmed])
                        for is_trimmed in (False, True)
                    )
                    num_pairs = min(plain.size, trimmed.size)
                    if num_pairs:  # a short context may not hold one
                        added_us = np.median(trimmed[:num_pairs] - plain[:num_pairs])  # of neighbours
                        found.append((size, length, np.median(plain), np.median(plain) + added_us))
        finally:
            engine.close()
        trim_us, trim_sequence_us = fit_trim(*np.array(found).T) if found else (0.0, 0.0)
        return {"trim_us": trim_us, "trim_sequence_us": trim_sequence_us}

    def exits(self, target: ModelEngine) -> dict[str, float]:
        """Fields of OverheadCost, of a target with exit layers: scores in the graph, and reading them and taking rows
        out.

        The graph's part is a segment with and without scores, in turns; the rest is read from the phases of steps, with
        a pruner that leaves two rows of every chain.
        """
        added_us = np.array(self._scores_us(target)) + np.array(self._exit_host_us(target))
        features = np.array([(1, size * (EXIT_LENGTH + 1)) for size in LOADS], np.float64)
        exit_us, exit_row_us = map(float, fit_non_negative(features, np.maximum(added_us, _LEAST_US)))
        return {"exit_us": exit_us, "exit_row_us": exit_row_us}

    def lanes(self) -> dict[str, float]:
        """A field of OverheadCost: median time in which the lanes of a split run nothing at all; {} without a split."""
        if not self._runtime.menu.splits:
            return {}
        lanes = self._runtime.open_lanes(*self._runtime.menu.splits[0])
        try:
            times = [self._timed_us(lanes.run_both, _nothing, _nothing) for _ in range(LANE_REPEATS)]
        finally:
            lanes.close()
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

    def _scores_us(self, model: ModelEngine) -> list[float]:
        """Per load, the mean over exits of what scores add to their segment."""
        runtime, rng, num_rows = self._runtime, self._rng, EXIT_LENGTH + 1
        context = max(min(EXIT_CONTEXT_TOKENS, model.spec.max_context - num_rows), 0)
        num_blocks = max(LOADS) * -(-(context + num_rows) // runtime.kv_block_size)
        runner = runtime.open_runner(model, runtime.menu.whole, runtime.open_pool(model, num_blocks))
        added = []
        try:
            for size in LOADS:
                case = Case((num_rows,) * size, context, size * num_rows)
                batch = make_batch(case, model.spec.vocab_size, runtime.kv_block_size, num_blocks, rng)
                candidates = rng.integers(0, model.spec.vocab_size, (case.num_rows, NUM_CANDIDATES))
                hidden, differences = None, []
                for segment in range(runner.num_segments):
                    call = (segment, batch, hidden)
                    if segment in runner.exits:
                        pairs = [
                            (
                                self._timed_us(runner.run_segment, *call),
                                self._timed_us(runner.run_segment_with_scores, *call, candidates),
                            )
                            for _ in range(self._effort.num_exit_repeats)
                        ]
                        differences.append(float(np.median([scored - plain for plain, scored in pairs])))
                    output = runner.run_segment(*call)
                    hidden = runner.take_rows(output, np.arange(case.num_rows))  # a copy
                added.append(max(float(np.mean(differences)), 0.0))
        finally:
            runner.close()
        return added

    def _exit_host_us(self, model: ModelEngine) -> list[float]:
        """Per load, what one exit adds to the phases of a step outside the model."""
        segment = min(i for i, each in enumerate(model.segments) if each.has_exit_scores)
        layer = model.segments[segment].last_layer
        # Chances of 0.5 whatever the margins: survival 0.5 and then 0.25, so that rows 0 and 1 stay.
        halving = ExitCalibration(segment, layer, 0.0, 0.0, 0.0, 0.3, 1.0, (0.0,), 1.0, 0.0)
        pruner = EarlyExit((halving,), MatchCalibration(None).curve)
        engine = self._make_engine(EngineConfig.from_options(policy=f"fixed:{EXIT_LENGTH}"))
        wait_for_calls(engine, self._runtime)
        added = []
        try:
            for size in LOADS:
                medians = []
                for tried in (None, pruner):
                    engine.step_runner.scheduler.policy = ProbePolicy(EXIT_LENGTH, tried)
                    steps = phases_of_steps(engine, size, EXIT_LENGTH, self._effort.num_exit_repeats, self._rng)
                    spent = [sum(step.get(name, 0) for name in EXIT_PHASES) for step in steps]
                    medians.append(float(np.median(spent)) / 1e3)
                added.append(max(medians[1] - medians[0], 0.0))
        finally:
            engine.close()
        return added


def records_of_steps(
    engine: Engine, num_sequences: int, num_draft_tokens: int, num_steps: int, rng: np.random.Generator
) -> list[StepRecord]:
    """Records of steps, trimmed and untrimmed in turn, in which all sequences decode and draft the full length."""
    records: list[StepRecord] = []
    engine.step_runner.scheduler.policy = ProbePolicy(num_draft_tokens, trims=(STOPS_NOTHING, None))
    engine.step_runner.observers.append(records.append)
    try:
        phases_of_steps(engine, num_sequences, num_draft_tokens, num_steps, rng)
    finally:
        engine.step_runner.observers.remove(records.append)
    return [
        record
        for record in records
        if record.num_tokens.size == num_sequences
        and not record.plan.prefills
        and record.frontier.num_drafted.min() == num_draft_tokens
    ]


def wait_for_calls(engine: Engine, runtime: AnyRuntime) -> None:
    """From now on the phases of model calls end when the device is done with them."""
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
    """Nanoseconds per phase, and of the whole under WALL, of num_steps steps in which all sequences decode and
    none ends; fewer steps where the context is short. Then cancels them."""
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
    """Work for lanes that take nothing but their hand-over."""
