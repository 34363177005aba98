"""Converts text to token ids and back for one engine directory, with the `tokenizers` library.

Words get no special tokens; prompts and conversations get those of the checkpoint (prompts.py). For byte-level
vocabularies, `token_bytes` holds the bytes of every token, with which answer_stream.py decodes exactly and fast.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # encode on the calling thread

from tokenizers import Tokenizer

from faser_backend.core.errors import ConfigError, ErrorCode, RequestError
from faser_backend.files import FileError, read_text
from faser_backend.text.prompts import ChatRenderer, Message, PromptFormat, read_messages

PANIC = "PanicException"  # pyo3's exception, which cannot be imported


class TextTokenizer:
    """A loaded tokenizer with the prompt format of its checkpoint. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, prompts: PromptFormat | None = None, file: Path | None = None) -> None:
        """file: of the tokenizer, from which another process can load it."""
        self._tokenizer, self.file = tokenizer, file
        self.prompts = prompts or PromptFormat()
        self._chat = ChatRenderer(self.prompts.chat_template, self.prompts.special_tokens)

    @classmethod
    def from_file(cls, path: Path, prompts: PromptFormat | None = None) -> TextTokenizer:
        """Loads a tokenizer. Raises ConfigError naming the file if it is missing or not a tokenizer."""
        return cls(load_tokenizer(path), prompts, path)

    def adding_special_tokens(self, adds_special_tokens: bool) -> TextTokenizer:
        """Returns the same tokenizer with PromptFormat.adding_special_tokens applied."""
        return TextTokenizer(self._tokenizer, self.prompts.adding_special_tokens(adds_special_tokens), self.file)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token(self) -> int:
        """The bytes of the longest token as the vocabulary writes it, at least as many as its text has."""
        return max((len(token.encode()) for token in self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    @property
    def pad_id(self) -> int | None:
        """The id of the checkpoint's pad_token."""
        return self._special_id("pad_token")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Returns token ids. Raises RequestError if the library fails."""
        with _failures_as(lambda reason: RequestError("text", text, f"the tokenizer cannot encode it ({reason})")):
            # A batch of one: the library releases the interpreter's lock for batches only.
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the ids of a plain prompt with the checkpoint's special tokens, the begin token at most once."""
        token_ids = self.encode(text, add_special_tokens=self.prompts.adds_special_tokens)
        begin_id = self._special_id("bos_token")
        if begin_id is None or not self.prompts.adds_special_tokens:
            return token_ids
        if self.prompts.adds_begin_token and token_ids[:1] != [begin_id]:
            return [begin_id, *token_ids]
        if token_ids[:2] == [begin_id, begin_id]:  # the text has its own begin token
            return token_ids[1:]
        return token_ids

    def encode_chat(self, field: str, messages: str | list[Any], max_bytes: int | None = None) -> tuple[str, list[int]]:
        """Returns the prompt of a conversation [{role, content}], or of its JSON, and its ids.

        The ids hold the special tokens that the template writes and no others. Raises RequestError naming the field,
        also for a prompt of more than max_bytes.
        """
        return self.encode_conversation(field, read_messages(field, messages), max_bytes=max_bytes)

    def encode_conversation(
        self,
        field: str,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        *,
        max_bytes: int | None = None,
    ) -> tuple[str, list[int]]:
        """Works as encode_chat for checked messages. tools: functions that the template may show to the model."""
        text = self._chat.render(field, messages, tools)
        if max_bytes is not None and (num_bytes := len(text.encode())) > max_bytes:
            limit = f"must be at most {max_bytes} bytes, rendered"
            raise RequestError(f"{field} length", num_bytes, limit, code=ErrorCode.TOO_LONG)
        return text, self.encode(text)

    def close(self) -> None:
        """Ends the process that renders conversations, if it runs."""
        self._chat.close()

    def encode_words(self, name: str, words: list[str]) -> tuple[tuple[int, ...], ...]:
        """Returns the token sequences of stop or bad words. Raises RequestError for a word without tokens."""
        encoded = tuple(tuple(self.encode(word)) for word in words)
        for word, token_ids in zip(words, encoded, strict=True):
            if not token_ids:
                raise RequestError(name, word, "the tokenizer has no token for this word")
        return encoded

    def decode(self, token_ids: list[int], *, skips_special_tokens: bool = True) -> str:
        """Returns the text of ids, by default without special tokens; invalid UTF-8 becomes U+FFFD.

        Raises RequestError if the library fails.
        """
        with _failures_as(lambda reason: RequestError("token_ids", token_ids, f"cannot be decoded ({reason})")):
            return self._tokenizer.decode(token_ids, skip_special_tokens=skips_special_tokens)

    def bytes_of(self, token_id: int) -> bytes:
        """Returns the bytes of a token, or b"" where only the text of its answer can tell."""
        if self.token_bytes is not None:  # a model's vocabulary may be larger
            return self.token_bytes[token_id] if token_id < len(self.token_bytes) else b""
        token = self._tokenizer.id_to_token(token_id) or ""  # SentencePiece spells single bytes as <0xNN>
        return bytes.fromhex(token[3:5]) if re.fullmatch("<0x[0-9A-F]{2}>", token) else b""

    def _special_id(self, name: str) -> int | None:
        token = self.prompts.special_tokens.get(name)
        return None if token is None else self._tokenizer.token_to_id(token)

    @cached_property
    def token_bytes(self) -> list[bytes] | None:
        """The bytes of every token id, b"" for special tokens and unused ids; None if not byte-level."""
        description = json.loads(self._tokenizer.to_str())
        if not _is_byte_level(description.get("decoder")):
            return None
        added = {token["id"]: token for token in description.get("added_tokens", [])}
        by_id = {token_id: token for token, token_id in self._tokenizer.get_vocab(with_added_tokens=True).items()}
        byte_of = {char: byte for byte, char in enumerate(_byte_level_alphabet())}
        table = [b""] * (max(by_id, default=-1) + 1)
        for token_id, token in by_id.items():
            if token_id in added and added[token_id]["special"]:
                continue
            if all(char in byte_of for char in token):
                table[token_id] = bytes(byte_of[char] for char in token)
            else:  # an added token, written as plain text
                table[token_id] = token.encode()
        return table


def check_length(name: str, text: object, max_bytes: int) -> None:
    """Raises RequestError for a text, or its bytes, of more than max_bytes."""
    if isinstance(text, str | bytes) and len(text) * (4 if isinstance(text, str) else 1) > max_bytes:
        num_bytes = len(text) if isinstance(text, bytes) else len(text.encode(errors="replace"))
        if num_bytes > max_bytes:
            limit = f"must be at most {max_bytes} bytes"
            raise RequestError(f"{name} length", num_bytes, limit, code=ErrorCode.TOO_LONG)


def load_tokenizer(path: Path) -> Tokenizer:
    """Loads the library's tokenizer. Raises ConfigError with the file's name alone, because clients may see it."""
    try:
        text = read_text(path)
    except FileError as error:
        raise ConfigError(f"tokenizer {path.name}: {error.reason}") from None
    with _failures_as(lambda reason: ConfigError(f"tokenizer {path.name}: the library cannot read it ({reason})")):
        tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()  # some files hold what a training used
    tokenizer.no_padding()
    return tokenizer


@contextmanager
def _failures_as(error_of: Callable[[str], Exception]) -> Iterator[None]:
    """Converts the library's errors: a plain Exception for any cause, a BaseException for a panic."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        lines = str(error).strip().splitlines() or [""]
        reason = "it panicked" if type(error).__name__ == PANIC else lines[0][:200]
        raise error_of(reason) from None


def _is_byte_level(decoder: dict | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return len(decoder["decoders"]) == 1 and _is_byte_level(decoder["decoders"][0])
    return decoder["type"] == "ByteLevel"


def _byte_level_alphabet() -> list[str]:
    """Returns the 256 printable characters that represent bytes 0..255 in byte-level vocabularies.

    Printable Latin-1 bytes represent themselves; the other 68 use code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
