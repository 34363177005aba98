"""Runs `faser bench`: the ladder, a timeline per pipeline mode, and three files that are written together at the end.

It prints beforehand how much memory and time it needs. An interrupted or failed run writes the loads that it has
measured completely. If there are none, it leaves the output unchanged.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import ConfigError, FaserError
from faser_backend.device.runtime import ModelPair
from faser_backend.lab import environment
from faser_backend.lab.answers import jobs_of
from faser_backend.lab.bench.compare import add_comparisons, headline, table
from faser_backend.lab.bench.measure import Ladder, Workload, reference_speeds
from faser_backend.lab.bench.plan import MAX_CONTEXT, estimate_s, fitted, in_minutes, load_s, plan_memory, timeline_s
from faser_backend.lab.bench.report import render, roofline
from faser_backend.lab.bench.timeline import trace_events
from faser_backend.lab.command_options import BenchOptions
from faser_backend.lab.contestants import (
    AGAIN,
    FIXED_REFERENCE,
    MAX_NUM_SEQS,
    REFERENCE,
    WHOLE,
    Contestant,
    Sizing,
    choose_contestants,
)
from faser_backend.lab.drive import InProcess
from faser_backend.lab.progress import progress_bar
from faser_backend.lab.prompts import PromptLimits, PromptMaker, PromptSet, load_prompt_set
from faser_backend.lab.steps import StepLog
from faser_backend.lab.tables import check_output
from faser_backend.lab.traces import read_trace
from faser_backend.manifest import EngineManifest
from faser_backend.profiling.profile import run_profile
from faser_backend.serving.model_source import demo_engine_dir
from faser_backend.serving.processes import terminable
from faser_backend.serving.profile_store import PROFILE_FILE, load_profile
from faser_backend.text.tokenizer import load_tokenizer

REPORT_BYTES = 32 << 20  # at most, of all three files together
# Policies of timelines: a fixed length in each pipeline mode, then the policy that chooses the mode.
MODES = {"serial": FIXED_REFERENCE, "run_ahead": FIXED_REFERENCE, "ping_pong": FIXED_REFERENCE, "auto": WHOLE}
TIMELINE_STEPS, TIMELINE_CLIENTS, TIMELINE_TOKENS = 200, 8, 100


def run_bench(options: BenchOptions, sizing: Sizing, *, command: str) -> None:
    """Measures, then writes bench.json, report.html and timeline.json to options.output. Raises FaserError."""
    if options.budget_s is not None and not options.budget_s > 0:
        raise ConfigError(f"--budget-s = {options.budget_s:g}: must be above 0")
    with terminable():
        try:
            failure = BenchRun(options, sizing).run(command)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"{options.output} is unchanged") from None
    if failure is not None:
        raise failure


class BenchRun:
    """One run of the benchmark. The report shows `missing` and `warnings`."""

    def __init__(self, options: BenchOptions, sizing: Sizing) -> None:
        """Reads and checks all inputs, so that errors are reported before anything takes time."""
        budget_s = math.inf if options.budget_s is None else options.budget_s
        self._end_s = time.monotonic() + budget_s
        self._options, self._sizing = options, sizing
        self._contestants, self.missing = choose_contestants(options.policies)
        self._contestants.insert((len(self._contestants) + 1) // 2, AGAIN)  # far from the first in each rotation
        self.warnings: list[str] = []
        check_output(options.output, REPORT_BYTES)
        self._engine_dir = options.engine_dir or demo_engine_dir()
        self._manifest = EngineManifest.load(self._engine_dir)
        self._prompts = self._load_prompts()
        self._sizing = replace(sizing, num_categories=len({prompt.category for prompt in self._prompts.prompts}))
        self._workload = self._make_workload()
        self._memory = plan_memory(self._manifest, len(self._contestants) + 1)  # one more for timelines
        self._meta: dict[str, Any] = environment.describe(options.seed)
        self._ensure_profile()

    def run(self, command: str) -> BaseException | None:
        """Returns the error or interrupt after which the rest was not measured. Raises it if nothing had been."""
        options = self._options
        if self._memory.words:
            print(f"{len(self._contestants)} engines; {self._memory.words}", file=sys.stderr)
        failure, events, timelines = None, [], []
        with closing(InProcess(self._engine_dir)) as place, progress_bar() as bar:
            present = self._open(place, bar)
            speeds = reference_speeds(place, self._workload)
            sizing = self._fit(present, speeds, self._end_s - time.monotonic())

            def report(what: str, num_runs: float) -> None:
                bar.update(task, description=what, advance=num_runs)

            num_layers = self._manifest.target.spec.num_layers
            ladder = Ladder(place, present, self._workload, sizing, report, num_layers)
            task = bar.add_task("warming up", total=ladder.num_runs)
            try:
                ladder.run(lambda load: time.monotonic() + load_s(load, sizing, present, speeds) <= self._end_s)
                events, timelines = self._timelines(place, bar, sizing, self._end_s - timeline_s(sizing, speeds))
            except (KeyboardInterrupt, FaserError) as error:
                if not ladder.rows:
                    raise
                failure, why = error, f"failed ({error})" if error.args else "was interrupted"
                error.args = error.args or ("the files hold what was measured until then",)  # of an interrupt
                self.warnings.append(f"The run {why}: loads and timelines are missing.")
        self.missing += [f"load {what}: the time budget was spent" for what in ladder.left_out]
        add_comparisons(ladder.rows)
        meta = self._meta | {
            "command": command,
            **dict.fromkeys(("repeats", "bursty_repeats"), sizing.repeats),
            "max_tokens": sizing.max_tokens,
            "budget_s": options.budget_s,
            "is_whole": failure is None,
            "num_kv_blocks": self._memory.num_kv_blocks,
            "prompts": self._prompts.as_dict(),
            "engine_dir": self._engine_dir.name,
            "runtime": self._manifest.runtime,
            "exit_layers": list(self._manifest.exit_layers),
            "bursty": ladder.bursty,
            "missing": self.missing,
            "warnings": self.warnings,
            "timelines": timelines,
            "roofline": roofline(self._manifest.target) if self._manifest.runtime_spec.is_cpu else None,
        }
        write_files(options.output, {"meta": meta, "rows": ladder.rows}, events)
        sentences = [*headline(ladder.rows), *meta["warnings"]]
        lines = [*table(ladder.rows), "", *(f"- {sentence}" for sentence in sentences)]
        print("\n".join(lines + [f"- left out: {each}" for each in self.missing]), flush=True)
        print(f"wrote {options.output}/bench.json, report.html and timeline.json", file=sys.stderr)
        return failure

    def _load_prompts(self) -> PromptSet:
        """Returns the prompts of closed loops, and prints on stderr which are left out."""
        options = self._options
        limits = PromptLimits(max(self._sizing.max_tokens, TIMELINE_TOKENS), options.max_prompt_tokens)
        prompts = load_prompt_set(options.prompts, self._engine_dir, self._manifest, limits, is_chat=options.is_chat)
        if prompts.left_out:
            print(prompts.left_out, file=sys.stderr)
            self.warnings.append(f"{prompts.left_out}.")
        return prompts

    def _ensure_profile(self) -> None:
        """Profiles the demo pair if it has no valid profile. Adds a warning for other engines without one."""
        try:
            load_profile(self._engine_dir, self._manifest)
        except ConfigError as error:
            if self._options.engine_dir is None:
                print(f"{error}: measuring a quick one first", file=sys.stderr)
                # Links with a profile of their own, which no server takes for its user's.
                self._links, skips = tempfile.TemporaryDirectory(), shutil.ignore_patterns(PROFILE_FILE)
                own = Path(self._links.name, self._engine_dir.name)
                shutil.copytree(self._engine_dir.resolve(), own, copy_function=os.symlink, ignore=skips)
                self._engine_dir = own
                run_profile(self._engine_dir, is_quick=True, budget_s=max((self._end_s - time.monotonic()) / 3, 1.0))
                self.warnings.append("The engines had no valid profile: a quick one was measured before the benchmark.")
            elif not os.path.lexists(self._engine_dir / PROFILE_FILE):  # policies that read an invalid one are left out
                self.warnings.append(f"Policies that decide by cost had only guesses: {error}.")

    def _make_workload(self) -> Workload:
        manifest, options, prompts = self._manifest, self._options, self._prompts.prompts
        tokenizer = load_tokenizer(self._engine_dir / manifest.tokenizer.name)
        lengths = None if options.trace is None else read_trace(options.trace)
        max_context = min(ModelPair(manifest.target, manifest.draft).max_context, MAX_CONTEXT)
        maker = PromptMaker(tokenizer, [prompt.text for prompt in prompts])
        # Windows are tokenised again and may grow a little: some room is left.
        return Workload(prompts, maker, lengths, max_context * 9 // 10, options.seed)

    def _config(self, policy: str, **changes: object) -> EngineConfig:
        # Every repeat asks the same prompts. Without reuse, each answer pays for its own prefill.
        return EngineConfig.from_options(
            policy=policy,
            max_num_seqs=MAX_NUM_SEQS,
            max_queue_size=0,
            num_kv_blocks=self._memory.num_kv_blocks,
            enable_prefix_reuse=False,
            num_threads=self._options.num_threads,
            **{"draft": self._options.draft, **changes},
        )

    def _open(self, place: InProcess, bar: Any) -> list[Contestant]:
        """Loads an engine for each contestant. Lists those that this directory cannot run as missing."""
        task = bar.add_task("loading engines", total=len(self._contestants))
        opened = []
        for contestant in self._contestants:
            try:
                place.open(contestant.name, self._config(contestant.policy, **contestant.options))
                opened.append(contestant)
            except ConfigError as error:
                if contestant.policy == REFERENCE:
                    raise
                self.missing.append(f"{contestant.name}: {error}")
            bar.advance(task)
        bar.remove_task(task)
        return opened

    def _fit(self, present: list[Contestant], speeds: Any, left_s: float) -> Sizing:
        """Returns a sizing for the time that is left, printing its estimate on stderr. Removes ablations from `present`
        if they do not fit. Adds a warning for what is reduced."""
        chosen = fitted(self._sizing, present, speeds, left_s, len(MODES))
        if estimate_s(chosen, present, speeds, len(MODES)) > left_s:
            self.missing += [f"{each.name}: the time budget was spent" for each in present if each.options]
            present[:] = [each for each in present if not each.options]
            chosen = fitted(self._sizing, present, speeds, left_s, len(MODES))
        seconds = estimate_s(chosen, present, speeds, len(MODES))
        print(f"time: about {in_minutes(seconds)}, answers of {chosen.max_tokens} tokens", file=sys.stderr)
        reduced = [
            f"{name.replace('_', ' ')} {now:g} instead of {before:g}"
            for name in ("repeats", "max_tokens", "loop_s", "bursty_s", "min_waves")
            if (now := getattr(chosen, name)) != (before := getattr(self._sizing, name))
        ]
        if reduced:
            self.warnings.append(f"The time budget reduced what is measured: {', '.join(reduced)}.")
            print(self.warnings[-1], file=sys.stderr)
        if seconds > left_s:
            print(f"there are {in_minutes(max(left_s, 0.0))}: loads that do not fit are left out", file=sys.stderr)
        return chosen

    def _timelines(
        self, place: InProcess, bar: Any, sizing: Sizing, latest_s: float
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Returns the events of up to TIMELINE_STEPS steps of each pipeline mode, and the names of the modes."""
        task = bar.add_task("timelines", total=len(MODES))
        events: list[dict[str, Any]] = []
        shown: list[str] = []
        num_tokens = min(TIMELINE_TOKENS, sizing.max_tokens)
        jobs = jobs_of(self._prompts.prompts, 4 * TIMELINE_CLIENTS, num_tokens, 0.8, self._options.seed)
        for mode, policy in MODES.items():
            name = f"timeline of {mode}"
            if time.monotonic() > latest_s:
                self.missing.append(f"{name}: the time budget was spent")
                continue
            try:
                place.open(name, self._config(policy, pipeline=mode))
            except ConfigError as error:
                self.missing.append(f"{name}: {error}")
                continue
            log = StepLog(place.engine(name))
            place.run(name, jobs, TIMELINE_CLIENTS)
            if mode == "auto" or any(record.plan.decision.mode.value == mode for record in log.records):
                shown.append(f"{policy}, {mode.replace('_', '-')}")
                events += trace_events(shown[-1], len(shown), log, TIMELINE_STEPS)
            else:
                self.missing.append(f"{name}: no step ran in this mode")
            place.close_one(name)
            bar.advance(task)
        return events, shown


def write_files(output: Path, bench: dict[str, Any], events: list[dict[str, Any]]) -> None:
    """Writes all files into a temporary directory, then replaces the older ones."""
    texts = {
        "bench.json": json.dumps(bench, indent=1) + "\n",
        "report.html": render(bench),
        "timeline.json": json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n",
    }
    with tempfile.TemporaryDirectory(dir=output, prefix=".partial-") as partial:
        for name, text in texts.items():
            (Path(partial) / name).write_text(text, encoding="utf-8")
        for name in texts:
            os.replace(Path(partial) / name, output / name)
