"""The `preprocessing` and `postprocessing` models as functions on arrays, one row per prompt."""

from __future__ import annotations

import numpy as np

from faser_backend.core.errors import ErrorCode, RequestError
from faser_backend.serving.link import Hello
from faser_backend.serving.tensor_values import (
    BAD_WORDS,
    STOP_WORDS,
    WordLimit,
    bias_by_words,
    read_text,
    read_words,
    word_ids_array,
)
from faser_backend.serving.tensors import Tensors, refuse_unsupported
from faser_backend.serving.tokenizer import TextTokenizer
from faser_backend.serving.triton_io import NamedArray

MAX_TOKENS = 1 << 20  # that one request may have turned into text


def preprocess(tensors: Tensors, hello: Hello, tokenizer: TextTokenizer) -> list[NamedArray]:
    """QUERY or MESSAGES [B, 1] and friends -> token ids, padded to the longest row with the pad id.

    The decoder's ids, one padding token each, are for clients that pass them on; a decoder-only model reads none.
    """
    refuse_unsupported(tensors)
    rows = _read_prompts(tensors, tokenizer, hello.max_text_bytes)
    num_rows = len(rows)
    if "REQUEST_OUTPUT_LEN" not in tensors or tensors["REQUEST_OUTPUT_LEN"].size != num_rows:
        raise RequestError("REQUEST_OUTPUT_LEN", None, f"needs one value per prompt, {num_rows}")
    end_ids = _ids_by_row(tensors, "END_ID", num_rows, hello.end_ids[0] if hello.end_ids else -1)
    default_pad_id = max(int(end_ids[0, 0]), 0) if tokenizer.pad_id is None else tokenizer.pad_id
    pad_ids = _ids_by_row(tensors, "PAD_ID", num_rows, default_pad_id)
    input_ids = np.repeat(pad_ids, max(map(len, rows)), axis=1)
    for row, token_ids in enumerate(rows):
        input_ids[row, : len(token_ids)] = token_ids
    ones = np.ones((num_rows, 1), np.int32)
    return [
        ("INPUT_ID", input_ids),
        ("DECODER_INPUT_ID", pad_ids),
        ("BAD_WORDS_IDS", _words_by_row(tensors, "BAD_WORDS_DICT", BAD_WORDS, num_rows, tokenizer)),
        ("STOP_WORDS_IDS", _words_by_row(tensors, "STOP_WORDS_DICT", STOP_WORDS, num_rows, tokenizer)),
        ("REQUEST_INPUT_LEN", np.array([[len(token_ids)] for token_ids in rows], np.int32)),
        ("REQUEST_DECODER_INPUT_LEN", ones),
        ("REQUEST_OUTPUT_LEN", tensors["REQUEST_OUTPUT_LEN"].reshape(num_rows, 1).astype(np.int32)),
        ("EMBEDDING_BIAS", _bias_by_row(tensors, num_rows, hello, tokenizer)),
        ("OUT_END_ID", end_ids),
        ("OUT_PAD_ID", pad_ids),
    ]


def postprocess(tensors: Tensors, tokenizer: TextTokenizer, *, skips_special_tokens: bool = True) -> list[NamedArray]:
    """TOKENS_BATCH [B, beams, n] + SEQUENCE_LENGTH [B, beams] -> OUTPUT [B * beams].

    Ids beyond a sequence's length are padding, whatever they are.
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


def _read_prompts(tensors: Tensors, tokenizer: TextTokenizer, max_bytes: int) -> list[list[int]]:
    """Token ids of every row."""
    if "QUERY" in tensors and "MESSAGES" in tensors:
        raise RequestError("MESSAGES", "given with QUERY", "send one of the two")
    if "MESSAGES" in tensors:
        conversations = [read_text("MESSAGES", value, max_bytes) for value in tensors["MESSAGES"].reshape(-1)]
        return [tokenizer.encode_chat("MESSAGES", messages, max_bytes)[1] for messages in conversations]
    if "QUERY" not in tensors:
        raise RequestError("QUERY", None, "a prompt is needed: send QUERY or MESSAGES")
    texts = [read_text("QUERY", value, max_bytes) for value in tensors["QUERY"].reshape(-1)]
    return [tokenizer.encode_prompt(text) for text in texts]


def _ids_by_row(tensors: Tensors, name: str, num_rows: int, default: int) -> np.ndarray:
    """INT32 [B, 1]: the client's, else the default."""
    if name not in tensors or tensors[name].size == 0:
        return np.full((num_rows, 1), default, np.int32)
    if tensors[name].size != num_rows:
        raise RequestError(name, list(tensors[name].shape), f"needs one value per prompt, {num_rows}")
    return tensors[name].reshape(num_rows, 1).astype(np.int32)


def _words_by_row(tensors: Tensors, name: str, limit: WordLimit, num_rows: int, tokenizer: TextTokenizer) -> np.ndarray:
    """[B, 2, n]; rows with fewer ids are padded with 0 and end offsets with -1."""
    rows = []
    for row in range(num_rows):
        words = read_words({name: tensors[name][row]}, name, limit) if name in tensors else []
        rows.append(word_ids_array(tokenizer.encode_words(name, words)))
    array = np.zeros((num_rows, 2, max(row.shape[1] for row in rows)), np.int32)
    array[:, 1] = -1
    for index, words in enumerate(rows):
        array[index, :, : words.shape[1]] = words
    return array


def _bias_by_row(tensors: Tensors, num_rows: int, hello: Hello, tokenizer: TextTokenizer) -> np.ndarray:
    """[B, vocab_size], or [B, 0] where no row has a bias."""
    names = ("EMBEDDING_BIAS_WORDS", "EMBEDDING_BIAS_WEIGHTS")
    rows = []
    for row in range(num_rows):
        present = {name: tensors[name][row] for name in names if name in tensors}
        rows.append(bias_by_words(present, *names, tokenizer) or {})
    array = np.zeros((num_rows, hello.limits.vocab_size if any(rows) else 0), np.float32)
    for row, bias in enumerate(rows):
        for token_id, weight in bias.items():
            array[row, token_id] = weight
    return array
