"""`faser generate`: one prompt through the Python API."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faser_backend.api.batch import Conversation, Prompt, check_params
from faser_backend.api.llm import LLM
from faser_backend.api.outputs import CompletionOutput, RequestOutput
from faser_backend.api.params import SamplingParams
from faser_backend.config import DEFAULT_POLICY
from faser_backend.core.errors import RequestError
from faser_backend.core.record import StepRecord
from faser_backend.core.request import FinishReason
from faser_backend.manifest import EngineManifest
from faser_backend.serving.chat import read_messages
from faser_backend.serving.profile_store import PROFILE_FILE

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
    on_loaded: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Streams text to `on_text`; returns token_ids, text, num_drafted, num_accepted, both by
    source as well (accepted tokens behind the end of the answer included), num_pruned, num_rows_verified (anchors
    included), kept_per_verification (draft tokens), tokens_per_s, finish_reason, seed, and in words why_no_drafts and
    why_no_pruning, empty where there were some or could have been. Raises FaserError.
    """
    _check_prompt_options(options)
    prompt = _messages_of(options) if options.is_chat else options.prompt
    if prompt is None:
        prompt = list(options.prompt_ids or ())
    params = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop=list(options.stop_strings),
        include_stop_str_in_output=True,
    )
    num_rows: list[int] = []

    def note(record: StepRecord) -> None:
        num_rows.append(int(record.frontier.num_rows.sum()))
        if on_step is not None:
            on_step(record)

    check_params(params)
    with LLM(
        options.engine_dir,
        chat_template=options.chat_template_file,
        progress=progress,
        on_step=note,
        policy=options.policy,
        draft=options.draft,
        acceptance=options.acceptance,
        early_exit=options.early_exit,
        pipeline=options.pipeline,
        max_num_seqs=1,
        num_threads=options.num_threads,
    ) as llm:
        on_loaded()
        result = _run(llm, prompt, params, on_text) | {"num_rows_verified": sum(num_rows)}
    has_profile = (llm.engine_dir / PROFILE_FILE).is_file()
    why_no_drafts = "" if result["num_drafted"] else _why_no_drafts(options, has_profile=has_profile)
    why_no_pruning = "" if result["num_pruned"] else _why_no_pruning(llm.manifest, options, has_profile=has_profile)
    return result | {"why_no_drafts": why_no_drafts, "why_no_pruning": why_no_pruning}


def accepted_words(num_drafted: int, num_accepted: int) -> str:
    """What a person reads of an answer for which tokens were drafted."""
    return f"accepted {num_accepted} of {num_drafted} drafted tokens ({num_accepted / num_drafted:.0%})"


def report_line(result: dict[str, Any]) -> str:
    """What a person reads after the text."""
    drafted, accepted = result["num_drafted"], result["num_accepted"]
    speculation = result["why_no_drafts"] or accepted_words(drafted, accepted)
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
        if not (options.prompt or options.prompt_ids):
            raise RequestError("prompt", options.prompt, "is empty; at least 1 token is needed")
        return
    if options.prompt_ids is not None:
        raise RequestError("--prompt-ids", list(options.prompt_ids), "cannot be a message: leave --chat out")
    if (options.prompt is None) == (options.messages_file is None):
        raise RequestError("prompt", options.prompt, "give exactly one of --prompt and --messages with --chat")
    if options.system is not None and options.messages_file is not None:
        raise RequestError("--system", options.system, "write it into the file of --messages as its first message")


def _messages_of(options: OneShotOptions) -> Conversation:
    """The conversation of --messages, or of --system and the prompt."""
    if options.messages_file is not None:
        try:
            text = options.messages_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError("--messages", str(options.messages_file), f"not readable as text ({error})") from None
        return read_messages("messages", text)
    before = [] if options.system is None else [{"role": "system", "content": options.system}]
    return [*before, {"role": "user", "content": options.prompt}]


def _run(llm: LLM, prompt: Prompt, params: SamplingParams, on_text: Callable[[str], None]) -> dict[str, Any]:
    started_s = time.perf_counter()
    last: RequestOutput | None = None
    for last in llm.stream(prompt, params):
        on_text(last.outputs[0].text_diff)
    seconds = time.perf_counter() - started_s
    assert last is not None  # the last output comes in any case
    answer = last.outputs[0]
    assert answer.stats is not None  # of every answer that has ended
    metrics = llm.metrics()
    return {
        "token_ids": answer.token_ids,
        "text": answer.text,
        "num_drafted": answer.stats.num_drafted,
        "num_accepted": answer.stats.num_accepted,
        "num_drafted_by_source": dict(+metrics.num_drafted_by_source),
        "num_accepted_by_source": dict(+metrics.num_accepted_by_source),
        "num_pruned": answer.stats.num_pruned,
        "kept_per_verification": round(answer.stats.num_accepted / max(answer.stats.num_steps, 1), 3),
        "tokens_per_s": round(len(answer.token_ids) / seconds, 1),
        "finish_reason": _finish_reason(answer).value,
        "seed": answer.seed,
    }


def _finish_reason(answer: CompletionOutput) -> FinishReason:
    """As the server tells it."""
    if answer.finish_reason == "length":
        return FinishReason.LENGTH
    return FinishReason.END_ID if answer.stop_reason is None else FinishReason.STOP_WORDS
