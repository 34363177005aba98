"""What a frontend exchanges with the models around it: a contract's wire, where answers go, and what became of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple, Protocol

from faser_backend.core.errors import Failure
from faser_backend.core.request import RequestOutput
from faser_backend.serving.contract import ParsedRequest, parse_requests
from faser_backend.serving.link import Hello
from faser_backend.serving.tensors import Tensors
from faser_backend.serving.tokenizer import TextTokenizer
from faser_backend.serving.triton_io import NamedArray, Reply


class Responder(Protocol):
    """Where one request's responses go. Exactly one call is the last: is_final, or fail."""

    requested_outputs: Iterable[str]

    def send(self, arrays: list[NamedArray], *, is_final: bool) -> None: ...
    def fail(self, failure: Failure) -> None: ...
    def is_cancelled(self) -> bool: ...


class Answering(Protocol):
    """The growing answer of one sequence (triton_io.Reply)."""

    parsed: ParsedRequest

    @property
    def is_stopped(self) -> bool: ...
    @property
    def has_news(self) -> bool: ...
    def add(self, output: RequestOutput) -> None: ...
    def render(self) -> list[NamedArray]: ...


class Wire(Protocol):
    """A contract with clients: names and shapes of tensors, and how a stop request is answered."""

    missing_stop_id: str  # the error for a stop request without an id

    def parse(
        self, tensors: Tensors, request_id: str, hello: Hello, tokenizer: TextTokenizer, *, is_decoupled: bool
    ) -> list[ParsedRequest]:
        """One entry per sequence that the request asks for, at least one."""
        ...

    def reply(self, parsed: ParsedRequest, requested: Iterable[str], tokenizer: TextTokenizer) -> Answering: ...
    def acknowledge_stop(self, responder: Responder) -> None: ...


class InflightBatcherWire:
    """The tensors of TensorRT-LLM's inflight batcher models.

    accumulates_text: streamed responses carry all text so far, as tensorrt_llm_bls does with accumulate_tokens.
    """

    missing_stop_id = "Trying to stop a request but request ID is not provided"
    reply = staticmethod(Reply)

    def __init__(self, *, accumulates_text: bool = False) -> None:
        self._accumulates_text = accumulates_text

    def parse(
        self, tensors: Tensors, request_id: str, hello: Hello, tokenizer: TextTokenizer, *, is_decoupled: bool
    ) -> list[ParsedRequest]:
        parsed = parse_requests(tensors, request_id, hello, tokenizer, is_decoupled=is_decoupled)
        return [replace(one, accumulates_text=True) for one in parsed] if self._accumulates_text else parsed

    def acknowledge_stop(self, responder: Responder) -> None:
        responder.send([], is_final=True)


class Answered(NamedTuple):
    """Where the time of one answered request went, in nanoseconds."""

    num_prompts: int
    preprocessing_ns: int  # its tensors became sequences of token ids
    submitting_ns: int  # the sequences went to the engine
    queued_ns: int  # in the engine, before a sequence was scheduled
    engine_ns: int  # from the first sequence that was submitted to the last one that ended
    postprocessing_ns: int  # tokens became text and tensors
    sending_ns: int  # responses went to the server
