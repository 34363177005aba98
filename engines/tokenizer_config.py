"""`tokenizer_config.json` of an engine directory: what transformers' AutoTokenizer reads beside tokenizer.json.

Clients cut and count tokens with it; the server reads prompts.json instead. It is the checkpoint's own file, or one
that is made of what the checkpoint says. Nothing in it may name code or a file that is not in the directory.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from engines.checkpoint import CONFIG_FILE, GENERATION_CONFIG_FILE, TOKENIZER_FILE, read_json
from engines.pairs import special_tokens
from engines.prompts import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, Prompts

# auto_map names Python files to run; the others name files that an engine directory does not have.
DROPPED = ("auto_map", "fast_tokenizer_files", "merges_file", "tokenizer_file", "vocab_file")
GENERIC_CLASS = "PreTrainedTokenizerFast"  # takes everything from tokenizer.json


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
