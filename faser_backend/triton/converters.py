"""Converts the tensors of models `preprocessing` and `postprocessing`, one row per prompt."""

from __future__ import annotations

import numpy as np

from faser_backend.core.errors import ErrorCode, RequestError
from faser_backend.serving.served_model import ServedModel
from faser_backend.text.tokenizer import TextTokenizer
from faser_backend.triton.contract import (
    BAD_WORDS,
    STOP_WORDS,
    WordLimit,
    bias_by_words,
    read_scalar,
    read_text,
    read_words,
    refuse_unsupported,
    split_batch,
    word_ids_array,
)
from faser_backend.triton.tensor_io import NamedArray
from faser_backend.triton.tensors import Tensors

MAX_TOKENS = 1 << 20  # of one request to `postprocessing`


def preprocess(tensors: Tensors, model: ServedModel) -> list[NamedArray]:
    """Turns QUERY or MESSAGES [B, 1] into token ids, padded to the longest row with the pad id. Raises RequestError.

    The decoder's ids are one padding token each, for clients that pass them on.
    """
    tokenizer = model.tokenizer
    refuse_unsupported(tensors)
    rows: list[Tensors] = [
        {name: array for name, array in row.items() if array.size}
        for row in split_batch(tensors, ("QUERY", "MESSAGES"))
    ]
    prompts = [_read_prompt(row, tokenizer, model.max_text_bytes) for row in rows]
    if any("REQUEST_OUTPUT_LEN" not in row for row in rows):
        raise RequestError("REQUEST_OUTPUT_LEN", None, f"needs one value per prompt, {len(rows)}")
    end_ids = _column(rows, "END_ID", model.end_ids[0] if model.end_ids else -1)
    default_pad_id = max(int(end_ids[0, 0]), 0) if tokenizer.pad_id is None else tokenizer.pad_id
    pad_ids = _column(rows, "PAD_ID", default_pad_id)
    input_ids = np.repeat(pad_ids, max(map(len, prompts)), axis=1)
    for row, token_ids in enumerate(prompts):
        input_ids[row, : len(token_ids)] = token_ids
    return [
        ("INPUT_ID", input_ids),
        ("DECODER_INPUT_ID", pad_ids),
        ("BAD_WORDS_IDS", _words(rows, "BAD_WORDS_DICT", BAD_WORDS, tokenizer)),
        ("STOP_WORDS_IDS", _words(rows, "STOP_WORDS_DICT", STOP_WORDS, tokenizer)),
        ("REQUEST_INPUT_LEN", np.array([[len(token_ids)] for token_ids in prompts], np.int32)),
        ("REQUEST_DECODER_INPUT_LEN", np.ones((len(rows), 1), np.int32)),
        ("REQUEST_OUTPUT_LEN", _column(rows, "REQUEST_OUTPUT_LEN", 0)),
        ("EMBEDDING_BIAS", _bias(rows, model.limits.vocab_size, tokenizer)),
        ("OUT_END_ID", end_ids),
        ("OUT_PAD_ID", pad_ids),
    ]


def postprocess(tensors: Tensors, tokenizer: TextTokenizer, *, skips_special_tokens: bool = True) -> list[NamedArray]:
    """Turns TOKENS_BATCH [B, beams, n] and SEQUENCE_LENGTH [B, beams] into OUTPUT [B * beams]. Raises RequestError.

    Ids beyond a sequence's length are ignored.
    """
    for name in ("TOKENS_BATCH", "SEQUENCE_LENGTH"):
        if name not in tensors:
            raise RequestError(name, None, "is required")
    tokens, lengths = tensors["TOKENS_BATCH"], tensors["SEQUENCE_LENGTH"]
    if tokens.size > MAX_TOKENS:
        limit = f"must be at most {MAX_TOKENS} ids"
        raise RequestError("TOKENS_BATCH length", tokens.size, limit, code=ErrorCode.TOO_LONG)
    if tokens.ndim != 3 or lengths.shape != tokens.shape[:2]:
        raise RequestError("SEQUENCE_LENGTH", list(lengths.shape), f"must be the first two of {list(tokens.shape)}")
    texts = []
    for sequence, length in zip(tokens.reshape(-1, tokens.shape[2]), lengths.reshape(-1).tolist(), strict=True):
        if not 0 <= length <= sequence.size:
            raise RequestError("SEQUENCE_LENGTH", length, f"must lie in [0, {sequence.size}]")
        ids = sequence[:length]
        for bad in ids[(ids < 0) | (ids >= tokenizer.vocab_size)][:1].tolist():
            raise RequestError("TOKENS_BATCH", bad, f"token ids must lie in [0, {tokenizer.vocab_size - 1}]")
        texts.append(tokenizer.decode(ids.tolist(), skips_special_tokens=skips_special_tokens).encode())
    return [("OUTPUT", np.array(texts, dtype=object))]


def _read_prompt(row: Tensors, tokenizer: TextTokenizer, max_bytes: int) -> list[int]:
    if "QUERY" in row and "MESSAGES" in row:
        raise RequestError("MESSAGES", "given with QUERY", "send one of the two")
    for name in ("MESSAGES", "QUERY"):
        if name in row:
            text = read_text(name, read_scalar(row, name), max_bytes)
            return tokenizer.encode_prompt(text) if name == "QUERY" else tokenizer.encode_chat(name, text, max_bytes)[1]
    raise RequestError("QUERY", None, "a prompt is needed: send QUERY or MESSAGES")


def _column(rows: list[Tensors], name: str, default: int) -> np.ndarray:
    """Returns INT32 [B, 1]: the client's values, else the default."""
    return np.array([[read_scalar(row, name, default=default)] for row in rows], np.int32)


def _words(rows: list[Tensors], name: str, limit: WordLimit, tokenizer: TextTokenizer) -> np.ndarray:
    """Returns word ids [B, 2, n]. Ids are padded with 0, ends with -1."""
    words = [word_ids_array(tokenizer.encode_words(name, read_words(row, name, limit))) for row in rows]
    array = np.zeros((len(rows), 2, max(ids.shape[1] for ids in words)), np.int32)
    array[:, 1] = -1
    for index, ids in enumerate(words):
        array[index, :, : ids.shape[1]] = ids
    return array


def _bias(rows: list[Tensors], vocab_size: int, tokenizer: TextTokenizer) -> np.ndarray:
    """Returns biases [B, vocab_size], or [B, 0] if no row has one."""
    biases = [bias_by_words(row, "EMBEDDING_BIAS_WORDS", "EMBEDDING_BIAS_WEIGHTS", tokenizer) or {} for row in rows]
    array = np.zeros((len(rows), vocab_size if any(biases) else 0), np.float32)
    for row, bias in enumerate(biases):
        array[row, list(bias)] = list(bias.values())
    return array
