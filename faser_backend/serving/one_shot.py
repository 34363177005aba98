"""`faser generate`: one prompt through the same engine that serves, without a server."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from faser_backend.config import DEFAULT_POLICY, EngineConfig
from faser_backend.core.errors import FaserError, RequestError
from faser_backend.core.record import StepRecord
from faser_backend.core.request import Request, RequestOutput, SamplingParams
from faser_backend.manifest import EngineManifest
from faser_backend.pipeline.engine import Engine
from faser_backend.serving.compose import build_engine
from faser_backend.serving.demo_engine import demo_engine_dir
from faser_backend.serving.profile_store import PROFILE_FILE
from faser_backend.serving.prompts import PromptFormat
from faser_backend.serving.text_stream import TextStream
from faser_backend.serving.tokenizer import TextTokenizer

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class OneShotOptions:
    """Exactly one of prompt and prompt_ids; with is_chat, of prompt and messages_file. seed None draws a fresh one."""

    engine_dir: Path | None
    prompt: str | None
    prompt_ids: tuple[int, ...] | None
    is_chat: bool = False
    system: str | None = None  # the message before the prompt
    messages_file: Path | None = None
    chat_template_file: Path | None = None  # instead of the checkpoint's
    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_strings: tuple[str, ...] = ()
    policy: str = DEFAULT_POLICY
    draft: str = "auto"
    acceptance: str = "match"
    early_exit: str = "auto"
    pipeline: str = "auto"
    num_threads: int | None = None


def generate_once(
    options: OneShotOptions,
    *,
    on_text: Callable[[str], None],
    progress: Progress | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
) -> dict[str, Any]:
    """Streams text to `on_text`; returns token_ids, text, num_drafted, num_accepted, both by
    source as well (accepted tokens behind the end of the answer included), num_pruned, num_rows_verified (anchors
    included), kept_per_verification (draft tokens), tokens_per_s, finish_reason, seed, and in words why_no_drafts and
    why_no_pruning, empty where there were some or could have been. Raises FaserError.
    """
    _check_prompt_options(options)
    engine_dir = options.engine_dir or demo_engine_dir(progress)
    manifest = EngineManifest.load(engine_dir)
    prompts = PromptFormat.load(engine_dir, manifest, chat_template_file=options.chat_template_file)
    tokenizer = TextTokenizer.from_file(engine_dir / manifest.tokenizer.name, prompts)
    try:
        request = _make_request(options, manifest, tokenizer)
    finally:
        tokenizer.close()
    config = EngineConfig.from_options(
        policy=options.policy,
        draft=options.draft,
        acceptance=options.acceptance,
        early_exit=options.early_exit,
        pipeline=options.pipeline,
        max_num_seqs=1,
        num_threads=options.num_threads,
    )
    engine = build_engine(engine_dir, config)
    num_rows: list[int] = []
    engine.stepper.observers.append(lambda record: num_rows.append(int(record.frontier.num_rows.sum())))
    if on_step is not None:
        engine.stepper.observers.append(on_step)
    try:
        stream = TextStream(tokenizer, context_ids=request.prompt_ids.tolist(), stop_strings=options.stop_strings)
        result = _run(engine, request, stream, on_text) | {"num_rows_verified": sum(num_rows)}
    finally:
        engine.close()
    has_profile = (engine_dir / PROFILE_FILE).is_file()
    why_no_drafts = "" if result["num_drafted"] else _why_no_drafts(options, has_profile=has_profile)
    why_no_pruning = "" if result["num_pruned"] else _why_no_pruning(manifest, options, has_profile=has_profile)
    return result | {"why_no_drafts": why_no_drafts, "why_no_pruning": why_no_pruning}


def report_line(result: dict[str, Any]) -> str:
    """What a person reads after the text."""
    drafted, accepted = result["num_drafted"], result["num_accepted"]
    share = f" ({accepted / drafted:.0%})" if drafted else ""
    speculation = result["why_no_drafts"] or f"accepted {accepted} of {drafted} drafted tokens{share}"
    pruning = result["why_no_pruning"] or f"{result['num_pruned']} rows pruned"
    return (
        f"== {len(result['token_ids'])} tokens, {result['tokens_per_s']:.3g} tokens/s; "
        f"{speculation}; {pruning}; ended by {result['finish_reason']}"
    )


def _why_no_drafts(options: OneShotOptions, *, has_profile: bool) -> str:
    """Of an answer for which nothing was drafted."""
    if options.policy == "none":
        return "policy none drafts nothing"
    if not has_profile:
        return "nothing drafted: without a profile the policy has only guesses of what it would bring"
    return "nothing drafted: it did not promise to pay"


def _why_no_pruning(manifest: EngineManifest, options: OneShotOptions, *, has_profile: bool) -> str:
    """Empty where rows could have been pruned."""
    if options.policy == "none" or options.early_exit == "off" or not manifest.exit_layers:
        return "no exits, so no rows pruned"
    return "" if has_profile else "exits are not calibrated without a profile, so no rows pruned"


def _check_prompt_options(options: OneShotOptions) -> None:
    """Raises RequestError where options contradict each other."""
    if not options.is_chat:
        for name in ("system", "messages_file", "chat_template_file"):
            if getattr(options, name) is not None:
                flag = "--" + name.removesuffix("_file").replace("_", "-")
                raise RequestError(flag, str(getattr(options, name)), "is for conversations: give --chat too")
        if (options.prompt is None) == (options.prompt_ids is None):
            raise RequestError("prompt", options.prompt, "give exactly one of --prompt and --prompt-ids")
        return
    if options.prompt_ids is not None:
        raise RequestError("--prompt-ids", list(options.prompt_ids), "cannot be a message: leave --chat out")
    if (options.prompt is None) == (options.messages_file is None):
        raise RequestError("prompt", options.prompt, "give exactly one of --prompt and --messages with --chat")
    if options.system is not None and options.messages_file is not None:
        raise RequestError("--system", options.system, "write it into the file of --messages as its first message")


def _read_prompt(options: OneShotOptions, tokenizer: TextTokenizer) -> Sequence[int]:
    """The token ids of whatever the options ask for."""
    if options.is_chat:
        return tokenizer.encode_chat("messages", _messages_of(options))[1]
    if options.prompt is not None:
        return tokenizer.encode_prompt(options.prompt)
    assert options.prompt_ids is not None  # checked before
    return options.prompt_ids


def _messages_of(options: OneShotOptions) -> str:
    """The conversation as JSON."""
    if options.messages_file is not None:
        try:
            return options.messages_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError("--messages", str(options.messages_file), f"not readable as text ({error})") from None
    before = [] if options.system is None else [{"role": "system", "content": options.system}]
    return json.dumps([*before, {"role": "user", "content": options.prompt}])


def _make_request(options: OneShotOptions, manifest: EngineManifest, tokenizer: TextTokenizer) -> Request:
    seed = options.seed
    if seed is None:
        seed = secrets.randbits(64) if options.temperature > 0 else 0
    sampling = SamplingParams(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, seed=seed)
    return Request(
        request_id="generate",
        prompt_ids=np.asarray(_read_prompt(options, tokenizer), np.int64),
        max_tokens=options.max_tokens,
        sampling=sampling,
        end_ids=manifest.end_ids,
        stop_sequences=tokenizer.encode_words("stop", list(options.stop_strings)),
    )


def _run(engine: Engine, request: Request, stream: TextStream, on_text: Callable[[str], None]) -> dict[str, Any]:
    token_ids: list[int] = []
    parts: list[str] = []
    last: RequestOutput | None = None
    started_s = time.perf_counter()
    engine.submit(request)
    while last is None:
        for output in engine.step():
            if not stream.is_stopped:
                delta = stream.push(output.token_ids)
                token_ids += output.token_ids[: delta.num_tokens]
                parts.append(delta.text)
                on_text(delta.text)
                if delta.is_stopped:
                    engine.stop(request.request_id)
            if output.is_final:
                last = output
    seconds = time.perf_counter() - started_s
    if last.error is not None:
        raise FaserError(last.error)
    parts.append(stream.finish())
    on_text(parts[-1])
    metrics = engine.metrics()
    assert last.finish_reason is not None and last.stats is not None  # the engine sets both on the last output
    return {
        "token_ids": token_ids,
        "text": "".join(parts),
        "num_drafted": last.stats.num_drafted,
        "num_accepted": last.stats.num_accepted,
        "num_drafted_by_source": dict(+metrics.num_drafted_by_source),
        "num_accepted_by_source": dict(+metrics.num_accepted_by_source),
        "num_pruned": last.stats.num_pruned,
        "kept_per_verification": round(last.stats.num_accepted / max(last.stats.num_steps, 1), 3),
        "tokens_per_s": round(len(token_ids) / seconds, 1),
        "finish_reason": "stop_words" if stream.is_stopped else last.finish_reason.value,
        "seed": request.sampling.seed,
    }
