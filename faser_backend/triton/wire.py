"""A contract with clients: names and shapes of tensors, and how a stop request is answered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from faser_backend.core.errors import Failure
from faser_backend.text.tokenizer import TextTokenizer
from faser_backend.triton.contract import ParsedRequest, parse_requests
from faser_backend.triton.link import Hello
from faser_backend.triton.tensor_io import NamedArray, Reply
from faser_backend.triton.tensors import Tensors


class Responder(Protocol):
    """Where one request's responses go. Exactly one call is the last: is_final, or fail."""

    requested_outputs: Iterable[str]

    def send(self, arrays: list[NamedArray], *, is_final: bool) -> None: ...
    def fail(self, failure: Failure) -> None: ...
    def is_cancelled(self) -> bool: ...


class InflightBatcherWire:
    """The tensors of TensorRT-LLM's inflight batcher models; llmapi.py has those of the other contract.

    accumulates_text: streamed responses carry all text so far, as tensorrt_llm_bls does with accumulate_tokens.
    """

    missing_stop_id = "Trying to stop a request but request ID is not provided"

    def __init__(self, *, accumulates_text: bool = False) -> None:
        self._accumulates_text = accumulates_text

    def parse(
        self, tensors: Tensors, request_id: str, hello: Hello, tokenizer: TextTokenizer, *, is_decoupled: bool
    ) -> list[ParsedRequest]:
        """Returns one entry per sequence that the request asks for, at least one. Raises RequestError."""
        parsed = parse_requests(tensors, request_id, hello, tokenizer, is_decoupled=is_decoupled)
        return [replace(one, accumulates_text=True) for one in parsed] if self._accumulates_text else parsed

    def reply(self, parsed: ParsedRequest, requested: Iterable[str], tokenizer: TextTokenizer) -> Reply:
        return Reply(parsed, requested, tokenizer)

    def acknowledge_stop(self, responder: Responder) -> None:
        responder.send([], is_final=True)
