"""The errors that cross rooms and processes: a code for programs, the field to blame, and a text for people.

Every message names the field, the value and the limit. What a code becomes for a client is decided where that client
is served: one table makes Triton's codes of them, another HTTP's. No program reads the text.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import ValidationError

Result = TypeVar("Result")
SHUTTING_DOWN = "the server is shutting down"
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = 60
MAX_SHOWN = 100  # fields of an object to sort before some are shown


class ErrorCode(Enum):
    """Kinds of failure that a request can meet."""

    INVALID = "invalid"  # the request is wrong; sent again, it fails again
    TOO_LONG = "too_long"  # the prompt, or prompt and output together, exceed the context or a size limit
    QUEUE_FULL = "queue_full"  # the waiting queue is at its limit; the client may retry later
    CANCELLED = "cancelled"  # a stop request or a closed connection ended the request
    UNAVAILABLE = "unavailable"  # the server starts, stops, hangs or has lost its engine
    INTERNAL = "internal"  # a fault of the server's


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed, as plain data that can be sent to another process."""

    code: ErrorCode
    message: str
    field: str | None = None  # of the request, which is to blame
    detail: str = ""  # the message without the field, where that is known

    def __str__(self) -> str:
        return self.message

    def named(self, field: str) -> Failure:
        """Returns the failure with its field as the client knows it."""
        return replace(self, message=f"{field} = {self.detail or self.message}", field=field)


class FaserError(Exception):
    """Base of every error that a user can cause or mend."""

    code = ErrorCode.INVALID
    field: str | None = None
    detail = ""

    @property
    def failure(self) -> Failure:
        return Failure(self.code, str(self), self.field, self.detail)


class RequestError(FaserError):
    """One request is refused or failed; other requests go on.

    field: of the request; what follows a blank says which quantity of it is meant ("prompt length" blames `prompt`).
    """

    def __init__(self, field: str, value: object, limit: str, *, code: ErrorCode = ErrorCode.INVALID) -> None:
        shown = repr(value)
        self.detail = f"{shown if len(shown) <= 80 else shown[:77] + '...'}: {limit}"
        self.code = code
        self.blame(field)

    def blame(self, field: str) -> None:
        """Names the field as the client knows it."""
        self.field = field.partition(" ")[0]
        self.args = (f"{field} = {self.detail}",)


class QueueFullError(FaserError):
    """The waiting queue is at its limit; the client may retry later. Load tools look for both of its phrases."""

    code = ErrorCode.QUEUE_FULL

    def __init__(self, limit: int) -> None:
        message = f"Exceeds maximum queue size. Maximum queue size of {limit} requests is reached; retry later"
        super().__init__(message)


class UnavailableError(FaserError):
    """The server cannot take or finish requests now: it stops, hangs, or its engine is gone."""

    code = ErrorCode.UNAVAILABLE


class FailedError(FaserError):
    """A failure that was received from another process, raised here."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.code, self.field, self.detail = failure.code, failure.field, failure.detail


def blamed(field: str | None, error: Exception) -> Failure:
    """Returns the failure of one request, caused by an error, in its field `field` if that is known."""
    if isinstance(error, FaserError):
        return replace(error.failure, field=error.field or field)
    return Failure(ErrorCode.INTERNAL, f"{field or 'internal error'}: {type(error).__name__}: {error}", field)


def blaming(field: str, work: Callable[..., Result], *arguments: Any) -> Result:
    """Calls `work` for one request. Raises its errors as a FailedError that names the field."""
    try:
        return work(*arguments)
    except Exception as error:
        raise FailedError(blamed(field, error)) from error


class ConfigError(FaserError):
    """The server cannot start as configured; the message says what to change."""


class ManifestError(FaserError):
    """An engine directory is missing, changed, truncated or of another format."""


class Brief:
    """A client's value in an error message, shown at bounded cost."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __repr__(self) -> str:
        if isinstance(self._value, dict) and len(self._value) > MAX_SHOWN:
            return f"an object of {len(self._value)} fields"
        return _BRIEF.repr(self._value)


def refusal_of(error: ValidationError, field: str = "") -> RequestError:
    """Converts pydantic's error: the first wrong field. field: of the value that was checked, in which it lies."""
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
