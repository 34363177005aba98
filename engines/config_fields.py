"""The fields of a checkpoint's config.json, each checked as it is read.

Every error names the file, the field, its value and what it must be. Knows nothing of models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.arrays import CheckpointError


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

    def section(self, name: str) -> ConfigFields | None:
        """A nested object, or None where the field is absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, value, "must be an object")
        return ConfigFields(value, self.where, self._names)

    def error(self, name: str, value: Any, reason: str) -> CheckpointError:
        text, name = repr(value).replace("\n", " "), self._names.get(name, name)  # arrays are shown in lines
        return CheckpointError(f"{self.where}: {name} = {text[:200]}{'...' if len(text) > 200 else ''}: {reason}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value
