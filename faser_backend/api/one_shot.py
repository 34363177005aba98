"""`faser generate`: answers one prompt with the Python API."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faser_backend.api.batch import Prompt, check_params
from faser_backend.api.llm import LLM
from faser_backend.api.outputs import CompletionOutput, RequestOutput
from faser_backend.api.params import SamplingParams
from faser_backend.core.errors import RequestError
from faser_backend.core.request import FinishReason
from faser_backend.text.chat import read_messages


def read_prompt(
    prompt: str | None,
    prompt_ids: tuple[int, ...] | None,
    *,
    is_chat: bool,
    system: str | None = None,
    messages_file: Path | None = None,
    chat_template: Path | None = None,
) -> Prompt:
    """Returns the prompt that the options of these names give. Raises RequestError if they contradict each other."""
    if not is_chat:
        for flag, value in (("--system", system), ("--messages", messages_file), ("--chat-template", chat_template)):
            if value is not None:
                raise RequestError(flag, str(value), "is for conversations: give --chat too")
        if (prompt is None) == (prompt_ids is None):
            raise RequestError("prompt", prompt, "give exactly one of --prompt and --prompt-ids")
        if not (given := prompt or list(prompt_ids or ())):
            name = "prompt" if prompt_ids is None else "--prompt-ids"
            raise RequestError(name, "", "is empty; at least 1 token is needed")
        return given
    if prompt_ids is not None:
        raise RequestError("--prompt-ids", list(prompt_ids), "cannot be a message: leave --chat out")
    if (prompt is None) == (messages_file is None):
        raise RequestError("prompt", prompt, "give exactly one of --prompt and --messages with --chat")
    if messages_file is None:
        before = [] if system is None else [{"role": "system", "content": system}]
        return [*before, {"role": "user", "content": prompt}]
    if system is not None:
        raise RequestError("--system", system, "write it into the file of --messages as its first message")
    try:
        return read_messages("messages", messages_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError("--messages", str(messages_file), f"not readable as text ({error})") from None


def generate_once(
    prompt: Prompt,
    params: SamplingParams,
    *,
    engine_dir: Path | None,
    on_text: Callable[[str], None] = lambda text: None,
    on_loaded: Callable[[], None] = lambda: None,
    **options: Any,
) -> dict[str, Any]:
    """Streams an answer to `on_text` and returns its figures. Raises FaserError.

    options: of LLM. If they name adapters, the first one is used.
    The counts by source include accepted tokens after the end of the answer.
    """
    check_params(params)
    with LLM(engine_dir, max_num_seqs=1, **options) as llm:
        on_loaded()
        lora = next((text.partition("=")[0] for text in options.get("lora", ())), "")
        return _run(llm, prompt, params, lora, on_text)


def accepted_words(num_drafted: int, num_accepted: int) -> str:
    """Returns the acceptance in words. num_drafted: at least 1."""
    return f"accepted {num_accepted} of {num_drafted} drafted tokens ({num_accepted / num_drafted:.0%})"


def report_line(result: dict[str, Any]) -> str:
    """Returns the figures that follow the text."""
    drafted = result["num_drafted"]
    speculation = accepted_words(drafted, result["num_accepted"]) if drafted else "nothing drafted"
    pruning = f"; {result['num_pruned']} rows pruned" if result["num_pruned"] else ""
    return (
        f"== {len(result['token_ids'])} tokens, {result['tokens_per_s']:.3g} tokens/s; "
        f"{speculation}{pruning}; ended by {result['finish_reason']}"
    )


def _run(llm: LLM, prompt: Prompt, params: SamplingParams, lora: str, on_text: Callable[[str], None]) -> dict[str, Any]:
    started_s = time.perf_counter()
    last: RequestOutput | None = None
    for last in llm.stream(prompt, params, lora):
        on_text(last.outputs[0].text_diff)
    seconds = time.perf_counter() - started_s
    assert last is not None  # a stream has at least one output
    answer = last.outputs[0]
    assert answer.stats is not None  # every answer that has ended has them
    metrics = llm.metrics()
    return {
        "token_ids": answer.token_ids,
        "text": answer.text,
        "num_drafted": answer.stats.num_drafted,
        "num_accepted": answer.stats.num_accepted,
        "num_drafted_by_source": dict(+metrics.num_drafted_by_source),
        "num_accepted_by_source": dict(+metrics.num_accepted_by_source),
        "num_pruned": answer.stats.num_pruned,
        "tokens_per_s": round(len(answer.token_ids) / seconds, 1),
        "finish_reason": _finish_reason(answer).value,
        "seed": answer.seed,
    }


def _finish_reason(answer: CompletionOutput) -> FinishReason:
    """Returns the reason in the server's words."""
    if answer.finish_reason == "length":
        return FinishReason.LENGTH
    return FinishReason.END_ID if answer.stop_reason is None else FinishReason.STOP_WORDS
