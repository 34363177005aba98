"""The commands of `faser` that measure and train. Each imports its work when it is called."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from faser_backend.core.errors import ConfigError
from lab.command_options import BenchOptions, ReplayOptions, SimulateOptions, command_of
from lab.train_head.options import HeadOptions, Stage


def profile(
    engine_dir: Annotated[Path, typer.Argument(help="Engine directory; profile.json is written into it.")],
    is_quick: Annotated[bool, typer.Option("--quick", help="Half a minute for the demo pair; larger errors.")] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='Texts to calibrate on: JSON lines with "prompt" or "text"; .txt: lines.',
            show_default="the target's own",
        ),
    ] = None,
    budget_s: Annotated[
        float | None,
        typer.Option(help="Seconds that it may take, about: less is measured.", show_default="no limit"),
    ] = None,
) -> None:
    """Measure what model calls cost on this machine, and how sure the draft may be, for policies that decide by it."""
    from lab.profiling.profile import run_profile

    run_profile(engine_dir, is_quick=is_quick, prompts=prompts, budget_s=budget_s)


def _command_line() -> str:
    return shlex.join(["faser", *sys.argv[1:]])


def _bench(options: BenchOptions) -> None:
    from lab.bench.command import run_bench
    from lab.contestants import Sizing

    run_bench(options, Sizing.quick() if options.is_quick else Sizing.full(), command=_command_line())


def _simulate(options: SimulateOptions) -> None:
    from lab.simulation.command import run_simulate

    run_simulate(options, command=_command_line())


def _replay(options: ReplayOptions) -> None:
    from lab.bench.replay import run_replay

    raise typer.Exit(run_replay(options))


def _train_head(options: HeadOptions) -> None:
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("train-head needs torch: pip install 'faser-backend[train]'")
    from lab.train_head.run import save_trained, train, write

    stages = {Stage.WRITE: write, Stage.TRAIN: train, Stage.SAVE: save_trained}
    for stage in options.stage or stages:
        stages[stage](options)


bench = command_of(
    "bench",
    BenchOptions,
    "Measure every policy side by side under four loads; writes JSON, an HTML report and a timeline.",
    _bench,
)
simulate = command_of(
    "simulate",
    SimulateOptions,
    "Run scheduler, policies and pipeline in virtual time, over a request trace on a named GPU and pair.",
    _simulate,
)
replay = command_of(
    "replay",
    ReplayOptions,
    "Send a trace's requests to a running server when they are due; print latencies and errors.",
    _replay,
)
train_head = command_of(
    "train_head",
    HeadOptions,
    "Train an EAGLE-3 head for a target, on conversations that the target writes itself.",
    _train_head,
)
