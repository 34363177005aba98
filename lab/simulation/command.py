"""`faser simulate`: a trace through simulated engines, policy beside policy, with progress, table and files."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from faser_backend.config import EngineConfig
from faser_backend.core.errors import ConfigError
from lab.contestants import ORACLE, STATIC, Contestant, simulated_contestants, split_names
from lab.environment import commit
from lab.interrupts import in_processes, terminable
from lab.progress import progress_bar
from lab.simulation import report
from lab.simulation.engine import Outcome, World, build_sim_engine, run_open_loop
from lab.simulation.worlds import (
    ACCEPTANCE,
    EXIT_AUC,
    behind_host,
    profile_world,
    roofline_world,
    spread_levels,
    with_levels,
)
from lab.tables import check_output, table_console, terminal_table
from lab.traces import Trace, arriving_as, fitted_to, read_trace, scaled, with_mean_lengths, with_rate_curve

AT_ONCE = 9e5  # requests per second
MOST_REQUESTS = 1000  # unless more are asked for
REPORT_BYTES = 1 << 20  # of both files, at most
MIDDLE = (25, 75)  # percentiles of answers between which a capacity is counted: neither start nor end


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """profile: an engine directory instead of hardware and pair. Optional fields: None is the default in words."""

    trace: Path
    hardware: str | None = None
    pair: str | None = None
    profile: Path | None = None
    policies: str | None = None  # the ladder
    num_requests: int | None = None  # None: MOST_REQUESTS, or as many as the trace has
    rate: float | None = None  # the trace's own
    loads: str | None = None  # instead of a rate: shares of what the best static length can do, "0.5,0.9"
    peak_trough: float | None = None  # the trace's own arrivals
    arrivals: Path | None = None  # another trace's
    lengths: str | None = None  # mean prompt and output tokens, "755/200"; the trace's own
    acceptance: float | None = None
    spread: float | None = None  # standard deviation of requests' acceptance; the demo pair's
    mix: str | None = None  # half of the requests at either acceptance, "0.9/0.6"
    exit_auc: float | None = None
    draft_call_ms: float | None = None
    host_step_ms: float | None = None
    max_num_seqs: int = 256
    max_prefill_tokens: int = 2048
    seed: int = 0
    output: Path = Path("faser-simulation")

    def check(self) -> None:
        """Raises ConfigError for options that exclude each other or are out of range."""
        if self.profile is None and (self.hardware is None or self.pair is None):
            raise ConfigError("give either --hardware and --pair, or --profile ENGINE_DIR")
        if self.profile is not None and (self.hardware is not None or self.pair is not None):
            raise ConfigError("--profile: an engine directory is a machine and a pair; leave out --hardware and --pair")
        for one, other in (("peak_trough", "arrivals"), ("rate", "loads"), ("spread", "mix"), ("acceptance", "mix")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ConfigError(f"give at most one of --{one.replace('_', '-')} and --{other}")
        if self.num_requests is not None and self.num_requests < 1:
            raise ConfigError(f"--requests = {self.num_requests}: must be at least 1")
        for name, low, high in (
            ("acceptance", 0.0, 1.0),
            ("exit_auc", 0.5, 1.0),
            ("spread", 0.0, 0.5),
            ("draft_call_ms", 0.0, 1e3),
            ("host_step_ms", 0.0, 1e3),
        ):
            value = getattr(self, name)
            if value is not None and not low < value < high:
                raise ConfigError(f"--{name.replace('_', '-')} = {value:g}: must lie in ({low:g}, {high:g})")

    @property
    def load_shares(self) -> list[float]:
        """[] where none are asked for. Raises ConfigError."""
        if self.loads is None:
            return []
        shares = _numbers("--loads", self.loads, ",", "shares of a capacity, e.g. 0.5,0.7,0.9,1.2")
        if not all(0.0 < share <= 10.0 for share in shares):
            raise ConfigError(f"--loads = {self.loads!r}: every share must lie in (0, 10]")
        return shares

    def make_trace(self) -> Trace:
        """Raises ConfigError for a file that is no trace, or too short."""
        trace = read_trace(self.trace, self.num_requests or MOST_REQUESTS, may_be_shorter=self.num_requests is None)
        if self.arrivals is not None:
            trace = arriving_as(trace, read_trace(self.arrivals, len(trace)))
        if self.lengths is not None:
            means = _numbers("--lengths", self.lengths, "/", "mean prompt and output tokens, e.g. 755/200", 2)
            trace = with_mean_lengths(trace, *means)
        if self.peak_trough is not None:
            return with_rate_curve(trace, self.rate or trace.rate, self.peak_trough, self.seed)
        return trace if self.rate is None else scaled(trace, self.rate)

    def make_world(self, trace: Trace) -> tuple[World, Trace]:
        """And the trace, with lengths that fit where a profiled engine's context is short. Raises ConfigError."""
        if self.profile is not None:
            world = profile_world(self.profile, self.max_num_seqs, self.acceptance)
            trace = fitted_to(trace, world.max_context)
        else:
            assert self.hardware is not None and self.pair is not None
            world = roofline_world(
                self.hardware,
                self.pair,
                max_context=trace.longest,
                acceptance=self.acceptance or ACCEPTANCE,
                exit_auc=self.exit_auc or EXIT_AUC,
            )
        if self.mix is not None:
            levels = _numbers("--mix", self.mix, "/", "two acceptances, e.g. 0.9/0.6", 2)
            if not all(0.0 < level < 1.0 for level in levels):
                raise ConfigError(f"--mix = {self.mix!r}: both acceptances must lie in (0, 1)")
            world = with_levels(
                world, levels, f"half of them agree at {levels[0]:.0%} of positions, half at {levels[1]:.0%}"
            )
        if self.spread is not None:
            mean = self.acceptance or ACCEPTANCE
            words = f"normal around {mean:.0%} with standard deviation {self.spread:g}, cut to 2 to 98 %"
            world = with_levels(world, spread_levels(mean, self.spread), words)
        return behind_host(world, self.draft_call_ms, self.host_step_ms), trace


def run_simulate(options: SimulateOptions, *, command: str) -> None:
    """The command: progress on stderr, tables on stdout, simulation.json and .md into the output directory."""
    options.check()
    contestants, missing = simulated_contestants(None if options.policies is None else split_names(options.policies))
    check_output(options.output, REPORT_BYTES)
    shares = options.load_shares
    world, trace = options.make_world(options.make_trace())
    capacity: dict[str, Any] = {}
    jobs = [(options, contestant, "") for contestant in contestants]
    if shares:
        capacity = find_capacity(options, trace)
        jobs = []
        for share in shares:
            loaded = replace(options, rate=share * capacity["requests_per_s"], loads=None)
            jobs += [
                (loaded, contestant, f"Load {share:g}, {loaded.rate:.3g} requests/s") for contestant in contestants
            ]
    rows = _simulate_all(jobs, "simulating")
    rows = [row for group in report.by_load(rows).values() for row in report.compared(group)]
    meta = {
        "world": world.name,
        "trace": options.trace.name,
        "arrivals": trace.description,
        "num_requests": len(trace),
        "mean_prompt_tokens": float(trace.num_prompt_tokens.mean()),
        "mean_output_tokens": float(trace.num_output_tokens.mean()),
        "max_num_seqs": options.max_num_seqs,
        "max_prefill_tokens": options.max_prefill_tokens,
        "num_kv_tokens": world.num_kv_tokens,
        "seed": options.seed,
        "commit": commit(),
        "command": command,
        "capacity": capacity,
        "assumptions": list(world.assumptions),
        "missing": missing,
    }
    (options.output / "simulation.json").write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    (options.output / "simulation.md").write_text(report.markdown(meta, rows))
    _print(meta, rows, options.output)


def find_capacity(options: SimulateOptions, trace: Trace) -> dict[str, Any]:
    """What the best static length answers while more requests wait than it can take: policy and requests per second."""
    at_once = replace(options, rate=AT_ONCE, loads=None, peak_trough=None)
    rows = _simulate_all([(at_once, Contestant(name), "") for name in STATIC], "capacity")
    best = max(rows, key=lambda row: row["middle_requests_per_s"])
    return {"policy": best["policy"], "requests_per_s": best["middle_requests_per_s"]}


def simulate_one(options: SimulateOptions, contestant: Contestant, load: str = "") -> dict[str, Any]:
    """One row; a process of its own may run it."""
    world, trace = options.make_world(options.make_trace())
    config = EngineConfig.from_options(
        policy="none" if contestant.policy == ORACLE else contestant.policy,
        max_num_seqs=options.max_num_seqs,
        max_prefill_tokens=options.max_prefill_tokens,
        max_queue_size=0,
        **contestant.options,
    )
    longest = int(trace.num_output_tokens.max())
    sim = build_sim_engine(world, config, seed=options.seed, max_output_tokens=longest, name=contestant.name)
    outcome = run_open_loop(sim, trace)
    row = {"policy": contestant.name, **outcome.summary(), "middle_requests_per_s": middle_rate(outcome)}
    return row | ({"load": load} if load else {})


def middle_rate(outcome: Outcome) -> float:
    """Requests answered per second between the first quarter of the answers and the last."""
    ends = [answer.response_s[-1] for answer in outcome.answers]
    first, last = np.percentile(ends, MIDDLE)
    share = (MIDDLE[1] - MIDDLE[0]) / 100
    return float(share * len(ends) / (last - first)) if last > first else len(ends) / outcome.seconds


def _numbers(option: str, text: str, separator: str, meaning: str, count: int | None = None) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(separator)]
    except ValueError:
        numbers = []
    if not numbers or count not in (None, len(numbers)):
        raise ConfigError(f"{option} = {text!r}: must be {meaning}")
    return numbers


Job = tuple[SimulateOptions, Contestant, str]


def _simulate_all(jobs: list[Job], what: str) -> list[dict[str, Any]]:
    """Side by side on all cores, in the order of the jobs."""
    num_workers = min(len(os.sched_getaffinity(0)), len(jobs))
    with terminable(), progress_bar() as bar:
        task = bar.add_task(what, total=len(jobs))
        rows: list[dict[str, Any]] = []
        results = map(_simulate_job, jobs) if num_workers == 1 else in_processes(_simulate_job, jobs, num_workers)
        for row in results:
            rows.append(row)
            bar.advance(task)
    return rows


def _simulate_job(job: Job) -> dict[str, Any]:
    return simulate_one(*job)


def _print(meta: dict[str, Any], rows: list[dict[str, Any]], output: Path) -> None:
    console = table_console()
    for load, group in report.by_load(rows).items():
        title = load or f"{meta['world']}: {meta['num_requests']} requests, {meta['arrivals']}"
        console.print(terminal_table(title, report.COLUMNS, group))
    for line in meta["missing"]:
        console.print(f"not simulated: {line}")
    console.print("assumptions:")
    for line in meta["assumptions"]:
        console.print(f"- {line}", highlight=False, soft_wrap=True)
    console.print(f"wrote {output / 'simulation.json'} and .md")
