"""What a GGUF file says about its tokenizer: tokens, merges, special and end tokens, chat template.

Read and checked here; made into a tokenizer.json in `gguf_tokenizer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engines.config_fields import ConfigFields
from engines.prompts import MAX_TEMPLATE_BYTES

KINDS = ("gpt2", "llama")  # byte-level merges; SentencePiece's merges
UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6  # types of tokens; 1 is a normal one
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
ENDS = ("eos", "eot", "eom")  # of the text, of a turn, of a message
SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # where the file names none
PREFIX = "tokenizer.ggml"


@dataclass(frozen=True, slots=True)
class GGUFVocabulary:
    """Tokens as the file spells them. Ids of what only pads an embedding have no token."""

    path: Path
    kind: str  # one of KINDS
    pre_tokenizer: str | None
    tokens: dict[str, int]
    types: list[int]  # by id
    scores: list[float] | None  # by id, of the merges that end in it
    merges: list[tuple[str, str]] | None  # best first
    named: dict[str, int]  # by names as in NAMED, and what ends a text
    adds_begin: bool | None  # None: as the kind does
    adds_end: bool
    adds_space_prefix: bool
    chat_template: str | None

    @property
    def end_ids(self) -> tuple[int, ...]:
        """What ends an answer, the end of the text first."""
        return tuple(dict.fromkeys(self.named[name] for name in ENDS if name in self.named))

    def of_types(self, *types: int) -> list[str]:
        """Tokens of these types in the order of their ids."""
        return [token for token, token_id in self.tokens.items() if self.types[token_id] in types]


def read_gguf_vocabulary(path: Path, metadata: dict[str, Any]) -> GGUFVocabulary:
    """Raises CheckpointError naming file, key and value."""
    fields = ConfigFields(metadata, path)
    kind = metadata.get(f"{PREFIX}.model")
    if kind not in KINDS:
        raise fields.error(f"{PREFIX}.model", kind, f"must be one of {', '.join(KINDS)}")
    fields.must_be(f"{PREFIX}.remove_extra_whitespaces", False)
    texts = _texts(fields, f"{PREFIX}.tokens")
    if not texts:
        raise fields.error(f"{PREFIX}.tokens", texts, "must list the vocabulary")
    named = _named(fields, len(texts), SENTENCEPIECE_IDS if kind == "llama" else {})
    types = _types(fields, len(texts), named)
    scores = _numbers(fields, f"{PREFIX}.scores", len(texts))
    return GGUFVocabulary(
        path=path,
        kind=kind,
        pre_tokenizer=metadata.get(f"{PREFIX}.pre"),
        tokens=_tokens(fields, texts, types),
        types=types,
        scores=None if scores is None else [float(score) for score in scores],
        merges=_merges(fields),
        named=named,
        adds_begin=None if f"{PREFIX}.add_bos_token" not in metadata else fields.flag(f"{PREFIX}.add_bos_token", False),
        adds_end=fields.flag(f"{PREFIX}.add_eos_token", False),
        adds_space_prefix=fields.flag(f"{PREFIX}.add_space_prefix", True),
        chat_template=_chat_template(fields),
    )


def _tokens(fields: ConfigFields, texts: list[str], types: list[int]) -> dict[str, int]:
    """Text -> id, without the placeholders that converters put where an embedding has more rows than tokens."""
    tokens: dict[str, int] = {}
    for token_id, text in enumerate(texts):
        if types[token_id] == UNUSED and text == f"[PAD{token_id}]":
            continue
        if text in tokens:
            raise fields.error(f"{PREFIX}.tokens[{token_id}]", text, f"is token {tokens[text]} already")
        tokens[text] = token_id
    return tokens


def _named(fields: ConfigFields, num_ids: int, defaults: dict[str, int]) -> dict[str, int]:
    """Ids by names as in NAMED and ENDS, where the file names one."""
    named = {}
    for name in dict.fromkeys((*NAMED.values(), *ENDS)):
        key = f"{PREFIX}.{name}_token_id"
        token_id = fields.values.get(key, defaults.get(name))
        if token_id is None:
            continue
        if type(token_id) is not int or not 0 <= token_id < num_ids:
            raise fields.error(key, token_id, f"must lie in [0, {num_ids - 1}]")
        named[name] = token_id
    return named


def _types(fields: ConfigFields, num_ids: int, named: dict[str, int]) -> list[int]:
    """Types by id; without any in the file, what it names is special and all else normal."""
    found = _numbers(fields, f"{PREFIX}.token_type", num_ids)
    if found is not None:
        return [int(kind) for kind in found]
    special = set(named.values())
    return [CONTROL if token_id in special else 1 for token_id in range(num_ids)]


def _merges(fields: ConfigFields) -> list[tuple[str, str]] | None:
    key = f"{PREFIX}.merges"
    texts = _texts(fields, key)
    if texts is None:
        return None
    merges = []
    for index, text in enumerate(texts):
        left, _, right = text.partition(" ")
        if not left or not right or " " in right:
            raise fields.error(f"{key}[{index}]", text, "must be two tokens with a space between")
        merges.append((left, right))
    return merges


def _chat_template(fields: ConfigFields) -> str | None:
    key = "tokenizer.chat_template"
    template = fields.values.get(key)
    if template is not None and not isinstance(template, str):
        raise fields.error(key, template, "must be text")
    if template is not None and len(template.encode()) > MAX_TEMPLATE_BYTES:
        raise fields.error(key, template, f"must fit {MAX_TEMPLATE_BYTES} bytes")
    return template


def _texts(fields: ConfigFields, key: str) -> list[str] | None:
    value = fields.values.get(key)
    if value is not None and not isinstance(value, list):
        raise fields.error(key, value, "must list texts")
    return value


def _numbers(fields: ConfigFields, key: str, count: int) -> np.ndarray | None:
    value = fields.values.get(key)
    if value is None:
        return None
    if not isinstance(value, np.ndarray) or len(value) != count:
        found = len(value) if isinstance(value, (np.ndarray, list)) else value
        raise fields.error(f"length of {key}", found, f"must be {count}, as of {PREFIX}.tokens")
    return value
