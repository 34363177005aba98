"""Hugging Face's layout: config.json, and weights in model.safetensors or in the shards that an index lists.

Files are mapped, so that no model is ever held in memory. The library checks a file as a whole (header, offsets,
length). This module finds each tensor, refuses number formats that cannot be built from, and checks that numbers are
finite. Pickled weights are never opened.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from faser_backend.engines.checkpoint import (
    CONFIG_FILE,
    DTYPES,
    Checkpoint,
    CheckpointError,
    ConfigFields,
    checked_finite,
    read_json,
)
from faser_backend.files import FileError, check_regular

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
INTEGERS = {"I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "BOOL": np.dtype(np.bool_)}
MAPPED = DTYPES | INTEGERS | {"I8": np.dtype(np.int8), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn)}
_METADATA = "__metadata__"


class HuggingFaceCheckpoint(Checkpoint):
    """A directory in Hugging Face's layout."""

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        self.origin = self.directory = directory
        self.fields = ConfigFields(config, directory / CONFIG_FILE)
        single, index = directory / WEIGHTS_FILE, directory / INDEX_FILE
        if index.is_file() and not single.exists():  # an index may be left over from other weights
            self._file_of = _read_index(index)
        else:
            weights = SafetensorsFile(single)
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
        """Reads a tensor of integers or booleans as int64."""
        return self._file_of[name].read_integers(name)


def _read_index(index: Path) -> dict[str, SafetensorsFile]:
    """Returns the shard of each tensor, as the index says and the shards confirm."""
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
            shards[shard] = SafetensorsFile(index.parent / shard)
        if name not in shards[shard].names:
            raise CheckpointError(f"{index.parent / shard}: tensor {name} is missing, though {index.name} lists it")
    return {name: shards[shard] for name, shard in weight_map.items()}


class SafetensorsFile:
    """A checked file. The mapping of a tensor lives as long as the array that `read` returned."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError, naming the file, if it is missing or malformed."""
        self.path = path
        try:
            check_regular(path)
            with safe_open(path, "np"):
                pass
            with path.open("rb") as file:
                num_header_bytes = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(num_header_bytes))
        except FileError as error:
            hint = "; pickled weights (.bin, .pt, .pth) are never opened: convert them" * error.is_missing
            raise CheckpointError(f"{error}{hint}") from None
        except (OSError, SafetensorError, RecursionError) as error:
            raise CheckpointError(f"{path}: not readable as safetensors ({error})") from None
        self._entries: dict[str, dict] = {name: entry for name, entry in header.items() if name != _METADATA}
        self._first_byte = 8 + num_header_bytes

    @property
    def names(self) -> Collection[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name]["shape"])

    def dtype(self, name: str) -> str:
        """Returns the format as safetensors spells it. Raises CheckpointError for one that cannot be built from."""
        return self._checked_dtype(name, DTYPES)

    def read(self, name: str, part: int | slice | tuple[int | slice, ...] = ()) -> np.ndarray:
        """Returns a read-only view of a tensor, or of a part of it, in the file's dtype.

        Raises CheckpointError if a number of that part is not finite.
        """
        where = f" of part {part}" if part != () else ""
        return checked_finite(self.map(name, *DTYPES)[part], f"{self.path}: {name}", where)

    def stored_dtype(self, name: str) -> str:
        """Returns the format as safetensors spells it, whatever it is."""
        return self._entries[name]["dtype"]

    def map(self, name: str, *dtypes: str) -> np.ndarray:
        """Maps a tensor unchecked, a scalar as a vector. Raises CheckpointError for a format not in `dtypes`."""
        dtype = MAPPED[self._checked_dtype(name, dtypes)]
        offset = self._first_byte + self._entries[name]["data_offsets"][0]
        return np.memmap(self.path, dtype, "r", offset, self.shape(name) or (1,))

    def read_integers(self, name: str) -> np.ndarray:
        """Reads a tensor of integers or booleans as int64. Raises CheckpointError for another format."""
        return self.map(name, *INTEGERS).astype(np.int64)

    def _checked_dtype(self, name: str, choices: Collection[str]) -> str:
        dtype = self._entries[name]["dtype"]
        if dtype not in choices:
            raise CheckpointError(f"{self.path}: {name} has dtype {dtype}: must be one of {', '.join(choices)}")
        return dtype
