"""A model directory on disk: its config, its tensors by Hugging Face's names, its tokenizer and end ids.

Three layouts are read: Hugging Face's here, TensorRT-LLM's in `tensorrt_llm_checkpoint`, GGUF files in
`gguf_checkpoint`. All answer in the words of the first, so that nothing after this knows the difference. Pickled
weights are never opened.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from engines.arrays import CheckpointError
from engines.config_fields import ConfigFields
from engines.safetensors_file import SafetensorsFile
from faser_backend import files

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
GENERATION_CONFIG_FILE = "generation_config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


class Checkpoint(Protocol):
    """What engines are built from. Every error is a CheckpointError that names file or field and value."""

    origin: Path  # what was opened, as errors name it
    directory: Path  # of tokenizer.json and what lies beside it
    config: dict[str, Any]  # config.json in Hugging Face's words
    fields: ConfigFields  # the same; its errors name file and field as they were found

    @property
    def names(self) -> Collection[str]:
        """Every tensor, e.g. model.layers.0.mlp.up_proj.weight."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """The number format: F32, F16 or BF16; of numbers that are quantised, the format of their scales."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The finite numbers of a tensor in the checkpoint's dtype, or float32 where they are quantised.

        A mapped view where one file holds the tensor whole, as numbers.
        """
        ...

    def stored_type(self, name: str) -> str:
        """As dtype; of numbers that are quantised, how they are, e.g. Q4_1."""
        ...

    def read_stored(self, name: str) -> tuple[str, np.ndarray]:
        """The stored type and the rows as they are stored: bytes of blocks [..., row_bytes] where it is quantised."""
        ...


class HuggingFaceCheckpoint:
    """config.json and model.safetensors, or the shards that model.safetensors.index.json lists."""

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        self.origin = self.directory = directory
        self.config = config
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
        """See Checkpoint."""
        return self._file_of[name].read(name)

    def stored_type(self, name: str) -> str:
        """See Checkpoint."""
        return self.dtype(name)

    def read_stored(self, name: str) -> tuple[str, np.ndarray]:
        """See Checkpoint."""
        return self.dtype(name), self.read(name)

    def read_integers(self, name: str) -> np.ndarray:
        """A tensor of whole numbers or truth values, as int64."""
        return self._file_of[name].read_integers(name)


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a directory of any layout, or a GGUF file.

    Raises CheckpointError where config or weights are missing or malformed.
    """
    file = _gguf_file(path)
    if file is not None:
        from engines.gguf_checkpoint import GGUFCheckpoint

        return GGUFCheckpoint(file)
    return _open_directory(path)


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


def _open_directory(directory: Path) -> Checkpoint:
    config = read_json(directory / CONFIG_FILE)
    if "architecture" in config and "model_type" not in config:
        from engines.tensorrt_llm_checkpoint import TensorRTLLMCheckpoint

        return TensorRTLLMCheckpoint(directory, config)
    return HuggingFaceCheckpoint(directory, config)


def end_ids(checkpoint: Checkpoint, vocab_size: int) -> tuple[int, ...]:
    """eos_token_id of generation_config.json, else of config.json; empty where neither has one."""
    generation = checkpoint.directory / GENERATION_CONFIG_FILE
    sources = [(generation, read_json(generation))] if generation.is_file() else []
    for path, config in (*sources, (checkpoint.directory / CONFIG_FILE, checkpoint.config)):
        value = config.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if any(type(end_id) is not int or not 0 <= end_id < vocab_size for end_id in ids):
            raise CheckpointError(f"{path}: eos_token_id = {value!r}: ids must lie in [0, {vocab_size - 1}]")
        return tuple(ids)
    return ()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError naming the file."""
    try:
        content = files.read_json(path)
    except files.FileError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return content


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
