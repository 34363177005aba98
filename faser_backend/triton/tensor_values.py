"""Values out of request tensors and into them: scalars, texts, word lists, biases. Numpy and the tokenizer alone.

Bytes and words are counted before anything is decoded or tokenised.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from faser_backend.core.errors import RequestError
from faser_backend.core.request import MAX_BAD_WORDS, MAX_STOP_SEQUENCES
from faser_backend.text.tokenizer import TextTokenizer, check_length
from faser_backend.triton.tensors import Tensors


class WordLimit(NamedTuple):
    """How many words a list may hold, and of how many bytes in all."""

    num_words: int
    num_bytes: int


STOP_WORDS = WordLimit(MAX_STOP_SEQUENCES, 4096)
BAD_WORDS = WordLimit(MAX_BAD_WORDS, 64 << 10)
BIAS_WORDS = WordLimit(MAX_BAD_WORDS, 64 << 10)
MIN_TEXT_BYTES = 64 << 10
MAX_TOKEN_BYTES = 16  # that a token of a text is taken to have on average, however long the longest is


def default_text_bytes(max_context: int, longest_token: int) -> int:
    """Bytes of a text that may fit into the context; longer ones are refused before they are tokenised."""
    return max(MIN_TEXT_BYTES, max_context * min(longest_token, MAX_TOKEN_BYTES))


def num_text_bytes(tensors: Tensors) -> int:
    """Bytes of all strings of a request."""
    return sum(len(value) for array in tensors.values() if array.dtype == object for value in array.reshape(-1))


def read_scalar(tensors: Tensors, *names: str, default=None):
    """The one element of the first tensor of `names` that is present (they are aliases), else default."""
    for name in names:
        if name in tensors:
            values = tensors[name].reshape(-1)
            if values.size != 1:
                raise RequestError(name, list(tensors[name].shape), "must hold exactly 1 value")
            return values[0].item() if isinstance(values[0], np.generic) else values[0]
    return default


def read_text(name: str, value: object, max_bytes: int | None = None) -> str:
    """Raises RequestError for what is longer than max_bytes, None is any length, or no UTF-8."""
    if max_bytes is not None:
        check_length(name, value, max_bytes)
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode("utf-8")  # pyright: ignore[reportArgumentType]
    except (UnicodeDecodeError, TypeError, ValueError):
        raise RequestError(name, value, "must be UTF-8 text") from None


def read_words(tensors: Tensors, name: str, limit: WordLimit) -> list[str]:
    """Strings of a STRING[-1] tensor; empty strings mean none."""
    if name not in tensors:
        return []
    values = [value for value in tensors[name].reshape(-1) if value]
    if len(values) > limit.num_words:
        raise RequestError(name, len(values), f"at most {limit.num_words} are allowed")
    if (num_bytes := sum(map(len, values))) > limit.num_bytes:
        raise RequestError(f"{name} length", num_bytes, f"at most {limit.num_bytes} bytes in all are allowed")
    return [read_text(name, value) for value in values]


def read_word_ids(tensors: Tensors, name: str, max_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Words from INT32 [2, n] (or [1, 2, n]): row 0 flat ids, row 1 cumulative ends padded with -1; n <= max_tokens."""
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
    words = read_words(tensors, words_name, BIAS_WORDS)
    weights = tensors[weights_name].reshape(-1).tolist() if weights_name in tensors else []
    if len(words) != len(weights):
        raise RequestError(weights_name, len(weights), f"one weight per word is needed; {len(words)} words were given")
    bias: dict[int, float] = {}
    for token_ids, weight in zip(tokenizer.encode_words(words_name, words), weights, strict=True):
        for token_id in token_ids:
            bias[token_id] = bias.get(token_id, 0.0) + weight
    return bias or None
