"""The Python API, loaded on first use: `from faser_backend import LLM, SamplingParams`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from faser_backend.version import VERSION as __version__

if TYPE_CHECKING:
    from faser_backend.api.llm import LLM
    from faser_backend.api.outputs import CompletionOutput, Logprob, RequestOutput
    from faser_backend.api.params import GuidedDecodingParams, SamplingParams
    from faser_backend.core.errors import ConfigError, FaserError, ManifestError, RequestError
    from faser_backend.text.answer_stream import TextPiece

_HOMES = {
    "LLM": "api.llm",
    **dict.fromkeys(("CompletionOutput", "Logprob", "RequestOutput"), "api.outputs"),
    "TextPiece": "text.answer_stream",
    **dict.fromkeys(("GuidedDecodingParams", "SamplingParams"), "api.params"),
    **dict.fromkeys(("ConfigError", "FaserError", "ManifestError", "RequestError"), "core.errors"),
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "ConfigError",
    "FaserError",
    "GuidedDecodingParams",
    "Logprob",
    "ManifestError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "TextPiece",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
