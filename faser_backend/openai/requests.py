"""From a body to what the engine is asked: a `Generation` for every answer to a request.

Ranges are checked by `core.request.Request`, as for all other ways in; its errors get the names that this API has.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from faser_backend.core.errors import RequestError
from faser_backend.core.request import Limits, Request, Sampling
from faser_backend.openai.bodies import parse
from faser_backend.openai.errors import ApiError
from faser_backend.openai.fields import (
    Body,
    ChatBody,
    CompletionBody,
    Message,
    ResponsesBody,
    text_of,
)
from faser_backend.openai.tools import Guide, ToolForm, answer_guide, shows_tools, written_out
from faser_backend.text.guides import GUIDE, MAX_GUIDE_BYTES
from faser_backend.text.tokenizer import TextTokenizer
from faser_backend.triton.tensor_values import check_length

MAX_PROMPTS = 256  # of one request
MAX_DIGITS = 10  # of a token id
MAX_PREDICTED_TOKENS = 32  # of `prediction`: what the engine takes of a client's draft
DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's completions have it
LIMIT_FIELDS = ("max_output_tokens", "max_completion_tokens", "max_tokens")  # the first that is given counts


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that requests are for."""

    name: str
    tokenizer: TextTokenizer
    end_ids: tuple[int, ...]
    limits: Limits
    kv_block_size: int
    max_text_bytes: int  # of a prompt or a conversation, before it is tokenised
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True, slots=True)
class Generation:
    """One sequence to generate, and what its answer shows."""

    request: Request
    max_tokens: int  # 0 is 1 to the engine, and the token is dropped
    stop: tuple[str, ...] = ()
    num_top: int | None = None  # best tokens beside each; None: no log-probabilities
    echoes: bool = False  # whether the answer repeats the prompt, with its log-probabilities where they are wanted
    guide: Guide | None = None


def completions(body: CompletionBody, model: ServedModel) -> Iterator[Generation]:
    """The answers to every prompt, tokenised as they are asked for. Raises RequestError."""
    given: Any = body.prompt
    prompts = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
    if len(prompts) * body.num_choices > MAX_PROMPTS:
        limit = f"at most {MAX_PROMPTS} answers to a request (prompts times n)"
        raise RequestError("prompt", f"{len(prompts)} prompts with n = {body.num_choices}", limit)
    for prompt in prompts:
        check_length("prompt", prompt, model.max_text_bytes)
    for prompt in prompts:
        ids = model.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt
        yield from _generations(body, "prompt", ids, model)


def conversation(
    body: ChatBody | ResponsesBody, model: ServedModel, form: type[ToolForm] | None
) -> Iterator[Generation]:
    """The answers to a conversation as the chat template writes it. Raises RequestError."""
    guide = answer_guide(body, form)
    if guide is not None and len(guide.text) > MAX_GUIDE_BYTES:  # the engine would say so, of a larger message
        raise RequestError(f"{GUIDE} length", len(guide.text), f"must be at most {MAX_GUIDE_BYTES} bytes")
    ids = conversation_ids(body, model.tokenizer, model.max_text_bytes)
    draft_ids: tuple[int, ...] = ()
    if isinstance(body, ChatBody) and body.prediction is not None:
        predicted = text_of(body.prediction.content)
        check_length("prediction", predicted, model.max_text_bytes)
        draft_ids = tuple(model.tokenizer.encode(predicted)[:MAX_PREDICTED_TOKENS])
    name = "messages" if isinstance(body, ChatBody) else "input"
    return _generations(body, name, ids, model, guide=guide, draft_ids=draft_ids)


def conversation_ids(body: ChatBody | ResponsesBody, tokenizer: TextTokenizer, max_bytes: int) -> list[int]:
    """The prompt. max_bytes: of its text. Raises RequestError."""
    calls = [call.function for message in body.messages for call in message.tool_calls or ()]
    texts = [text_of(message.content) for message in body.messages] + [call.arguments for call in calls]
    check_length("messages", "".join(texts), max_bytes)
    messages = [_for_template(f"messages[{index}]", message) for index, message in enumerate(body.messages)]
    tools = [tool.model_dump(exclude_none=True) for tool in body.offered_tools] or None
    if not shows_tools(tokenizer.chat_template):
        messages, tools = written_out(messages, tools), None
    return tokenizer.encode_conversation("messages", messages, tools, max_bytes=max_bytes)[1]


def _for_template(name: str, message: Message) -> dict[str, Any]:
    """Content is text, as templates expect, and the arguments of calls are objects."""
    if message.content is None and not message.tool_calls:
        raise RequestError(f"{name}.content", None, "is required")
    shown: dict[str, Any] = {"role": message.role, "content": text_of(message.content)}
    shown |= message.model_dump(include={"name", "tool_call_id", "tool_calls"}, exclude_none=True)
    for call in shown.get("tool_calls", ()):
        text = call["function"]["arguments"]
        try:
            call["function"]["arguments"] = parse(text.encode() or b"{}")
        except ApiError:
            raise RequestError(f"{name}.tool_calls.function.arguments", text[:60], "must be JSON") from None
    return shown


def _generations(
    body: Body,
    prompt_field: str,
    prompt_ids: list[int],
    model: ServedModel,
    *,
    guide: Guide | None = None,
    draft_ids: tuple[int, ...] = (),
) -> Iterator[Generation]:
    """One for each of the n answers. prompt_field: to blame for the prompt."""
    limit_field = next((name for name in LIMIT_FIELDS if getattr(body, name, None) is not None), LIMIT_FIELDS[-1])
    room = max(1, model.limits.max_context - len(prompt_ids))
    default = min(DEFAULT_COMPLETION_TOKENS, room) if isinstance(body, CompletionBody) else room
    asked = getattr(body, limit_field, None)
    max_tokens = default if asked is None else asked
    echoes = isinstance(body, CompletionBody) and bool(body.echo)
    num_top = body.num_top
    try:
        request = Request(
            "",
            np.array(prompt_ids, np.int64),
            max(1, max_tokens),
            _sampling(body, model.limits.vocab_size),
            end_ids=() if body.ignore_eos else model.end_ids,
            max_draft_tokens=body.num_draft_tokens,
            draft_ids=draft_ids,
            wants_log_probs=num_top is not None,
            wants_context_log_probs=num_top is not None and echoes,
            wants_generation_logits=bool(num_top),
        )
        request.validate(model.limits)
    except OverflowError:
        limit = f"token ids must lie in [0, {model.limits.vocab_size - 1}]"
        raise RequestError(prompt_field, max(prompt_ids, key=abs), limit) from None
    except RequestError as error:
        names = {"input_ids": prompt_field, "max_tokens": limit_field}
        error.blame(names.get(error.field or "", error.field or ""))
        raise
    stop = tuple(getattr(body, "stop", None) or ())
    first = Generation(request, max_tokens, stop, num_top, echoes, guide)
    return (replace(first, request=request.nth(index)) for index in range(body.num_choices))


def _sampling(body: Body, vocab_size: int) -> Sampling:
    """The API samples at temperature 1 unless told otherwise."""
    given = {
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_k": None if body.top_k == -1 else body.top_k,
        "seed": secrets.randbits(63) if body.seed is None else body.seed,
        "logit_bias": _logit_bias(getattr(body, "logit_bias", None) or {}, vocab_size),
    }
    for name in ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens"):
        given[name] = getattr(body, name)
    return Sampling(**{name: value for name, value in given.items() if value is not None})


def _logit_bias(given: dict[str, float], vocab_size: int) -> dict[int, float] | None:
    for key in given:
        if not key.isdecimal() or len(key) > MAX_DIGITS or int(key) >= vocab_size:
            raise RequestError("logit_bias", key[:60], f"token ids must lie in [0, {vocab_size - 1}]")
    return {int(key): value for key, value in given.items()} or None
