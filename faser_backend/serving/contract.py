"""Tensors of a Triton request -> `ParsedRequest`, on numpy arrays alone.

The names are those of TensorRT-LLM's backend, at the text and at the token level; every face shares
this table and its config.pbtxt decides which of them exist. What this engine cannot do is refused by
name, and only when it is really asked for.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from faser_backend.core.errors import RequestError
from faser_backend.core.request import Request, SamplingParams
from faser_backend.serving.link import Hello
from faser_backend.serving.tokenizer import TextTokenizer

Tensors = Mapping[str, np.ndarray]

REFUSED_TENSORS = {
    "lora_task_id": "LoRA adapters",
    "lora_weights": "LoRA adapters",
    "lora_config": "LoRA adapters",
    "guided_decoding_guide_type": "guided decoding",
    "guided_decoding_guide": "guided decoding",
    "prompt_embedding_table": "prompt tables",
    "prompt_vocab_size": "prompt tables",
    "prompt_table_extra_id": "prompt tables",
    "encoder_input_ids": "encoder inputs",
    "encoder_input_features": "encoder inputs",
    "encoder_output_lengths": "encoder inputs",
    "cross_attention_mask": "encoder inputs",
    "retention_token_range_starts": "KV retention priorities",
    "retention_token_range_ends": "KV retention priorities",
    "retention_token_range_priorities": "KV retention priorities",
    "retention_token_range_durations_ms": "KV retention priorities",
    "retention_decode_priority": "KV retention priorities",
    "retention_decode_duration_ms": "KV retention priorities",
    "draft_input_ids": "client-side draft tokens (the server drafts itself)",
    "draft_logits": "client-side draft tokens (the server drafts itself)",
    "draft_acceptance_threshold": "client-side draft tokens (the server drafts itself)",
}
REFUSED_FLAGS = {
    "return_context_logits": "returning context logits",
    "return_generation_logits": "returning generation logits",
    "use_draft_logits": "choosing the acceptance rule per request",
}


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """An engine request and what its answer should look like."""

    request: Request
    prompt_text: str | None  # None at the token level
    stop_strings: tuple[str, ...]
    is_streaming: bool
    excludes_input: bool
    wants_log_probs: bool
    wants_perf_metrics: bool
    wants_num_input_tokens: bool
    wants_num_output_tokens: bool
    includes_stop: bool = True  # whether a stop string stays in the text
    extra_outputs: frozenset[str] = frozenset()  # outputs of one contract alone that were asked for


def is_stop_request(tensors: Tensors) -> bool:
    return bool(read_scalar(tensors, "stop", default=False))


def parse_request(
    tensors: Tensors, request_id: str, hello: Hello, tokenizer: TextTokenizer, *, is_decoupled: bool
) -> ParsedRequest:
    """Checks and translates one request. Raises RequestError naming the field, its value and the limit."""
    _check_batch(tensors)
    _refuse_unsupported(tensors)
    is_streaming = bool(read_scalar(tensors, "streaming", "stream", default=False))
    if is_streaming and not is_decoupled:
        raise RequestError("streaming", True, "Streaming is only supported if model is deployed using decoupled mode.")
    prompt_text, prompt_ids = _read_prompt(tensors, hello, tokenizer)
    stop_strings = read_words(tensors, "stop_words")
    stop_sequences = tokenizer.encode_words("stop_words", stop_strings) + read_word_ids(tensors, "stop_words_list")
    wants_log_probs = bool(read_scalar(tensors, "return_log_probs", default=False))
    num_draft_tokens = read_scalar(tensors, "num_draft_tokens")
    request = Request(
        request_id=request_id,
        prompt_ids=prompt_ids,
        max_tokens=_read_max_tokens(tensors),
        sampling=_read_sampling(tensors, hello, tokenizer),
        end_ids=_read_end_ids(tensors, hello),
        stop_sequences=stop_sequences,
        max_draft_tokens=None if num_draft_tokens is None else int(num_draft_tokens),
        wants_log_probs=wants_log_probs,
    )
    request.validate(hello.limits)
    excludes_input = read_scalar(tensors, "exclude_input_in_output", default=hello.excludes_input)
    return ParsedRequest(
        request=request,
        prompt_text=prompt_text,
        stop_strings=tuple(stop_strings),
        is_streaming=is_streaming,
        excludes_input=bool(excludes_input),
        wants_log_probs=wants_log_probs,
        wants_perf_metrics=bool(read_scalar(tensors, "return_perf_metrics", default=False)),
        wants_num_input_tokens=bool(read_scalar(tensors, "return_num_input_tokens", default=False)),
        wants_num_output_tokens=bool(read_scalar(tensors, "return_num_output_tokens", default=False)),
    )


def read_scalar(tensors: Tensors, *names: str, default=None):
    """The one element of the first tensor of `names` that is present (they are aliases), else default."""
    for name in names:
        if name in tensors:
            values = tensors[name].reshape(-1)
            if values.size != 1:
                raise RequestError(name, list(tensors[name].shape), "must hold exactly 1 value")
            return values[0].item() if isinstance(values[0], np.generic) else values[0]
    return default


def read_text(name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode("utf-8")  # pyright: ignore[reportArgumentType]
    except (UnicodeDecodeError, TypeError, ValueError):
        raise RequestError(name, value, "must be UTF-8 text") from None


def read_words(tensors: Tensors, name: str) -> list[str]:
    """Strings of a STRING[-1] tensor; empty strings mean none."""
    if name not in tensors:
        return []
    words = [read_text(name, value) for value in tensors[name].reshape(-1)]
    return [word for word in words if word]


def read_word_ids(tensors: Tensors, name: str) -> tuple[tuple[int, ...], ...]:
    """Words from INT32 [2, n] (or [1, 2, n]): row 0 flat ids, row 1 cumulative ends padded with -1."""
    if name not in tensors or tensors[name].size == 0:
        return ()
    array = tensors[name]
    array = array[0] if array.ndim == 3 else array
    if array.ndim != 2 or array.shape[0] != 2:
        raise RequestError(name, list(tensors[name].shape), "must have shape [1, 2, n]: ids and cumulative ends")
    flat, ends = array[0].tolist(), [end for end in array[1].tolist() if end >= 0]
    words, start = [], 0
    for end in ends:
        if not start < end <= len(flat):
            raise RequestError(name, ends, f"ends must rise strictly and stay within {len(flat)} ids")
        words.append(tuple(flat[start:end]))
        start = end
    return tuple(words)


def word_ids_array(words: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """The inverse of read_word_ids: INT32 [2, n], n = 0 for no words."""
    flat = [token_id for word in words for token_id in word]
    array = np.full((2, len(flat)), -1, np.int32)
    array[0] = flat
    array[1, : len(words)] = np.cumsum([len(word) for word in words])
    return array


def bias_by_words(
    tensors: Tensors, words_name: str, weights_name: str, tokenizer: TextTokenizer
) -> dict[int, float] | None:
    """Every token of a word gets the word's weight; weights of shared tokens add up."""
    words = read_words(tensors, words_name)
    weights = tensors[weights_name].reshape(-1).tolist() if weights_name in tensors else []
    if len(words) != len(weights):
        raise RequestError(weights_name, len(weights), f"one weight per word is needed; {len(words)} words were given")
    bias: dict[int, float] = {}
    for token_ids, weight in zip(tokenizer.encode_words(words_name, words), weights, strict=True):
        for token_id in token_ids:
            bias[token_id] = bias.get(token_id, 0.0) + weight
    return bias or None


def _check_batch(tensors: Tensors) -> None:
    for name, array in tensors.items():
        if array.ndim >= 2 and array.shape[0] > 1:
            raise RequestError(name, list(array.shape), "batch size must be 1: send one request per prompt")


def _refuse_unsupported(tensors: Tensors) -> None:
    for name, feature in REFUSED_TENSORS.items():
        if name in tensors and tensors[name].size:
            raise RequestError(name, list(tensors[name].shape), f"{feature}: not supported; leave this tensor out")
    for name, feature in REFUSED_FLAGS.items():
        if read_scalar(tensors, name, default=False):
            raise RequestError(name, True, f"{feature}: not supported")
    for name, feature in (("beam_width", "beam search"), ("num_return_sequences", "several sequences per request")):
        value = read_scalar(tensors, name, default=1)
        if value != 1:
            raise RequestError(name, value, f"{feature}: not supported; must be 1")


def _read_prompt(tensors: Tensors, hello: Hello, tokenizer: TextTokenizer) -> tuple[str | None, np.ndarray]:
    given = [name for name in ("text_input", "messages", "input_ids") if name in tensors]
    if len(given) > 1:
        raise RequestError(given[1], f"given with {given[0]}", "send one of the two")
    if not given:
        raise RequestError("text_input", None, "a prompt is needed: send text_input, messages or input_ids")
    if given[0] != "input_ids":
        text = read_text(given[0], read_scalar(tensors, given[0]))
        if given[0] == "messages":
            text, token_ids = tokenizer.encode_chat("messages", text)
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
    if hello.out_of_vocab == "clamp":
        ids = ids.clip(0, hello.limits.vocab_size - 1)
    return None, ids


def _read_max_tokens(tensors: Tensors) -> int:
    value = read_scalar(tensors, "request_output_len", "max_tokens")
    if value is None:
        raise RequestError("max_tokens", None, "is required (request_output_len at the token level)")
    return int(value)


def _read_end_ids(tensors: Tensors, hello: Hello) -> tuple[int, ...]:
    """The model's own end ids unless the client names one; -1 switches them off."""
    end_id = read_scalar(tensors, "end_id")
    if end_id is None:
        return hello.end_ids
    return () if end_id == -1 else (int(end_id),)


def _read_sampling(tensors: Tensors, hello: Hello, tokenizer: TextTokenizer) -> SamplingParams:
    """Nothing given decodes greedily; top_k, top_p or min_p alone sample at temperature 1."""
    temperature = read_scalar(tensors, "temperature")
    top_k = int(read_scalar(tensors, "runtime_top_k", "top_k", default=0))
    top_p = read_scalar(tensors, "runtime_top_p", "top_p", default=0.0)
    top_p = 1.0 if top_p == 0.0 else top_p  # 0 means unset, as in TensorRT-LLM
    min_p = read_scalar(tensors, "runtime_min_p", "min_p", default=0.0)
    if temperature is None:
        temperature = 1.0 if top_k != 0 or top_p != 1.0 or min_p != 0.0 else 0.0
    if top_k == 1 and temperature > 0:
        temperature = 0.0
    seed = read_scalar(tensors, "seed", "random_seed")
    if seed is None:
        seed = secrets.randbits(64) if temperature != 0.0 else 0
    bad_words = tokenizer.encode_words("bad_words", read_words(tensors, "bad_words"))
    return SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=read_scalar(tensors, "repetition_penalty", default=1.0),
        presence_penalty=read_scalar(tensors, "presence_penalty", default=0.0),
        frequency_penalty=read_scalar(tensors, "frequency_penalty", default=0.0),
        min_tokens=int(read_scalar(tensors, "min_tokens", "min_length", default=0)),
        seed=int(seed),
        logit_bias=_read_logit_bias(tensors, hello, tokenizer),
        bad_words=bad_words + read_word_ids(tensors, "bad_words_list"),
    )


def _read_logit_bias(tensors: Tensors, hello: Hello, tokenizer: TextTokenizer) -> dict[int, float] | None:
    dense = tensors.get("embedding_bias")
    if dense is None or dense.size == 0:
        return bias_by_words(tensors, "embedding_bias_words", "embedding_bias_weights", tokenizer)
    if dense.size != hello.limits.vocab_size:
        raise RequestError("embedding_bias length", dense.size, f"must be the vocabulary of {hello.limits.vocab_size}")
    values = dense.reshape(-1)
    return {int(token_id): float(values[token_id]) for token_id in np.flatnonzero(values)} or None
