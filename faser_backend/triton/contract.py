"""Tensors of a Triton request -> `ParsedRequest`s, one per sequence that answers it.

The names and their meaning are those of TensorRT-LLM's inflight batcher models, at the text and at the token level
(tensors.py); the llmapi contract translates its names and comes here too. A batch is several prompts in one request,
and `num_return_sequences` asks for several answers to each.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

import numpy as np

from faser_backend.core.errors import RequestError
from faser_backend.core.request import MAX_BAD_TOKENS, MAX_STOP_TOKENS, Limits, Request, Sampling
from faser_backend.serving.log_format import fitting_max_tokens
from faser_backend.text.guides import GUIDE, GUIDE_TYPE, MAX_GUIDE_BYTES, read_guide
from faser_backend.text.tokenizer import TextTokenizer
from faser_backend.triton.link import Hello
from faser_backend.triton.tensor_values import (
    BAD_WORDS,
    STOP_WORDS,
    bias_by_words,
    read_scalar,
    read_text,
    read_word_ids,
    read_words,
)
from faser_backend.triton.tensors import Tensors, refuse_unsupported

PROMPT_INPUTS = ("text_input", "messages", "input_ids")
MAX_SEQUENCES = 1024  # that one request may ask for: its batch times its num_return_sequences
MAX_LOGITS_BYTES = 1 << 30  # of one sequence


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """An engine request, what its answer should look like, and its place in the client's request."""

    request: Request
    prompt_text: str | None  # None at the token level
    stop_strings: tuple[str, ...]
    is_streaming: bool
    excludes_input: bool
    wants_num_input_tokens: bool
    wants_num_output_tokens: bool
    num_prompt_blocks: int  # of the KV cache that the prompt takes
    batch_index: int = 0
    batch_size: int = 1
    sequence_index: int = 0
    num_sequences: int = 1  # per prompt
    accumulates_text: bool = False  # streamed responses carry all text so far, not what is new
    includes_stop: bool = True  # whether a stop string stays in the text
    extra_outputs: frozenset[str] = frozenset()  # outputs of one contract alone that were asked for


def is_stop_request(tensors: Tensors) -> bool:
    return bool(np.any(tensors["stop"])) if "stop" in tensors else False


def parse_requests(
    tensors: Tensors,
    request_id: str,
    hello: Hello,
    tokenizer: TextTokenizer,
    *,
    is_decoupled: bool,
    is_llm_api: bool = False,
) -> list[ParsedRequest]:
    """Checks and translates one request, prompt by prompt and within a prompt sequence by sequence.

    is_llm_api: a temperature alone samples, and a seed that is left out is a fresh one.
    Raises RequestError naming the field, its value and the limit; then no sequence of the request may start.
    """
    refuse_unsupported(tensors)
    rows = split_batch(tensors)
    parsed: list[ParsedRequest] = []
    for batch_index, row in enumerate(rows):
        num_sequences = int(read_scalar(row, "num_return_sequences", default=1)) or 1
        if not 1 <= num_sequences * len(rows) <= MAX_SEQUENCES:
            limit = f"must lie in [1, {MAX_SEQUENCES // len(rows)}] with {len(rows)} prompts"
            raise RequestError("num_return_sequences", num_sequences, limit)
        first = _parse_row(row, f"{request_id}.{batch_index}", hello, tokenizer, is_llm_api=is_llm_api)
        if first.is_streaming and not is_decoupled:
            limit = "Streaming is only supported if model is deployed using decoupled mode."
            raise RequestError("streaming", True, limit)
        parsed += [
            replace(
                first,
                request=first.request.nth(sequence_index),
                batch_index=batch_index,
                batch_size=len(rows),
                sequence_index=sequence_index,
                num_sequences=num_sequences,
            )
            for sequence_index in range(num_sequences)
        ]
    return parsed


def split_batch(tensors: Tensors, prompt_inputs: tuple[str, ...] = PROMPT_INPUTS) -> list[Tensors]:
    """One set of tensors per prompt. Tensors without a batch dimension hold one prompt."""
    prompts = next((tensors[name] for name in prompt_inputs if name in tensors), None)
    num_rows = prompts.shape[0] if prompts is not None and prompts.ndim > 1 else 1
    if num_rows == 1:
        return [tensors]
    for name, array in tensors.items():
        if array.ndim < 2 or array.shape[0] != num_rows:
            raise RequestError(name, list(array.shape), f"the batch holds {num_rows} prompts: must have as many rows")
    return [{name: array[row : row + 1] for name, array in tensors.items()} for row in range(num_rows)]


def _parse_row(
    tensors: Tensors, request_id: str, hello: Hello, tokenizer: TextTokenizer, *, is_llm_api: bool
) -> ParsedRequest:
    prompt_text, prompt_ids = _read_prompt(tensors, hello, tokenizer)
    stop_strings = read_words(tensors, "stop_words", STOP_WORDS)
    stop_ids = read_word_ids(tensors, "stop_words_list", MAX_STOP_TOKENS)
    stop_sequences = tokenizer.encode_words("stop_words", stop_strings) + stop_ids
    num_draft_tokens = read_scalar(tensors, "num_draft_tokens")
    request = Request(
        request_id=request_id,
        prompt_ids=prompt_ids,
        max_tokens=_read_max_tokens(tensors, hello.limits, prompt_ids.size, request_id),
        sampling=_read_sampling(tensors, hello, tokenizer, is_llm_api=is_llm_api),
        end_ids=_read_end_ids(tensors, hello),
        stop_sequences=stop_sequences,
        max_draft_tokens=None if num_draft_tokens is None else int(num_draft_tokens),
        draft_ids=_read_draft_ids(tensors, hello.limits),
        wants_log_probs=_flag(tensors, "return_log_probs"),
        wants_context_logits=_flag(tensors, "return_context_logits"),
        wants_context_log_probs=_flag(tensors, "return_context_log_probs"),
        wants_generation_logits=_flag(tensors, "return_generation_logits"),
        wants_stats=_flag(tensors, "return_perf_metrics"),
        guide=_read_guide(tensors),
    )
    request.validate(hello.limits)
    _check_logits(request, hello.limits)
    return ParsedRequest(
        request=request,
        prompt_text=prompt_text,
        stop_strings=tuple(stop_strings),
        is_streaming=bool(read_scalar(tensors, "streaming", "stream", default=False)),
        excludes_input=bool(read_scalar(tensors, "exclude_input_in_output", default=hello.excludes_input)),
        wants_num_input_tokens=_flag(tensors, "return_num_input_tokens"),
        wants_num_output_tokens=_flag(tensors, "return_num_output_tokens"),
        num_prompt_blocks=-(-prompt_ids.size // hello.kv_block_size),
    )


def _check_logits(request: Request, limits: Limits) -> None:
    for name, is_wanted, num_rows in (
        ("return_context_logits", request.wants_context_logits, request.prompt_ids.size),
        ("return_generation_logits", request.wants_generation_logits, request.max_tokens),
    ):
        num_bytes = 4 * num_rows * limits.vocab_size
        if is_wanted and num_bytes > MAX_LOGITS_BYTES:
            limit = f"{num_rows} tokens x {limits.vocab_size} logits take {num_bytes >> 20} MiB: at most "
            raise RequestError(name, True, limit + f"{MAX_LOGITS_BYTES >> 20} MiB are returned")


def _flag(tensors: Tensors, name: str) -> bool:
    return bool(read_scalar(tensors, name, default=False))


def _read_prompt(tensors: Tensors, hello: Hello, tokenizer: TextTokenizer) -> tuple[str | None, np.ndarray]:
    given = [name for name in PROMPT_INPUTS if name in tensors]
    if len(given) > 1:
        raise RequestError(given[1], f"given with {given[0]}", "send one of the two")
    if not given:
        raise RequestError("text_input", None, "a prompt is needed: send text_input, messages or input_ids")
    if given[0] != "input_ids":
        text = read_text(given[0], read_scalar(tensors, given[0]), hello.max_text_bytes)
        if given[0] == "messages":
            text, token_ids = tokenizer.encode_chat("messages", text, hello.max_text_bytes)
        else:
            token_ids = tokenizer.encode_prompt(text)
        if not token_ids:
            raise RequestError(given[0], text, "prompt is empty; at least 1 token is needed")
        return text, np.asarray(token_ids, np.int64)
    ids = tensors["input_ids"].reshape(-1).astype(np.int64)
    length = read_scalar(tensors, "input_lengths", default=ids.size)
    if not 0 <= length <= ids.size:
        raise RequestError("input_lengths", length, f"must lie in [1, {ids.size}], the number of input_ids")
    ids = ids[:length]
    last_id = hello.limits.vocab_size - 1
    if hello.out_of_vocab == "clamp":
        ids = ids.clip(0, last_id)
    elif ids.size and not 0 <= (bad := int(ids.min() if ids.min() < 0 else ids.max())) <= last_id:
        limit = f"token ids must lie in [0, {last_id}]; for load tools that send any, start with --out-of-vocab clamp"
        raise RequestError("input_ids", bad, limit)
    return None, ids


def _read_draft_ids(tensors: Tensors, limits: Limits) -> tuple[int, ...]:
    """The client's draft tokens, without the padding behind them."""
    if "draft_input_ids" not in tensors:
        return ()
    if (num_ids := tensors["draft_input_ids"].size) > limits.max_context:
        limit = f"must be at most the context length of {limits.max_context} tokens"
        raise RequestError("draft_input_ids length", num_ids, limit)
    ids = tensors["draft_input_ids"].reshape(-1).tolist()
    while ids and ids[-1] == -1:
        ids.pop()
    return tuple(ids)


def _read_max_tokens(tensors: Tensors, limits: Limits, num_prompt_tokens: int, request_id: str) -> int:
    """Returns the requested number of tokens, or as many as the context holds behind a prompt that fits."""
    value = read_scalar(tensors, "request_output_len", "max_tokens")
    if value is None:
        raise RequestError("max_tokens", None, "is required (request_output_len at the token level)")
    return fitting_max_tokens(int(value), limits, num_prompt_tokens, request_id)


def _read_end_ids(tensors: Tensors, hello: Hello) -> tuple[int, ...]:
    """The model's own end ids unless the client names one; an id that no token has, like -1, means none."""
    end_id = read_scalar(tensors, "end_id")
    if end_id is None:
        return hello.end_ids
    return (int(end_id),) if 0 <= end_id < hello.limits.vocab_size else ()


def _temperature(given: float | None, top_k: int, top_p: float | None, min_p: float, *, is_llm_api: bool) -> float:
    """Returns the temperature to decode at, 0 for greedy."""
    if is_llm_api:
        is_greedy = top_k == 1 or top_p == 0.0 or (given is None and top_p is None and not (top_k or min_p))
    else:
        # TensorRT-LLM turns top_k 0 with top_p 0 into top_k 1: its clients always send a temperature, and mean nothing.
        is_greedy = top_k == 1 or not (top_k or (top_p or 0.0) > 0.0 or min_p)
    return 0.0 if is_greedy else 1.0 if given is None else given


def _read_sampling(tensors: Tensors, hello: Hello, tokenizer: TextTokenizer, *, is_llm_api: bool) -> Sampling:
    top_k = int(read_scalar(tensors, "runtime_top_k", "top_k", default=0))
    top_p = read_scalar(tensors, "runtime_top_p", "top_p")
    min_p = read_scalar(tensors, "min_p", default=0.0)
    given = read_scalar(tensors, "temperature")
    if given is not None:
        Sampling(temperature=given).validate(hello.limits.vocab_size)  # even where it has no effect
    temperature = _temperature(given, top_k, top_p, min_p, is_llm_api=is_llm_api)
    seed = read_scalar(tensors, "seed", "random_seed")
    bad_words = tokenizer.encode_words("bad_words", read_words(tensors, "bad_words", BAD_WORDS))
    return Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=1.0 if top_p is None or top_p <= 0.0 else top_p,  # 0 is unset
        min_p=min_p,
        repetition_penalty=read_scalar(tensors, "repetition_penalty", default=1.0),
        presence_penalty=read_scalar(tensors, "presence_penalty", default=0.0),
        frequency_penalty=read_scalar(tensors, "frequency_penalty", default=0.0),
        min_tokens=int(read_scalar(tensors, "min_tokens", "min_length", default=0)),
        seed=int(seed) if seed is not None else secrets.randbits(64) if is_llm_api else 0,
        logit_bias=_read_logit_bias(tensors, hello, tokenizer),
        bad_words=bad_words + read_word_ids(tensors, "bad_words_list", MAX_BAD_TOKENS),
    )


def _read_guide(tensors: Tensors) -> str | None:
    kind, guide = (
        read_text(name, read_scalar(tensors, name, default=b""), MAX_GUIDE_BYTES) for name in (GUIDE_TYPE, GUIDE)
    )
    if not kind and guide:
        raise RequestError(GUIDE, guide, f"is given without {GUIDE_TYPE}")
    return read_guide(kind, guide) if kind else None


def _read_logit_bias(tensors: Tensors, hello: Hello, tokenizer: TextTokenizer) -> dict[int, float] | None:
    dense = tensors.get("embedding_bias")
    if dense is None or dense.size == 0:
        return bias_by_words(tensors, "embedding_bias_words", "embedding_bias_weights", tokenizer)
    if dense.size != hello.limits.vocab_size:
        raise RequestError("embedding_bias length", dense.size, f"must be the vocabulary of {hello.limits.vocab_size}")
    values = dense.reshape(-1)
    return {int(token_id): float(values[token_id]) for token_id in np.flatnonzero(values)} or None
