"""`faser profile`: measure, fit, check on held-out calls, store."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import WHOLE
from faser_backend.core.errors import ConfigError
from faser_backend.device.runtime import ModelPair
from faser_backend.files import check_room
from faser_backend.lab.interrupts import terminable
from faser_backend.lab.progress import progress_bar
from faser_backend.manifest import EngineManifest
from faser_backend.pipeline.engine import Engine
from faser_backend.policy.cost_model import NO_OVERHEAD, CostModel, OverheadCost
from faser_backend.profiling.calibration import TOKENS_EACH, calibrate
from faser_backend.profiling.cases import MAX_SEQUENCES, Case, choose_cases
from faser_backend.profiling.effort import FULL, QUICK, Effort, share_within
from faser_backend.profiling.measure import Bench, Sampled, Share, fit_error, fit_segments, shares_of
from faser_backend.profiling.step_costs import LENGTHS, LOADS, TRIM_LENGTHS, WALL, StepMeter, phases_of_steps
from faser_backend.profiling.tables import print_tables
from faser_backend.serving.compose import engine_on
from faser_backend.serving.profile_store import (
    PROFILE_FILE,
    Fingerprint,
    Profile,
    cost_model_of,
    is_padded,
    key_columns,
)
from faser_backend.serving.runtimes import AnyRuntime, open_runtime

CALIBRATION_SHARE = 0.35  # of a budget, at most
PROFILE_BYTES = 8 << 20  # at most
# Of an estimate: steps that a probe makes, tokens that a calibration emits for a request in a step, the time of a step
# whose chains are half as long as the probe's beside the probe's, and calls that find out what a case takes.
PROBE_STEPS, TOKENS_PER_STEP, SHORTER, CALLS_PER_CASE = 2, 1.5, 0.7, 4

Report = Callable[[str, float], None]  # what is being done, and the share of all work that is done


def profile_engine(
    engine_dir: Path,
    *,
    is_quick: bool = False,
    report: Report = lambda what, done: None,
    seed: int = 0,
    prompts: Path | None = None,
    budget_s: float | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Measures every model on every partition of the runtime's menu, and calibrates the pair.

    prompts: a file of texts to continue; None lets the target write its own. budget_s: seconds in which less is
    measured where all would take longer. tell: is told how long it will take, and what an interrupt left out. Raises
    ManifestError for a broken directory, ConfigError for an option out of range, KeyboardInterrupt before the whole
    machine was measured. Saves nothing: the caller does.
    """
    manifest = EngineManifest.load(engine_dir)
    with closing(open_runtime(engine_dir, manifest, EngineConfig())) as runtime:
        profiler = _Profiler(runtime, engine_dir, manifest, report=report, tell=tell, seed=seed)
        return profiler.run(QUICK if is_quick else FULL, prompts, budget_s)


class _Profiler:
    """The parts of a profile, one after the other, on one open runtime."""

    def __init__(
        self,
        runtime: AnyRuntime,
        engine_dir: Path,
        manifest: EngineManifest,
        *,
        report: Report,
        tell: Callable[[str], None],
        seed: int,
    ) -> None:
        self._runtime = runtime
        self._engine_dir = engine_dir
        self._manifest = manifest
        self._models = ModelPair(manifest.target, manifest.draft)
        self._report = report
        self._tell = tell
        self._seed = seed
        self._shares = shares_of(runtime.menu, has_draft=manifest.draft is not None)
        self._num_parts = len(self._shares) + 2

    def run(self, effort: Effort, prompts: Path | None, budget_s: float | None) -> Profile:
        manifest, widths, pads = self._manifest, key_columns(self._manifest), is_padded(self._manifest)
        self._report("looking at the engine's speed", 0.0)
        seconds = self._estimate_s(effort)
        work = share_within(seconds, budget_s)
        less = "" if work == 1.0 else f", of which {work:.0%} is done"
        self._tell(f"time: about {max(seconds, 1.0):.0f} s{less}")
        effort = effort.scaled(work)
        # Calibration goes first: it does not mind a machine that warms up, and finds bad options before the long part.
        calibration = calibrate(
            self._make_engine,
            self._engine_dir,
            manifest,
            effort.num_requests,
            prompts=prompts,
            seed=self._seed,
            progress=lambda done: self._report("calibration", done / self._num_parts),
            latest_s=math.inf if budget_s is None else time.monotonic() + CALIBRATION_SHARE * budget_s,
        )
        steps = StepMeter(self._runtime, self._make_engine, effort, self._seed)
        steps.visit()
        cases, sampled = self._cases(effort), dict[Share, list[Sampled]]()
        is_whole = True
        try:
            self._measure_calls(cases, effort, sampled)
        except KeyboardInterrupt:
            if {share.model for share in sampled if share.partition == WHOLE} != set(cases):
                raise
            is_whole = False
            self._tell(f"interrupted after {len(sampled)} of {len(self._shares)} partitions: the rest keeps guesses")
        costs = {
            (share.model, share.partition): fit_segments(points, widths, pads=pads) for share, points in sampled.items()
        }
        calls = CostModel(costs, NO_OVERHEAD, widths, is_measured=True, is_padded=pads)
        overhead = self._measure_steps(calls, steps) if is_whole else steps.overhead(calls)
        self._report("done", 1.0)
        model = replace(calls, overhead=overhead)
        return Profile(
            fingerprint=Fingerprint.here(manifest),
            date=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            costs=costs,
            overhead=overhead,
            errors=tuple(fit_error(model, share, points) for share, points in sampled.items()),
            calibration=calibration,
        )

    def _make_engine(self, config: EngineConfig) -> Engine:
        return engine_on(self._runtime, self._engine_dir, self._manifest, config)

    def _cases(self, effort: Effort) -> dict[str, list[Case]]:
        rng, names = np.random.default_rng(self._seed), dict.fromkeys(share.model for share in self._shares)
        return {name: choose_cases(name, self._models.max_context, rng, effort.case_share) for name in names}

    def _estimate_s(self, effort: Effort) -> float:
        """Seconds that all of it takes, about, from a few steps with the longest chains."""
        length, step_s = max(LENGTHS), []
        engine = self._make_engine(EngineConfig.from_options(policy=f"fixed:{length}"))
        try:
            for size in LOADS:
                steps = phases_of_steps(engine, size, length, PROBE_STEPS, np.random.default_rng(self._seed))
                if steps:  # a short context may not hold one
                    step_s.append(min(step[WALL] for step in steps) / 1e9)
        finally:
            engine.close()
        each, cases = sum(step_s), self._cases(effort)
        num_calls = sum(len(cases[share.model]) for share in self._shares)
        waves = -(-effort.num_requests // MAX_SEQUENCES)
        rounds = 3 * len(LENGTHS) * (effort.num_steps + 2)
        rounds += len(TRIM_LENGTHS) * (effort.num_trim_steps + 2) if self._models.draft is not None else 0
        num_exit_steps = 4 * effort.num_exit_repeats if self._manifest.exit_layers else 0
        calls_s = CALLS_PER_CASE * num_calls * SHORTER * each / max(len(step_s), 1)
        return (
            waves * TOKENS_EACH / TOKENS_PER_STEP * max(step_s, default=0.0)
            + (SHORTER * rounds + num_exit_steps) * each
            + max(effort.calls_s, calls_s)
        )

    def _measure_calls(self, cases: dict[str, list[Case]], effort: Effort, sampled: dict[Share, list[Sampled]]) -> None:
        """Into `sampled`, partition by partition."""
        bench = Bench(self._runtime, self._models, cases, max_sweeps=effort.max_sweeps, seed=self._seed)
        for index, share in enumerate(self._shares, 1):
            what = f"{share.model} on {share.partition}"
            self._report(what, index / self._num_parts)

            def progress(done: float, what: str = what, index: int = index) -> None:
                self._report(what, (index + done) / self._num_parts)

            sampled[share] = bench.measure(share, effort.calls_s / len(self._shares), progress)

    def _measure_steps(self, calls: CostModel, steps: StepMeter) -> OverheadCost:
        self._report("step overhead", (self._num_parts - 1) / self._num_parts)
        steps.visit()
        found = steps.lanes()
        if self._models.draft is not None:
            found |= steps.trim()
        if self._manifest.exit_layers:
            found |= steps.exits(self._models.target)
        steps.visit()
        return replace(steps.overhead(calls), **found)


def run_profile(
    engine_dir: Path,
    *,
    is_quick: bool,
    prompts: Path | None = None,
    budget_s: float | None = None,
) -> None:
    """The command: progress on stderr, the profile into the directory, the tables on stdout."""
    if budget_s is not None and not budget_s > 0:
        raise ConfigError(f"--budget-s = {budget_s:g}: must be above 0")
    manifest = EngineManifest.load(engine_dir)
    check_room(engine_dir, PROFILE_BYTES, PROFILE_FILE)
    with terminable(), progress_bar() as bar:
        task = bar.add_task("loading", total=1.0)
        try:
            profile = profile_engine(
                engine_dir,
                is_quick=is_quick,
                prompts=prompts,
                report=lambda what, done: bar.update(task, description=what, completed=done),
                budget_s=budget_s,
                tell=lambda text: print(text, file=sys.stderr),
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"{engine_dir} is as it was") from None
    profile.save(engine_dir)
    print_tables(profile, cost_model_of(profile, manifest), has_exits=bool(manifest.exit_layers))
    Console().print(f"written to {engine_dir / PROFILE_FILE}", highlight=False, soft_wrap=True)
