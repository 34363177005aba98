"""`PromptFormat`: the special tokens and the chat template of an engine directory's prompts.

`engines/tokenizer_files.py` writes it to prompts.json, which the manifest verifies. It is a plain value: the engine's
process sends it to the frontends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from faser_backend.core.errors import ConfigError
from faser_backend.files import FileError, read_json, read_text, shown
from faser_backend.manifest import EngineManifest
from faser_backend.text.chat import ChatRenderer

MAX_TEMPLATE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """The format of prompts. Without chat_template, conversations are refused."""

    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # as templates name them, e.g. "bos_token"
    adds_special_tokens: bool = True  # plain prompts get the tokens that tokenizer.json adds
    adds_begin_token: bool = False  # they begin with bos_token even if tokenizer.json adds none

    @classmethod
    def load(
        cls,
        engine_dir: Path,
        manifest: EngineManifest,
        *,
        chat_template_file: Path | None = None,
        adds_special_tokens: bool | None = None,
    ) -> PromptFormat:
        """Reads the checkpoint's format, which the manifest has verified; options override it. Raises ConfigError."""
        content = read_json(engine_dir / manifest.prompts.name)
        begins = content["adds_begin_token"]
        found = cls(content["chat_template"], content["special_tokens"], begins is not False, begins is True)
        if chat_template_file is not None:
            found = replace(found, chat_template=read_template(chat_template_file))
        return found if adds_special_tokens is None else found.adding_special_tokens(adds_special_tokens)

    def adding_special_tokens(self, adds_special_tokens: bool) -> PromptFormat:
        """Returns the format with or without the tokenizer's own tokens around plain prompts."""
        begins = adds_special_tokens and self.adds_begin_token
        return replace(self, adds_special_tokens=adds_special_tokens, adds_begin_token=begins)

    def renderer(self) -> ChatRenderer:
        return ChatRenderer(self.chat_template, self.special_tokens)


def read_template(file: Path) -> str:
    """Reads a file with a chat template. Raises ConfigError naming the file."""
    try:
        return read_text(file, MAX_TEMPLATE_BYTES)
    except FileError as error:
        raise ConfigError(f"chat_template = {shown(file)}: not readable as a template ({error.reason})") from None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a file."""

    text: str
    category: str = ""  # "": the file names none
    token_ids: tuple[int, ...] = ()  # (): not tokenised yet
    is_chat: bool = False  # the text is a user's message, which the chat template surrounds in token_ids


def read_prompts(path: Path) -> list[Prompt]:
    """Returns the prompts of a file, in its order. Raises ConfigError with the file, the line and the reason.

    In a file whose name ends in .txt, each line is a prompt. Otherwise each line is a JSON object with "turns" (as in
    Spec-Bench; the first turn is the prompt), "prompt" or "text", and optionally a "category".
    """
    try:
        # JSON strings may contain other line separators, at which splitlines() would split.
        lines = read_text(path).removeprefix("\ufeff").split("\n")
    except FileError as error:
        raise ConfigError(f"prompts {error}") from None
    read = (lambda line, source: Prompt(line)) if path.suffix == ".txt" else _read_line
    stripped = ((f"prompts {path}, line {number}", line.strip("\r")) for number, line in enumerate(lines, 1))
    found = [read(line, source) for source, line in stripped if line.strip()]
    if not found:
        raise ConfigError(f"prompts {path}: the file holds no prompts")
    return found


def _read_line(line: str, source: str) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not JSON ({error}); only files named .txt hold plain lines") from None
    field_name = next((name for name in ("turns", "prompt", "text") if isinstance(record, dict) and name in record), "")
    if not field_name:
        raise ConfigError(f'{source}: must be a JSON object with "turns", "prompt" or "text"')
    text, category = record[field_name], record.get("category")
    if field_name == "turns":
        text = text[0] if isinstance(text, list) and text else None
    for name, value in ((field_name, text), ("category", "-" if category is None else category)):
        if not isinstance(value, str) or not value.strip() or value != value.encode(errors="replace").decode():
            raise ConfigError(f"{source}: {name} = {ascii(record[name])[:80]}: must be text, not empty, valid Unicode")
    return Prompt(str(text), str(category or ""))
