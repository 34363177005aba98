"""Who may ask: clients with a key where keys are set; else all that reach the port, but no web page of another origin.

A page in a browser of the same machine reaches loopback ports as well, under a name of its own if it likes (DNS
rebinding). Browsers tell by headers that they are browsers, which origin asks, and by which name; other clients send
none of these headers, and are not asked for any.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.requests import Request

from faser_backend.core.errors import ConfigError
from faser_backend.openai.errors import ApiError


class Callers:
    """keys: none: everybody may ask. host: the address that is listened on; origins: allowed beside our own."""

    def __init__(self, keys: Sequence[str] = (), host: str = "127.0.0.1", origins: Sequence[str] = ()) -> None:
        self.origins = tuple(origins)
        self._keys = [key.encode() for key in keys]
        self._names = {host, *(_name_of(urlsplit(origin).netloc) for origin in origins)}

    def check(self, request: Request) -> None:
        """Raises ApiError."""
        if self._keys:
            self._check_key(request)
        elif _is_browser(request) and request.headers.get("origin") not in self.origins:
            self._check_origin(request)

    def _check_key(self, request: Request) -> None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        # Every key is compared, so that the time tells nothing.
        matches = [secrets.compare_digest(key.strip().encode(), known) for known in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError("an API key is needed: Authorization: Bearer KEY", status=401, code="invalid_api_key")

    def _check_origin(self, request: Request) -> None:
        host = request.headers.get("host", "")
        if not self._is_ours(_name_of(host)):
            raise _forbidden(f"Host = {host[:80]!r}: a browser reaches this server by another name")
        origin, site = (request.headers.get(name) for name in ("origin", "sec-fetch-site"))
        if (origin is not None and _netloc_of(origin) != host) or site not in (None, "same-origin", "none"):
            raise _forbidden(f"Origin = {origin and origin[:80]!r}: a page of another origin asks")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind != "application/json":
            limit = "a browser must send application/json"
            raise ApiError(f"Content-Type = {kind[:80]!r}: {limit}", status=415, code="unsupported_media_type")

    def _is_ours(self, name: str) -> bool:
        if name in self._names or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False


def check_origins(origins: Sequence[str]) -> tuple[str, ...]:
    """The origins as browsers write them. Raises ConfigError."""
    for origin in origins:
        parts = urlsplit(origin.rstrip("/"))
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.path or parts.query or parts.fragment:
            raise ConfigError(f"allow-origin = {origin!r}: must be SCHEME://HOST[:PORT], with http or https")
    return tuple(origin.rstrip("/").lower() for origin in origins)


def _is_browser(request: Request) -> bool:
    agent = request.headers.get("user-agent", "")
    return any(name in request.headers for name in ("origin", "sec-fetch-site")) or agent.startswith("Mozilla/")


def _netloc_of(origin: str) -> str | None:
    """None: that of a page without one, which browsers write as null."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def _name_of(netloc: str) -> str:
    """Without port and brackets."""
    if netloc.startswith("["):
        return netloc[1:].partition("]")[0]
    return netloc.partition(":")[0].lower()


def _forbidden(message: str) -> ApiError:
    return ApiError(f"{message}; see --allow-origin", status=403, code="forbidden_origin")
