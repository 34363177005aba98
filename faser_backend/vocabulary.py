"""Reads the vocabulary of a tokenizer file, and computes a hash to compare vocabularies."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from faser_backend.core.errors import ManifestError
from faser_backend.files import FileError, read_json


def read_vocabulary(tokenizer_file: Path) -> dict[str, int]:
    """Returns ids by token of a Hugging Face tokenizer.json, with added tokens. Raises ManifestError."""
    try:
        content = read_json(tokenizer_file)
        model_vocab = content["model"]["vocab"]
        entries = (
            model_vocab.items() if isinstance(model_vocab, dict) else ((t[0], i) for i, t in enumerate(model_vocab))
        )
        vocabulary = {str(token): int(token_id) for token, token_id in entries}
        vocabulary.update({str(added["content"]): int(added["id"]) for added in content.get("added_tokens", ())})
    except FileError as error:
        raise ManifestError(str(error)) from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise ManifestError(f"{tokenizer_file}: not a tokenizer.json ({type(error).__name__}: {error})") from None
    return vocabulary


def vocab_hash(vocabulary: dict[str, int]) -> str:
    """Returns the sha256 over (id, token) in order of id: equal if and only if all ids mean the same tokens."""
    ordered = sorted((token_id, token) for token, token_id in vocabulary.items())
    return hashlib.sha256(json.dumps(ordered).encode()).hexdigest()
