"""The parts that all layouts of checkpoints share: file names, limits, config fields and the `Checkpoint` interface.

Config fields are checked as they are read. Every error names the file, the field, its value and the limit. Arrays are
checked and converted block by block, so that no second copy of one is in memory.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from faser_backend import files
from faser_backend.core.errors import FaserError

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
MAX_TEMPLATE_BYTES = 1 << 20
QUANTISED_BLOCK = 32  # inputs of a block of quantised numbers
ZERO_POINTS = "Q4_ZP"  # the type of blocks like Q4_1's, with a zero point in place of the minimum
GENERIC_CLASS = "PreTrainedTokenizerFast"  # a tokenizer_class that takes everything from tokenizer.json
BLOCK_ELEMENTS = 1 << 23
COPIED_COLUMNS = 256
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)  # the import registers the name with numpy
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": BFLOAT16}  # by the names of safetensors
FLOAT_TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # by the manifest's dtypes
_EXPONENTS = {  # these bits are all set only in infinities and NaNs
    np.dtype(np.float32): np.uint32(0x7F800000),
    np.dtype(np.float16): np.uint16(0x7C00),
    BFLOAT16: np.uint16(0x7F80),
}


class CheckpointError(FaserError):
    """An error in a checkpoint or in an option of a build. The message names file or field, and value."""


def read_json(path: Path) -> dict[str, Any]:
    """Reads the object in a JSON file. Raises CheckpointError naming the file."""
    try:
        content = files.read_json(path)
    except files.FileError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return content


class ConfigFields:
    """A JSON object whose fields are checked as they are read. Null counts as absent, as in transformers."""

    def __init__(
        self, values: dict[str, Any], where: Path, names: Mapping[str, str] | None = None, prefix: str = ""
    ) -> None:
        """names: the names that errors use, for fields that the file calls otherwise. prefix: of the other names."""
        self.values = values
        self.where = where
        self._names, self._prefix = names or {}, prefix

    def count(self, name: str, limit: int, default: int | None = None, *, least: int = 1) -> int:
        """Returns an integer in [least, limit]."""
        value = self._get(name, default)
        if type(value) is not int or not least <= value <= limit:
            raise self.error(name, value, f"must be an integer in [{least}, {limit}]")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """Returns a finite number in [low, high]."""
        value = self._get(name, default)
        if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
            raise self.error(name, value, f"must be a number in [{low:g}, {high:g}]")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if type(value) is not bool:
            raise self.error(name, value, "must be true or false")
        return value

    def choice(self, name: str, choices: Collection[str]) -> str:
        """Returns a text that is one of the choices."""
        value = self.values.get(name)
        if not isinstance(value, str) or value not in choices:
            raise self.error(name, value, f"must be one of {', '.join(choices)}")
        return value

    def must_be(self, name: str, *wanted: Any) -> None:
        """Raises CheckpointError unless the field is absent or has one of the wanted values."""
        value = self.values.get(name)
        if value is not None and not any(type(value) is type(choice) and value == choice for choice in wanted):
            choices = " or ".join(repr(choice) for choice in wanted) or "no value"
            raise self.error(name, value, f"only {choices} can be built")

    def must_be_target_s(self, **wanted: int) -> None:
        """Raises CheckpointError unless the fields of a draft are absent or equal its target's values."""
        for name, value in wanted.items():
            if self.values.get(name, value) not in (None, value):
                raise self.error(name, self.values[name], f"must be the target's, {value}")

    def section(self, name: str) -> ConfigFields:
        """Returns a nested object, empty if the field is absent."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, value, "must be an object")
        return ConfigFields(value, self.where, self._names, f"{self._prefix}{name}.")

    def error(self, name: str, value: Any, reason: str) -> CheckpointError:
        text = repr(value).replace("\n", " ")  # arrays are shown in lines
        name = self._names.get(name, self._prefix + name)
        return CheckpointError(f"{self.where}: {name} = {text[:200]}{'...' if len(text) > 200 else ''}: {reason}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value


class Checkpoint(ABC):
    """A model on disk, under Hugging Face's names for fields and tensors. Every error is a CheckpointError."""

    origin: Path  # the path that was opened, as errors name it
    directory: Path  # the directory of tokenizer.json and the files beside it
    fields: ConfigFields  # the fields of config.json; errors name them as the file does

    @property
    def tokenizer_path(self) -> Path:
        return self.directory / TOKENIZER_FILE

    @property
    @abstractmethod
    def names(self) -> Collection[str]:
        """The names of all tensors, e.g. model.layers.0.mlp.up_proj.weight."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape, the outermost axis first."""

    @abstractmethod
    def dtype(self, name: str) -> str:
        """Returns the number format: F32, F16 or BF16. For quantised numbers, it is the format of their scales."""

    @abstractmethod
    def read(self, name: str) -> np.ndarray:
        """Returns the finite numbers of a tensor, in the checkpoint's dtype, or in float32 if they are quantised.

        The result is a mapped view if one file holds the whole tensor as numbers.
        """

    def stored_type(self, name: str) -> str:
        """Returns the dtype, or the type of quantisation, e.g. Q4_1."""
        return self.dtype(name)

    def read_stored(self, name: str) -> np.ndarray:
        """Returns the rows as they are stored: bytes of blocks [..., row_bytes] if numbers are quantised."""
        return self.read(name)


def row_blocks(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (first row, rows) in order, at most BLOCK_ELEMENTS numbers or one row at a time."""
    num_rows = max(BLOCK_ELEMENTS // max(array[:1].size, 1), 1)
    for first in range(0, len(array), num_rows):
        yield first, array[first : first + num_rows]


def checked_finite(array: np.ndarray, name: str, where: str = "") -> np.ndarray:
    """Returns the array. Raises CheckpointError naming it and the index of an infinity or a NaN."""
    exponents = _EXPONENTS[array.dtype]
    for first, block in row_blocks(array):
        is_bad = block.view(exponents.dtype) & exponents == exponents
        if is_bad.any():
            row, *rest = (int(i) for i in np.argwhere(is_bad)[0])
            index = (first + row, *rest)
            raise CheckpointError(f"{name}{list(index)}{where} = {array[index]}: must be finite")
    return array


def converted_blocks(name: str, array: np.ndarray, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yields the rows of an array of finite numbers in order, contiguous and in `dtype`.

    Raises CheckpointError naming the array if a number does not fit the format.
    """
    limit = float(ml_dtypes.finfo(dtype).max)
    for _, block in row_blocks(array):
        if limit < float(ml_dtypes.finfo(block.dtype).max):
            largest = max(float(block.max()), -float(block.min()))
            if largest > limit:
                raise CheckpointError(f"{name}: its largest weight = {largest:.6g}: {dtype} holds at most {limit:.6g}")
        yield _contiguous(block, dtype)


def _contiguous(block: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Converts a block. Transposed blocks are copied in groups of columns that fit the cache, up to 6x as fast."""
    if block.ndim != 2 or block.flags.c_contiguous:
        return np.ascontiguousarray(block, dtype)
    copied = np.empty(block.shape, dtype)
    for first in range(0, block.shape[1], COPIED_COLUMNS):
        columns = slice(first, first + COPIED_COLUMNS)
        copied[:, columns] = np.asarray(block[:, columns].T, dtype).T
    return copied
