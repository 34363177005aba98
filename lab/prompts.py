"""Prompt files, how an engine directory's text models read them, and prompts of given lengths.

Files are Spec-Bench's JSON lines, plainer JSON lines, or lines of text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from faser_backend.core.errors import ConfigError
from faser_backend.device.runtime import ModelPair
from faser_backend.manifest import EngineManifest
from faser_backend.places import DEMO_PAIR
from faser_backend.text.prompts import Prompt, PromptFormat, read_prompts
from faser_backend.text.tokenizer import TextTokenizer

DEMO_PROMPTS = DEMO_PAIR / "prompts.jsonl"
WINDOW_STRIDE = 977  # tokens between two prompts; a prime, so that wrapped windows begin elsewhere


def interleaved(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Returns the prompts with categories alternating, each category in its given order."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    rounds: Iterator[tuple[Prompt | None, ...]] = zip_longest(*groups.values())
    return [prompt for each in rounds for prompt in each if prompt is not None]


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """Limits beyond which prompts are left out; None means no limit. The context must also hold max_tokens."""

    max_tokens: int
    max_prompt_tokens: int | None = None
    max_prompt_chars: int | None = None


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts in the order in which they are asked, with categories alternating, and a note of what was left out."""

    name: str  # name of the source, for reports
    prompts: list[Prompt]
    is_chat: bool
    left_out: str  # how many of which category, and why; "" for none
    num_left_out: int

    def as_dict(self) -> dict[str, object]:
        """Returns plain values for the meta data of results."""
        return {
            "name": self.name,
            "is_chat": self.is_chat,
            "num_prompts": len(self.prompts),
            "num_left_out": self.num_left_out,
            "categories": dict(Counter(prompt.category for prompt in self.prompts if prompt.category)),
        }


def load_prompt_set(
    path: Path | None, engine_dir: Path, manifest: EngineManifest, limits: PromptLimits, *, is_chat: bool
) -> PromptSet:
    """Reads the prompts of a file (None: the demo pair's held-out ones) with this directory's tokenizer and template.

    is_chat: each prompt is a user message, from which the directory's chat template makes a conversation. Raises
    ConfigError if the file is unreadable, nothing fits or there is no template; RequestError if it refuses a message.
    """
    name = "the demo pair's held-out prompts" if path is None else path.name
    path = path or DEMO_PROMPTS
    formats = PromptFormat.load(engine_dir, manifest)
    if is_chat and formats.chat_template is None:
        raise ConfigError(
            f"--chat: the engines in {engine_dir} came without a chat template; "
            "leave --chat out, or build again from a checkpoint that has one"
        )
    limit, reason = _longest(manifest, limits)
    with closing(TextTokenizer.from_file(engine_dir / manifest.tokenizer.name, formats)) as tokenizer:
        found = [_tokenised(prompt, tokenizer, is_chat=is_chat) for prompt in read_prompts(path)]
    max_chars = math.inf if limits.max_prompt_chars is None else limits.max_prompt_chars
    kept = [prompt for prompt in found if len(prompt.text) <= max_chars and len(prompt.token_ids) <= limit]
    if limits.max_prompt_chars is not None:
        reason = f"{max_chars} characters or {reason}"
    if not kept:
        raise ConfigError(f"--prompts = {str(path)!r}: all {len(found)} prompts are longer than {reason}")
    return PromptSet(name, interleaved(kept), is_chat, _left_out(found, kept, reason), len(found) - len(kept))


def _longest(manifest: EngineManifest, limits: PromptLimits) -> tuple[int, str]:
    """Returns the most tokens that a prompt may have, and the limit that says so, in words."""
    if limits.max_prompt_tokens is not None and limits.max_prompt_tokens < 1:
        raise ConfigError(f"--max-prompt-tokens = {limits.max_prompt_tokens}: must be at least 1")
    context = ModelPair(manifest.target, manifest.draft).max_context
    room = context - limits.max_tokens
    if room < 1:
        raise ConfigError(f"max_context = {context}: no room for a prompt and {limits.max_tokens} answer tokens")
    if limits.max_prompt_tokens is not None and limits.max_prompt_tokens <= room:
        return limits.max_prompt_tokens, f"{limits.max_prompt_tokens} tokens"
    return room, f"{room} tokens, all that a context of {context} holds beside an answer of {limits.max_tokens}"


def _tokenised(prompt: Prompt, tokenizer: TextTokenizer, *, is_chat: bool) -> Prompt:
    if is_chat:
        _, token_ids = tokenizer.encode_chat("--prompts", [{"role": "user", "content": prompt.text}])
    else:
        token_ids = tokenizer.encode_prompt(prompt.text)
    if not token_ids:
        raise ConfigError(f"--prompts: {prompt.text!r} has no tokens")
    return replace(prompt, token_ids=tuple(token_ids), is_chat=is_chat)


def _left_out(found: list[Prompt], kept: list[Prompt], reason: str) -> str:
    if len(found) == len(kept):
        return ""
    totals = Counter(prompt.category for prompt in found)
    missing = totals - Counter(prompt.category for prompt in kept)
    parts = ", ".join(f"{name or 'without a category'} {count} of {totals[name]}" for name, count in missing.items())
    text = f"{len(found) - len(kept)} of {len(found)} prompts are left out: longer than {reason}"
    return text if set(totals) == {""} else f"{text} ({parts})"


class PromptMaker:
    """A maker of prompts of given lengths: windows of a text's tokens, decoded to text.

    Tokenised again, a window may differ from its length by a few tokens.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._ids = np.array(tokenizer.encode("\n".join(texts), add_special_tokens=False).ids, np.int64)
        if not self._ids.size:
            raise ConfigError("prompts: no text to cut prompts from")

    def prompt(self, num_tokens: int, index: int) -> str:
        """Returns the text of window `index`; windows wrap around."""
        start = index * WINDOW_STRIDE
        return self._tokenizer.decode(self._ids.take(range(start, start + num_tokens), mode="wrap").tolist())
