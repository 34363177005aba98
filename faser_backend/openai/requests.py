"""Turns a checked body into a `Generation` for every answer, with the engine's own `Request`.

`generations` renders the conversation and tokenises the prompt. `core.request.Request` checks the ranges that every way
into the engine shares; its errors get the field names of this API.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from faser_backend.core.errors import FailedError, FaserError, RequestError
from faser_backend.core.request import Request, Sampling
from faser_backend.openai.bodies import Body, ChatBody, CompletionBody, ConversationBody, Message, parse, text_of
from faser_backend.openai.errors import ApiError
from faser_backend.openai.tools import Guide, ToolForm, answer_guide, form_of, shows_tools, written_out
from faser_backend.serving.served_model import ServedModel
from faser_backend.text.guides import GUIDE
from faser_backend.text.tokenizer import TextTokenizer, check_length

MAX_PROMPTS = 256  # per request, times n
MAX_DIGITS = 10  # in a token id
MAX_PREDICTED_TOKENS = 32  # of `prediction`: the engine takes no longer draft from a client
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for completions
LIMIT_FIELDS = ("max_output_tokens", "max_completion_tokens", "max_tokens")  # the first that is given counts


@dataclass(frozen=True, slots=True)
class Generation:
    """One sequence to generate, and how its answer is shown."""

    request: Request
    max_tokens: int  # 0: the engine generates one token, which the answer drops
    stop: tuple[str, ...] = ()
    num_top: int | None = None  # alternatives per token; None without log-probabilities
    echoes: bool = False  # the answer repeats the prompt, with its log-probabilities if wanted
    guide: Guide | None = None
    guide_field: str = ""  # of the body, which asks for the guide
    tool_form: type[ToolForm] | None = None  # None: the request offers no tools

    def named(self, error: Exception) -> Exception:
        """Returns the error; one of the guide names the field of this API that asks for it."""
        if not isinstance(error, FaserError) or error.field != GUIDE:
            return error
        return FailedError(error.failure.named(self.guide_field))


def generations(body: Body, model: ServedModel) -> list[Generation]:
    """Returns a Generation per answer, prompt by prompt. Raises RequestError."""
    if isinstance(body, ConversationBody):
        return _conversation(body, model)
    assert isinstance(body, CompletionBody)
    given: Any = body.prompt
    prompts = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
    if len(prompts) * body.num_choices > MAX_PROMPTS:
        limit = f"at most {MAX_PROMPTS} answers per request are allowed (prompts times n)"
        raise RequestError("prompt", f"{len(prompts)} prompts with n = {body.num_choices}", limit)
    for prompt in prompts:
        check_length("prompt", prompt, model.max_text_bytes)
    encode = model.tokenizer.encode_prompt
    encoded = (encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts)
    return [one for ids in encoded for one in _choices(body, ids, model)]


def _conversation(body: ConversationBody, model: ServedModel) -> list[Generation]:
    tokenizer = model.tokenizer
    form = form_of(tokenizer.prompts.chat_template) if body.offered_tools else None
    guide = answer_guide(body, form) if form or body.answer_format else None
    guide_field = "tools" if form else body.format_field
    ids = conversation_ids(body, tokenizer, model.max_text_bytes)
    draft_ids: tuple[int, ...] = ()
    if isinstance(body, ChatBody) and body.prediction is not None:
        predicted = text_of(body.prediction.content)
        check_length("prediction", predicted, model.max_text_bytes)
        draft_ids = tuple(tokenizer.encode(predicted)[:MAX_PREDICTED_TOKENS])
    choices = _choices(body, ids, model, draft_ids=draft_ids)
    return [replace(choice, guide=guide, guide_field=guide_field, tool_form=form) for choice in choices]


def conversation_ids(body: ConversationBody, tokenizer: TextTokenizer, max_bytes: int) -> list[int]:
    """Returns the prompt that the chat template makes of a conversation. max_bytes: limits its text.

    Raises RequestError.
    """
    name = body.prompt_field
    calls = [call.function for message in body.messages for call in message.tool_calls or ()]
    texts = [text_of(message.content) for message in body.messages] + [call.arguments for call in calls]
    check_length(name, "".join(texts), max_bytes)
    messages = [_for_template(f"{name}[{index}]", message) for index, message in enumerate(body.messages)]
    tools = [tool.model_dump(exclude_none=True) for tool in body.offered_tools] or None
    has_tools = tools or any(message.role == "tool" or message.tool_calls for message in body.messages)
    if has_tools and not shows_tools(tokenizer.prompts.chat_template):
        messages, tools = written_out(messages, tools), None
    return tokenizer.encode_conversation(name, messages, tools, max_bytes=max_bytes)[1]


def _for_template(name: str, message: Message) -> dict[str, Any]:
    """Returns a message as templates expect it: content is text, and the arguments of calls are objects."""
    if message.content is None and not message.tool_calls:
        raise RequestError(f"{name}.content", None, "is required")
    shown: dict[str, Any] = {"role": message.role, "content": text_of(message.content)}
    others = message.model_dump(include={"name", "tool_call_id", "tool_calls"})
    shown |= {name: value for name, value in others.items() if value}  # templates ask whether there are tool_calls
    for call in shown.get("tool_calls", ()):
        text = call["function"]["arguments"]
        try:
            call["function"]["arguments"] = parse(text.encode() or b"{}")
        except ApiError:
            raise RequestError(f"{name}.tool_calls.function.arguments", text[:60], "must be JSON") from None
    return shown


def _choices(
    body: Body, prompt_ids: list[int], model: ServedModel, *, draft_ids: tuple[int, ...] = ()
) -> list[Generation]:
    """Returns the n choices for one prompt."""
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
            model.limits.prompt_array(prompt_ids),
            max(1, max_tokens),
            _sampling(body, model.limits.vocab_size),
            end_ids=() if body.ignore_eos else model.end_ids,
            max_draft_tokens=body.num_draft_tokens,
            draft_ids=draft_ids,
            lora_name=model.lora_name,
            wants_log_probs=num_top is not None,
            wants_context_log_probs=num_top is not None and echoes,
            wants_generation_logits=bool(num_top),
            wants_stats=body.wants_stats or bool(getattr(body, "stop", None)),
        )
        request.validate(model.limits)
    except RequestError as error:
        names = {"input_ids": body.prompt_field, "max_tokens": limit_field}
        error.blame(names.get(error.field or "", error.field or ""))
        raise
    first = Generation(request, max_tokens, tuple(getattr(body, "stop", None) or ()), num_top, echoes)
    return [replace(first, request=request.nth(index)) for index in range(body.num_choices)]


def _sampling(body: Body, vocab_size: int) -> Sampling:
    """Returns the sampling parameters; this API samples at temperature 1 by default."""
    given = {
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_k": None if body.top_k == -1 else body.top_k,
        "seed": secrets.randbits(63) if body.seed is None else body.seed % 2**64,
        "logit_bias": _logit_bias(getattr(body, "logit_bias", None) or {}, vocab_size),
    }
    for name in ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens"):
        given[name] = getattr(body, name)
    return Sampling(**{name: _rounded(value) for name, value in given.items() if value is not None})


def _rounded(value: Any) -> Any:
    """Returns a real number as Triton's tensors have it, so that both ways to the engine give equal tokens."""
    return float(np.float32(value)) if isinstance(value, float) else value


def _logit_bias(given: dict[str, float], vocab_size: int) -> dict[int, float] | None:
    for key in given:
        if not key.isdecimal() or len(key) > MAX_DIGITS or int(key) >= vocab_size:
            raise RequestError("logit_bias", key[:60], f"token ids must lie in [0, {vocab_size - 1}]")
    return {int(key): _rounded(value) for key, value in given.items()} or None
