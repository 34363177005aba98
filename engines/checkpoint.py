"""Opens a model directory on disk: its config, its tensors by Hugging Face's names, its tokenizer and end ids.

Three layouts are read: Hugging Face's here, TensorRT-LLM's in `tensorrt_llm_checkpoint`, GGUF files in
`gguf_checkpoint`. All answer in the words of the first, so that nothing after this knows the difference. Pickled
weights are never opened.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from faser_backend.engines.checkpoint_base import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    Checkpoint,
    CheckpointError,
    ConfigFields,
    read_json,
)
from faser_backend.engines.gguf_checkpoint import GGUFCheckpoint
from faser_backend.engines.safetensors_file import SafetensorsFile
from faser_backend.engines.tensorrt_llm_checkpoint import TensorRTLLMCheckpoint

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


class HuggingFaceCheckpoint(Checkpoint):
    """config.json and model.safetensors, or the shards that model.safetensors.index.json lists."""

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        self.origin = self.directory = directory
        self.fields = ConfigFields(config, directory / CONFIG_FILE)
        index = directory / INDEX_FILE
        if index.is_file():
            self._file_of = _indexed(index)
        else:
            weights = _open(directory, WEIGHTS_FILE)
            self._file_of = dict.fromkeys(weights.names, weights)

    @property
    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file_of[name].shape(name)

    def dtype(self, name: str) -> str:
        return self._file_of[name].dtype(name)

    def read(self, name: str) -> np.ndarray:
        return self._file_of[name].read(name)

    def read_integers(self, name: str) -> np.ndarray:
        """A tensor of whole numbers or truth values, as int64."""
        return self._file_of[name].read_integers(name)


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a directory of any layout, or a GGUF file.

    Raises CheckpointError where config or weights are missing or malformed.
    """
    file = _gguf_file(path)
    if file is not None:
        return GGUFCheckpoint(file)
    config = read_json(path / CONFIG_FILE)
    if "architecture" in config and "model_type" not in config:
        return TensorRTLLMCheckpoint(path, config)
    return HuggingFaceCheckpoint(path, config)


def _gguf_file(path: Path) -> Path | None:
    """The file itself, or the one that lies in a directory without a config; None for other layouts."""
    if path.is_file():
        return path
    if path.suffix == ".gguf" and not path.exists():
        raise CheckpointError(f"{path}: missing")
    found = sorted(path.glob("*.gguf")) if path.is_dir() and not (path / CONFIG_FILE).exists() else []
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:3])
        raise CheckpointError(f"{path}: holds {len(found)} GGUF files ({names}): name one of them")
    return found[0] if found else None


def end_ids(checkpoint: Checkpoint, vocab_size: int) -> tuple[int, ...]:
    """eos_token_id of generation_config.json, else of config.json; empty where neither has one."""
    generation = checkpoint.directory / GENERATION_CONFIG_FILE
    sources = [(generation, read_json(generation))] if generation.is_file() else []
    for path, config in (*sources, (checkpoint.directory / CONFIG_FILE, checkpoint.fields.values)):
        value = config.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if any(type(end_id) is not int or not 0 <= end_id < vocab_size for end_id in ids):
            raise CheckpointError(f"{path}: eos_token_id = {value!r}: ids must lie in [0, {vocab_size - 1}]")
        return tuple(ids)
    return ()


def _indexed(index: Path) -> dict[str, SafetensorsFile]:
    """Tensor -> the shard that holds it, as the index says and the shards confirm."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map = {weight_map!r}: must map tensors to files")
    shards: dict[str, SafetensorsFile] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or "\\" in shard or shard in ("", "..", "."):
            raise CheckpointError(f"{index}: weight_map[{name!r}] = {shard!r}: must be a plain file name")
        if not shard.endswith(".safetensors"):
            raise CheckpointError(f"{index}: weight_map[{name!r}] = {shard!r}: only .safetensors files are read")
        if shard not in shards:
            shards[shard] = _open(index.parent, shard)
        if name not in shards[shard].names:
            raise CheckpointError(f"{index.parent / shard}: tensor {name} is missing, though {index.name} says so")
    return {name: shards[shard] for name, shard in weight_map.items()}


def _open(directory: Path, name: str) -> SafetensorsFile:
    """Opens a weight file; where there is none, says whether pickled weights lie there instead."""
    pickles = sorted(path.name for pattern in PICKLES for path in directory.glob(pattern))
    if pickles and not (directory / name).exists():
        raise CheckpointError(
            f"{directory / name}: missing; {pickles[0]} is a pickle, which could run code when it is opened: "
            "convert it to safetensors"
        )
    return SafetensorsFile(directory / name)
