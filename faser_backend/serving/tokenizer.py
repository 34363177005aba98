"""Text <-> token ids of one engine directory, on the `tokenizers` library.

Encodes without special tokens unless asked. For byte-level vocabularies it also gives the exact
bytes of every token, which makes streaming both cheap and exact (see text_stream.py).
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from faser_backend.core.errors import ConfigError, RequestError


class TextTokenizer:
    """A loaded tokenizer. Thread-safe: encoding and decoding keep no state."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def from_file(cls, path: Path) -> TextTokenizer:
        """Raises ConfigError naming the file where it is missing or not a tokenizer."""
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises plain Exception for every cause
            raise ConfigError(f"tokenizer {path}: {error}") from None

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_words(self, name: str, words: list[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences of stop or bad words. Raises RequestError for a word without tokens."""
        encoded = tuple(tuple(self.encode(word)) for word in words)
        for word, token_ids in zip(words, encoded, strict=True):
            if not token_ids:
                raise RequestError(name, word, "the tokenizer has no token for this word")
        return encoded

    def decode(self, token_ids: list[int]) -> str:
        """Text of ids without special tokens; invalid UTF-8 becomes U+FFFD."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    @cached_property
    def token_bytes(self) -> list[bytes] | None:
        """Bytes of every token id (b"" for special tokens and holes), or None if not byte-level."""
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
            else:  # added text that never went through the byte alphabet
                table[token_id] = token.encode()
        return table


def _is_byte_level(decoder: dict | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return len(decoder["decoders"]) == 1 and _is_byte_level(decoder["decoders"][0])
    return decoder["type"] == "ByteLevel"


def _byte_level_alphabet() -> list[str]:
    """The 256 printable characters that stand for bytes 0..255 in byte-level vocabularies.

    Printable Latin-1 bytes stand for themselves; the other 68 take code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
