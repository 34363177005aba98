"""The commands of `faser` that measure: profile, bench, replay, simulate. Signatures alone; each imports its work."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from faser_backend.cli_options import takes
from faser_backend.config import EngineConfig
from faser_backend.serving.parameters import ServingOptions


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


@takes(serving=(ServingOptions, "engine_dir"), engine=(EngineConfig, "draft num_threads"))
def bench(
    *,
    is_quick: Annotated[bool, typer.Option("--quick", help="Two minutes for the demo pair; larger spreads.")] = False,
    output: Annotated[Path, typer.Option(help="Directory to write into.")] = Path("faser-bench"),
    serving: ServingOptions,
    policies: Annotated[str | None, typer.Option(help="Contestants, a,b,...", show_default="the ladder")] = None,
    trace: Annotated[Path | None, typer.Option(help="CSV of request lengths.", show_default="synthetic")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='JSON lines as of Spec-Bench, or with "prompt" or "text" and perhaps "category"; .txt: plain lines.',
            show_default="the demo's",
        ),
    ] = None,
    is_chat: Annotated[
        bool,
        typer.Option("--chat", help="Prompts are messages for the engines' chat template; the model ends answers."),
    ] = False,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            help="Longer prompts, template included, are left out and counted.", show_default="as the context holds"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts, arrivals and sampling.")] = 0,
    engine: EngineConfig,
    budget_s: Annotated[
        float | None,
        typer.Option(help="Seconds that it may take, about: answers get shorter.", show_default="no limit"),
    ] = None,
) -> None:
    """Measure every policy side by side under four loads; writes JSON, an HTML report and a timeline."""
    from lab.bench.command import BenchOptions, run_bench
    from lab.contestants import Sizing

    options = BenchOptions(
        output, serving.engine_dir, policies, trace, prompts, seed, engine.num_threads, engine.draft, is_chat,
        max_prompt_tokens, budget_s,
    )  # fmt: skip
    run_bench(options, Sizing.quick() if is_quick else Sizing.full(), command=shlex.join(["faser", *sys.argv[1:]]))


def simulate(
    *,
    trace: Annotated[Path, typer.Option(help="CSV: TIMESTAMP,ContextTokens,GeneratedTokens.")],
    hardware: Annotated[str | None, typer.Option(help="h100, h100x2, ...", show_default=False)] = None,
    pair: Annotated[str | None, typer.Option(help="qwen3-32b/0.6b, ...", show_default=False)] = None,
    profile: Annotated[Path | None, typer.Option(help="A profiled engine instead.", show_default=False)] = None,
    policies: Annotated[str | None, typer.Option(help="Contestants, a,b,...", show_default="the ladder")] = None,
    requests: Annotated[
        int | None, typer.Option(help="From the start of the trace.", show_default="1000, or all")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Mean requests/s.", show_default="the trace's")] = None,
    loads: Annotated[
        str | None, typer.Option(help="Shares of the best static length's capacity, 0.5,0.9,1.2.", show_default=False)
    ] = None,
    peak_trough: Annotated[float | None, typer.Option(help="Rate curve.", show_default="the trace's arrivals")] = None,
    arrivals: Annotated[Path | None, typer.Option(help="Trace to arrive as.", show_default=False)] = None,
    lengths: Annotated[str | None, typer.Option(help="Mean tokens, e.g. 755/200.", show_default="the trace's")] = None,
    acceptance: Annotated[float | None, typer.Option(help="Positions at which the pair agrees.")] = None,
    spread: Annotated[
        float | None, typer.Option(help="Of requests' acceptance: deviation.", show_default=False)
    ] = None,
    mix: Annotated[str | None, typer.Option(help="Half of requests at either, 0.9/0.6.", show_default=False)] = None,
    exit_auc: Annotated[float | None, typer.Option(help="Separability at the exit.", show_default=False)] = None,
    draft_call_ms: Annotated[float | None, typer.Option(help="Least time of a draft call.", show_default=False)] = None,
    host_step_ms: Annotated[float | None, typer.Option(help="Host's time of a step.", show_default=False)] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that decode side by side.")] = 256,
    max_prefill_tokens: Annotated[int, typer.Option(help="Prompt tokens per step.")] = 2048,
    seed: Annotated[int, typer.Option(help="Of arrivals and acceptance.")] = 0,
    output: Annotated[Path, typer.Option(help="Directory to write into.")] = Path("faser-simulation"),
) -> None:
    """Run scheduler, policies and pipeline in virtual time, over a request trace on a named GPU and pair."""
    from lab.simulation.command import SimulateOptions, run_simulate

    options = SimulateOptions(
        trace=trace, hardware=hardware, pair=pair, profile=profile, policies=policies, num_requests=requests, rate=rate,
        loads=loads, peak_trough=peak_trough, arrivals=arrivals, lengths=lengths, acceptance=acceptance, spread=spread,
        mix=mix, exit_auc=exit_auc, draft_call_ms=draft_call_ms, host_step_ms=host_step_ms, max_num_seqs=max_num_seqs,
        max_prefill_tokens=max_prefill_tokens, seed=seed, output=output,
    )  # fmt: skip
    run_simulate(options, command=shlex.join(["faser", *sys.argv[1:]]))


def replay(
    *,
    trace: Annotated[Path, typer.Option(help="CSV: TIMESTAMP,ContextTokens,GeneratedTokens.")],
    url: Annotated[str, typer.Option(help="HOST:PORT, gRPC.")] = "127.0.0.1:8001",
    rate: Annotated[float | None, typer.Option(help="Mean requests/s.", show_default="as recorded")] = None,
    scale: Annotated[float | None, typer.Option(help="Times as fast as recorded.", show_default="1")] = None,
    requests: Annotated[int | None, typer.Option(help="Stop after so many.", show_default="all")] = None,
    max_concurrency: Annotated[int | None, typer.Option(help="Most in flight.", show_default="no limit")] = None,
    model: Annotated[str, typer.Option(help="A text model of the server.")] = "ensemble",
    output: Annotated[Path | None, typer.Option(help="JSON file to write.", show_default=False)] = None,
    max_context: Annotated[int, typer.Option(help="Prompt + output tokens that the server takes.")] = 1024,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json.", show_default="the demo's")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines.", show_default="the demo's")] = None,
    temperature: Annotated[float, typer.Option(help="0 decodes greedily.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Request i draws with seed + i.")] = 0,
) -> None:
    """Send a trace's requests to a running server when they are due; print latencies and errors."""
    from lab.bench.replay import ReplayOptions, run_replay

    options = ReplayOptions(
        trace, url, rate, scale, requests, max_concurrency, model, output, max_context, tokenizer, prompts,
        temperature, seed,
    )  # fmt: skip
    raise typer.Exit(run_replay(options))
