"""Reads the tensors of a Triton request: one `ParsedRequest` per sequence that answers it.

Names and meanings are those of TensorRT-LLM's inflight batcher models, for text and for token ids (tensors.py). The
llmapi contract translates its names and is read here too. A batch is several prompts in one request, and
`num_return_sequences` asks for several answers to each. Bytes and words are counted before anything is tokenised.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from faser_backend.core.errors import RequestError
from faser_backend.core.request import (
    MAX_BAD_TOKENS,
    MAX_BAD_WORDS,
    MAX_STOP_SEQUENCES,
    MAX_STOP_TOKENS,
    Limits,
    Request,
    Sampling,
)
from faser_backend.serving.request_reports import log_clamp
from faser_backend.text.guides import GUIDE, GUIDE_TYPE, MAX_GUIDE_BYTES, read_guide
from faser_backend.text.tokenizer import TextTokenizer, check_length
from faser_backend.triton.link import Handshake
from faser_backend.triton.tensors import (
    LLMAPI_INPUTS,
    POSTPROCESSING_INPUTS,
    PREPROCESSING_INPUTS,
    TEXT_INPUTS,
    TOKEN_INPUTS,
    Tensors,
)


class WordLimit(NamedTuple):
    """The largest number of words in a list, and of their bytes in all."""

    num_words: int
    num_bytes: int


STOP_WORDS = WordLimit(MAX_STOP_SEQUENCES, 4096)
BAD_WORDS = WordLimit(MAX_BAD_WORDS, 64 << 10)
BIAS_WORDS = WordLimit(MAX_BAD_WORDS, 64 << 10)
PROMPT_INPUTS = ("text_input", "messages", "input_ids")
_SENT_AS = {  # fields of the engine's request -> other inputs that give them
    "max_tokens": {"request_output_len"}, "top_k": {"runtime_top_k"}, "top_p": {"runtime_top_p"},
    "min_tokens": {"min_length"}, "stop_words": {"stop_words_list"}, "bad_words": {"bad_words_list"},
    "logit_bias": {"embedding_bias", "embedding_bias_weights"}, "streaming": {"stream"},
}  # fmt: skip
MAX_SEQUENCES = 1024  # of one request: its prompts times its num_return_sequences
MAX_LOGITS_BYTES = 1 << 30  # of one sequence


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """One sequence of a client's request: the engine's request, and the form of the answer."""

    request: Request
    prompt_text: str | None  # None at the token level
    stop_strings: tuple[str, ...]
    is_streaming: bool
    excludes_input: bool
    wants_num_input_tokens: bool
    wants_num_output_tokens: bool
    num_prompt_blocks: int  # KV blocks of the prompt
    batch_index: int = 0
    batch_size: int = 1
    sequence_index: int = 0
    num_sequences: int = 1  # per prompt
    accumulates_text: bool = False  # streamed responses carry all text so far
    includes_stop: bool = True  # whether a stop string stays in the text
    extra_outputs: frozenset[str] = frozenset()  # requested outputs that only the llmapi contract has


def is_stop_request(tensors: Tensors) -> bool:
    return bool(np.any(tensors["stop"])) if "stop" in tensors else False


def parse_requests(
    tensors: Tensors, request_id: str, handshake: Handshake, *, is_decoupled: bool, is_llm_api: bool = False
) -> list[ParsedRequest]:
    """Checks one request and returns its sequences, ordered by prompt and by sequence within a prompt.

    is_llm_api: a temperature alone turns sampling on, and a missing seed is drawn at random.
    Raises RequestError with field, value and limit; the caller then starts none of the sequences.
    """
    refuse_unsupported(tensors)
    rows = split_batch(tensors)
    for name, array in tensors.items() if len(rows) > 1 and not is_decoupled else ():
        if name.startswith(("num_return_sequences", "return_")) and len(values := np.unique(array)) > 1:
            raise RequestError(name, values.tolist(), "must be equal for all prompts of a unary request")
    parsed: list[ParsedRequest] = []
    for batch_index, row in enumerate(rows):
        num_sequences = int(read_scalar(row, "num_return_sequences", default=1)) or 1
        if not 1 <= num_sequences * len(rows) <= MAX_SEQUENCES:
            limit = f"must lie in [1, {MAX_SEQUENCES // len(rows)}] with {len(rows)} prompts"
            raise RequestError("num_return_sequences", num_sequences, limit)
        try:
            first = _parse_row(row, f"{request_id}.{batch_index}", handshake, is_llm_api=is_llm_api)
            if first.is_streaming and not is_decoupled:
                limit = "Streaming is only supported if model is deployed using decoupled mode."
                raise RequestError("streaming", True, limit)
        except RequestError as error:
            if error.field not in row and (sent := row.keys() & _SENT_AS.get(error.field or "", {})):
                error.blame(min(sent))
            raise
        first = replace(first, batch_index=batch_index, batch_size=len(rows), num_sequences=num_sequences)
        parsed += [replace(first, request=first.request.nth(n), sequence_index=n) for n in range(num_sequences)]
    return parsed


def split_batch(tensors: Tensors, prompt_inputs: tuple[str, ...] = PROMPT_INPUTS) -> list[Tensors]:
    """Returns one set of tensors per prompt. Tensors without a batch dimension hold one prompt."""
    prompts = next((tensors[name] for name in prompt_inputs if name in tensors), None)
    num_rows = prompts.shape[0] if prompts is not None and prompts.ndim > 1 else 1
    if num_rows == 1:
        return [tensors]
    for name, array in tensors.items():
        if array.ndim < 2 or array.shape[0] != num_rows:
            raise RequestError(name, list(array.shape), f"the batch holds {num_rows} prompts: must have as many rows")
    return [{name: array[row : row + 1] for name, array in tensors.items()} for row in range(num_rows)]


def _parse_row(tensors: Tensors, request_id: str, handshake: Handshake, *, is_llm_api: bool) -> ParsedRequest:
    model = handshake.model
    prompt_text, prompt_ids = _read_prompt(tensors, handshake)
    stop_strings = read_words(tensors, "stop_words", STOP_WORDS)
    stop_ids = read_word_ids(tensors, "stop_words_list", MAX_STOP_TOKENS)
    stop_sequences = model.tokenizer.encode_words("stop_words", stop_strings) + stop_ids
    num_draft_tokens = read_scalar(tensors, "num_draft_tokens")
    asked = read_scalar(tensors, "request_output_len", "max_tokens")
    if asked is None:
        raise RequestError("max_tokens", None, "is required (request_output_len of model tensorrt_llm)")
    request = Request(
        request_id=request_id,
        prompt_ids=prompt_ids,
        max_tokens=model.limits.clamp_max_tokens(asked, prompt_ids.size),
        sampling=_read_sampling(tensors, handshake, is_llm_api=is_llm_api),
        end_ids=_read_end_ids(tensors, handshake),
        stop_sequences=stop_sequences,
        max_draft_tokens=None if num_draft_tokens is None else int(num_draft_tokens),
        draft_ids=_read_draft_ids(tensors, model.limits),
        wants_log_probs=_flag(tensors, "return_log_probs"),
        wants_context_logits=_flag(tensors, "return_context_logits"),
        wants_context_log_probs=_flag(tensors, "return_context_log_probs"),
        wants_generation_logits=_flag(tensors, "return_generation_logits"),
        wants_stats=_flag(tensors, "return_perf_metrics"),
        guide=_read_guide(tensors),
        **_read_lora(tensors, handshake.model.adapters),
    )
    log_clamp(asked, request)
    request.validate(model.limits)
    _check_logits(request, model.limits)
    return ParsedRequest(
        request=request,
        prompt_text=prompt_text,
        stop_strings=tuple(stop_strings),
        is_streaming=bool(read_scalar(tensors, "streaming", "stream", default=False)),
        excludes_input=bool(read_scalar(tensors, "exclude_input_in_output", default=handshake.excludes_input)),
        wants_num_input_tokens=_flag(tensors, "return_num_input_tokens"),
        wants_num_output_tokens=_flag(tensors, "return_num_output_tokens"),
        num_prompt_blocks=-(-prompt_ids.size // model.kv_block_size),
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


def _read_prompt(tensors: Tensors, handshake: Handshake) -> tuple[str | None, np.ndarray]:
    """Returns the prompt's text, None for token ids, and its ids [num_prompt_tokens] int64."""
    model = handshake.model
    given = [name for name in PROMPT_INPUTS if name in tensors]
    if len(given) > 1:
        raise RequestError(given[1], f"given with {given[0]}", "send one of the two")
    if not given:
        raise RequestError("text_input", None, "a prompt is needed: send text_input, messages or input_ids")
    if given[0] != "input_ids":
        text = read_text(given[0], read_scalar(tensors, given[0]), model.max_text_bytes)
        if given[0] == "messages":
            text, token_ids = model.tokenizer.encode_chat("messages", text, model.max_text_bytes)
        else:
            token_ids = model.tokenizer.encode_prompt(text)
        if not token_ids:
            raise RequestError(given[0], text, "prompt is empty; at least 1 token is needed")
        return text, np.asarray(token_ids, np.int64)
    ids = tensors["input_ids"].reshape(-1).astype(np.int64)
    length = read_scalar(tensors, "input_lengths", default=ids.size)
    if not 0 <= length <= ids.size:
        raise RequestError("input_lengths", length, f"must lie in [1, {ids.size}], the number of input_ids")
    ids = ids[:length]
    last_id = model.limits.vocab_size - 1
    if handshake.out_of_vocab == "clamp":
        ids = ids.clip(0, last_id)
    elif ids.size and not 0 <= (bad := int(ids.min() if ids.min() < 0 else ids.max())) <= last_id:
        limit = f"token ids must lie in [0, {last_id}]; --out-of-vocab clamp accepts any, for load tools"
        raise RequestError("input_ids", bad, limit)
    return None, ids


def _read_draft_ids(tensors: Tensors, limits: Limits) -> tuple[int, ...]:
    """Returns the client's draft tokens without the padding behind them."""
    if "draft_input_ids" not in tensors:
        return ()
    if (num_ids := tensors["draft_input_ids"].size) > limits.max_context:
        limit = f"must be at most the context length of {limits.max_context} tokens"
        raise RequestError("draft_input_ids length", num_ids, limit)
    ids = tensors["draft_input_ids"].reshape(-1).tolist()
    while ids and ids[-1] == -1:
        ids.pop()
    return tuple(ids)


def _read_end_ids(tensors: Tensors, handshake: Handshake) -> tuple[int, ...]:
    """Returns the client's end id, else the model's. An id outside the vocabulary, such as -1, means none."""
    end_id = read_scalar(tensors, "end_id")
    if end_id is None:
        return handshake.model.end_ids
    return (int(end_id),) if 0 <= end_id < handshake.model.limits.vocab_size else ()


def _temperature(given: float | None, top_k: int, top_p: float | None, min_p: float, *, is_llm_api: bool) -> float:
    """Returns the temperature to decode at, 0 for greedy."""
    if is_llm_api:
        is_greedy = top_k == 1 or top_p == 0.0 or (given is None and top_p is None and not (top_k or min_p))
    else:
        # TensorRT-LLM turns top_k 0 with top_p 0 into top_k 1, and its clients always send a temperature.
        is_greedy = top_k == 1 or not (top_k or (top_p or 0.0) > 0.0 or min_p)
    return 0.0 if is_greedy else 1.0 if given is None else given


def _read_sampling(tensors: Tensors, handshake: Handshake, *, is_llm_api: bool) -> Sampling:
    tokenizer = handshake.model.tokenizer
    top_k = int(read_scalar(tensors, "runtime_top_k", "top_k", default=0))
    top_p = read_scalar(tensors, "runtime_top_p", "top_p")
    min_p = read_scalar(tensors, "min_p", default=0.0)
    given = read_scalar(tensors, "temperature")
    if given is not None:
        Sampling(temperature=given).validate(handshake.model.limits.vocab_size)  # even if it has no effect
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
        logit_bias=_read_logit_bias(tensors, handshake),
        bad_words=bad_words + read_word_ids(tensors, "bad_words_list", MAX_BAD_TOKENS),
    )


def _read_lora(tensors: Tensors, names: Sequence[str]) -> dict[str, Any]:
    """Returns the request's adapter: a loaded one by name or by its place, or a sent one, perhaps with its tensors."""
    task_id = int(read_scalar(tensors, "lora_task_id", default=0))
    given = {name: tensors[name] for name in ("lora_weights", "lora_config") if name in tensors and tensors[name].size}
    if len(given) == 1:
        raise RequestError(next(iter(given)), "given alone", "lora_weights and lora_config come together")
    if given and task_id <= len(names):
        limit = f"must be above {len(names)} with lora_weights: 0 is none, and --lora has loaded {len(names)}"
        raise RequestError("lora_task_id", task_id, limit)
    if task_id > len(names):
        return {"lora_task_id": task_id, **{name: np.array(array) for name, array in given.items()}}
    name = names[task_id - 1] if task_id else read_text("lora_name", read_scalar(tensors, "lora_name", default=b""))
    return {"lora_name": name}


def _read_guide(tensors: Tensors) -> str | None:
    kind, guide = (
        read_text(name, read_scalar(tensors, name, default=b""), MAX_GUIDE_BYTES) for name in (GUIDE_TYPE, GUIDE)
    )
    if not kind and guide:
        raise RequestError(GUIDE, guide, f"is given without {GUIDE_TYPE}")
    return read_guide(kind, guide) if kind else None


def _read_logit_bias(tensors: Tensors, handshake: Handshake) -> dict[int, float] | None:
    model = handshake.model
    dense = tensors.get("embedding_bias")
    if dense is None or dense.size == 0:
        return bias_by_words(tensors, "embedding_bias_words", "embedding_bias_weights", model.tokenizer)
    if dense.size != model.limits.vocab_size:
        limit = f"must be the vocabulary size of {model.limits.vocab_size}"
        raise RequestError("embedding_bias length", dense.size, limit)
    values = dense.reshape(-1)
    (token_ids,) = values.nonzero()
    return dict(zip(token_ids.tolist(), values[token_ids].tolist(), strict=True)) or None


# -- values of tensors ----------------------------------------------------------------------------------------------
def num_text_bytes(tensors: Tensors) -> int:
    return sum(len(value) for array in tensors.values() if array.dtype == object for value in array.reshape(-1))


def read_scalar(tensors: Tensors, *names: str, default=None):
    """Returns the single element of the first of these aliases that is present, else default. Raises RequestError."""
    for name in names:
        if name in tensors:
            values = tensors[name].reshape(-1)
            if values.size != 1:
                raise RequestError(name, list(tensors[name].shape), "must hold exactly 1 value")
            return values[0].item() if isinstance(values[0], np.generic) else values[0]
    return default


def read_text(name: str, value: object, max_bytes: int | None = None) -> str:
    """Returns a string's text. Raises RequestError if it is not UTF-8 or longer than max_bytes (None: any length)."""
    if max_bytes is not None:
        check_length(name, value, max_bytes)
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode("utf-8")  # pyright: ignore[reportArgumentType]
    except (UnicodeDecodeError, TypeError, ValueError):
        raise RequestError(name, value, "must be UTF-8 text") from None


def read_words(tensors: Tensors, name: str, limit: WordLimit) -> list[str]:
    """Returns the strings of a STRING [-1] tensor except empty ones. Raises RequestError."""
    if name not in tensors:
        return []
    values = [value for value in tensors[name].reshape(-1) if value]
    if len(values) > limit.num_words:
        raise RequestError(name, len(values), f"at most {limit.num_words} are allowed")
    if (num_bytes := sum(map(len, values))) > limit.num_bytes:
        raise RequestError(f"{name} length", num_bytes, f"at most {limit.num_bytes} bytes in all are allowed")
    return [read_text(name, value) for value in values]


def read_word_ids(tensors: Tensors, name: str, max_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Returns words of INT32 [2, n] or [1, 2, n]: row 0 flat ids, row 1 cumulative ends padded with -1.

    Raises RequestError, for n above max_tokens too.
    """
    if name not in tensors or tensors[name].size == 0:
        return ()
    array = tensors[name]
    if array.shape[-1] > max_tokens:
        raise RequestError(f"{name} length", array.shape[-1], f"at most {max_tokens} tokens in all are allowed")
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
    """Returns words as read_word_ids reads them: INT32 [2, n], n = 0 for no words."""
    flat = [token_id for word in words for token_id in word]
    array = np.full((2, len(flat)), -1, np.int32)
    array[0] = flat
    array[1, : len(words)] = np.cumsum([len(word) for word in words])
    return array


def bias_by_words(
    tensors: Tensors, words_name: str, weights_name: str, tokenizer: TextTokenizer
) -> dict[int, float] | None:
    """Returns a bias by token id: each token of a word gets the word's weight, and weights of shared tokens add up."""
    words = read_words(tensors, words_name, BIAS_WORDS)
    weights = tensors[weights_name].reshape(-1).tolist() if weights_name in tensors else []
    if len(words) != len(weights):
        raise RequestError(weights_name, len(weights), f"one weight per word is needed; {len(words)} words were given")
    bias: dict[int, float] = {}
    for token_ids, weight in zip(tokenizer.encode_words(words_name, words), weights, strict=True):
        for token_id in token_ids:
            bias[token_id] = bias.get(token_id, 0.0) + weight
    return bias or None


# -- refused inputs --------------------------------------------------------------------------------
def _is_blank(array: np.ndarray) -> bool:
    """Is true for no value, zeros, False and empty strings, which clients send for "not used"."""
    if array.dtype != object:
        return not array.any()
    return not any(value not in (0, b"", "") for value in array.reshape(-1))


def _holds_at_most(*neutral: float) -> Callable[[np.ndarray], bool]:
    return lambda array: all(value in neutral for value in array.reshape(-1).tolist())


def _is_empty(array: np.ndarray) -> bool:
    return array.size == 0


class Unsupported(NamedTuple):
    """A feature that the engine lacks, and a test for values that do not use it."""

    feature: str
    is_neutral: Callable[[np.ndarray], bool]


_ENCODER, _IMAGES, _LORA = "encoder-decoder models", "images and videos", "LoRA adapters by request"
_PROMPT_TABLE, _RETENTION = "prompt tables", "KV retention priorities"
_DRAFT_LOGITS = "accepting draft tokens by their logits"
UNSUPPORTED = {
    name: Unsupported(feature, is_neutral)
    for feature, is_neutral, names in (
        (_LORA, _is_blank, "lora_id lora_path lora_ckpt_source"),
        ("logits post-processors", _is_blank, "sampling_param_logits_post_processor_name"),
        (_PROMPT_TABLE, _is_empty, "prompt_embedding_table"),
        (_PROMPT_TABLE, _is_blank, "prompt_vocab_size prompt_table_extra_id prompt_table_extra_ids"),
        (_PROMPT_TABLE, _is_blank, "PROMPT_TABLE_EXTRA_ID"),
        (_ENCODER, _is_blank, "decoder_text_input encoder_output_lengths cross_attention_mask skip_cross_attn_blocks"),
        (_ENCODER, _is_blank, "DECODER_QUERY"),
        # Preprocessing returns one padding token as the decoder's input.
        (_ENCODER, lambda ids: ids.size <= 1 or (ids.ndim > 1 and ids.shape[-1] <= 1), "decoder_input_ids"),
        (_ENCODER, _holds_at_most(0, 1), "decoder_input_lengths"),
        (_ENCODER, _is_empty, "encoder_input_ids encoder_input_features"),
        (_IMAGES, _is_empty, "image_input image_bytes_input video_bytes_input IMAGE_BYTES VIDEO_BYTES"),
        (_IMAGES, _is_blank, "image_url_input image_url IMAGE_URL IMAGES"),
        ("multimodal rotary positions", _is_blank, "mrope_rotary_cos_sin mrope_position_deltas"),
        ("disaggregated serving", _is_empty, "context_phase_params"),
        (_RETENTION, _is_empty, "retention_token_range_starts retention_token_range_ends"),
        (_RETENTION, _is_empty, "retention_token_range_priorities retention_token_range_durations_ms"),
        (_RETENTION, _holds_at_most(0, 35), "retention_decode_priority"),  # 35 is TensorRT-LLM's default
        (_RETENTION, _holds_at_most(0, -1), "retention_decode_duration_ms"),
        ("lookahead decoding", _holds_at_most(0), "lookahead_window_size lookahead_ngram_size"),
        ("lookahead decoding", _holds_at_most(0), "lookahead_verification_set_size"),
        (_DRAFT_LOGITS, _is_empty, "draft_logits"),
        (_DRAFT_LOGITS, _is_blank, "draft_acceptance_threshold use_draft_logits"),
        # A decay of 1 is none, and without one the bounds of top_p are never reached.
        ("top_p that decays", _holds_at_most(0.0, 1.0), "runtime_top_p_decay"),
        ("beam search", _holds_at_most(0, 1), "beam_width"),
        ("several candidates", _holds_at_most(0, 1), "sampling_param_best_of"),
    )
    for name in names.split()
}
ALL_INPUT_NAMES = frozenset(
    spec.name
    for specs in (TEXT_INPUTS, TOKEN_INPUTS, PREPROCESSING_INPUTS, POSTPROCESSING_INPUTS, LLMAPI_INPUTS)
    for spec in specs
)


def refuse_unsupported(tensors: Tensors) -> None:
    """Raises RequestError for the first tensor that asks for a feature in UNSUPPORTED."""
    for name, array in tensors.items():
        unsupported = UNSUPPORTED.get(name)
        if unsupported is not None and not unsupported.is_neutral(array):
            shown = array.reshape(-1)[0] if array.size == 1 else list(array.shape)
            shown = shown.item() if isinstance(shown, np.generic) else shown
            raise RequestError(name, shown, f"{unsupported.feature}: not supported; leave this tensor out")


def refuse_undeclared(names: list[str], model: str) -> None:
    """Raises RequestError for a tensor's name among the request's parameters.

    Triton's generate endpoint turns every JSON key that the model does not declare into a parameter.
    """
    for name in names:
        if name in ALL_INPUT_NAMES:
            raise RequestError(name, "given", f"model {model} has no such input; leave it out")
