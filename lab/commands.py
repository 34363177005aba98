"""The commands of `faser` that measure and train. Each imports its implementation when it is called."""

from __future__ import annotations

import importlib.util
import shlex
import sys

import typer

from faser_backend.cli.options import takes
from faser_backend.core.errors import ConfigError
from faser_backend.lab.command_options import BenchOptions, ReplayOptions, SimulateOptions
from faser_backend.lab.train_head.options import HeadOptions
from faser_backend.serving.parameters import RunOptions


@takes(run=RunOptions, options=BenchOptions)
def bench(*, run: RunOptions, options: BenchOptions) -> None:
    """Compare policies under four loads.

    Write JSON, an HTML report and a timeline.
    """
    from faser_backend.lab.bench.command import run_bench
    from faser_backend.lab.contestants import Sizing
    from faser_backend.serving.model_source import find_engine

    options = options.model_copy(update=find_engine(run))
    run_bench(options, Sizing.quick() if options.is_quick else Sizing.full(), command=_command_line())


@takes(options=SimulateOptions)
def simulate(*, options: SimulateOptions) -> None:
    """Simulate policies over a trace in virtual time."""
    from faser_backend.lab.simulation.command import run_simulate

    run_simulate(options, command=_command_line())


@takes(options=ReplayOptions)
def replay(*, options: ReplayOptions) -> None:
    """Send a trace's requests to a running server.

    Print latencies and errors.
    """
    from faser_backend.lab.bench.replay import run_replay

    raise typer.Exit(run_replay(options))


@takes(options=HeadOptions)
def train_head(*, options: HeadOptions) -> None:
    """Train an EAGLE-3 head or block drafter for a target.

    Learn from conversations that the target writes itself.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("train-head needs torch: pip install 'faser-backend[train]'")
    from faser_backend.lab.train_head.run import save_trained, train, write

    options.check_use()
    stages = {"write": write, "train": train, "save": save_trained}
    for stage in options.stage or stages:
        stages[stage](options)


def _command_line() -> str:
    return shlex.join(["faser", *sys.argv[1:]])
