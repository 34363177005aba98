"""Hugging Face checkpoints on disk: config.json, safetensors weights (one file or sharded), tokenizer.json.

Knows files and number formats; what the tensors mean is the business of `families`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, which safetensors needs to read such files
import numpy as np
from safetensors import SafetensorError, safe_open

from faser_backend.core.errors import FaserError

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
GENERATION_CONFIG_FILE = "generation_config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class CheckpointError(FaserError):
    """A checkpoint, or a pair of them, cannot be built; the message names file or field and value."""


class Checkpoint:
    """One model directory. Weights are read tensor by tensor, as float32."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError where config or weights are missing or malformed."""
        self.directory = directory
        self.config = read_json(directory / CONFIG_FILE)
        index = directory / INDEX_FILE
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(f"{index}: weight_map is missing")
            shards = sorted(set(weight_map.values()))
        else:
            shards = [WEIGHTS_FILE]
        self._shard_of: dict[str, Path] = {}
        for shard in shards:
            path = directory / shard
            with _open(path) as weights:
                self._shard_of.update(dict.fromkeys(weights.keys(), path))

    @property
    def tokenizer_file(self) -> Path:
        return self.directory / TOKENIZER_FILE

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A float32 copy of a tensor. Raises CheckpointError if it is missing or of another shape."""
        path = self._shard_of.get(name)
        if path is None:
            raise CheckpointError(f"{self.directory}: tensor {name} is missing from the checkpoint")
        with _open(path) as weights:
            tensor = weights.get_tensor(name)
        if tensor.shape != shape:
            raise CheckpointError(f"{path}: {name} has shape {list(tensor.shape)}, config.json wants {list(shape)}")
        return np.ascontiguousarray(tensor, np.float32)

    def end_ids(self) -> tuple[int, ...]:
        """eos_token_id of generation_config.json, else of config.json; empty where neither has one."""
        generation = self.directory / GENERATION_CONFIG_FILE
        configs = [read_json(generation)] if generation.is_file() else []
        for config in (*configs, self.config):
            end_id = config.get("eos_token_id")
            if end_id is not None:
                return tuple(int(i) for i in end_id) if isinstance(end_id, list) else (int(end_id),)
        return ()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return content


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "np")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not readable as safetensors ({error})") from None
