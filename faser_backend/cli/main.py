"""The `faser` command. Each command is one function; what it does lives in the rooms, what measures in `lab/`.

Every error that a user can cause or mend ends as one line on stderr and exit status 1.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from faser_backend.cli.build import build
from faser_backend.cli.chat import chat
from faser_backend.cli.options import PanelCommand, SamplingOptions, parse_integers, print_steps, takes
from faser_backend.cli.serve import openai, reload, serve
from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import FaserError
from faser_backend.files import shown
from faser_backend.lab.commands import bench, replay, simulate, train_head
from faser_backend.serving.parameters import ServingOptions
from faser_backend.version import VERSION

COMMANDS = {
    "Run a model": ["generate", "chat", "serve", "openai", "reload"],
    "Build and measure engines": ["doctor", "build", "profile", "train-head"],
    "Compare policies": ["bench", "simulate", "replay"],
}


class _Commands(TyperGroup):
    """The commands; Ctrl-C ends any of them with one line and status 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            print(": ".join(["interrupted", *map(str, interrupt.args)]), file=sys.stderr)
            raise typer.Exit(130) from None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, names in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(200)) for name in names])


app = typer.Typer(
    cls=_Commands,
    rich_markup_mode=None,  # its tables cut names
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Speculative decoding behind NVIDIA Triton.",
)


@app.callback()
def _main(
    is_version: Annotated[bool, typer.Option("--version", help="Print the version and end.", is_eager=True)] = False,
) -> None:
    if is_version:
        print(f"faser {VERSION}")
        raise typer.Exit


@app.command(cls=PanelCommand)
@takes(engine=(EngineConfig, "max_num_seqs num_kv_blocks"))
def doctor(
    *,
    is_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    engine_dir: Annotated[Path | None, typer.Option(help="Print what this engine takes of memory.")] = None,
    gpu_gib: Annotated[float | None, typer.Option(help="With --engine-dir: of a GPU that is not here.")] = None,
    engine: EngineConfig,
) -> None:
    """Say what this machine can run, and why not. Status 1 where it cannot serve at all."""
    from faser_backend.cli.doctor import examine, memory_report, print_report

    if engine_dir is not None:
        print("\n".join(memory_report(engine_dir, gpu_gib=gpu_gib, config=engine)))
        return
    findings = examine()
    if is_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        print_report(findings)
    if any(finding.is_needed and not finding.is_ok for finding in findings):
        raise typer.Exit(1)


@app.command(cls=PanelCommand)
def profile(
    engine_dir: Annotated[Path, typer.Argument(help="Engine directory; profile.json is written into it.")],
    is_quick: Annotated[bool, typer.Option("--quick", help="Half a minute for the demo pair; larger errors.")] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Texts to calibrate on: JSON lines, or .txt.", show_default="the target's own"),
    ] = None,
    budget_s: Annotated[float | None, typer.Option(help="Approximate time limit.", show_default="no limit")] = None,
) -> None:
    """Measure the costs of this engine on this machine, and how often drafts are accepted; policies use both."""
    from faser_backend.profiling.profile import run_profile

    run_profile(engine_dir, is_quick=is_quick, prompts=prompts, budget_s=budget_s)


app.command(cls=PanelCommand)(build)
app.command(cls=PanelCommand)(chat)


@app.command(cls=PanelCommand)
@takes(
    serving=(ServingOptions, "engine_dir chat_template"),
    sampling=SamplingOptions,
    engine=(EngineConfig, "policy draft acceptance early_exit pipeline num_threads"),
)
def generate(
    *,
    prompt: Annotated[str | None, typer.Option(help="Text to complete.", show_default=False)] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids instead, e.g. 1,2,3.", show_default=False)] = None,
    is_chat: Annotated[bool, typer.Option("--chat", help="The prompt is a message; use the chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message before it.", show_default=False)] = None,
    messages: Annotated[
        Path | None, typer.Option(help='JSON file instead: [{"role": ..., "content": ...}].', show_default=False)
    ] = None,
    serving: ServingOptions,
    sampling: SamplingOptions,
    engine: EngineConfig,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    explain: Annotated[bool, typer.Option(help="Print to stderr what the policy weighed, and when.")] = False,
) -> None:
    """Complete one prompt without a server; prints the text as it comes, then speed and acceptance."""
    from faser_backend.api.one_shot import generate_once, read_prompt, report_line
    from faser_backend.api.params import SamplingParams
    from faser_backend.cli.explain import Explainer
    from faser_backend.serving.loading import shown_phases

    asked = read_prompt(
        prompt,
        None if prompt_ids is None else parse_integers("--prompt-ids", prompt_ids),
        is_chat=is_chat,
        system=system,
        messages_file=messages,
        chat_template=serving.chat_template,
    )
    params = SamplingParams(**sampling.model_dump(), include_stop_str_in_output=True)
    on_step = {"on_step": Explainer(partial(print, file=sys.stderr)).observe} if explain else {}
    with shown_phases(in_pipes=False) as phases:
        result = generate_once(
            asked,
            params,
            engine_dir=serving.engine_dir,
            on_text=(lambda text: None) if is_json else _print_text,
            on_loaded=phases.end,
            **on_step,
            chat_template=serving.chat_template,
            progress=print_steps(),
            **engine.model_dump(exclude_unset=True),
        )
    if is_json:
        print(json.dumps(result))
    else:
        print(f"\n{report_line(result)}")


for command in (serve, openai, reload, bench, replay, simulate, train_head):
    app.command(cls=PanelCommand)(command)


def main() -> None:
    """Entry point: turns errors into one line and a status."""
    if not {"serve", "openai"} & set(
        sys.argv[1:2]
    ):  # `faser generate | head` ends quietly; a server's client may leave
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        app()
    except FaserError as error:
        fail(str(error))
    except OSError as error:  # a full disk, a folder that nobody may write to
        where = "" if error.filename is None else f"{shown(os.fsdecode(error.filename))}: "
        fail(f"{where}{error.strerror or error}")
    except MemoryError as error:
        fail(f"out of memory: {error or 'no further details'}")


def fail(message: str) -> None:
    """Ends the command with one line."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)


def _print_text(text: str) -> None:
    print(text, end="", flush=True)


if __name__ == "__main__":
    main()
