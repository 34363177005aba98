"""The frontend of one model: takes requests, tokenises, and answers from a single sender thread.

The sender takes everything that has piled up, merges it per sequence, detokenises and sends one response per
sequence: a slow server makes fewer, larger responses, never a queue. A second thread polls for cancelled clients.
Knows Triton only through `Responder` (wire.py).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty

from faser_backend.core.errors import SHUTTING_DOWN, ErrorCode, Failure, FaserError, RequestError, blamed
from faser_backend.core.request import EngineOutput, FinishReason
from faser_backend.serving.log_format import about
from faser_backend.serving.request_life import Listener, RequestLife, SequenceLife
from faser_backend.text.tokenizer import TextTokenizer
from faser_backend.triton.contract import is_stop_request
from faser_backend.triton.link import EngineLink, Hello
from faser_backend.triton.long_texts import LongTexts
from faser_backend.triton.tensor_io import Reply, merge
from faser_backend.triton.tensors import Tensors
from faser_backend.triton.wire import InflightBatcherWire, Responder

_log = logging.getLogger(__name__)
DRAIN_POLL_S = 0.02
BEAT_S = 1.0


@dataclass(slots=True, eq=False)
class _Exchange:
    """One Triton request under way: where its answers go, and the sequences that make them."""

    responder: Responder
    replies: dict[str, Reply]  # by request id of the engine, prompt by prompt
    life: RequestLife
    open_ids: set[str]  # of sequences that have not ended
    is_ending: bool = False  # a cancel is under way in the engine
    is_failed: bool = False


class Frontend:
    """Serves the requests of one model until `close`. Thread-safe.

    on_answered: called with every request that was answered without an error, on the sender thread.
    listeners: called with every request that has ended, refused ones too; on any of the frontend's threads.
    beat: called by the sender in every round, and every second without outputs.
    """

    def __init__(
        self,
        link: EngineLink,
        hello: Hello,
        tokenizer: TextTokenizer,
        *,
        is_decoupled: bool,
        wire: InflightBatcherWire | None = None,
        on_answered: Listener = lambda life: None,
        listeners: Sequence[Listener] = (),
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._wire = wire or InflightBatcherWire()
        self._link = link
        self._hello = hello
        self._tokenizer = tokenizer
        self._is_decoupled = is_decoupled
        self._on_answered = on_answered
        self._listeners = listeners
        self._beat = beat
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._live: dict[str, _Exchange] = {}  # by request id of the engine
        self._stopping: set[str] = set()  # sequences whose text has met a stop string
        self._closing = threading.Event()
        self._long_texts = LongTexts(hello.max_queue_size)
        self._threads = [
            threading.Thread(target=self._run_sender, name="sender", daemon=True),
            threading.Thread(target=self._run_canceller, name="canceller", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def handle(
        self, tensors: Tensors, client_id: str, responder: Responder, context: Mapping[str, str] | None = None
    ) -> None:
        """Starts one request, or executes a stop request. Every failure is answered here, never raised.

        context: the client's trace headers.
        """
        request_id = f"{os.getpid()}-{next(self._numbers)}"
        life = RequestLife(request_id, time.perf_counter_ns(), client_id, context or {})
        try:
            self._long_texts.run(tensors, lambda: self._start(tensors, life, responder))
        except FaserError as error:
            self._refuse(None, life, responder, error)

    def _start(self, tensors: Tensors, life: RequestLife, responder: Responder) -> None:
        exchange: _Exchange | None = None
        try:
            if is_stop_request(tensors):
                self._stop(life.client_id, responder)
                return
            parsed = self._wire.parse(
                tensors, life.request_id, self._hello, self._tokenizer, is_decoupled=self._is_decoupled
            )
            requested = responder.requested_outputs
            replies = {one.request.request_id: self._wire.reply(one, requested, self._tokenizer) for one in parsed}
            life.parsed_ns, life.num_prompts = time.perf_counter_ns(), parsed[0].batch_size
            exchange = _Exchange(responder, replies, life, set(replies))
            if self._listeners:
                life.sequences = {one.request.request_id: SequenceLife.of(one.request) for one in parsed}
            with self._lock:
                self._live.update(dict.fromkeys(replies, exchange))
            for one in parsed:
                self._link.submit(one.request, life.client_id)
            life.submitted_ns = time.perf_counter_ns()
            if exchange.is_failed:  # by a refusal of its first sequences, while the others were still on their way
                self._cancel(list(replies))
        except Exception as error:
            self._refuse(exchange, life, responder, error)

    @property
    def num_live(self) -> int:
        """Sequences under way."""
        return len(self._live)

    def drain(self) -> None:
        """Waits until every request has been answered."""
        self._long_texts.drain()
        while self._live:
            time.sleep(DRAIN_POLL_S)

    def close(self) -> None:
        """Ends the threads; requests that still run are failed."""
        self._closing.set()
        self._long_texts.close()
        self._link.close()
        self._threads[1].join(5.0)
        self._fail_all(SHUTTING_DOWN)

    def _stop(self, client_id: str, responder: Responder) -> None:
        if not self._hello.takes_stop_requests:
            limit = "stop requests are off (--stop-requests): they would end anybody's request; cancel the call instead"
            raise RequestError("stop", True, limit)
        if not client_id:
            raise RequestError("stop", True, self._wire.missing_stop_id)
        self._link.stop_client(client_id)
        self._wire.acknowledge_stop(responder)

    def _refuse(self, exchange: _Exchange | None, life: RequestLife, responder: Responder, error: Exception) -> None:
        if isinstance(error, FaserError):
            failure = error.failure
        else:
            _log.exception("a request could not be taken", extra=about(life.request_id))
            failure = Failure(ErrorCode.INTERNAL, f"internal error: {type(error).__name__}: {error}")
        if exchange is not None:
            self._abandon(exchange, failure.message)
        else:
            self._tell(life, failure.message)
        responder.fail(failure)

    def _tell(self, life: RequestLife, error: str = "") -> None:
        """Tells the listeners of a request that has ended, once."""
        if life.ended_ns:
            return
        life.ended_ns, life.error = time.perf_counter_ns(), error
        for listener in self._listeners:
            try:
                listener(life)
            except Exception:  # whoever listens, the request is answered
                _log.exception("a listener failed for a request that has ended", extra=about(life.request_id))

    def _abandon(self, exchange: _Exchange, error: str) -> None:
        """Forgets a request that is answered with an error; what of it still runs is cancelled."""
        exchange.is_failed = True
        self._tell(exchange.life, error)
        with self._lock:
            left = [request_id for request_id in exchange.open_ids if self._live.pop(request_id, None) is not None]
            self._stopping.difference_update(left)
        self._cancel(left)

    def _cancel(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            with contextlib.suppress(FaserError):  # the engine is gone, which the sender learns by itself
                self._link.cancel(request_id)

    # -- the sender thread ------------------------------------------------------------------------

    def _run_sender(self) -> None:
        outputs = self._link.outputs
        while (batch := self._wait_for_outputs()) is not None:
            while not outputs.empty():
                more = outputs.get()
                if more is None:
                    self._answer(batch)
                    self._fail_all("the engine process is gone")
                    return
                batch = batch + more
            self._answer(batch)
        self._fail_all("the engine process is gone")

    def _wait_for_outputs(self) -> list[EngineOutput] | None:
        while True:
            self._beat()
            with contextlib.suppress(Empty):
                return self._link.outputs.get(timeout=BEAT_S)

    def _answer(self, batch: list[EngineOutput]) -> None:
        touched: dict[str, EngineOutput] = {}  # request id -> its last output in the batch
        for output in batch:
            exchange = self._live.get(output.request_id)
            if exchange is not None:
                try:
                    self._take(exchange, output)
                    touched[output.request_id] = output
                except Exception as error:
                    self._give_up(output.request_id, exchange, error)
        for request_id, output in touched.items():
            exchange = self._live.get(request_id)
            if exchange is None:  # another sequence of the same request has failed it
                continue
            try:
                self._respond(request_id, exchange, output)
            except Exception as error:
                self._give_up(request_id, exchange, error)

    def _take(self, exchange: _Exchange, output: EngineOutput) -> None:
        start_ns = time.perf_counter_ns()
        exchange.replies[output.request_id].add(output)
        if exchange.life.sequences:
            exchange.life.sequences[output.request_id].add(output, start_ns)
        exchange.life.postprocessing_ns += time.perf_counter_ns() - start_ns

    def _give_up(self, request_id: str, exchange: _Exchange, error: Exception) -> None:
        """Ends a request whose answer cannot be made or sent. Nobody else must notice."""
        _log.exception("a response could not be made or sent", extra=about(request_id))
        failure = blamed("text_output", error)
        self._abandon(exchange, failure.message)
        with contextlib.suppress(Exception):  # the client may be gone
            exchange.responder.fail(failure)

    def _respond(self, request_id: str, exchange: _Exchange, last: EngineOutput) -> None:
        reply = exchange.replies[request_id]
        if last.is_final:
            self._finish(request_id, exchange, last)
            return
        if reply.is_stopped and request_id not in self._stopping:
            self._stopping.add(request_id)
            self._link.stop(request_id)
        if reply.parsed.is_streaming and reply.has_news:
            self._send(exchange, [reply], is_final=False)

    def _finish(self, request_id: str, exchange: _Exchange, last: EngineOutput) -> None:
        """The last output of one sequence. The last sequence of a request ends its exchange."""
        with self._lock:
            self._live.pop(request_id, None)
            self._stopping.discard(request_id)
            exchange.open_ids.discard(request_id)
        if last.finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR):
            failure = last.error or Failure(ErrorCode.CANCELLED, "Request cancelled")
            self._abandon(exchange, failure.message)
            exchange.responder.fail(failure)
            return
        exchange.life.answered_ns = time.perf_counter_ns()
        if last.stats is not None:
            exchange.life.queued_for_ns = max(0, last.stats.first_scheduled_ns - last.stats.arrival_ns)
        is_last = not exchange.open_ids
        if self._is_decoupled:
            self._send(exchange, [exchange.replies[request_id]], is_final=is_last)
        elif is_last:
            self._send(exchange, list(exchange.replies.values()), is_final=True)
        if is_last:
            self._tell(exchange.life)
            self._on_answered(exchange.life)

    def _send(self, exchange: _Exchange, replies: list[Reply], *, is_final: bool) -> None:
        """One response that tells what is new in the replies, of which several are merged."""
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
            self._tell(exchange.life, message)
            try:
                exchange.responder.fail(Failure(ErrorCode.UNAVAILABLE, message))
            except Exception:  # the others must be told all the same
                _log.exception("a failure could not be sent")

    # -- the canceller thread ---------------------------------------------------------------------

    def _run_canceller(self) -> None:
        period_s = self._hello.cancellation_period_s
        while not self._closing.wait(period_s):
            started_s = time.monotonic()
            with self._lock:
                exchanges = set(self._live.values())
            for exchange in exchanges:
                if not exchange.is_ending and _has_left(exchange.responder):
                    exchange.is_ending = True
                    self._cancel(list(exchange.open_ids))
            if time.monotonic() - started_s > 10 * period_s:
                _log.warning("polling %d requests for cancellation took over %.1f s", len(exchanges), 10 * period_s)


def _has_left(responder: Responder) -> bool:
    """Whether the client has cancelled, or cannot be asked."""
    try:
        return responder.is_cancelled()
    except Exception:
        _log.exception("a request could not be asked whether it is cancelled")
        return True
