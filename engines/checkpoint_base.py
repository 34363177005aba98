"""Parts of every layout of checkpoints: file names, the fields of a config, checked as they are read, and tensors.

Every error names the file, the field, its value and what it must be. Knows nothing of models.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from faser_backend import files
from faser_backend.core.errors import FaserError

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
MAX_TEMPLATE_BYTES = 1 << 20
GENERIC_CLASS = "PreTrainedTokenizerFast"  # a tokenizer_class that takes everything from tokenizer.json


class CheckpointError(FaserError):
    """A checkpoint, or a pair of them, cannot be built; the message names file or field and value."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError naming the file."""
    try:
        content = files.read_json(path)
    except files.FileError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return content


class ConfigFields:
    """One JSON object. A field that is null counts as absent, as transformers has it."""

    def __init__(self, values: dict[str, Any], where: Path, names: Mapping[str, str] | None = None) -> None:
        """names: what errors call a field, where the file has another word for it."""
        self.values = values
        self.where = where
        self._names = names or {}

    def count(self, name: str, limit: int, default: int | None = None) -> int:
        """A whole number in [1, limit]."""
        value = self._get(name, default)
        if type(value) is not int or not 1 <= value <= limit:
            raise self.error(name, value, f"must be a whole number in [1, {limit}]")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number in [low, high]."""
        value = self._get(name, default)
        if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
            raise self.error(name, value, f"must be a number in [{low:g}, {high:g}]")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if type(value) is not bool:
            raise self.error(name, value, "must be true or false")
        return value

    def must_be(self, name: str, *wanted: Any) -> None:
        """Refuses a variant that cannot be built; an absent field is the common variant."""
        value = self.values.get(name)
        if value is not None and not any(type(value) is type(choice) and value == choice for choice in wanted):
            choices = " or ".join(repr(choice) for choice in wanted) or "no value"
            raise self.error(name, value, f"only {choices} can be built")

    def section(self, name: str) -> ConfigFields:
        """A nested object, one without fields where the field is absent."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, value, "must be an object")
        return ConfigFields(value, self.where, self._names)

    def error(self, name: str, value: Any, reason: str) -> CheckpointError:
        text, name = repr(value).replace("\n", " "), self._names.get(name, name)  # arrays are shown in lines
        return CheckpointError(f"{self.where}: {name} = {text[:200]}{'...' if len(text) > 200 else ''}: {reason}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value


class Checkpoint(ABC):
    """The source of an engine, in Hugging Face's words. Every error is a CheckpointError."""

    origin: Path  # what was opened, as errors name it
    directory: Path  # of tokenizer.json and what lies beside it
    fields: ConfigFields  # of config.json; its errors name file and field as they were found

    @property
    @abstractmethod
    def names(self) -> Collection[str]:
        """Every tensor, e.g. model.layers.0.mlp.up_proj.weight."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Outermost axis first."""

    @abstractmethod
    def dtype(self, name: str) -> str:
        """The number format: F32, F16 or BF16; of numbers that are quantised, the format of their scales."""

    @abstractmethod
    def read(self, name: str) -> np.ndarray:
        """The finite numbers of a tensor in the checkpoint's dtype, or float32 where they are quantised.

        A mapped view where one file holds the tensor whole, as numbers.
        """

    def stored_type(self, name: str) -> str:
        """As dtype; of numbers that are quantised, how they are, e.g. Q4_1."""
        return self.dtype(name)

    def read_stored(self, name: str) -> np.ndarray:
        """The rows as they are stored: bytes of blocks [..., row_bytes] where numbers are quantised."""
        return self.read(name)
