"""Options of the commands that measure: name, type, default and help of each, declared once. Knows nothing of the
work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from faser_backend.core.config import Option, OptionTable


class BenchOptions(OptionTable):
    """engine_dir None: the demo pair's. draft: of contestants that do not say themselves."""

    is_quick: Annotated[bool, Option("Take two minutes for the demo pair.", flags="--quick")] = False
    output: Annotated[Path, Option("Directory to write into.")] = Path("faser-bench")
    policies: Annotated[str | None, Option("Contestants, a,b,...", shown_default="the ladder")] = None
    trace: Annotated[Path | None, Option("CSV of request lengths.", shown_default="synthetic")] = None
    prompts: Annotated[
        Path | None,
        Option(
            'JSON lines as of Spec-Bench, or with "prompt" or "text" and perhaps "category"; .txt: plain lines.',
            shown_default="the demo's",
        ),
    ] = None
    is_chat: Annotated[
        bool, Option("Prompts are messages for the engines' chat template; the model ends answers.", flags="--chat")
    ] = False
    max_prompt_tokens: Annotated[
        int | None,
        Option("Longer prompts, template included, are left out and counted.", shown_default="as the context holds"),
    ] = None
    seed: Annotated[int, Option("Seed of prompts, arrivals and sampling.")] = 0
    budget_s: Annotated[
        float | None, Option("Approximate time limit: answers get shorter.", shown_default="no limit")
    ] = None
    # On the command line they are those of an engine:
    engine_dir: Path | None = None
    draft: str = "auto"
    num_threads: int | None = None


class ReplayOptions(OptionTable):
    """At most one of rate and scale."""

    trace: Annotated[Path, Option("CSV: TIMESTAMP,ContextTokens,GeneratedTokens.")]
    url: Annotated[str, Option("HOST:PORT, gRPC.")] = "127.0.0.1:8001"
    rate: Annotated[float | None, Option("Send R requests/s on average.", shown_default="as recorded")] = None
    scale: Annotated[float | None, Option("Speed up recorded arrivals.", shown_default="1")] = None
    requests: Annotated[int | None, Option("Stop after this many requests.", shown_default="all")] = None
    max_concurrency: Annotated[int | None, Option("Limit requests in flight.", shown_default="no limit")] = None
    model: Annotated[str, Option("A text model of the server.")] = "ensemble"
    output: Annotated[Path | None, Option("JSON file to write.")] = None
    max_context: Annotated[int, Option("Context length of the server.")] = 1024
    tokenizer: Annotated[Path | None, Option("tokenizer.json.", shown_default="the demo's")] = None
    prompts: Annotated[Path | None, Option("JSON lines.", shown_default="the demo's")] = None
    temperature: Annotated[float, Option("0 decodes greedily.")] = 0.8
    seed: Annotated[int, Option("Request i samples with seed + i.")] = 0


class SimulateOptions(OptionTable):
    """profile: an engine directory instead of hardware and pair."""

    trace: Annotated[Path, Option("CSV: TIMESTAMP,ContextTokens,GeneratedTokens.")]
    hardware: Annotated[str | None, Option("h100, h100x2, ...")] = None
    pair: Annotated[str | None, Option("qwen3-32b/0.6b, ...")] = None
    profile: Annotated[Path | None, Option("Use a profiled engine instead.")] = None
    policies: Annotated[str | None, Option("Contestants, a,b,...", shown_default="the ladder")] = None
    requests: Annotated[int | None, Option("From the start of the trace.", shown_default="1000, or all")] = None
    rate: Annotated[float | None, Option("Send R requests/s on average.", shown_default="the trace's")] = None
    loads: Annotated[str | None, Option("Shares of the best static length's capacity, 0.5,0.9,1.2.")] = None
    peak_trough: Annotated[float | None, Option("Rate curve.", shown_default="the trace's arrivals")] = None
    arrivals: Annotated[Path | None, Option("Trace to arrive as.")] = None
    lengths: Annotated[str | None, Option("Mean tokens, e.g. 755/200.", shown_default="the trace's")] = None
    acceptance: Annotated[float | None, Option("Share of positions at which the pair agrees.")] = None
    spread: Annotated[float | None, Option("Standard deviation of requests' acceptance.")] = None
    mix: Annotated[str | None, Option("Half of requests at either, 0.9/0.6.")] = None
    exit_auc: Annotated[float | None, Option("Separability at the exit.")] = None
    draft_call_ms: Annotated[float | None, Option("Minimum time of a draft call.")] = None
    host_step_ms: Annotated[float | None, Option("Host time of a step.")] = None
    max_num_seqs: Annotated[int, Option("Requests that decode together.")] = 256
    max_prefill_tokens: Annotated[int, Option("Prompt tokens per step.")] = 2048
    seed: Annotated[int, Option("Seed of arrivals and acceptance.")] = 0
    output: Annotated[Path, Option("Directory to write into.")] = Path("faser-simulation")
