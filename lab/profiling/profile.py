"""`faser profile`: measure, fit, check on held-out calls, store."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from faser_backend.config import EngineConfig
from faser_backend.core.decision import WHOLE
from faser_backend.core.errors import ConfigError
from faser_backend.device.runtime import ModelPair
from faser_backend.files import check_room
from faser_backend.manifest import EngineManifest
from faser_backend.pipeline.engine import Engine
from faser_backend.policy.cost_model import NO_OVERHEAD, CostModel
from faser_backend.serving.compose import engine_on
from faser_backend.serving.profile_store import (
    PROFILE_FILE,
    Fingerprint,
    Profile,
    is_padded,
    key_columns,
    load_cost_model,
)
from faser_backend.serving.runtimes import AnyRuntime, open_runtime
from lab.interrupts import terminable
from lab.profiling.budget import Speed, share_of, thinned
from lab.profiling.calibration import calibrate
from lab.profiling.cases import choose_cases
from lab.profiling.measure import Bench, Effort, Sampled, Share, fit_error, fit_segments, shares_of
from lab.profiling.step_costs import StepCosts, StepTimes, measure_exits, measure_lanes, measure_trim
from lab.profiling.tables import print_tables
from lab.progress import progress_bar

BUDGET_S, QUICK_BUDGET_S = 120.0, 15.0  # of timed calls, over all partitions
CALIBRATION_SHARE = 0.35  # of a budget, at most
PROFILE_BYTES = 8 << 20  # at most
MAX_SWEEPS, QUICK_MAX_SWEEPS = 25, 7
DEFAULT_RETENTION = 0.95

Report = Callable[[str, float], None]  # what is being done, and the share of all work that is done


def profile_engine(
    engine_dir: Path,
    *,
    is_quick: bool = False,
    report: Report = lambda what, done: None,
    seed: int = 0,
    prompts: Path | None = None,
    retention: float = DEFAULT_RETENTION,
    budget_s: float | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Measures every model on every partition of the runtime's menu, and calibrates the pair.

    prompts: a file of texts to continue; None lets the target write its own. retention: share of tokens that
    would be accepted and that an exit must keep. budget_s: seconds in which less is measured where all would take
    longer. tell: is told how long it will take, and what an interrupt left out. Raises ManifestError for a broken
    directory, ConfigError for an option out of range, KeyboardInterrupt before the whole machine was measured. Saves
    nothing: the caller does.
    """
    manifest = EngineManifest.load(engine_dir)
    with closing(open_runtime(engine_dir, manifest, EngineConfig())) as runtime:
        profiler = _Profiler(runtime, engine_dir, manifest, report, is_quick=is_quick, seed=seed)
        profiler.plan(budget_s, tell)
        return profiler.run(prompts, retention, tell)


class _Profiler:
    """The parts of a profile, one after the other, on one open runtime."""

    def __init__(
        self,
        runtime: AnyRuntime,
        engine_dir: Path,
        manifest: EngineManifest,
        report: Report,
        *,
        is_quick: bool,
        seed: int,
    ) -> None:
        self._runtime = runtime
        self._engine_dir = engine_dir
        self._manifest = manifest
        self._models = ModelPair(manifest.target, manifest.draft)
        self._report = report
        self._is_quick = is_quick
        self._seed = seed
        self._shares = shares_of(runtime.menu, has_draft=manifest.draft is not None)
        self._num_parts = len(self._shares) + 2
        rng, max_context = np.random.default_rng(seed), self._models.max_context
        names = dict.fromkeys(share.model for share in self._shares)
        self._cases = {model: choose_cases(model, max_context, rng, is_quick=is_quick) for model in names}
        self._work = 1.0  # the share of it that is done
        self._budget_s = math.inf

    def plan(self, budget_s: float | None, tell: Callable[[str], None]) -> None:
        """Finds out how long all would take; does less of it where that is too long."""
        self._report("looking at the engine's speed", 0.0)
        seconds = Speed.probe(self._make_engine, self._seed).estimate_s(
            num_calls=sum(len(self._cases[share.model]) for share in self._shares),
            calls_s=self._calls_s,
            is_quick=self._is_quick,
            has_draft=self._manifest.draft is not None,
            has_exits=bool(self._manifest.exit_layers),
        )
        self._work = share_of(seconds, budget_s)
        self._budget_s = math.inf if budget_s is None else budget_s
        rng = np.random.default_rng(self._seed)
        self._cases = {model: thinned(cases, self._work, rng) for model, cases in self._cases.items()}
        less = "" if self._work == 1.0 else f", of which {self._work:.0%} is done"
        tell(f"time: about {max(seconds, 1.0):.0f} s{less}")

    @property
    def _calls_s(self) -> float:
        return QUICK_BUDGET_S if self._is_quick else BUDGET_S

    def run(self, prompts: Path | None, retention: float, tell: Callable[[str], None]) -> Profile:
        manifest, widths = self._manifest, key_columns(self._manifest)
        self._report("preparing", 0.0)
        # Calibration goes first: it does not mind a machine that warms up, and finds bad options before the long part.
        calibration = calibrate(
            self._make_engine,
            self._engine_dir,
            manifest,
            prompts=prompts,
            retention=retention,
            is_quick=self._is_quick,
            seed=self._seed,
            progress=lambda done: self._report("calibration", done / self._num_parts),
            share=self._work,
            latest_s=time.monotonic() + CALIBRATION_SHARE * self._budget_s,
        )
        steps = StepTimes(self._runtime, self._make_engine, is_quick=self._is_quick, seed=self._seed, share=self._work)
        steps.visit()
        sampled: dict[Share, list[Sampled]] = {}
        is_whole = True
        try:
            self._measure_calls(sampled)
        except KeyboardInterrupt:
            if {share.model for share in sampled if share.partition == WHOLE} != set(self._cases):
                raise
            is_whole = False
            tell(f"interrupted after {len(sampled)} of {len(self._shares)} partitions: the rest keeps guesses")
        costs = {
            (share.model, share.partition): fit_segments(points, widths, pads=is_padded(manifest))
            for share, points in sampled.items()
        }
        calls = CostModel(costs, NO_OVERHEAD, widths, is_measured=True, is_padded=is_padded(manifest))
        found = self._measure_steps(calls, steps) if is_whole else StepCosts(*steps.fit(calls), [], [])
        self._report("done", 1.0)
        model = replace(calls, overhead=found.overhead)
        return Profile(
            fingerprint=Fingerprint.here(manifest),
            date=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            costs=costs,
            overhead=found.overhead,
            errors=tuple(fit_error(model, share, points) for share, points in sampled.items()),
            points=[_point(share, point) for share, points in sampled.items() for point in points],
            overhead_points=found.overhead_points,
            trim_points=found.trim_points,
            exit_points=found.exit_points,
            calibration=calibration,
        )

    def _make_engine(self, config: EngineConfig) -> Engine:
        return engine_on(self._runtime, self._engine_dir, self._manifest, config)

    def _measure_calls(self, sampled: dict[Share, list[Sampled]]) -> None:
        """Into `sampled`, partition by partition."""
        bench = Bench(self._runtime, self._models, self._cases, self._seed)
        effort = Effort(
            self._work * self._calls_s / len(self._shares), QUICK_MAX_SWEEPS if self._is_quick else MAX_SWEEPS
        )
        for index, share in enumerate(self._shares, 1):
            what = f"{share.model} on {share.partition}"
            self._report(what, index / self._num_parts)

            def tell(done: float, what: str = what, index: int = index) -> None:
                self._report(what, (index + done) / self._num_parts)

            sampled[share] = bench.measure(share, effort, tell)

    def _measure_steps(self, calls: CostModel, steps: StepTimes) -> StepCosts:
        self._report("step overhead", (self._num_parts - 1) / self._num_parts)
        effort: dict[str, Any] = {"is_quick": self._is_quick, "seed": self._seed, "share": self._work}
        steps.visit()
        found, trim_points, exit_points = measure_lanes(self._runtime), [], []
        if self._manifest.draft is not None:
            more, trim_points = measure_trim(self._make_engine, **effort)
            found |= more
        if self._manifest.exit_layers:
            more, exit_points = measure_exits(self._runtime, self._models.target, self._make_engine, **effort)
            found |= more
        steps.visit()
        overhead, overhead_points = steps.fit(calls)
        return StepCosts(replace(overhead, **found), overhead_points, trim_points, exit_points)


def run_profile(
    engine_dir: Path,
    *,
    is_quick: bool,
    prompts: Path | None = None,
    retention: float = DEFAULT_RETENTION,
    budget_s: float | None = None,
) -> None:
    """The command: progress on stderr, the profile into the directory, the tables on stdout."""
    if budget_s is not None and not budget_s > 0:
        raise ConfigError(f"--budget-s = {budget_s:g}: must be above 0")
    EngineManifest.load(engine_dir)
    check_room(engine_dir, PROFILE_BYTES, PROFILE_FILE)
    with terminable(), progress_bar() as bar:
        task = bar.add_task("loading", total=1.0)
        try:
            profile = profile_engine(
                engine_dir,
                is_quick=is_quick,
                prompts=prompts,
                retention=retention,
                report=lambda what, done: bar.update(task, description=what, completed=done),
                budget_s=budget_s,
                tell=lambda text: print(text, file=sys.stderr),
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"{engine_dir} is as it was") from None
    profile.save(engine_dir)
    print_tables(profile, load_cost_model(engine_dir, EngineManifest.load(engine_dir)))
    Console().print(f"written to {engine_dir / PROFILE_FILE}", highlight=False, soft_wrap=True)


def _point(share: Share, point: Sampled) -> dict[str, object]:
    """One measured call for profile.json."""
    case = point.case
    return {
        "model": share.model,
        "partition": share.partition,
        "counts": case.counts,
        "context": case.context,
        "num_logit_rows": case.num_logit_rows,
        "is_held_out": case.is_held_out,
        "segment_us": [round(us, 2) for us in point.segment_us],
    }
