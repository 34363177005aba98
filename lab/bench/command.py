"""`faser bench`: the ladder, a timeline per pipeline mode, and three files that appear together at the end.

What memory and time it will take is told before. A run that is interrupted writes the loads that it has measured whole;
one that has none leaves what was there as it was.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from faser_backend.cli_options import print_steps
from faser_backend.config import EngineConfig
from faser_backend.core.errors import ConfigError
from faser_backend.device.runtime import ModelPair
from faser_backend.manifest import EngineManifest
from faser_backend.serving.demo_engine import demo_engine_dir
from faser_backend.serving.profile_store import load_profile
from faser_backend.serving.tokenizer import load_tokenizer
from lab import environment
from lab.answers import jobs_of
from lab.bench.compare import add_comparisons, in_words, spread_warning
from lab.bench.estimate import Speed, estimate_s, fitted, in_minutes, load_s, timeline_s
from lab.bench.measure import NUM_SERIES_BINS, Ladder, Results, Workload, reference_speeds
from lab.bench.memory import MemoryPlan, plan_memory
from lab.bench.oracle import make_oracle
from lab.bench.report import render, roofline
from lab.bench.timeline import trace_events
from lab.contestants import (
    FIXED_REFERENCE,
    MAX_NUM_SEQS,
    ORACLE,
    WHOLE,
    Contestant,
    Sizing,
    choose_contestants,
    split_names,
)
from lab.drive import ClosedLoop, InProcess
from lab.interrupts import terminable
from lab.profiling.profile import run_profile
from lab.progress import progress_bar
from lab.prompts import PromptLimits, PromptMaker, PromptSet, load_prompt_set
from lab.steps import StepLog
from lab.tables import check_output
from lab.traces import read_trace

REPORT_BYTES = 32 << 20  # of all three files, at most
MAX_CONTEXT = 768  # of a request of the bench; bounds the KV pools of all engines together
# Of timelines: a fixed length forced into each pipeline mode, then the policy that chooses for itself.
MODES = {"serial": FIXED_REFERENCE, "run_ahead": FIXED_REFERENCE, "ping_pong": FIXED_REFERENCE, "auto": WHOLE}
TIMELINE_STEPS, TIMELINE_CLIENTS, TIMELINE_TOKENS = 200, 8, 100


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """engine_dir None: the demo pair's. policies: separated by commas, None for the whole ladder."""

    output: Path
    engine_dir: Path | None = None
    policies: str | None = None
    trace: Path | None = None
    prompts: Path | None = None
    seed: int = 0
    num_threads: int | None = None
    draft: str = "auto"  # of contestants that do not say themselves
    is_chat: bool = False
    max_prompt_tokens: int | None = None  # None: as many as the context holds beside an answer
    budget_s: float | None = None  # of everything; None: as the sizing says


def run_bench(options: BenchOptions, sizing: Sizing, *, command: str) -> None:
    """Measures, then writes bench.json, report.html and timeline.json into the output. Raises FaserError."""
    if options.budget_s is not None and not options.budget_s > 0:
        raise ConfigError(f"--budget-s = {options.budget_s:g}: must be above 0")
    with terminable():
        try:
            is_whole = _run(options, sizing, command)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"{options.output} is as it was") from None
    if not is_whole:
        raise KeyboardInterrupt("the files hold what was measured until then")


def _run(options: BenchOptions, sizing: Sizing, command: str) -> bool:
    """Returns whether everything was measured."""
    start_s = time.monotonic()
    names = None if options.policies is None else split_names(options.policies)
    contestants, missing = choose_contestants(names)
    check_output(options.output, REPORT_BYTES)
    warnings: list[str] = []
    engine_dir = options.engine_dir or demo_engine_dir(print_steps())
    manifest = EngineManifest.load(engine_dir)
    # Before anything that takes time: a file that cannot be asked is told at once.
    prompts = _prompts(options, sizing, engine_dir, manifest)
    warnings += [f"{prompts.left_out}."] * bool(prompts.left_out)
    warnings += _ensure_profile(engine_dir, is_demo=options.engine_dir is None)
    workload = _workload(options, engine_dir, manifest, prompts)
    meta: dict[str, Any] = environment.describe(options.seed)
    memory = _plan_memory(manifest, len(contestants) + 1)  # and one of a timeline
    if memory.num_bytes:
        print(f"{len(contestants)} contestants; {memory}", file=sys.stderr)
    console, results, is_whole = Console(file=sys.stderr), Results(), True
    events, timelines = [], []
    with ExitStack() as stack:
        place = InProcess(engine_dir, {})
        stack.callback(place.close)
        bar = stack.enter_context(progress_bar(console))

        def config_of(policy: str, **changes: object) -> EngineConfig:
            return _config(policy, options, memory.num_kv_blocks, **changes)

        present = _open(place, contestants, lambda c: config_of(c.policy, **c.options), missing, bar)
        speeds = reference_speeds(place, workload)
        left_s = math.inf if options.budget_s is None else options.budget_s - (time.monotonic() - start_s)
        sizing, present = _fitted(sizing, present, speeds, left_s, missing)
        ladder = Ladder(
            place,
            present,
            workload,
            manifest.target.spec.num_layers,
            lambda what, num_runs: bar.update(task, description=what, advance=num_runs),
        )
        task = bar.add_task("warming up", total=Ladder.num_runs(present, sizing))
        deadline_s = time.monotonic() + left_s
        try:
            ladder.run(
                sizing,
                results,
                lambda load: time.monotonic() + load_s(load, sizing, present, speeds) <= deadline_s,
            )
            events, timelines = _timelines(
                place,
                lambda mode: config_of(MODES[mode], pipeline=mode),
                workload,
                missing,
                bar,
                num_tokens=min(TIMELINE_TOKENS, sizing.max_tokens),
                latest_s=deadline_s - timeline_s(sizing, speeds),
            )
        except KeyboardInterrupt:
            if not results.rows:
                raise
            is_whole = False
            warnings.append("The run was interrupted: loads and timelines are missing.")
    missing += [f"load {what}: the time budget was spent" for what in results.left_out]
    add_comparisons(results.rows)
    warnings += spread_warning(results.rows)
    meta |= {
        "command": command,
        "repeats": sizing.repeats,
        "bursty_repeats": sizing.bursty_repeats,
        "max_tokens": sizing.max_tokens,
        "budget_s": options.budget_s,
        "is_whole": is_whole,
        "num_kv_blocks": memory.num_kv_blocks,
        "prompts": prompts.as_dict(),
        "engine_dir": engine_dir.name,
        "runtime": manifest.runtime,
        "exit_layers": list(manifest.exit_layers),
        "num_series_bins": NUM_SERIES_BINS,
        "bursty": results.bursty,
        "missing": missing,
        "warnings": warnings,
        "timelines": timelines,
        "roofline": roofline(manifest.target.spec, manifest.target.num_weight_bytes),
    }
    _write(options.output, meta, results, events)
    for sentence in in_words(results.rows):
        console.print(f"- {sentence.replace('`', '')}", highlight=False, soft_wrap=True)
    console.print(f"wrote {options.output}/bench.json, report.html and timeline.json", highlight=False, soft_wrap=True)
    return is_whole


def _fitted(
    sizing: Sizing, present: list[Contestant], speeds: dict[str, Speed], left_s: float, missing: list[str]
) -> tuple[Sizing, list[Contestant]]:
    """How much is measured of whom in the seconds that are left; says so on stderr."""
    chosen = fitted(sizing, present, speeds, left_s, len(MODES))
    if estimate_s(chosen, present, speeds, len(MODES)) > left_s:
        missing += [f"{each.name}: the time budget was spent" for each in present if each.options]
        present = [each for each in present if not each.options]
        chosen = fitted(sizing, present, speeds, left_s, len(MODES))
    seconds = estimate_s(chosen, present, speeds, len(MODES))
    print(f"time: about {in_minutes(seconds)}, answers of {chosen.max_tokens} tokens", file=sys.stderr)
    if seconds > left_s:
        print(f"there are {in_minutes(max(left_s, 0.0))}: loads that do not fit are left out", file=sys.stderr)
    return chosen, present


def _plan_memory(manifest: EngineManifest, num_engines: int) -> MemoryPlan:
    """Elsewhere than on a CPU the runtime counts its memory itself, as it opens."""
    context = manifest.target.spec.max_context
    most_tokens = max(context, MAX_NUM_SEQS * min(context, MAX_CONTEXT))
    if not manifest.runtime_spec.is_cpu:
        return MemoryPlan(-(-most_tokens // manifest.kv_block_size), 0, 0)
    return plan_memory(manifest, num_engines, most_tokens)


def _ensure_profile(engine_dir: Path, *, is_demo: bool) -> list[str]:
    """The demo pair is profiled quickly where nobody did; returns what the report must say of it."""
    manifest = EngineManifest.load(engine_dir)
    try:
        load_profile(engine_dir, manifest)
    except ConfigError as error:
        if is_demo:
            print(f"{error}: measuring a quick one first", file=sys.stderr)
            run_profile(engine_dir, is_quick=True)
            return ["The engines had no valid profile: a quick one was measured just before the benchmark."]
        return [f"Policies that decide by cost had only guesses: {error}."]
    return []


def _prompts(options: BenchOptions, sizing: Sizing, engine_dir: Path, manifest: EngineManifest) -> PromptSet:
    """What closed loops ask; says on stderr what is left out."""
    limits = PromptLimits(max(sizing.max_tokens, TIMELINE_TOKENS), options.max_prompt_tokens)
    prompts = load_prompt_set(options.prompts, engine_dir, manifest, limits, is_chat=options.is_chat)
    if prompts.left_out:
        print(prompts.left_out, file=sys.stderr)
    return prompts


def _workload(options: BenchOptions, engine_dir: Path, manifest: EngineManifest, prompts: PromptSet) -> Workload:
    tokenizer = load_tokenizer(engine_dir / manifest.tokenizer.name)
    lengths = None if options.trace is None else read_trace(options.trace)
    max_context = min(ModelPair(manifest.target, manifest.draft).max_context, MAX_CONTEXT)
    # Windows are tokenised again and may grow a little: some room is left.
    maker = PromptMaker(tokenizer, [prompt.text for prompt in prompts.prompts])
    return Workload(prompts.prompts, maker, lengths, max_context * 9 // 10, options.seed)


def _config(policy: str, options: BenchOptions, num_kv_blocks: int, **changes: object) -> EngineConfig:
    # Prompts come again in every repeat: without reuse each answer pays for its own prefill.
    return EngineConfig.from_options(
        policy=FIXED_REFERENCE if policy == ORACLE else policy,  # it takes the policy's place
        max_num_seqs=MAX_NUM_SEQS,
        max_queue_size=0,
        num_kv_blocks=num_kv_blocks,
        enable_prefix_reuse=False,
        num_threads=options.num_threads,
        **{"draft": options.draft, **changes},
    )


def _open(
    place: InProcess,
    contestants: list[Contestant],
    config_of: Callable[[Contestant], EngineConfig],
    missing: list[str],
    bar: Any,
) -> list[Contestant]:
    """Loads an engine for each; an ablation that cannot run here is named among what is missing."""
    task = bar.add_task("loading engines", total=len(contestants))
    opened = []
    for contestant in contestants:
        try:
            config = config_of(contestant)
            place.open(contestant.name, config)
            if contestant.policy == ORACLE:
                make_oracle(place.engine(contestant.name), place.knowledge(config).costs)
            opened.append(contestant)
        except ConfigError as error:
            if not contestant.options:
                raise
            missing.append(f"{contestant.name}: {error}")
        bar.advance(task)
    bar.remove_task(task)
    return opened


def _timelines(
    place: InProcess,
    config_of: Callable[[str], EngineConfig],
    workload: Workload,
    missing: list[str],
    bar: Any,
    *,
    num_tokens: int,
    latest_s: float,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Events of a few hundred steps of each pipeline mode, and the modes by name."""
    task = bar.add_task("timelines", total=len(MODES))
    events: list[dict[str, Any]] = []
    shown = []
    jobs = jobs_of(workload.prompts, 4 * TIMELINE_CLIENTS, num_tokens, 0.8, workload.seed)
    for mode, policy in MODES.items():
        name = f"timeline {mode}"
        if time.monotonic() > latest_s:
            missing.append(f"timeline of {mode}: the time budget was spent")
            continue
        try:
            place.open(name, config_of(mode))
        except ConfigError as error:
            missing.append(f"timeline of {mode}: {error}")
            continue
        log = StepLog(place.engine(name))
        place.serve(name, jobs, ClosedLoop(TIMELINE_CLIENTS))
        if mode == "auto" or any(note.mode.value == mode for note in log.notes):
            shown.append(f"{policy}, {mode.replace('_', '-')}")
            events += trace_events(shown[-1], len(shown), log, TIMELINE_STEPS)
        else:
            missing.append(f"timeline of {mode}: no step ran in this mode")
        place.close_one(name)
        bar.advance(task)
    return events, shown


def _write(output: Path, meta: dict[str, Any], results: Results, events: list[dict[str, Any]]) -> None:
    """All files are complete before the first replaces an older one."""
    bench = {"meta": meta, "rows": results.rows, "series": results.series}
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
