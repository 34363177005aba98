"""How a checkpoint's prompts are written: its chat template and special tokens -> `prompts.json`.

Read from `chat_template.jinja` and `tokenizer_config.json` beside the target's tokenizer, in Hugging Face's words.
`prompts.json` is {"chat_template": text or null, "special_tokens": {"bos_token": "<s>", ...}, "adds_begin_token":
true, false or null = as tokenizer.json does}. Templates are carried, never rendered here.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engines.arrays import CheckpointError
from engines.checkpoint import read_json
from faser_backend.files import FileError, read_text
from faser_backend.vocabulary import read_vocabulary

PROMPTS_FILE = "prompts.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_TEMPLATE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Prompts:
    """What serving needs besides tokenizer.json to write prompts as the model was trained on them."""

    chat_template: str | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)  # by their names in templates, e.g. "bos_token"
    adds_begin_token: bool | None = None
    end_ids: tuple[int, ...] = ()  # the eos_token's, for checkpoints whose configs name no end id

    def save(self, directory: Path) -> Path:
        """Writes prompts.json into directory."""
        path = directory / PROMPTS_FILE
        fields = asdict(self)
        del fields["end_ids"]  # the manifest has them
        path.write_text(json.dumps(fields, indent=1) + "\n")
        return path


def read_prompts(tokenizer: Path) -> Prompts:
    """Reads what lies beside a tokenizer.json; empty where nothing does. Raises CheckpointError naming the file."""
    path = tokenizer.parent / TOKENIZER_CONFIG_FILE
    config = read_json(path) if path.is_file() else {}
    special_tokens = _special_tokens(path, config)
    vocabulary = read_vocabulary(tokenizer)
    adds_begin_token = config.get("add_bos_token")
    if not (adds_begin_token is None or isinstance(adds_begin_token, bool)):
        raise CheckpointError(f"{path}: add_bos_token = {adds_begin_token!r:.80}: must be true or false")
    begin_token = special_tokens.get("bos_token")
    if adds_begin_token and begin_token not in vocabulary:
        raise CheckpointError(f"{path}: add_bos_token is true and bos_token = {begin_token!r}: not in {tokenizer.name}")
    end_id = vocabulary.get(special_tokens.get("eos_token", ""))
    return Prompts(
        chat_template=_chat_template(path, config),
        special_tokens=special_tokens,
        adds_begin_token=adds_begin_token,
        end_ids=() if end_id is None else (end_id,),
    )


def _special_tokens(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """What the config names: text, or an object that holds it under "content"."""
    tokens = {}
    for name in TOKEN_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
        elif value is not None:
            raise CheckpointError(f"{path}: {name} = {value!r:.80}: must be a token's text")
    return tokens


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    """The template in a file of its own, else tokenizer_config.json's, of several the one named "default"."""
    file = path.parent / TEMPLATE_FILE
    if file.is_file():
        return _read_template(file)
    value = config.get("chat_template")
    if isinstance(value, list):
        if not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in value):
            raise CheckpointError(f"{path}: chat_template = {value!r:.80}: must list objects with name and template")
        named = {entry["name"]: entry.get("template") for entry in value}
        if not isinstance(named.get("default"), str):
            raise CheckpointError(f"{path}: chat_template names {list(named)}: must have the text of a 'default'")
        value = named["default"]
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{path}: chat_template = {value!r:.80}: must be text or a list of named texts")
    if value is not None and len(value.encode(errors="replace")) > MAX_TEMPLATE_BYTES:
        raise CheckpointError(f"{path}: chat_template of {len(value)} characters: must fit {MAX_TEMPLATE_BYTES} bytes")
    return value


def _read_template(file: Path) -> str:
    try:
        return read_text(file, MAX_TEMPLATE_BYTES)
    except FileError as error:
        raise CheckpointError(str(error)) from None
