"""Files of prompts: Spec-Bench's JSON lines, plainer JSON lines, and lines of text.

Knows nothing of engines, tokens and chat templates; `prompts.py` does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from faser_backend.core.errors import ConfigError

FIELDS = ("turns", "prompt", "text")  # where a line's prompt is looked for, in this order


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request asks."""

    text: str
    category: str = ""  # "": the file names none
    token_ids: tuple[int, ...] = ()  # as the engines read it; (): not tokenised yet
    is_chat: bool = False  # the text is a user's message, token_ids what the chat template makes of it


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file, in its order. Raises ConfigError naming file, line and what is wrong.

    A line of text is a prompt where the name ends in .txt. Else each line is a JSON object with "turns" (of a
    conversation as Spec-Bench writes it, the first is taken), "prompt" or "text", and perhaps a "category".
    """
    try:
        # Not splitlines(): JSON strings may hold characters that it takes for the end of a line.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise ConfigError(f"prompts {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts {path}: not readable as UTF-8 text ({error})") from None
    is_text = path.suffix == ".txt"
    numbered = [(number, line.strip("\r")) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"prompts {path}: the file holds no prompts")
    return [
        Prompt(line) if is_text else _prompt_of(line, f"prompts {path}, line {number}") for number, line in numbered
    ]


def interleaved(prompts: Sequence[Prompt]) -> list[Prompt]:
    """One prompt of each category in turn, so that the first few cover all of them; within one in the given order."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    rounds: Iterator[tuple[Prompt | None, ...]] = zip_longest(*groups.values())
    return [prompt for each in rounds for prompt in each if prompt is not None]


def _prompt_of(line: str, place: str) -> Prompt:
    """The prompt in a line of JSON."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not JSON ({error}); only files named .txt hold plain lines") from None
    field = next((name for name in FIELDS if isinstance(record, dict) and name in record), None)
    if field is None:
        raise ConfigError(f'{place}: must be a JSON object with "turns", "prompt" or "text"')
    text = record[field]
    if field == "turns":
        if not isinstance(text, list) or not text:
            raise ConfigError(f"{place}: turns = {_shown(text)}: must list at least one text")
        text = text[0]
    return Prompt(_text(text, f"{place}: {field}"), _category(record.get("category"), place))


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{name} = {_shown(value)}: must be text, not empty")
    try:
        value.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can write and UTF-8 cannot
        raise ConfigError(f"{name} = {_shown(value)}: must be valid Unicode") from None
    return value


def _category(value: object, place: str) -> str:
    return "" if value is None else _text(value, f"{place}: category")


def _shown(value: object) -> str:
    shown = ascii(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
