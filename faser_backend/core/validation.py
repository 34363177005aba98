"""Converts pydantic's errors to RequestError: the first wrong field, its value and the limit."""

from __future__ import annotations

import reprlib

from pydantic import ValidationError

from faser_backend.core.errors import RequestError

_BRIEF = reprlib.Repr()
_BRIEF.maxstring = 60
MAX_SHOWN = 100  # fields of an object to sort before some are shown


class Brief:
    """A client's value in an error message, shown at bounded cost."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __repr__(self) -> str:
        if isinstance(self._value, dict) and len(self._value) > MAX_SHOWN:
            return f"an object of {len(self._value)} fields"
        return _BRIEF.repr(self._value)


def refusal_of(error: ValidationError, field: str = "") -> RequestError:
    """Returns the error as RequestError. field: of the value that was checked, in which the wrong one lies."""
    # In a union, the branch that got furthest counts.
    first = max(error.errors(include_url=False), key=lambda one: len(one["loc"]))
    path = [part for part in first["loc"] if isinstance(part, int) or part.isidentifier()]
    names = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    name = (field + names).removeprefix(".") or error.title
    if first["type"] == "missing":
        return RequestError(name, None, "is required")
    if first["type"] == "extra_forbidden":
        return RequestError(name, Brief(first["input"]), f"{error.title} has no such field")
    limit = str(first.get("ctx", {})["error"]) if first["type"] == "value_error" else first["msg"]
    return RequestError(name, Brief(first["input"]), limit[:1].lower() + limit[1:])
