"""The tokenizer of a checkpoint, and the files of an engine directory about text.

A build reads the checkpoint's tokenizer once and writes three files:
- tokenizer.json, a copy.
- tokenizer_config.json, for transformers' AutoTokenizer, with which clients count tokens. It is the checkpoint's own
  file, or is made from its configs. It never names code, or a file outside the directory.
- prompts.json, for the server: {"chat_template": text or null, "special_tokens": {"bos_token": "<s>", ...},
  "adds_begin_token": true, false, or null to do as tokenizer.json says}. Templates are copied, never rendered here.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from faser_backend.engines.checkpoint import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    GENERIC_CLASS,
    MAX_TEMPLATE_BYTES,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    Checkpoint,
    CheckpointError,
    ConfigFields,
    read_json,
)
from faser_backend.files import FileError, check_regular, read_text

PROMPTS_FILE = "prompts.json"
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# auto_map names Python files to run; the others name files that an engine directory does not have.
DROPPED = ("auto_map", "fast_tokenizer_files", "merges_file", "tokenizer_file", "vocab_file")


@dataclass(frozen=True, slots=True, eq=False)
class TokenizerFile:
    """The tokens of a tokenizer.json."""

    path: Path
    vocabulary: dict[str, int]  # added tokens included
    special_tokens: dict[int, str]  # added tokens that are marked special, by id

    @property
    def vocab_hash(self) -> str:
        """The sha256 over (id, token) in order of id: equal if and only if all ids mean the same tokens."""
        ordered = sorted((token_id, token) for token, token_id in self.vocabulary.items())
        return hashlib.sha256(json.dumps(ordered).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Prompts:
    """Everything besides tokenizer.json that is needed to write prompts as the model was trained on them."""

    chat_template: str | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)  # by their names in templates, e.g. "bos_token"
    adds_begin_token: bool | None = None
    end_ids: tuple[int, ...] = ()  # the id of eos_token, for checkpoints whose configs name no end id


def read_tokenizer(path: Path) -> TokenizerFile:
    """Reads a tokenizer.json. Raises CheckpointError naming the file."""
    try:
        check_regular(path)
        tokenizer = Tokenizer.from_file(str(path))
    except FileError as error:
        raise CheckpointError(str(error)) from None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises plain Exception for every cause, and BaseException for a panic
        raise CheckpointError(f"{path}: not a tokenizer.json ({str(error)!r:.200})") from None
    special = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return TokenizerFile(path, tokenizer.get_vocab(with_added_tokens=True), special)


def read_prompts(tokenizer: TokenizerFile) -> Prompts:
    """Reads the files beside a tokenizer.json; empty if there are none. Raises CheckpointError naming the file."""
    path = tokenizer.path.with_name(TOKENIZER_CONFIG_FILE)
    fields = ConfigFields(read_json(path) if path.is_file() else {}, path)
    special_tokens = _special_tokens(fields)
    adds_begin_token = fields.flag("add_bos_token", False) if fields.values.get("add_bos_token") is not None else None
    begin_token = special_tokens.get("bos_token")
    if adds_begin_token and begin_token not in tokenizer.vocabulary:
        raise CheckpointError(
            f"{path}: add_bos_token is true and bos_token = {begin_token!r}: not in {tokenizer.path.name}"
        )
    end_id = tokenizer.vocabulary.get(special_tokens.get("eos_token", ""))
    return Prompts(
        chat_template=_chat_template(fields),
        special_tokens=special_tokens,
        adds_begin_token=adds_begin_token,
        end_ids=() if end_id is None else (end_id,),
    )


def _special_tokens(fields: ConfigFields) -> dict[str, str]:
    """Returns the tokens that the config names: as text, or as an object that holds it under "content"."""
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
    """Returns chat_template.jinja, else the template of tokenizer_config.json; of several, the "default"."""
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
        fields = ConfigFields({"chat_template": named["default"]}, fields.where)
    return checked_template(fields, "chat_template", "text or a list of named texts")


def checked_template(fields: ConfigFields, name: str, wanted: str) -> str | None:
    """Returns the text of a field, or None if it is absent."""
    value = fields.values.get(name)
    if value is not None and not isinstance(value, str):
        raise fields.error(name, value, f"must be {wanted}")
    if value is not None and len(value.encode(errors="replace")) > MAX_TEMPLATE_BYTES:
        raise fields.error(name, value, f"must fit {MAX_TEMPLATE_BYTES} bytes")
    return value


def read_end_ids(checkpoint: Checkpoint, vocab_size: int) -> tuple[int, ...]:
    """Returns eos_token_id of generation_config.json, else of config.json; empty if neither has one."""
    generation = checkpoint.tokenizer_path.with_name(GENERATION_CONFIG_FILE)
    sources = [(generation, read_json(generation))] if generation.is_file() else []
    for path, config in (*sources, (checkpoint.tokenizer_path.with_name(CONFIG_FILE), checkpoint.fields.values)):
        value = config.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if any(type(end_id) is not int or not 0 <= end_id < vocab_size for end_id in ids):
            raise CheckpointError(f"{path}: eos_token_id = {value!r}: ids must lie in [0, {vocab_size - 1}]")
        return tuple(ids)
    return ()


def write_tokenizer(
    tokenizer: TokenizerFile, prompts: Prompts, end_ids: tuple[int, ...], max_context: int, directory: Path
) -> tuple[Path, Path, Path]:
    """Writes tokenizer.json, tokenizer_config.json and prompts.json into directory, and returns their paths.

    prompts: as read_prompts returned it. end_ids, max_context: the engine's, for a checkpoint without a
    tokenizer_config.json. Raises CheckpointError naming the file.
    """
    copy, config, prompts_file = (directory / name for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, PROMPTS_FILE))
    shutil.copyfile(tokenizer.path, copy)
    source = tokenizer.path.with_name(TOKENIZER_CONFIG_FILE)
    found = read_json(source) if source.is_file() else None
    fields = _made_config(tokenizer, end_ids, max_context) if found is None else found
    fields = {name: value for name, value in fields.items() if name not in DROPPED}
    if tokenizer.path.with_name(TEMPLATE_FILE).is_file():  # it takes precedence over a template in the config
        fields["chat_template"] = prompts.chat_template
    if fields == found:
        shutil.copyfile(source, config)
    else:
        config.write_text(json.dumps(fields, indent=2) + "\n")
    fields = asdict(prompts)
    del fields["end_ids"]  # the manifest has them
    prompts_file.write_text(json.dumps(fields, indent=1) + "\n")
    return copy, config, prompts_file


def _made_config(tokenizer: TokenizerFile, end_ids: tuple[int, ...], max_context: int) -> dict[str, Any]:
    """Makes the config of a checkpoint that has none.

    A token gets a name such as eos_token only if tokenizer.json marks it special. Otherwise transformers would make it
    special, and would then find it in the middle of other text.
    """
    special = tokenizer.special_tokens
    tokens: dict[str, str] = {}
    for name in (CONFIG_FILE, GENERATION_CONFIG_FILE):  # the second takes precedence
        path = tokenizer.path.with_name(name)
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
