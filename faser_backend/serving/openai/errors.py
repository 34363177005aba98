"""Errors in OpenAI's form."""

from __future__ import annotations

import re

from faser_backend.core.errors import RequestError

_FIELD = re.compile(r"[\w.\[\]]+(?= = )")
_QUEUE_FULL = "maximum queue size"
_INTERNAL = ("internal error", "the step of this request failed")
_UNAVAILABLE = ("shutting down", "is gone", "unavailable", "not ready")


class ApiError(Exception):
    """One request's error. status: of HTTP; param: the field that is to blame; code: for programs."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    @classmethod
    def of_request(cls, error: RequestError, param: str | None = None) -> ApiError:
        return cls(str(error), param=param or error.field)

    @classmethod
    def of_engine(cls, message: str) -> ApiError:
        """What the engine or Triton said. Triton's streams carry a message alone, whose words tell the kind."""
        lower = message.lower()
        if _QUEUE_FULL in lower:
            return cls(message, status=429, code="queue_full")
        if any(words in lower for words in _UNAVAILABLE):
            return cls(message, status=503, code="unavailable")
        if lower.startswith(_INTERNAL):
            return cls(message, status=500, code="internal_error")
        field = _FIELD.match(message)
        return cls(message, param=field[0] if field else None)

    def body(self) -> dict[str, object]:
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
