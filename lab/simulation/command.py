"""`faser simulate`: a trace through simulated engines, policy beside policy, with progress, one table and files."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np

from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import ConfigError, FaserError
from faser_backend.lab import traces
from faser_backend.lab.command_options import SimulateOptions
from faser_backend.lab.contestants import FIXED_REFERENCE, ORACLE, STATIC, Contestant, simulated_contestants
from faser_backend.lab.environment import commit
from faser_backend.lab.progress import progress_bar
from faser_backend.lab.simulation import worlds
from faser_backend.lab.simulation.engine import World, build_sim_engine, run_open_loop
from faser_backend.lab.tables import Column, check_output, markdown_table
from faser_backend.profiling.profile import table_console, terminal_table
from faser_backend.serving.processes import die_with_parent, terminable

AT_ONCE = 9e5  # requests per second
MOST_REQUESTS = 1000  # unless more are asked for
REPORT_BYTES = 1 << 20  # of both files, at most
MIDDLE = (25, 75)  # percentiles of answers between which a capacity is counted: neither start nor end
LEAST_HEADROOM = 0.01  # of the reference's time, below which a share of it means nothing
EXCLUSIVE = (("rate", "loads"), ("spread", "mix"), ("acceptance", "mix"), ("exit_auc", "profile"))
RANGES = {"acceptance": (0.0, 1.0), "exit_auc": (0.5, 1.0), "spread": (0.0, 0.5)}
COLUMNS = (
    Column("policy", "policy"), Column("tok/s", "tokens_per_s", "{:.0f}"), Column("x", "speedup", "{:.2f}"),
    Column("e2e mean s", "e2e_s_mean", "{:.2f}"), Column("change", "e2e_change", "{:+.0%}"),
    Column("of oracle's headroom", "headroom_share", "{:.0%}"), Column("ttft p50 ms", "ttft_ms_p50", "{:.0f}"),
    Column("tpot p50 ms", "tpot_ms_p50", "{:.1f}"), Column("kept", "mean_accepted", "{:.2f}"),
    Column("pruned", "pruned_share", "{:.1%}"), Column("overlap", "overlap_share", "{:.0%}"),
    Column("mean batch", "mean_batch_size", "{:.0f}"),
)  # fmt: skip
NOTES = (
    "x and change: throughput and mean end-to-end latency against `fixed:4`, the fixed length that stands for VSD. Of "
    "oracle's headroom: the share of the time that the oracle saves over `fixed:4` that a policy saves too. Kept: "
    "draft tokens per request and verification; pruned: of the draft rows that entered a verification; overlap: of the "
    "time of drafting and verifying, both ran."
)

Row = dict[str, Any]


def check(options: SimulateOptions) -> None:
    """Raises ConfigError for options that exclude each other or are out of range."""
    if options.profile is None and (options.hardware is None or options.pair is None):
        raise ConfigError("give either --hardware and --pair, or --profile ENGINE_DIR")
    if options.profile is not None and (options.hardware is not None or options.pair is not None):
        raise ConfigError("--profile: an engine directory is a machine and a pair; leave out --hardware and --pair")
    for one, other in EXCLUSIVE:
        if getattr(options, one) is not None and getattr(options, other) is not None:
            raise ConfigError(f"give at most one of --{one.replace('_', '-')} and --{other}")
    if options.requests is not None and options.requests < 1:
        raise ConfigError(f"--requests = {options.requests}: must be at least 1")
    for name, (low, high) in RANGES.items():
        value = getattr(options, name)
        if value is not None and not low < value < high:
            raise ConfigError(f"--{name.replace('_', '-')} = {value:g}: must lie in ({low:g}, {high:g})")


def make_trace(options: SimulateOptions) -> traces.Trace:
    """Raises ConfigError for a file that is no trace, or too short."""
    trace = traces.read_trace(options.trace, options.requests or MOST_REQUESTS, may_be_shorter=options.requests is None)
    if options.lengths is not None:
        means = _numbers("--lengths", options.lengths, "mean prompt and output tokens, e.g. 755/200", 1e6)
        trace = traces.with_mean_lengths(trace, *means)
    if options.peak_trough is not None:
        return traces.with_rate_curve(trace, options.rate or trace.rate, options.peak_trough, options.seed)
    return trace if options.rate is None else traces.scaled(trace, options.rate)


def make_world(options: SimulateOptions, trace: traces.Trace) -> tuple[World, traces.Trace]:
    """And the trace, with lengths that fit where a profiled engine's context is short. Raises ConfigError."""
    mean = options.acceptance or worlds.ACCEPTANCE
    if options.profile is not None:
        world = worlds.profile_world(options.profile, options.max_num_seqs, options.acceptance)
        trace = traces.fitted_to(trace, world.max_context)
    else:
        assert options.hardware is not None and options.pair is not None
        exit_auc = options.exit_auc or worlds.EXIT_AUC
        world = worlds.roofline_world(
            options.hardware, options.pair, max_context=trace.longest, acceptance=mean, exit_auc=exit_auc
        )
    if options.mix is not None:
        levels = _numbers("--mix", options.mix, "two acceptances in (0, 1), e.g. 0.9/0.6", 1.0 - 1e-9)
        words = f"half of them agree at {levels[0]:.0%} of positions, half at {levels[1]:.0%}"
        world = worlds.with_levels(world, levels, words)
    if options.spread is not None:
        words = f"normal around {mean:.0%} with standard deviation {options.spread:g}, cut to 2 to 98 %"
        world = worlds.with_levels(world, worlds.spread_levels(mean, options.spread), words)
    return world, trace


def _numbers(option: str, text: str, meaning: str, most: float) -> list[float]:
    """Numbers in (0, most], separated by commas, or two of them by a slash. Raises ConfigError."""
    is_pair = "/" in meaning
    try:
        numbers = [float(part) for part in text.split("/" if is_pair else ",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0.0 < number <= most for number in numbers) or (is_pair and len(numbers) != 2):
        raise ConfigError(f"{option} = {text!r}: must be {meaning}")
    return numbers


def run_simulate(options: SimulateOptions, *, command: str) -> None:
    """The command: progress on stderr, tables on stdout, simulation.json and .md into the output directory."""
    check(options)
    contestants, missing = simulated_contestants(options.policies)
    check_output(options.output, REPORT_BYTES)
    shares: list[float] = []
    if options.loads is not None:
        shares = _numbers("--loads", options.loads, "shares of a capacity in (0, 10], e.g. 0.5,0.7,0.9,1.2", 10.0)
    world, trace = make_world(options, make_trace(options))
    capacity: Row = {}
    loads = {"": options}  # by what the load is in words
    if shares:
        traces.scaled(trace, 1.0)  # raises an error here, not in a process
        capacity = find_capacity(options)
        rates = [share * capacity["requests_per_s"] for share in shares]
        names = [f"Load {share:g}, {rate:.3g} requests/s" for share, rate in zip(shares, rates, strict=True)]
        copies = [options.model_copy(update={"rate": rate, "loads": None}) for rate in rates]
        loads = dict(zip(names, copies, strict=True))
    jobs = [(loaded, contestant) for loaded in loads.values() for contestant in contestants]
    simulated = iter(simulate_all(jobs, "simulating"))
    tables = {load: compared([next(simulated) for _ in contestants], load) for load in loads}
    meta = {
        "world": world.name, "trace": options.trace.name, "arrivals": trace.description, "num_requests": len(trace),
        "mean_prompt_tokens": float(trace.num_prompt_tokens.mean()),
        "mean_output_tokens": float(trace.num_output_tokens.mean()),
        "max_num_seqs": options.max_num_seqs, "max_prefill_tokens": options.max_prefill_tokens,
        "num_kv_tokens": world.num_kv_tokens, "seed": options.seed, "commit": commit(), "command": command,
        "capacity": capacity, "assumptions": list(world.assumptions), "missing": missing,
    }  # fmt: skip
    rows = [row for table in tables.values() for row in table]
    (options.output / "simulation.json").write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    (options.output / "simulation.md").write_text(markdown(meta, tables))
    console = table_console()
    for load, table in tables.items():
        title = load or f"{world.name}: {len(trace)} request{'s' * (len(trace) > 1)}, {trace.description}"
        cells = [[column.show(row) for column in COLUMNS] for row in table]
        console.print(terminal_table(title, [column.heading for column in COLUMNS], cells))
    told = [f"not simulated: {each}" for each in missing]
    for line in [*told, "assumptions:", *(f"- {each}" for each in world.assumptions)]:
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"wrote {options.output / 'simulation.json'} and .md")


def find_capacity(options: SimulateOptions) -> Row:
    """Returns policy and requests per second of the best static length under saturation."""
    at_once = options.model_copy(update={"rate": AT_ONCE, "loads": None, "peak_trough": None})
    rows = simulate_all([(at_once, Contestant(name)) for name in STATIC], "capacity")
    best = max(rows, key=lambda row: row["middle_requests_per_s"])
    return {"policy": best["policy"], "requests_per_s": best["middle_requests_per_s"]}


def simulate_all(jobs: list[tuple[SimulateOptions, Contestant]], what: str) -> list[Row]:
    """Returns a row of each job, in order, from processes on all cores. Raises FaserError if one was killed.

    An error or an interrupt ends the processes in the middle of their work, and none outlives this one.
    """
    num_workers = min(len(os.sched_getaffinity(0)), len(jobs))
    with terminable(), progress_bar() as bar:
        if num_workers == 1:
            return list(bar.track(map(simulate_one, jobs), total=len(jobs), description=what))
        context, others = multiprocessing.get_context("spawn"), set(multiprocessing.active_children())
        with ProcessPoolExecutor(num_workers, context, _follow_parent, (os.getpid(),)) as pool:
            try:
                return list(bar.track(pool.map(simulate_one, jobs), total=len(jobs), description=what))
            except BrokenProcessPool:
                raise FaserError("a process that worked on this was killed; is there enough memory?") from None
            except BaseException:
                for worker in set(multiprocessing.active_children()) - others:  # the pool would wait for them
                    worker.kill()
                raise


def _follow_parent(pid: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent ends its workers
    die_with_parent(signal.SIGKILL)
    if os.getppid() != pid:  # it was quicker
        os._exit(1)


def simulate_one(job: tuple[SimulateOptions, Contestant]) -> Row:
    """Simulates one job and returns its row. A worker process may run it."""
    options, contestant = job
    world, trace = make_world(options, make_trace(options))
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
    # Requests answered per second between the first quarter of the answers and the last.
    ends = [answer.response_s[-1] for answer in outcome.answers]
    first, last = np.percentile(ends, MIDDLE)
    middle = (MIDDLE[1] - MIDDLE[0]) / 100 * len(ends) / (last - first) if last > first else len(ends) / outcome.seconds
    return {"policy": contestant.name, **outcome.summary(), "middle_requests_per_s": float(middle)}


def compared(rows: list[Row], load: str) -> list[Row]:
    """Rows of one load with what tables show beside the plain figures; ratios only where the reference took part."""
    by_name = {row["policy"]: row for row in rows}
    reference, oracle = by_name.get(FIXED_REFERENCE), by_name.get(ORACLE)
    for row in rows:
        if load:
            row["load"] = load
        row["e2e_s_mean"] = row["e2e_ms_mean"] / 1e3
        if reference is not None:
            row["speedup"] = row["tokens_per_s"] / reference["tokens_per_s"]
            row["e2e_change"] = row["e2e_ms_mean"] / reference["e2e_ms_mean"] - 1.0
            headroom = 0.0 if oracle is None else reference["e2e_ms_mean"] - oracle["e2e_ms_mean"]
            if headroom > LEAST_HEADROOM * reference["e2e_ms_mean"]:
                row["headroom_share"] = (reference["e2e_ms_mean"] - row["e2e_ms_mean"]) / headroom
    return rows


def markdown(meta: Row, tables: dict[str, list[Row]]) -> str:
    """tables: rows as `compared` gives them, by load."""
    lines = [
        f"# Simulation: {meta['world']}",
        "",
        f"{meta['num_requests']} request{'s' * (meta['num_requests'] > 1)} of {meta['trace']}: {meta['arrivals']}. "
        f"Seed {meta['seed']}, commit {meta['commit']}. Remade by `{meta['command']}`.",
        f"Prompts of {meta['mean_prompt_tokens']:.0f} and outputs of {meta['mean_output_tokens']:.0f} tokens on "
        f"average. Up to {meta['max_num_seqs']} requests at once, {meta['max_prefill_tokens']} prompt tokens per step.",
    ]
    if meta["capacity"]:
        lines.append(
            f"Loads are shares of {meta['capacity']['requests_per_s']:.2f} requests/s, which "
            f"`{meta['capacity']['policy']}` answers when all of them wait, more than any other fixed length."
        )
    for load, table in tables.items():
        lines += ["", *([f"## {load}", ""] if load else []), *markdown_table(COLUMNS, table)]
    lines += ["", NOTES, "", "## Assumptions", "", *(f"- {line}" for line in meta["assumptions"])]
    lines += [f"- Not simulated: {line}" for line in meta["missing"]]
    return "\n".join(lines) + "\n"
