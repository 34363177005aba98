"""One face of the engine: takes requests, tokenises, and answers from a single sender thread.

The sender takes everything that has piled up, merges it per request, detokenises and sends one
response per request: a slow server makes fewer, larger responses, never a queue. A second thread
polls for cancelled clients. Knows Triton only through `Responder`.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from faser_backend.core.errors import FaserError, RequestError
from faser_backend.core.request import FinishReason, RequestOutput
from faser_backend.serving.contract import ParsedRequest, Tensors, is_stop_request, parse_request
from faser_backend.serving.link import EngineLink, Hello, describe_refusal
from faser_backend.serving.tokenizer import TextTokenizer
from faser_backend.serving.triton_io import NamedArray, Reply

_log = logging.getLogger(__name__)


class Responder(Protocol):
    """Where one request's responses go. Exactly one call is the last: is_final, or fail."""

    requested_outputs: Iterable[str]

    def send(self, arrays: list[NamedArray], *, is_final: bool) -> None: ...
    def fail(self, message: str, code: str) -> None:
        """`code`: INVALID_ARG, UNAVAILABLE, CANCELLED or INTERNAL."""
        ...

    def is_cancelled(self) -> bool: ...


class Answering(Protocol):
    """The growing answer to one request (triton_io.Reply)."""

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

    def is_stop_request(self, tensors: Tensors) -> bool: ...
    def parse(
        self, tensors: Tensors, request_id: str, hello: Hello, tokenizer: TextTokenizer, *, is_decoupled: bool
    ) -> ParsedRequest: ...
    def reply(self, parsed: ParsedRequest, requested: Iterable[str], tokenizer: TextTokenizer) -> Answering: ...
    def acknowledge_stop(self, responder: Responder) -> None: ...


class InflightBatcherWire:
    """The tensors of TensorRT-LLM's inflight batcher models."""

    missing_stop_id = "Trying to stop a request but request ID is not provided"
    is_stop_request = staticmethod(is_stop_request)
    parse = staticmethod(parse_request)
    reply = staticmethod(Reply)

    def acknowledge_stop(self, responder: Responder) -> None:
        responder.send([], is_final=True)


@dataclass(slots=True, eq=False)
class _Live:
    responder: Responder
    reply: Answering
    is_ending: bool = False  # a stop or a cancel is under way in the engine


class Frontend:
    """Serves the requests of one model until `close`. Thread-safe."""

    def __init__(
        self, link: EngineLink, hello: Hello, tokenizer: TextTokenizer, *, is_decoupled: bool, wire: Wire | None = None
    ) -> None:
        self._wire: Wire = wire or InflightBatcherWire()
        self._link = link
        self._hello = hello
        self._tokenizer = tokenizer
        self._is_decoupled = is_decoupled
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._live: dict[str, _Live] = {}
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._run_sender, name="sender", daemon=True),
            threading.Thread(target=self._run_canceller, name="canceller", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def handle(self, tensors: Tensors, client_id: str, responder: Responder) -> None:
        """Starts one request, or executes a stop request. Every failure is answered here, never raised."""
        request_id = f"{os.getpid()}-{next(self._numbers)}"
        try:
            if self._wire.is_stop_request(tensors):
                self._stop(client_id, responder)
                return
            parsed = self._wire.parse(
                tensors, request_id, self._hello, self._tokenizer, is_decoupled=self._is_decoupled
            )
            reply = self._wire.reply(parsed, responder.requested_outputs, self._tokenizer)
            with self._lock:
                self._live[request_id] = _Live(responder, reply)
            self._link.submit(parsed.request, client_id)
        except Exception as error:
            self._refuse(request_id, responder, error)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def close(self) -> None:
        """Ends the threads; requests that still run are failed."""
        self._closing.set()
        self._link.close()
        self._threads[1].join(5.0)
        self._fail_all("the server is shutting down")

    def _stop(self, client_id: str, responder: Responder) -> None:
        if not client_id:
            raise RequestError("stop", True, self._wire.missing_stop_id)
        self._link.stop_client(client_id)
        self._wire.acknowledge_stop(responder)

    def _refuse(self, request_id: str, responder: Responder, error: Exception) -> None:
        with self._lock:
            self._live.pop(request_id, None)
        if isinstance(error, FaserError):
            message = describe_refusal(error, self._hello.max_queue_size)
            responder.fail(message, _code_of(message, default="INVALID_ARG"))
        else:
            _log.exception("a request could not be taken")
            responder.fail(f"internal error: {type(error).__name__}: {error}", "INTERNAL")

    # -- the sender thread ------------------------------------------------------------------------

    def _run_sender(self) -> None:
        outputs = self._link.outputs
        while (batch := outputs.get()) is not None:
            while not outputs.empty():
                more = outputs.get()
                if more is None:
                    self._answer(batch)
                    self._fail_all("the engine process is gone")
                    return
                batch = batch + more
            self._answer(batch)
        self._fail_all("the engine process is gone")

    def _answer(self, batch: list[RequestOutput]) -> None:
        touched: dict[str, RequestOutput] = {}  # request id -> its last output in the batch
        for output in batch:
            live = self._live.get(output.request_id)
            if live is not None:
                live.reply.add(output)
                touched[output.request_id] = output
        for request_id, output in touched.items():
            live = self._live[request_id]
            try:
                self._respond(request_id, live, output)
            except Exception:  # the client may be gone; nobody else must notice
                _log.exception("a response could not be sent")
                self._end(request_id)
                self._link.cancel(request_id)

    def _respond(self, request_id: str, live: _Live, last: RequestOutput) -> None:
        reply = live.reply
        if last.is_final:
            self._end(request_id)
            if last.finish_reason is FinishReason.CANCELLED:
                live.responder.fail("Request cancelled", "CANCELLED")
            elif last.finish_reason is FinishReason.ERROR:
                message = last.error or "the request failed"
                live.responder.fail(message, _code_of(message, default="INTERNAL"))
            else:
                live.responder.send(reply.render(), is_final=True)
            return
        if reply.is_stopped and not live.is_ending:
            live.is_ending = True
            self._link.stop(request_id)
        if reply.parsed.is_streaming and reply.has_news:
            live.responder.send(reply.render(), is_final=False)

    def _end(self, request_id: str) -> None:
        with self._lock:
            self._live.pop(request_id, None)

    def _fail_all(self, message: str) -> None:
        with self._lock:
            live, self._live = self._live, {}
        for entry in live.values():
            try:
                entry.responder.fail(message, "UNAVAILABLE")
            except Exception:  # the others must be told all the same
                _log.exception("a failure could not be sent")

    # -- the canceller thread ---------------------------------------------------------------------

    def _run_canceller(self) -> None:
        period_s = self._hello.cancellation_period_s
        while not self._closing.wait(period_s):
            started_s = time.monotonic()
            with self._lock:
                live = list(self._live.items())
            for request_id, entry in live:
                if not entry.is_ending and entry.responder.is_cancelled():
                    entry.is_ending = True
                    self._link.cancel(request_id)
            if time.monotonic() - started_s > 10 * period_s:
                _log.warning("polling %d requests for cancellation took over %.1f s", len(live), 10 * period_s)


def _code_of(message: str, default: str) -> str:
    return "UNAVAILABLE" if message.startswith("Exceeds maximum queue size") else default
