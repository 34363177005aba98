"""The frontend of one model: reads requests, submits them to the engine, and answers from a single sender thread.

The sender takes all waiting outputs, merges them per sequence, and sends one response per sequence. So a slow server
makes fewer, larger responses, and no queue grows. A second thread polls for cancelled clients. Short texts are read on
the caller's thread, in order; two other threads read long texts, so that tokenising one delays no other request.
`InflightBatcherContract` parses requests and makes replies; `Responder` sends to Triton.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from queue import Empty
from typing import Any, Protocol

from faser_backend.core.errors import (
    SHUTTING_DOWN,
    ErrorCode,
    FailedError,
    Failure,
    FaserError,
    QueueFullError,
    RequestError,
    UnavailableError,
    blamed,
)
from faser_backend.core.request import EngineOutput, FinishReason
from faser_backend.serving.request_reports import Listener, RequestLife, SequenceLife, about, report_ended
from faser_backend.text.tokenizer import TextTokenizer
from faser_backend.triton.contract import ParsedRequest, is_stop_request, num_text_bytes, parse_requests
from faser_backend.triton.launch_folder import Heartbeat
from faser_backend.triton.link import GONE, EngineLink, Handshake
from faser_backend.triton.tensor_io import NamedArray, Reply, merge
from faser_backend.triton.tensors import Tensors

_log = logging.getLogger(__name__)
DRAIN_POLL_S = 0.02
BEAT_S = 1.0
LONG_TEXT_BYTES = 16 << 10  # tokenised in 5 to 10 ms
NUM_READERS = 2  # threads that read long texts
_numbers = itertools.count()  # of requests, which logs tell apart after a reload too


class Responder(Protocol):
    """The sender of one request's responses. The last call is `send` with is_final, or `fail`."""

    requested_outputs: Iterable[str]

    def send(self, arrays: list[NamedArray], *, is_final: bool) -> None: ...
    def fail(self, failure: Failure) -> None: ...
    def is_cancelled(self) -> bool: ...


class InflightBatcherContract:
    """The contract of TensorRT-LLM's inflight batcher models. llmapi.py has the other one.

    accumulates_text: streamed responses carry all text so far, as in tensorrt_llm_bls with accumulate_tokens.
    """

    missing_stop_id = "Trying to stop a request but request ID is not provided"

    def __init__(self, *, accumulates_text: bool = False) -> None:
        self._accumulates_text = accumulates_text

    def parse(
        self, tensors: Tensors, request_id: str, handshake: Handshake, *, is_decoupled: bool
    ) -> list[ParsedRequest]:
        """Returns the sequences of a request, at least one. Raises RequestError."""
        parsed = parse_requests(tensors, request_id, handshake, is_decoupled=is_decoupled)
        return [replace(one, accumulates_text=True) for one in parsed] if self._accumulates_text else parsed

    def reply(self, parsed: ParsedRequest, requested: Iterable[str], tokenizer: TextTokenizer) -> Reply:
        return Reply(parsed, requested, tokenizer)

    def acknowledge_stop(self, responder: Responder) -> None:
        responder.send([], is_final=True)


@dataclass(slots=True, eq=False)
class _Exchange:
    """One Triton request in progress: its responder and its sequences."""

    responder: Responder
    life: RequestLife
    parsed: dict[str, ParsedRequest] = field(default_factory=dict)  # by the engine's request id, ordered by prompt
    open_ids: set[str] = field(default_factory=set)  # sequences that have not ended
    replies: dict[str, Reply] = field(default_factory=dict)  # made by the sender with a sequence's first output
    is_stopped: bool = False  # a stop request has named it before the engine got it
    is_ending: bool = False  # its cancellation was sent to the engine
    is_failed: bool = False


@dataclass(eq=False)
class Frontend:
    """A frontend that serves the requests of one model until `close`. Thread-safe."""

    link: EngineLink
    handshake: Handshake
    _: KW_ONLY
    is_decoupled: bool
    contract: InflightBatcherContract = field(default_factory=InflightBatcherContract)
    on_answered: Listener = lambda life: None  # called on the sender thread with requests answered without an error
    listeners: Sequence[Listener] = ()  # called with every request that has ended, refused ones too, on any thread
    launch_folder: Path = Path()  # of `faser serve`, which watches the sender

    def __post_init__(self) -> None:
        self._heartbeat = Heartbeat(self.launch_folder)
        self._lock = threading.Lock()
        self._entering: set[_Exchange] = set()  # which are read and submitted
        self._live: dict[str, _Exchange] = {}  # by the engine's request id
        self._stopping: set[str] = set()  # sequences whose text a stop string has ended
        self._closing = threading.Event()
        self._long_texts = LongTexts(self.handshake.max_queue_size)
        self._threads = [
            threading.Thread(target=self._run_sender, name="sender", daemon=True),
            threading.Thread(target=self._run_canceller, name="canceller", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def handle(
        self, tensors: Tensors, client_id: str, responder: Responder, parameters: Mapping[str, Any] | None = None
    ) -> None:
        """Starts one request, or executes a stop request. Every failure is sent to the responder, none is raised.

        parameters: the request's parameters in Triton, for its life's record.
        """
        request_id = f"{os.getpid()}-{next(_numbers)}"
        life = RequestLife(request_id, time.perf_counter_ns(), client_id, self.handshake.model.name, parameters or {})
        exchange = _Exchange(responder, life)
        try:
            if is_stop_request(tensors):
                self._stop(client_id, responder)
                return
            with self._lock:
                self._entering.add(exchange)
            self._long_texts.run(tensors, lambda: self._start(tensors, exchange))
        except Exception as error:
            self._fail(exchange, error)

    def _start(self, tensors: Tensors, exchange: _Exchange) -> None:
        life = exchange.life
        try:
            parsed = self.contract.parse(tensors, life.request_id, self.handshake, is_decoupled=self.is_decoupled)
            life.parsed_ns, life.num_prompts = time.perf_counter_ns(), parsed[0].batch_size
            by_id = exchange.parsed = {one.request.request_id: one for one in parsed}
            exchange.open_ids = set(by_id)
            if self.listeners:
                life.sequences = {request_id: SequenceLife.of(one.request) for request_id, one in by_id.items()}
            with self._lock:
                self._live.update(dict.fromkeys(by_id, exchange))
            for one in parsed:
                self.link.submit(one.request, life.client_id)
            life.submitted_ns = time.perf_counter_ns()
            with self._lock:
                self._entering.discard(exchange)  # a stop request from now on finds the sequences in the engine
            for request_id in by_id if exchange.is_stopped else ():
                self.link.stop(request_id)
            if exchange.is_failed or exchange.is_ending:  # before all sequences were submitted
                self._cancel(list(by_id))
        except Exception as error:
            self._fail(exchange, error)

    def drain(self) -> None:
        """Waits until every request is answered, and reads no more long texts."""
        self._long_texts.close()
        while self._live:
            time.sleep(DRAIN_POLL_S)

    def close(self) -> None:
        """Ends the threads and fails the requests that still run."""
        self._closing.set()
        self._long_texts.close()
        self.link.close()
        self._threads[1].join(5.0)
        self._fail_all(SHUTTING_DOWN)
        self._heartbeat.close()

    def _stop(self, client_id: str, responder: Responder) -> None:
        if not self.handshake.takes_stop_requests:
            limit = "--stop-requests is off, as they can end other clients' requests; cancel the call instead"
            raise RequestError("stop", True, limit)
        if not client_id:
            raise RequestError("stop", True, self.contract.missing_stop_id)
        with self._lock:
            for exchange in self._entering:
                exchange.is_stopped |= exchange.life.client_id == client_id
        self.link.stop_client(client_id)
        self.contract.acknowledge_stop(responder)

    def _fail(self, exchange: _Exchange, error: Exception, field: str | None = None) -> None:
        """Answers a request with an error, and cancels its running sequences. Others are unaffected.

        field: of the request, which the error blames if it names none.
        """
        failure = blamed(field, error)
        if not isinstance(error, FaserError):
            _log.exception("a request failed", extra=about(exchange.life.request_id))
        exchange.is_failed = True
        self._notify(exchange.life, failure.message)
        with self._lock:
            self._entering.discard(exchange)
            left = [request_id for request_id in exchange.open_ids if self._live.pop(request_id, None) is not None]
            self._stopping.difference_update(left)
        self._cancel(left)
        with contextlib.suppress(Exception):  # the client may be gone
            exchange.responder.fail(failure)

    def _notify(self, life: RequestLife, error: str = "") -> None:
        """Calls the listeners with a request that has ended, once."""
        if not life.ended_ns:
            life.error = error
            report_ended(life, self.listeners)

    def _cancel(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            with contextlib.suppress(FaserError):  # the engine is gone; the sender thread notices it
                self.link.cancel(request_id)

    # -- the sender thread ------------------------------------------------------------------------

    def _run_sender(self) -> None:
        outputs, is_open = self.link.outputs, True
        while is_open and (batch := self._wait_for_outputs()) is not None:
            while is_open and not outputs.empty():
                more = outputs.get()
                is_open, batch = more is not None, batch + (more or [])
            self._answer(batch)
        self._fail_all(GONE.message)

    def _wait_for_outputs(self) -> list[EngineOutput] | None:
        while True:
            self._heartbeat.beat()
            with contextlib.suppress(Empty):
                return self.link.outputs.get(timeout=BEAT_S)

    def _answer(self, batch: list[EngineOutput]) -> None:
        touched = {output.request_id: output for output in batch if self._try(self._take, output)}  # each one's last
        for output in touched.values():
            self._try(self._respond, output)

    def _try(self, work: Callable[[_Exchange, EngineOutput], None], output: EngineOutput) -> bool:
        """Calls work with an output of a live request, which fails if that raises. Returns whether it has succeeded."""
        exchange = self._live.get(output.request_id)
        if exchange is None:  # another sequence of the same request may have failed it
            return False
        try:
            work(exchange, output)
        except Exception as error:
            self._fail(exchange, error, "text_output")
            return False
        return True

    def _take(self, exchange: _Exchange, output: EngineOutput) -> None:
        start_ns = time.perf_counter_ns()
        reply = exchange.replies.get(output.request_id)
        if reply is None:
            parsed, tokenizer = exchange.parsed[output.request_id], self.handshake.model.tokenizer
            reply = self.contract.reply(parsed, exchange.responder.requested_outputs, tokenizer)
            exchange.replies[output.request_id] = reply
        reply.add(output)
        if exchange.life.sequences:
            exchange.life.sequences[output.request_id].add(output, start_ns)
        exchange.life.postprocessing_ns += time.perf_counter_ns() - start_ns

    def _respond(self, exchange: _Exchange, last: EngineOutput) -> None:
        request_id, reply = last.request_id, exchange.replies[last.request_id]
        if last.is_final:
            self._finish(exchange, last)
            return
        if reply.stream.is_stopped and request_id not in self._stopping:
            self._stopping.add(request_id)
            self.link.stop(request_id)
        if reply.parsed.is_streaming and reply.has_new_output:
            self._send(exchange, [reply], is_final=False)

    def _finish(self, exchange: _Exchange, last: EngineOutput) -> None:
        """Ends one sequence, and with the last one its exchange. Raises the error of a sequence that has failed."""
        request_id = last.request_id
        with self._lock:
            self._live.pop(request_id, None)
            self._stopping.discard(request_id)
            exchange.open_ids.discard(request_id)
        if last.finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR):
            raise FailedError(last.error or Failure(ErrorCode.CANCELLED, "Request cancelled"))
        exchange.life.answered_ns = time.perf_counter_ns()
        if last.stats is not None:
            exchange.life.queued_for_ns = max(0, last.stats.first_scheduled_ns - last.stats.arrival_ns)
        is_last = not exchange.open_ids
        if self.is_decoupled:
            self._send(exchange, [exchange.replies[request_id]], is_final=is_last)
        elif is_last:
            self._send(exchange, [exchange.replies[one] for one in exchange.parsed], is_final=True)
        if is_last:
            self._notify(exchange.life)
            self.on_answered(exchange.life)

    def _send(self, exchange: _Exchange, replies: list[Reply], *, is_final: bool) -> None:
        """Sends one response with the new output of these replies, merged if they are several."""
        start_ns = time.perf_counter_ns()
        rendered = [reply.render() for reply in replies]
        arrays = rendered[0] if len(rendered) == 1 else merge(rendered, replies[0].parsed.batch_size)
        rendered_ns = time.perf_counter_ns()
        exchange.responder.send(arrays, is_final=is_final)
        exchange.life.postprocessing_ns += rendered_ns - start_ns
        exchange.life.sending_ns += time.perf_counter_ns() - rendered_ns

    def _fail_all(self, message: str) -> None:
        with self._lock:
            exchanges, self._live = set(self._live.values()), {}
        for exchange in exchanges:
            self._notify(exchange.life, message)
            try:
                exchange.responder.fail(Failure(ErrorCode.UNAVAILABLE, message))
            except Exception:  # the others are still failed
                _log.exception("a failure could not be sent")

    # -- the canceller thread ---------------------------------------------------------------------

    def _run_canceller(self) -> None:
        while not self._closing.wait(self.handshake.cancellation_period_s):
            with self._lock:
                exchanges = set(self._live.values())
            for exchange in exchanges:
                if not exchange.is_ending and _is_cancelled(exchange.responder):
                    exchange.is_ending = True
                    self._cancel(list(exchange.open_ids))


def _is_cancelled(responder: Responder) -> bool:
    """Returns whether the client has cancelled, or its state cannot be read."""
    try:
        return responder.is_cancelled()
    except Exception:
        _log.exception("a request's cancellation state could not be read; it is cancelled")
        return True


class LongTexts:
    """A reader of requests: short texts at once, long texts on its own threads. Thread-safe."""

    def __init__(self, max_waiting: int) -> None:
        """max_waiting: long texts that may wait; 0: any number."""
        self._max_waiting = max_waiting
        self._pool = ThreadPoolExecutor(NUM_READERS, "long-texts")
        self._free = threading.Semaphore(max_waiting or sys.maxsize)

    def run(self, tensors: Tensors, read: Callable[[], None]) -> None:
        """Calls read, which handles its own errors, now or later.

        Raises QueueFullError if too many long texts wait, and UnavailableError once closed.
        """
        if num_text_bytes(tensors) <= LONG_TEXT_BYTES:
            read()
            return
        if not self._free.acquire(blocking=False):
            raise QueueFullError(self._max_waiting)
        try:
            self._pool.submit(read).add_done_callback(lambda _: self._free.release())
        except RuntimeError:  # the pool is closed
            self._free.release()
            raise UnavailableError(SHUTTING_DOWN) from None

    def close(self) -> None:
        """Refuses further long texts, and waits until all are read. May be called again."""
        self._pool.shutdown()
