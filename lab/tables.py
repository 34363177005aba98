"""Writes all reports: columns as data, tables in Markdown and on a terminal, and results as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faser_backend.core.errors import ConfigError
from faser_backend.files import FileError, check_room
from faser_backend.lab import environment

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. key: a row's key, or a function of the row. A row without the value has an empty entry."""

    heading: str
    key: str | Callable[[Any], Any]
    form: str = "{}"
    unit: str = ""
    meaning: str = ""

    def show(self, row: Row) -> str:
        value = self.key(row) if callable(self.key) else row.get(self.key)
        return "" if value is None else self.form.format(value)


def number(value: Any) -> str:
    """Formats a number with three significant digits; integers and other values stay as they are."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.3g}"


def pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in values.items())


def markdown_table(columns: Sequence[Column | str], rows: Iterable[Row]) -> list[str]:
    """Returns a table's lines. A column given by name alone shows the rows' values under that name."""
    chosen = [
        Column(each, lambda row, key=each: number(row.get(key))) if isinstance(each, str) else each for each in columns
    ]
    lines = ["| " + " | ".join(column.heading for column in chosen) + " |", "|" + "---|" * len(chosen)]
    return lines + ["| " + " | ".join(column.show(row).replace("|", "/") for column in chosen) + " |" for row in rows]


def check_output(directory: Path, num_bytes: int) -> None:
    """Creates the directory of an option --output. Raises ConfigError if it cannot hold num_bytes of files."""
    try:
        check_room(directory, num_bytes, "what is written")
        directory.mkdir(parents=True, exist_ok=True)
    except FileError as error:
        raise ConfigError(f"--output = {error}; name a directory to write into") from None


def write_results(stem: Path, title: str, meta: dict[str, Any], lines: list[str], rows: Any) -> str:
    """Writes STEM.json with every figure, and STEM.md with a head, the command and the lines. Returns the latter's
    text."""
    command = environment.command_line()
    head = [f"# {title}", "", f"Remade by `{command}`.", *environment.as_lines(meta), ""]
    text = "\n".join([*head, *lines]).rstrip() + "\n"
    stem.parent.mkdir(parents=True, exist_ok=True)
    content = {"meta": meta | {"command": command}, "rows": rows}
    stem.with_name(f"{stem.name}.json").write_text(json.dumps(content, indent=1) + "\n")
    stem.with_name(f"{stem.name}.md").write_text(text)
    return text
