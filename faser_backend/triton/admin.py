"""Triton's administration over HTTP: configurations of models, and their loading and unloading with the admin key."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from typing import Any

from faser_backend.core.errors import FaserError
from faser_backend.serving.parameters import KEY_HEADER

_RAISED = re.compile(r"TritonModelException: (.*?)(?:\n\nAt:|;?\n|$)", re.DOTALL)


class AdminError(FaserError):
    """The server refuses a call, or does not answer."""


class Administration:
    """A client of one server's administration. Every method raises AdminError."""

    def __init__(self, address: str, key: str) -> None:
        """address: HOST:PORT of Triton's HTTP port."""
        self._address, self._key = address, key

    def config(self, model: str) -> dict[str, Any]:
        """Returns the configuration that a model was loaded with."""
        return json.loads(self._ask(f"/v2/models/{model}/config", 10.0))

    def load(self, model: str, config: dict[str, Any], timeout_s: float) -> None:
        """Loads a model. A loaded one serves until the new one is ready, and stays if loading fails."""
        self._ask(f"/v2/repository/models/{model}/load", timeout_s, {"parameters": {"config": json.dumps(config)}})

    def unload(self, model: str, timeout_s: float) -> None:
        """Makes a model not ready. It finishes its requests."""
        self._ask(f"/v2/repository/models/{model}/unload", timeout_s, {})

    def _ask(self, path: str, timeout_s: float, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://{self._address}{path}", data, {KEY_HEADER: self._key})
        try:
            return fetch(request, timeout_s)
        except urllib.error.HTTPError as error:
            raise AdminError(_reason(error)) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise AdminError(f"{self._address}: Triton's HTTP port does not answer ({reason})") from None


def fetch(request: urllib.request.Request | str, timeout_s: float) -> bytes:
    """Returns what this server answers, asked without a proxy, as a key is for it alone. Raises what urllib raises."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout_s) as answer:
        return answer.read()


def _reason(error: urllib.error.HTTPError) -> str:
    """Returns the error that a model raised, else Triton's."""
    text = error.read().decode(errors="replace")
    try:
        message = str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        message = text.strip() or f"status {error.code}"
    if error.code == 403:
        return f"the server refuses the admin key ({message})"
    raised = _RAISED.search(message)
    return raised[1].strip() if raised else message
