"""JSON responses, and errors in OpenAI's form: translates the engine's error codes for clients of this API."""

from __future__ import annotations

import logging
import secrets
from typing import Any

import pydantic_core
from starlette.responses import JSONResponse

from faser_backend.core.errors import ErrorCode, Failure, FaserError

_LOG = logging.getLogger(__name__)
ANSWERS = {  # the HTTP status and OpenAI's `code`
    ErrorCode.INVALID: (400, None),
    ErrorCode.TOO_LONG: (400, "context_length_exceeded"),
    ErrorCode.QUEUE_FULL: (429, "queue_full"),
    ErrorCode.CANCELLED: (499, "cancelled"),
    ErrorCode.UNAVAILABLE: (503, "unavailable"),
    ErrorCode.INTERNAL: (500, "internal_error"),
}
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}  # OpenAI's, by status


class ApiError(Exception):
    """The error of one request. status: of HTTP; param: the wrong field; code: for programs."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    @classmethod
    def of(cls, failure: Failure) -> ApiError:
        status, code = ANSWERS[failure.code]
        return cls(failure.message, status=status, param=failure.field, code=code)

    def body(self) -> dict[str, object]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def as_api_error(error: Exception) -> ApiError:
    """Returns the error that the client sees. An unexpected one shows only a number, which the log explains."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, FaserError):
        return ApiError.of(error.failure)
    number = secrets.token_hex(8)
    _LOG.error("request %s failed", number, exc_info=error)
    return ApiError.of(Failure(ErrorCode.INTERNAL, f"internal error; the server's log explains it under {number}"))


def error_response(failure: Exception) -> Json:
    error = as_api_error(failure)
    headers = {"retry-after": "1"} if error.status in (429, 503) else None
    return Json(error.body(), error.status, headers)


class Json(JSONResponse):
    def render(self, content: Any) -> bytes:
        return to_json(content)


def to_json(data: Any) -> bytes:
    """Writes any data as JSON; NaN and infinity become null."""
    return pydantic_core.to_json(data, inf_nan_mode="null")
