"""What a request's fields mean to the engine: a set of Triton tensors per prompt."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from faser_backend.core.errors import ErrorCode, Failure, RequestError
from faser_backend.serving.guides import GUIDE, MAX_GUIDE_BYTES
from faser_backend.serving.openai.errors import ApiError
from faser_backend.serving.openai.fields import ChatBody, CompletionBody, ResponsesBody

MAX_DIGITS = 10  # of a token id
MAX_SEED = 2**64 - 1
DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's completions have it


@dataclass(frozen=True, slots=True)
class Guide:
    """A grammar for the answer, in the names of `guided_decoding_guide_type`."""

    kind: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Generation:
    """One sequence to generate: the tokens of its prompt and what the engine is asked for.

    max_tokens: 0 is 1 to the engine, and the token is dropped.
    num_top: best alternatives whose log-probabilities are wanted beside each token; None: no log-probabilities.
    """

    prompt_ids: list[int]
    max_tokens: int
    seed: int
    scalars: dict[str, Any] = field(default_factory=dict)  # tensor name -> value
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    num_top: int | None = None
    ignores_end: bool = False
    echoes: bool = False  # whether the answer repeats the prompt, with its log-probabilities where they are wanted
    draft_ids: tuple[int, ...] = ()
    guide: Guide | None = None

    def nth(self, index: int) -> Generation:
        """Another answer to the same prompt, with a seed of its own."""
        return replace(self, seed=(self.seed + index) % (MAX_SEED + 1))


def plan_generation(
    body: CompletionBody | ChatBody | ResponsesBody,
    prompt_ids: list[int],
    *,
    vocab_size: int,
    max_context: int,
    guide: Guide | None = None,
    draft_ids: tuple[int, ...] = (),
) -> Generation:
    """Checks what depends on the model. Raises ApiError and RequestError."""
    room = max_context - len(prompt_ids)
    if not prompt_ids:
        raise ApiError("the prompt has no tokens: at least 1 is needed", param="prompt")
    if room < 1:
        message = f"the prompt has {len(prompt_ids)} tokens: must be below the context length of {max_context} tokens"
        field = "prompt" if isinstance(body, CompletionBody) else "messages"
        raise ApiError.of(Failure(ErrorCode.TOO_LONG, message, field))
    name, asked = _max_tokens(body)
    if asked is not None and asked > room:
        least = 0 if isinstance(body, CompletionBody) else 1
        limit = f"must lie in [{least}, {room}] (context length {max_context} - prompt of {len(prompt_ids)} tokens)"
        raise RequestError(name, asked, limit, code=ErrorCode.TOO_LONG)
    if guide is not None and len(guide.text) > MAX_GUIDE_BYTES:  # the engine would say so, of a larger message
        raise ApiError(f"{GUIDE}: {len(guide.text)} bytes: must be at most {MAX_GUIDE_BYTES}", param=GUIDE)
    default = min(DEFAULT_COMPLETION_TOKENS, room) if isinstance(body, CompletionBody) else room
    choices = body if isinstance(body, CompletionBody | ChatBody) else None
    return Generation(
        prompt_ids=prompt_ids,
        max_tokens=default if asked is None else asked,
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        scalars=_scalars(body),
        logit_bias=_logit_bias(choices.logit_bias or {}, vocab_size) if choices else {},
        stop=tuple(choices.stop or ()) if choices else (),
        num_top=_num_top(body),
        ignores_end=body.ignore_eos,
        echoes=isinstance(body, CompletionBody) and bool(body.echo),
        draft_ids=draft_ids,
        guide=guide,
    )


def dense_bias(bias: dict[int, float], vocab_size: int) -> np.ndarray:
    dense = np.zeros(vocab_size, np.float32)
    dense[list(bias)] = list(bias.values())
    return dense


def _max_tokens(body: CompletionBody | ChatBody | ResponsesBody) -> tuple[str, int | None]:
    if isinstance(body, ResponsesBody):
        return "max_output_tokens", body.max_output_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        return "max_completion_tokens", body.max_completion_tokens
    return "max_tokens", body.max_tokens


def _num_top(body: CompletionBody | ChatBody | ResponsesBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    return (body.top_logprobs or 0) if isinstance(body, ChatBody) and body.logprobs else None


def _scalars(body: CompletionBody | ChatBody | ResponsesBody) -> dict[str, Any]:
    """The API samples at temperature 1 unless told otherwise; the engine decodes greedily unless top_k, top_p or
    min_p say that it shall sample, so top_p is always sent."""
    temperature = 1.0 if body.temperature is None else body.temperature
    given = {
        "temperature": temperature,
        "runtime_top_p": 1.0 if body.top_p is None else body.top_p,
        "runtime_top_k": None if body.top_k in (None, -1) else body.top_k,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "min_tokens": body.min_tokens,
        "num_draft_tokens": body.num_draft_tokens,
    }
    return {name: value for name, value in given.items() if value is not None}


def _logit_bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        if not key.isdecimal() or len(key) > MAX_DIGITS or int(key) >= vocab_size:
            raise ApiError(
                f"logit_bias = {key[:60]!r}: token ids must lie in [0, {vocab_size - 1}]", param="logit_bias"
            )
        bias[int(key)] = value
    return bias
