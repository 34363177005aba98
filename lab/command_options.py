"""Options of the commands that measure, each declared once: a field is an option of the command line and
what the work reads. Knows nothing of the work."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from typer import Option

from faser_backend.cli_options import Draft, Drafting, EngineDir, Threads

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """engine_dir None: the demo pair's. draft: of contestants that do not say themselves."""

    is_quick: Annotated[bool, Option("--quick", help="Two minutes for the demo pair; larger spreads.")] = False
    output: Annotated[Path, Option(help="Directory to write into.")] = Path("faser-bench")
    engine_dir: EngineDir = None
    policies: Annotated[str | None, Option(help="Contestants, a,b,...", show_default="the ladder")] = None
    draft: Draft = Drafting.AUTO
    trace: Annotated[Path | None, Option(help="CSV of request lengths.", show_default="synthetic")] = None
    prompts: Annotated[
        Path | None,
        Option(
            help='JSON lines as of Spec-Bench, or with "prompt" or "text" and perhaps "category"; .txt: plain lines.',
            show_default="the demo's",
        ),
    ] = None
    is_chat: Annotated[
        bool, Option("--chat", help="Prompts are messages for the engines' chat template; the model ends answers.")
    ] = False
    max_prompt_tokens: Annotated[
        int | None,
        Option(
            help="Longer prompts, template included, are left out and counted.", show_default="as the context holds"
        ),
    ] = None
    seed: Annotated[int, Option(help="Of prompts, arrivals and sampling.")] = 0
    num_threads: Threads = None
    budget_s: Annotated[
        float | None, Option(help="Seconds that it may take, about: answers get shorter.", show_default="no limit")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """At most one of rate and scale."""

    trace: Annotated[Path, Option(help="CSV: TIMESTAMP,ContextTokens,GeneratedTokens.")]
    url: Annotated[str, Option(help="HOST:PORT, gRPC.")] = "127.0.0.1:8001"
    rate: Annotated[float | None, Option(help="Mean requests/s.", show_default="as recorded")] = None
    scale: Annotated[float | None, Option(help="Times as fast as recorded.", show_default="1")] = None
    requests: Annotated[int | None, Option(help="Stop after so many.", show_default="all")] = None
    max_concurrency: Annotated[int | None, Option(help="Most in flight.", show_default="no limit")] = None
    model: Annotated[str, Option(help="A text model of the server.")] = "ensemble"
    output: Annotated[Path | None, Option(help="JSON file to write.", show_default=False)] = None
    max_context: Annotated[int, Option(help="Prompt + output tokens that the server takes.")] = 1024
    tokenizer: Annotated[Path | None, Option(help="tokenizer.json.", show_default="the demo's")] = None
    prompts: Annotated[Path | None, Option(help="JSON lines.", show_default="the demo's")] = None
    temperature: Annotated[float, Option(help="0 decodes greedily.")] = 0.8
    seed: Annotated[int, Option(help="Request i draws with seed + i.")] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """profile: an engine directory instead of hardware and pair."""

    trace: Annotated[Path, Option(help="CSV: TIMESTAMP,ContextTokens,GeneratedTokens.")]
    hardware: Annotated[str | None, Option(help="h100, h100x2, ...", show_default=False)] = None
    pair: Annotated[str | None, Option(help="qwen3-32b/0.6b, ...", show_default=False)] = None
    profile: Annotated[Path | None, Option(help="A profiled engine instead.", show_default=False)] = None
    policies: Annotated[str | None, Option(help="Contestants, a,b,...", show_default="the ladder")] = None
    requests: Annotated[int | None, Option(help="From the start of the trace.", show_default="1000, or all")] = None
    rate: Annotated[float | None, Option(help="Mean requests/s.", show_default="the trace's")] = None
    loads: Annotated[
        str | None, Option(help="Shares of the best static length's capacity, 0.5,0.9,1.2.", show_default=False)
    ] = None
    peak_trough: Annotated[float | None, Option(help="Rate curve.", show_default="the trace's arrivals")] = None
    arrivals: Annotated[Path | None, Option(help="Trace to arrive as.", show_default=False)] = None
    lengths: Annotated[str | None, Option(help="Mean tokens, e.g. 755/200.", show_default="the trace's")] = None
    acceptance: Annotated[float | None, Option(help="Positions at which the pair agrees.")] = None
    spread: Annotated[float | None, Option(help="Of requests' acceptance: deviation.", show_default=False)] = None
    mix: Annotated[str | None, Option(help="Half of requests at either, 0.9/0.6.", show_default=False)] = None
    exit_auc: Annotated[float | None, Option(help="Separability at the exit.", show_default=False)] = None
    draft_call_ms: Annotated[float | None, Option(help="Least time of a draft call.", show_default=False)] = None
    host_step_ms: Annotated[float | None, Option(help="Host's time of a step.", show_default=False)] = None
    max_num_seqs: Annotated[int, Option(help="Requests that decode side by side.")] = 256
    max_prefill_tokens: Annotated[int, Option(help="Prompt tokens per step.")] = 2048
    seed: Annotated[int, Option(help="Of arrivals and acceptance.")] = 0
    output: Annotated[Path, Option(help="Directory to write into.")] = Path("faser-simulation")


def command_of(name: str, options: type[T], text: str, run: Callable[[T], None]) -> Callable[..., None]:
    """A command for typer whose options are the annotated fields of a dataclass. text: its help."""
    hints = get_type_hints(options, include_extras=True)
    declared = [each for each in fields(options) if hasattr(hints[each.name], "__metadata__")]  # type: ignore[arg-type]

    def command(**values: Any) -> None:
        run(options(**values))

    command.__name__, command.__doc__ = name, text
    command.__annotations__ = {each.name: hints[each.name] for each in declared}
    command.__signature__ = inspect.Signature([  # type: ignore[attr-defined]
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if each.default is MISSING else each.default,
            annotation=hints[each.name],
        )
        for each in declared
    ])  # fmt: skip
    return command
