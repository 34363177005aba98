"""The errors that cross rooms. Each message names the field, the value and the limit.

Knows nothing of where a request came from; serving turns these into Triton errors.
"""

from __future__ import annotations

SHUTTING_DOWN = "the server is shutting down"


class FaserError(Exception):
    """Base of every error that a user can cause or mend."""


class RequestError(FaserError):
    """One request is refused or failed; nobody else is touched."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{field} = {shown}: {limit}")
        self.field = field


class QueueFullError(RequestError):
    """The waiting queue is at its limit; the client may retry later. Load tools look for both of its phrases."""

    field = "max_queue_size"

    def __init__(self, limit: int) -> None:
        super().__init__(self.field, limit, "")
        message = f"Exceeds maximum queue size. Maximum queue size of {limit} requests is reached; retry later"
        self.args = (message,)


class ConfigError(FaserError):
    """The server cannot start as configured; the message says what to change."""


class ManifestError(FaserError):
    """An engine directory is missing, changed, truncated or of another format."""
