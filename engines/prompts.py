"""Files of an engine directory about text: `tokenizer.json`, `tokenizer_config.json` and `prompts.json`.

The second is what transformers' AutoTokenizer reads: clients cut and count tokens with it. It is the checkpoint's own
file, or made of what the checkpoint says; nothing in it may name code or a file that is not in the directory.
The server reads the third, taken from `chat_template.jinja` and `tokenizer_config.json` beside the target's tokenizer:
{"chat_template": text or null, "special_tokens": {"bos_token": "<s>", ...}, "adds_begin_token": true, false or null =
as tokenizer.json does}. Templates are carried, never rendered here.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from faser_backend.engines.checkpoint_base import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    GENERIC_CLASS,
    MAX_TEMPLATE_BYTES,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    CheckpointError,
    ConfigFields,
    read_json,
)
from faser_backend.files import FileError, read_text
from faser_backend.vocabulary import read_vocabulary

PROMPTS_FILE = "prompts.json"
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# auto_map names Python files to run; the others name files that an engine directory does not have.
DROPPED = ("auto_map", "fast_tokenizer_files", "merges_file", "tokenizer_file", "vocab_file")


@dataclass(frozen=True, slots=True)
class Prompts:
    """Everything besides tokenizer.json that it takes to write prompts as the model was trained on them."""

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
    fields = ConfigFields(read_json(path) if path.is_file() else {}, path)
    special_tokens = _special_tokens(fields)
    vocabulary = read_vocabulary(tokenizer)
    adds_begin_token = fields.flag("add_bos_token", False) if fields.values.get("add_bos_token") is not None else None
    begin_token = special_tokens.get("bos_token")
    if adds_begin_token and begin_token not in vocabulary:
        raise CheckpointError(f"{path}: add_bos_token is true and bos_token = {begin_token!r}: not in {tokenizer.name}")
    end_id = vocabulary.get(special_tokens.get("eos_token", ""))
    return Prompts(
        chat_template=_chat_template(fields),
        special_tokens=special_tokens,
        adds_begin_token=adds_begin_token,
        end_ids=() if end_id is None else (end_id,),
    )


def _special_tokens(fields: ConfigFields) -> dict[str, str]:
    """Tokens that the config names: text, or an object that holds it under "content"."""
    tokens = {}
    for name in TOKEN_NAMES:
        value = fields.values.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
        elif value is not None:
            raise fields.error(name, value, "must be a token's text")
    return tokens


def _chat_template(fields: ConfigFields) -> str | None:
    """The template in a file of its own, else tokenizer_config.json's, of several the one named "default"."""
    file = fields.where.parent / TEMPLATE_FILE
    if file.is_file():
        try:
            return read_text(file, MAX_TEMPLATE_BYTES)
        except FileError as error:
            raise CheckpointError(str(error)) from None
    value = fields.values.get("chat_template")
    if isinstance(value, list):
        if not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in value):
            raise fields.error("chat_template", value, "must list objects with name and template")
        named = {entry["name"]: entry.get("template") for entry in value}
        if not isinstance(named.get("default"), str):
            raise fields.error("chat_template", list(named), "must have the text of a 'default'")
        value = named["default"]
    if value is not None and not isinstance(value, str):
        raise fields.error("chat_template", value, "must be text or a list of named texts")
    if value is not None and len(value.encode(errors="replace")) > MAX_TEMPLATE_BYTES:
        raise fields.error("chat_template", value, f"must fit {MAX_TEMPLATE_BYTES} bytes")
    return value


def write_tokenizer(
    tokenizer: Path, prompts: Prompts, end_ids: tuple[int, ...], max_context: int, directory: Path
) -> tuple[Path, Path]:
    """Writes tokenizer.json and tokenizer_config.json into directory and returns their paths.

    tokenizer: the checkpoint's tokenizer.json. prompts: what was read beside it. end_ids, max_context: the engine's,
    for a checkpoint without a tokenizer_config.json. Raises CheckpointError naming the file.
    """
    copy, config = directory / TOKENIZER_FILE, directory / TOKENIZER_CONFIG_FILE
    shutil.copyfile(tokenizer, copy)
    source = tokenizer.parent / TOKENIZER_CONFIG_FILE
    found = read_json(source) if source.is_file() else None
    fields = _made(tokenizer, end_ids, max_context) if found is None else found
    fields = {name: value for name, value in fields.items() if name not in DROPPED}
    if (tokenizer.parent / TEMPLATE_FILE).is_file():  # it goes before a template in the config
        fields["chat_template"] = prompts.chat_template
    if fields == found:
        shutil.copyfile(source, config)
    else:
        config.write_text(json.dumps(fields, indent=2) + "\n")
    return copy, config


def _made(tokenizer: Path, end_ids: tuple[int, ...], max_context: int) -> dict[str, Any]:
    """The config of a checkpoint that has none.

    A token gets a name such as eos_token only where tokenizer.json calls it special: transformers would make it so,
    and would then read it out of the middle of other text.
    """
    special = special_tokens(tokenizer)
    tokens: dict[str, str] = {}
    for name in (CONFIG_FILE, GENERATION_CONFIG_FILE):  # the second wins
        path = tokenizer.parent / name
        fields = read_json(path) if path.is_file() else {}
        for kind in ("bos", "pad"):
            token_id = fields.get(f"{kind}_token_id")
            if type(token_id) is int and token_id in special:
                tokens[f"{kind}_token"] = special[token_id]
    ends = [special[end_id] for end_id in end_ids if end_id in special]
    if ends:
        tokens["eos_token"] = ends[0]
    return {
        "tokenizer_class": GENERIC_CLASS,
        "model_max_length": max_context,
        "clean_up_tokenization_spaces": False,
        **tokens,
    }


def special_tokens(tokenizer: Path) -> dict[int, str]:
    """Id -> text of the added tokens that are marked special. The file has been read as a vocabulary before."""
    added = read_json(tokenizer).get("added_tokens", ())
    return {int(token["id"]): str(token["content"]) for token in added if token.get("special") is True}
