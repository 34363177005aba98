"""`PromptFormat`: how prompts of an engine directory begin and how its conversations are written.

Read from the directory's prompts.json (written by `engines/prompts.py`), which the manifest has verified. A plain
value, so that the engine's process can hand it to the frontends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from faser_backend.core.errors import ConfigError, ManifestError
from faser_backend.files import FileError, read_json, read_text, shown
from faser_backend.manifest import EngineManifest
from faser_backend.text.chat import ChatRenderer

MAX_TEMPLATE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """chat_template None: conversations are refused."""

    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # as templates name them, e.g. "bos_token"
    adds_special_tokens: bool = True  # whether plain prompts get the tokens that tokenizer.json adds
    adds_begin_token: bool = False  # whether they begin with bos_token even where tokenizer.json adds none

    @classmethod
    def load(
        cls,
        engine_dir: Path,
        manifest: EngineManifest,
        *,
        chat_template_file: Path | None = None,
        adds_special_tokens: bool | None = None,
    ) -> PromptFormat:
        """The checkpoint's format, which the options override. Raises ManifestError or ConfigError naming the file."""
        found = _read(engine_dir / manifest.prompts.name)
        if chat_template_file is not None:
            found = replace(found, chat_template=read_template(chat_template_file))
        return found if adds_special_tokens is None else found.adding_special_tokens(adds_special_tokens)

    def adding_special_tokens(self, adds_special_tokens: bool) -> PromptFormat:
        """The same format, but plain prompts get the tokenizer's own tokens, or none."""
        begins = adds_special_tokens and self.adds_begin_token
        return replace(self, adds_special_tokens=adds_special_tokens, adds_begin_token=begins)

    def renderer(self) -> ChatRenderer:
        return ChatRenderer(self.chat_template, self.special_tokens)


def read_template(file: Path) -> str:
    """A chat template in a file of its own. Raises ConfigError naming the file."""
    try:
        return read_text(file, MAX_TEMPLATE_BYTES)
    except FileError as error:
        raise ConfigError(f"chat_template = {shown(file)}: not readable as a template ({error.reason})") from None


def _read(path: Path) -> PromptFormat:
    try:
        content = read_json(path)
        template, adds_begin_token = content["chat_template"], content["adds_begin_token"]
        tokens = {str(name): str(token) for name, token in content["special_tokens"].items()}
    except FileError as error:
        raise ManifestError(str(error)) from None
    except (TypeError, KeyError, AttributeError) as error:
        raise ManifestError(f"{path}: malformed ({type(error).__name__}: {error})") from None
    return PromptFormat(
        chat_template=None if template is None else str(template),
        special_tokens=tokens,
        adds_special_tokens=adds_begin_token is not False,
        adds_begin_token=adds_begin_token is True,
    )
