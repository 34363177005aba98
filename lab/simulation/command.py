"""`faser simulate`: a trace through simulated engines, policy beside policy, with progress, table and files."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from faser_backend.config import EngineConfig
from faser_backend.core.errors import ConfigError
from lab.bench.environment import commit
from lab.bench.ladder import Contestant, choose_contestants, split_names
from lab.simulation import report
from lab.simulation.drive import run_open_loop
from lab.simulation.engine import World, build_sim_engine
from lab.simulation.profiled import profile_world
from lab.simulation.trace import (
    Trace,
    arriving_as,
    fitted_to,
    read_trace,
    scaled,
    with_mean_lengths,
    with_rate_curve,
)
from lab.simulation.worlds import ACCEPTANCE, EXIT_AUC, roofline_world

PAPERS_WORLDS = ("h100 + qwen3-32b/0.6b", "h100x2 + qwen3-32b/0.6b", "h100x2 + llama3.3-70b/3.2-1b")


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """profile: an engine directory instead of hardware and pair. Optional fields: None is the default in words."""

    trace: Path
    hardware: str | None = None
    pair: str | None = None
    profile: Path | None = None
    policies: str | None = None  # the ladder
    num_requests: int = 1000
    rate: float | None = None  # the trace's own
    peak_trough: float | None = None  # the trace's own arrivals
    arrivals: Path | None = None  # another trace's
    lengths: str | None = None  # mean prompt and output tokens, "755/200"; the trace's own
    acceptance: float | None = None
    exit_auc: float | None = None
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
        if self.peak_trough is not None and self.arrivals is not None:
            raise ConfigError("give at most one of --peak-trough and --arrivals")
        if self.num_requests < 1:
            raise ConfigError(f"--requests = {self.num_requests}: must be at least 1")
        for name, value in (("--acceptance", self.acceptance), ("--exit-auc", self.exit_auc)):
            low = 0.5 if name == "--exit-auc" else 0.0
            if value is not None and not low < value < 1.0:
                raise ConfigError(f"{name} = {value:g}: must lie in ({low:g}, 1)")

    def make_trace(self) -> Trace:
        """Raises ConfigError for a file that is no trace, or too short."""
        trace = read_trace(self.trace, self.num_requests)
        if self.arrivals is not None:
            trace = arriving_as(trace, read_trace(self.arrivals, self.num_requests))
        if self.lengths is not None:
            trace = with_mean_lengths(trace, *_parse_lengths(self.lengths))
        if self.peak_trough is not None:
            return with_rate_curve(trace, self.rate or trace.rate, self.peak_trough, self.seed)
        return trace if self.rate is None else scaled(trace, self.rate)

    def make_world(self, trace: Trace) -> tuple[World, Trace]:
        """And the trace, with lengths that fit where a profiled engine's context is short. Raises ConfigError."""
        if self.profile is not None:
            world = profile_world(self.profile, self.max_num_seqs, self.acceptance)
            return world, fitted_to(trace, world.max_context)
        assert self.hardware is not None and self.pair is not None
        world = roofline_world(
            self.hardware,
            self.pair,
            max_context=trace.longest,
            acceptance=self.acceptance or ACCEPTANCE,
            exit_auc=self.exit_auc or EXIT_AUC,
        )
        return world, trace


def run_simulate(options: SimulateOptions, *, command: str) -> None:
    """The command: progress on stderr, the table on stdout, simulation.json and .md into the output directory."""
    options.check()
    names = None if options.policies is None else split_names(options.policies)
    contestants, missing = simulated(*choose_contestants(names), is_named=names is not None)
    world, trace = options.make_world(options.make_trace())
    rows = report.compared(_simulate_all(options, contestants))
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
        "is_papers": world.name in PAPERS_WORLDS,
        "assumptions": list(world.assumptions),
        "missing": missing,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "simulation.json").write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    (options.output / "simulation.md").write_text(report.markdown(meta, rows))
    _print(meta, rows, options.output)


def simulated(
    contestants: list[Contestant], missing: list[str], *, is_named: bool
) -> tuple[list[Contestant], list[str]]:
    """Without those that draft with n-grams, which a simulated text has none of. Raises ConfigError for one that the
    user named."""
    others = [contestant.name for contestant in contestants if contestant.options.get("draft") == "ngram"]
    if others and is_named:
        raise ConfigError(f"--policies = {', '.join(others)!r}: n-grams need texts, and a simulation has none")
    simulated = [contestant for contestant in contestants if contestant.name not in others]
    return simulated, [*missing, *(f"{name}: n-grams need texts, and a simulation has none" for name in others)]


def _parse_lengths(text: str) -> tuple[float, float]:
    try:
        prompt, output = map(float, text.split("/"))
    except ValueError:
        raise ConfigError(f"--lengths = {text!r}: must be mean prompt and output tokens, e.g. 755/200") from None
    return prompt, output


def simulate_one(options: SimulateOptions, contestant: Contestant) -> dict[str, Any]:
    """One row; a process of its own may run it."""
    world, trace = options.make_world(options.make_trace())
    config = EngineConfig.from_options(
        policy=contestant.policy,
        max_num_seqs=options.max_num_seqs,
        max_prefill_tokens=options.max_prefill_tokens,
        max_queue_size=0,
        **contestant.options,
    )
    longest = int(trace.num_output_tokens.max())
    sim = build_sim_engine(world, config, seed=options.seed, max_output_tokens=longest)
    return {"policy": contestant.name, **run_open_loop(sim, trace).summary()}


def _simulate_all(options: SimulateOptions, contestants: list[Contestant]) -> list[dict[str, Any]]:
    """Side by side on all cores, in the order of the contestants."""
    num_workers = min(len(os.sched_getaffinity(0)), len(contestants))
    rows: dict[str, dict[str, Any]] = {}
    with _progress(len(contestants)) as tell:
        if num_workers == 1:
            for contestant in contestants:
                rows[contestant.name] = tell(simulate_one(options, contestant))
        else:
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
                running = [pool.submit(simulate_one, options, contestant) for contestant in contestants]
                for done in as_completed(running):
                    row = tell(done.result())
                    rows[row["policy"]] = row
    return [rows[contestant.name] for contestant in contestants]


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    bar = Progress(
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("policies"),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
    )
    with bar:
        task = bar.add_task("simulating", total=total)

        def tell(row: dict[str, Any]) -> dict[str, Any]:
            bar.advance(task)
            return row

        yield tell


def _print(meta: dict[str, Any], rows: list[dict[str, Any]], output: Path) -> None:
    shown = ("tok/s", "x", "e2e mean s", "change", "tpot p50 ms", "kept", "pruned", "overlap")
    places = [[column.heading for column in report.COLUMNS].index(heading) for heading in shown]
    title = f"{meta['world']}: {meta['num_requests']} requests, {meta['arrivals']}"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for heading in shown:
        table.add_column(heading, justify="right", min_width=max(map(len, heading.split())))
    for row in rows:
        cells = report.cells(row)
        table.add_row(row["policy"], *(cells[place] for place in places))
    console = Console()
    console.print(table)
    best = report.best_static(rows)
    if best is not None:
        console.print(f"best static length: {best['policy']}")
    for line in meta["missing"]:
        console.print(f"not simulated: {line}")
    console.print("assumptions:")
    for line in meta["assumptions"]:
        console.print(f"- {line}", highlight=False)
    console.print(f"wrote {output / 'simulation.json'} and .md")
