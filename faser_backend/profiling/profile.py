"""`faser profile`: measures an engine on this machine, fits costs and chances, and stores them in its directory.

The parts, in order: calibration (calibration.py), model calls on each partition (measure.py), and the rest of a step,
with the real engine on random prompts (`OverheadCost`). Plain steps show scheduling, packing, sampling and commit, and
the time of drafting beyond its predicted calls (caches are full of the target's data at the first call of a round).
Policies read the result through serving/profile_store.py.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from operator import le
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import WHOLE
from faser_backend.core.errors import ConfigError
from faser_backend.core.ports import MODEL_PHASES
from faser_backend.core.request import Request, Sampling
from faser_backend.device.runtime import ModelPair
from faser_backend.files import check_room
from faser_backend.manifest import EngineManifest
from faser_backend.pipeline.engine import Engine
from faser_backend.policy.cost_model import DRAFT, TARGET, CostModel, OverheadCost
from faser_backend.profiling.calibration import RETENTION, TOKENS_EACH, MakeEngine, ProbePolicy, calibrate
from faser_backend.profiling.cases import FULL, MAX_SEQUENCES, QUICK, Case, Effort, choose_cases, share_within
from faser_backend.profiling.cost_fit import fit_overhead
from faser_backend.profiling.measure import Bench, Sampled, Share, WaitingRunner, fit_segments, shares_of
from faser_backend.serving.compose import engine_on, prepared
from faser_backend.serving.loading import log, shown_phases
from faser_backend.serving.processes import terminable
from faser_backend.serving.profile_store import PROFILE_FILE, Fingerprint, Profile, cost_model_of, key_columns
from faser_backend.serving.runtimes import AnyRuntime, open_runtime

CALIBRATION_SHARE = 0.35  # of a budget, at most
PROFILE_BYTES = 8 << 20  # at most
SEED = 0
WIDE = 200  # columns of a table that nobody sees
BUSY_SPREAD = 0.15  # an idle machine repeats a call within a few percent
BUSY_WAITING = 0.2  # of measuring time; beside a program that never rests, a thread waits for half of it
# For the estimate: probe steps, tokens per step and request in calibration, mean time of a measured step relative to a
# probe step (whose chains are the longest), and calls that warm up a case.
PROBE_STEPS, TOKENS_PER_STEP, SHORTER, CALLS_PER_CASE = 2, 1.5, 0.7, 4
STEP_SHARE = 1 / 60  # of a budget, for a step of the largest load, at most: a profile has some 30 of each load
LENGTHS = (1, 3, 6)  # draft tokens of each sequence in plain steps
# A decision by confidence: 30 us for one request in an engine, 17 to 40 us for 2 to 32 alone. Policies correct it.
TRIM = {"trim_us": 30.0, "trim_sequence_us": 1.0}
DRAFT_PHASES, DRAFT_CALLS = ("draft_rows", "draft_sample", "draft_lookup"), "draft_model"
PROMPT_TOKENS = 8
LANE_REPEATS = 200
STEP_QUANTILE = 0.25  # of the times of a kind of step
WALL = "wall"


class StepMeter:
    """Times steps of the real engine in one thread, greedily: a draft that seems too slow rests and teaches nothing,
    while one that seems too fast is tried, and what sampling adds is learned.

    Plain steps are collected in several visits during a profile: a shared machine can be slow for seconds, which the
    quick steps of all visits leave out. With medians, other work made the first draft call of a round seem 7 ms slow.
    """

    def __init__(self, runtime: AnyRuntime, make_engine: MakeEngine, effort: Effort, seed: int) -> None:
        self._runtime, self._make_engine, self._effort = runtime, make_engine, effort
        self._rng = np.random.default_rng(seed)
        self._times: dict[tuple[int, int], list[tuple[float, float]]] = {}  # by draft tokens and sequences

    def visit(self) -> None:
        """Runs some steps of each kind, on one engine: on a GPU, opening one takes seconds."""
        with closing(self._make_engine(EngineConfig.from_options(policy=f"fixed:{max(LENGTHS)}"))) as engine:
            wait_for_calls(engine, self._runtime)
            for num_draft_tokens in LENGTHS:
                engine.step_runner.scheduler.policy = ProbePolicy(num_draft_tokens)
                for num_sequences in self._effort.loads:
                    phases = phases_of_steps(engine, num_sequences, num_draft_tokens, self._effort.num_steps, self._rng)
                    self._times.setdefault((num_draft_tokens, num_sequences), []).extend(map(_outside, phases))

    def overhead(self, calls: CostModel) -> OverheadCost:
        """Fits the visits' times. calls: predicts the time of draft calls."""
        found = [
            (size, length, *np.quantile(times, STEP_QUANTILE, axis=0), self._drafting_us(calls, size, length))
            for (length, size), times in self._times.items()
            if times  # a short context may not hold one
        ]
        return fit_overhead(*np.array(found).T)

    def lanes(self) -> dict[str, float]:
        """Measures the field of OverheadCost for lanes: median time of two empty jobs. {}: there is no split."""
        if not self._runtime.splits:
            return {}
        times_ns = []
        with closing(self._runtime.open_lanes(*self._runtime.splits[0])) as lanes:
            for _ in range(LANE_REPEATS):
                start = time.perf_counter_ns()
                lanes.run_both(lambda: None, lambda: None)
                self._runtime.synchronize()
                times_ns.append(time.perf_counter_ns() - start)
        return {"lanes_us": float(np.median(times_ns)) / 1e3}

    def _drafting_us(self, calls: CostModel, num_sequences: int, length: int) -> float:
        """Returns the predicted time of the calls that draft `length` tokens of each sequence."""
        if (DRAFT, WHOLE) not in calls.segments:
            return 0.0
        return float(calls.drafting_us(WHOLE, length, num_sequences, PROMPT_TOKENS + self._effort.num_steps))


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
        prompt = rng.integers(0, limits.vocab_size, PROMPT_TOKENS)
        engine.submit(Request(f"profile-{index}", prompt, max_tokens, Sampling()))
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


def profile_engine(
    engine_dir: Path, *, is_quick: bool = False, prompts: Path | None = None, budget_s: float | None = None
) -> Profile:
    """Measures every model on every partition of the runtime's menu, and calibrates the pair.

    prompts: a file of texts to continue; None: the target writes its own. budget_s: less is measured if all would take
    longer. The log of loading has the estimated time and the parts. The caller saves the profile. Raises ManifestError
    for a broken directory and ConfigError for an option out of range.
    """
    manifest = EngineManifest.load(engine_dir)
    with closing(open_runtime(engine_dir, manifest, EngineConfig())) as runtime:
        budget_s = math.inf if budget_s is None else budget_s
        return _Profiler(runtime, engine_dir, manifest).run(QUICK if is_quick else FULL, prompts, budget_s)


@dataclass(frozen=True, slots=True)
class _Profiler:
    """Runs the parts of a profile, one after the other, on one open runtime."""

    runtime: AnyRuntime
    engine_dir: Path
    manifest: EngineManifest

    @property
    def models(self) -> ModelPair:
        return ModelPair(self.manifest.target, self.manifest.draft)

    @property
    def shares(self) -> list[Share]:
        menu = replace(self.runtime.menu, splits=self.runtime.splits)  # those that serving uses
        return shares_of(menu, has_draft=self.manifest.draft is not None)

    def run(self, effort: Effort, prompts: Path | None, budget_s: float) -> Profile:
        manifest, widths, pads = self.manifest, key_columns(self.manifest), self.manifest.runtime_spec.is_gathered
        log.info("  0%  measuring the engine's speed")
        step_s = self._probe(effort.loads, STEP_SHARE * budget_s)
        seconds = self._estimate_s(effort, list(step_s.values()))
        work = share_within(seconds, budget_s)
        less = "" if work == 1.0 else f" for {work:.0%} of a profile's calls"
        log.info(f"time: about {max(seconds * work, 1.0):.0f} s{less}")
        effort = replace(effort.scaled(work), loads=tuple(step_s))
        # Calibration is first: a machine that warms up does not affect it, and it finds bad options early.
        log.info("  0%  calibration")
        calibration = calibrate(
            self._make_engine, self.engine_dir, manifest, effort.num_requests, prompts=prompts, seed=SEED,
            latest_s=time.monotonic() + CALIBRATION_SHARE * budget_s,
        )  # fmt: skip
        steps = StepMeter(self.runtime, self._make_engine, effort, SEED)
        steps.visit()
        sampled, spread, warnings = self._measure_calls(effort, is_bounded=math.isfinite(budget_s))
        costs = {
            (share.model, share.partition): fit_segments(points, widths, pads=pads) for share, points in sampled.items()
        }
        calls = cost_model_of(manifest, costs, OverheadCost(0.0, 0.0, 0.0, 0.0, 0.0))
        overhead = self._measure_steps(calls, steps)
        log.info("100%  done")
        return Profile(
            fingerprint=Fingerprint.here(manifest),
            date=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            costs=costs,
            overhead=overhead,
            spread=spread,
            calibration=calibration,
            warnings=warnings,
        )

    def _make_engine(self, config: EngineConfig) -> Engine:
        config = config.model_copy(update={"max_num_seqs": min(config.max_num_seqs, self.models.most("B"))})
        return prepared(engine_on(self.runtime, self.engine_dir, self.manifest, config))

    def _cases(self, effort: Effort) -> dict[str, list[Case]]:
        rng, names = np.random.default_rng(SEED), dict.fromkeys(share.model for share in self.shares)
        draft = self.manifest.draft
        kind = DRAFT if draft is None or draft.spec.num_idle is None else TARGET  # a block is like a verification
        kinds = {TARGET: TARGET, DRAFT: kind}
        chosen = {name: choose_cases(kinds[name], self.models.max_context, rng, effort.case_share) for name in names}
        most = [self.models.most(dimension) for dimension in "BTQ"]
        sizes = lambda case: (len(case.counts), case.num_rows, max(case.counts))  # noqa: E731
        return {name: [case for case in cases if all(map(le, sizes(case), most))] for name, cases in chosen.items()}

    def _probe(self, loads: tuple[int, ...], most_s: float) -> dict[int, float]:
        """Returns the seconds of a step with the longest chains by load: of two, and of others expected in most_s."""
        length, step_s = max(LENGTHS), dict[int, float]()
        with closing(self._make_engine(EngineConfig.from_options(policy=f"fixed:{length}"))) as engine:
            for size in loads:
                is_long = len(step_s) > 1 and step_s[max(step_s)] * size / max(step_s) > most_s
                if is_long or size > self.models.most("B"):
                    break
                steps = phases_of_steps(engine, size, length, PROBE_STEPS, np.random.default_rng(SEED))
                step_s[size] = min((step[WALL] for step in steps), default=0) / 1e9  # a short context may hold none
        return step_s

    def _estimate_s(self, effort: Effort, step_s: list[float]) -> float:
        """Estimates the seconds of a profile from those of a step with the longest chains of each load."""
        each, cases = sum(step_s), self._cases(effort)
        num_calls = sum(len(cases[share.model]) for share in self.shares)
        waves = -(-effort.num_requests // MAX_SEQUENCES)
        rounds = 3 * len(LENGTHS) * (effort.num_steps + 2)
        calls_s = CALLS_PER_CASE * num_calls * SHORTER * each / max(len(step_s), 1)
        return (
            waves * TOKENS_EACH / TOKENS_PER_STEP * max(step_s, default=0.0)
            + SHORTER * rounds * each
            + max(effort.calls_s, calls_s)
        )

    def _measure_calls(
        self, effort: Effort, *, is_bounded: bool
    ) -> tuple[dict[Share, list[Sampled]], float, tuple[str, ...]]:
        """Measures one partition after the other. Returns also the median spread of a call, and warnings."""
        cases = self._cases(effort)
        bench = Bench(self.runtime, self.models, cases, max_sweeps=effort.max_sweeps, seed=SEED)
        bench.is_bounded = is_bounded
        sampled = {}
        for index, share in enumerate(self.shares, 1):
            log.info(f"{index / (len(self.shares) + 2):4.0%}  {share.model} on {share.partition}")
            sampled[share] = bench.measure(share, effort.calls_s / len(self.shares))
        spread = float(np.median([point.spread for points in sampled.values() for point in points]))
        warnings = []
        if spread > BUSY_SPREAD or bench.waiting_share > BUSY_WAITING:
            warnings.append("the machine was busy, so times are too long: run `faser profile` again when it is idle")
        if bench.is_cut:
            num_measured, num_all = sum(map(len, sampled.values())), sum(len(cases[share.model]) for share in sampled)
            reason = f"the budget allowed {num_measured} of {num_all} calls, so predicted times are rough"
            warnings.append(f"{reason}: run `faser profile` with a larger --budget-s")
        return sampled, spread, tuple(warnings)

    def _measure_steps(self, calls: CostModel, steps: StepMeter) -> OverheadCost:
        log.info(f"{1 - 1 / (len(self.shares) + 2):4.0%}  step overhead")
        steps.visit()
        found = steps.lanes()
        if self.models.draft is not None:
            found |= TRIM
        steps.visit()
        return replace(steps.overhead(calls), **found)


def run_profile(
    engine_dir: Path, *, is_quick: bool, prompts: Path | None = None, budget_s: float | None = None
) -> None:
    """Runs the command: progress on stderr, the profile into the directory, the tables on stdout."""
    if budget_s is not None and not budget_s > 0:
        raise ConfigError(f"--budget-s = {budget_s:g}: must be above 0")
    manifest = EngineManifest.load(engine_dir)
    check_room(engine_dir, PROFILE_BYTES, PROFILE_FILE)
    with terminable(), shown_phases():
        try:
            profile = profile_engine(engine_dir, is_quick=is_quick, prompts=prompts, budget_s=budget_s)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"{engine_dir} is unchanged") from None
        for warning in profile.warnings:
            log.warning(warning)
    profile.save(engine_dir)
    costs = cost_model_of(manifest, profile.costs, profile.overhead)
    print_tables(profile, costs, has_exits=bool(manifest.exit_layers))
    Console().print(f"written to {engine_dir / PROFILE_FILE}", highlight=False, soft_wrap=True)


def print_tables(profile: Profile, costs: CostModel, *, has_exits: bool) -> None:
    console, calibration = table_console(), profile.calibration
    printed = partial(console.print, highlight=False, soft_wrap=True)
    console.print(call_table(costs))
    outside_us = costs.overhead.step(1, 1)
    printed(f"spread between repeats of a call: {profile.spread:.1%}; a step takes {outside_us:.0f} us outside calls")
    source = f"{calibration.num_fitted} draft tokens of {calibration.source}"
    printed(f"calibrated on {source}; thresholds keep {RETENTION:.0%} of the accepted tokens")
    for each in calibration.exits:  # held out: draft rows that it ends, and useful ones that it keeps
        ended = f"{np.mean(each.pruned_shares):.1%} of the draft rows, {each.trimmed_pruned_share:.1%} after trimming"
        kept = f"{each.retention:.1%} and {each.trimmed_retention:.1%} of the useful ones"
        printed(f"exit after layer {each.layer}: ends {ended}; keeps {kept}")
    if has_exits and not calibration.exits:
        printed("exits not calibrated: too few draft tokens were accepted or rejected")


def call_table(costs: CostModel) -> Table:
    """Returns a line per model and partition: two predicted calls."""
    rows = []
    for model, partition in costs.segments:
        examples = costs.call_us(model, partition, np.array([1, 80]), np.array([1, 16]), 128)
        rows.append([model, partition, *(f"{us:.0f}" for us in examples)])
    title = "Predicted call times, context 128"
    return terminal_table(title, ["model", "cores", "1 row, us", "16 x 5 rows, us"], rows)


def table_console() -> Console:
    """Returns rich's console on stdout; in a pipe or a file it is wide enough for whole tables."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=WIDE)


def terminal_table(title: str, headings: list[str], rows: list[list[str]]) -> Table:
    """Returns a table with the first column to the left and figures to the right."""
    table = Table(title=title, box=None, pad_edge=False, title_justify="left", title_style="")
    for index, heading in enumerate(headings):
        width = max(map(len, heading.split()))
        table.add_column(heading, justify="right" if index else "left", no_wrap=not index, min_width=width)
    for row in rows:
        table.add_row(*row)
    return table
