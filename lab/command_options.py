"""The options of the commands that measure. cli/options.py declares those that other commands share."""

from __future__ import annotations

from pathlib import Path

from faser_backend.cli.options import CHAT, MAX_CONTEXT, OUTPUT, SEED, ProfileOptions, SamplingOptions
from faser_backend.core.config import DraftSource, EngineConfig, Option, OptionTable, option
from faser_backend.serving.parameters import ServingOptions

ENGINE, SAMPLING, PROFILE = EngineConfig.options(), SamplingOptions.options(), ProfileOptions.options()
TRACE = Option("Read requests from this CSV (TIMESTAMP,ContextTokens,GeneratedTokens).")
POLICY_LIST = Option("Compare these policies, separated by commas.", unset="a ladder of policies")
RATE = Option("Issue this many requests per second on average.", unset="as recorded")
REQUESTS = Option("Stop after this many requests.", unset="all")


class BenchOptions(OptionTable):
    """The options of `faser bench`. engine_dir None means the demo pair. draft applies to policies that choose none."""

    engine_dir: Path | None = option(None, ServingOptions.options()["engine_dir"])
    is_quick: bool = option(False, PROFILE["is_quick"])
    output: Path = option(Path("faser-bench"), OUTPUT)
    policies: str | None = option(None, POLICY_LIST)
    trace: Path | None = option(None, TRACE, unset="synthetic lengths")
    prompts: Path | None = option(None, PROFILE["prompts"], unset="the demo pair's")
    is_chat: bool = option(False, CHAT)
    max_prompt_tokens: int | None = option(
        None, "Leave out prompts of more tokens, template included.", unset="what fits the context"
    )
    seed: int = option(0, SEED, ge=0)
    budget_s: float | None = option(None, PROFILE["budget_s"])
    draft: DraftSource = option("auto", ENGINE["draft"])
    num_threads: int | None = option(None, ENGINE["num_threads"])


class ReplayOptions(OptionTable):
    """The options of `faser replay`. At most one of rate and scale may be given."""

    trace: Path = option(..., TRACE)
    url: str = option("127.0.0.1:8001", "Connect to Triton's gRPC port at HOST:PORT.")
    rate: float | None = option(None, RATE)
    scale: float | None = option(None, "Replay this many times as fast as recorded.", unset="1")
    requests: int | None = option(None, REQUESTS)
    max_concurrency: int | None = option(None, "Keep at most this many requests in flight.", unset="no limit")
    model: str = option("ensemble", "Call this text model of the server.")
    output: Path | None = option(None, "Write the results to this JSON file.")
    max_context: int = option(1024, MAX_CONTEXT)
    tokenizer: Path | None = option(None, "Measure prompts with this tokenizer.json.", unset="the served engine's")
    prompts: Path | None = option(None, PROFILE["prompts"], unset="the demo pair's")
    temperature: float = option(0.8, SAMPLING["temperature"], section="Options")
    seed: int = option(0, SEED, ge=0)


class SimulateOptions(OptionTable):
    """The options of `faser simulate`. profile names an engine directory, instead of hardware and pair."""

    trace: Path = option(..., TRACE)
    hardware: str | None = option(None, "Simulate this hardware, such as h100 or h100x2.")
    pair: str | None = option(None, "Simulate this pair of models, such as qwen3-32b/0.6b.")
    profile: Path | None = option(None, "Simulate this profiled engine directory instead.")
    policies: str | None = option(None, POLICY_LIST)
    requests: int | None = option(None, REQUESTS, unset="1000, or all")
    rate: float | None = option(None, RATE)
    loads: str | None = option(None, "Run at these shares of the capacity, as 0.5,0.9.")
    peak_trough: float | None = option(None, "Vary the rate by this peak-to-trough ratio.", unset="as recorded")
    lengths: str | None = option(None, "Scale mean prompt/output lengths to this, as 755/200.", unset="as recorded")
    acceptance: float | None = option(None, "Let draft and target agree at this share of positions.")
    spread: float | None = option(None, "Vary acceptance among requests by this standard deviation.")
    mix: str | None = option(None, "Give half of the requests each acceptance, as 0.9/0.6.")
    exit_auc: float | None = option(None, "Set how well exits predict rejection, as AUC.")
    max_num_seqs: int = option(256, ENGINE["max_num_seqs"], section="Options")
    max_prefill_tokens: int = option(2048, "Prefill at most this many prompt tokens per step.")
    seed: int = option(0, SEED, ge=0)
    output: Path = option(Path("faser-simulation"), OUTPUT)
