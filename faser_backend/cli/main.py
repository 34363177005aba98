"""The `faser` command line: each command is one function, which calls the rooms or the laboratory.

An error that a user can cause or fix is one line on stderr and exit status 1.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from faser_backend.cli.build import build
from faser_backend.cli.generate import chat, generate
from faser_backend.cli.options import DoctorOptions, PanelCommand, ProfileOptions, takes
from faser_backend.cli.serve import openai, reload, serve
from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import FaserError
from faser_backend.files import shown
from faser_backend.lab.commands import bench, replay, simulate, train_head
from faser_backend.version import VERSION


class _Commands(TyperGroup):
    """The commands. Ctrl-C ends any of them with one line and status 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            print(": ".join(["interrupted", *map(str, interrupt.args)]), file=sys.stderr)
            raise typer.Exit(130) from None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, commands in COMMANDS.items():
            names = [command.__name__.replace("_", "-") for command in commands]
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(200)) for name in names])


app = typer.Typer(
    cls=_Commands,
    rich_markup_mode=None,  # its tables cut names
    no_args_is_help=True,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    help="Serve language models with speculative decoding, behind NVIDIA Triton.",
)


@app.callback()
def _main(
    is_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if is_version:
        print(f"faser {VERSION}")
        raise typer.Exit


@takes(options=DoctorOptions, engine=(EngineConfig, "max_num_seqs num_kv_blocks"))
def doctor(*, options: DoctorOptions, engine: EngineConfig) -> None:
    """Report what this machine can run, and why not.

    With --engine-dir, report how much memory its engines need. Exit with status 1 if this machine cannot serve.
    """
    from faser_backend.cli.doctor import examine, memory_report, print_report

    if options.engine_dir is not None:
        lines = memory_report(options.engine_dir, gpu_gib=options.gpu_gib, config=engine)
        print(json.dumps(lines, indent=1) if options.is_json else "\n".join(lines))
        return
    findings = examine()
    if options.is_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        print_report(findings)
    if any(finding.is_needed and not finding.is_ok for finding in findings):
        raise typer.Exit(1)


@takes(options=ProfileOptions)
def profile(
    engine_dir: Annotated[Path, typer.Argument(help="Measure these engines and write profile.json beside them.")],
    *,
    options: ProfileOptions,
) -> None:
    """Measure the costs of an engine on this machine.

    Measure also how often drafts are accepted; policies use both.
    """
    from faser_backend.profiling.profile import run_profile

    run_profile(engine_dir, is_quick=options.is_quick, prompts=options.prompts, budget_s=options.budget_s)


def cache(
    action: Annotated[Literal["list", "remove"], typer.Argument(help="List all, or remove some.")],
    names: Annotated[list[str] | None, typer.Argument(help="Remove these engines, or all.")] = None,
) -> None:
    """List or remove engines that were built by name."""
    from faser_backend.serving.model_source import list_engines, remove_engines

    if action == "remove":
        remove_engines(names or [])
    for name, words in list_engines().items():
        print(f"{name}  {words}")


COMMANDS = {
    "Run a model": (generate, chat, serve, openai, reload, cache),
    "Build and measure engines": (doctor, build, profile, train_head),
    "Compare policies": (bench, simulate, replay),
}
for _command in chain.from_iterable(COMMANDS.values()):
    app.command(cls=PanelCommand)(_command)


def main() -> None:
    """Runs the command line. Prints an error as one line and exits with status 1."""
    if sys.argv[1:2] != ["openai"]:  # which raises the signal again when it has ended by it
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing half built is left
    # `faser generate | head` ends quietly; a server outlives its clients.
    if not {"serve", "openai"} & set(sys.argv[1:2]):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        app()
    except FaserError as error:
        fail(str(error))
    except OSError as error:  # a full disk, a folder without write permission
        where = "" if error.filename is None else f"{shown(os.fsdecode(error.filename))}: "
        fail(f"{where}{error.strerror or error}")
    except MemoryError as error:
        fail(f"out of memory: {error or 'no further details'}")


def fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)
