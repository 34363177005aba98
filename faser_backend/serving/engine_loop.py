"""Runs `Engine.step` on one thread, and routes requests to the engine and outputs to their subscribers.

A subscriber is one frontend: of the engine's own process, or of another process behind a socket (triton/link.py).
Each step puts one list per subscriber into a queue, so no client can block a step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from queue import SimpleQueue

from faser_backend.core.errors import SHUTTING_DOWN, ErrorCode, Failure, FaserError, UnavailableError, blamed
from faser_backend.core.ports import run_behind
from faser_backend.core.request import EngineOutput, FinishReason, Grammar, Request, RequestStats
from faser_backend.pipeline.engine import Engine, EngineMetrics
from faser_backend.text.guides import GuideCompiler

_log = logging.getLogger(__name__)
IDLE_WAIT_S = 0.1
DRAIN_POLL_S = 0.02
Deliver = Callable[[list[EngineOutput] | None], None]


class Subscription:
    """A subscription of one frontend. `outputs` yields lists of EngineOutput, then None at the end.

    deliver: takes the lists instead of `outputs`. It is called on the step's thread and must not block.
    """

    def __init__(self, loop: EngineLoop, deliver: Deliver | None = None) -> None:
        self.outputs: SimpleQueue[list[EngineOutput] | None] = SimpleQueue()
        self.deliver: Deliver = deliver or self.outputs.put
        self._loop = loop

    def submit(self, request: Request, client_id: str) -> None:
        """Submits a request. Raises RequestError. client_id: the id that a stop request names; "" for none."""
        self._loop.submit(request, client_id, self)

    def cancel(self, request_id: str) -> None:
        self._loop.end(request_id, FinishReason.CANCELLED)

    def stop(self, request_id: str) -> None:
        self._loop.end(request_id, FinishReason.STOPPED)

    def stop_client(self, client_id: str) -> None:
        """Stops every request that was submitted under `client_id`, through any frontend."""
        self._loop.end_all(FinishReason.STOPPED, lambda route: route.client_id == client_id)

    def close(self) -> None:
        """Cancels running requests and ends `outputs`."""
        self._loop.end_all(FinishReason.CANCELLED, lambda route: route.subscriber is self)
        self.deliver(None)


@dataclass(slots=True, eq=False)
class _Route:
    subscriber: Subscription
    client_id: str
    num_output_tokens: int = 0
    is_compiling: bool = False  # its grammar is being compiled; the engine has not got the request yet


@dataclass(eq=False)
class EngineLoop:
    """A loop that runs steps until `close`. Request ids must be unique among all subscribers.

    Making one returns when the engine is prepared, on the step's thread; an error closes the engine and is raised.

    `on_metrics` and `on_finished` (last output, number of output tokens) are called on the step's thread, for requests
    that never started on others, and must not block. `on_stopped` is called on the step's thread after an error has
    broken the engine and failed its requests. `beat` is called before every step, and several times a second without
    work.
    """

    engine: Engine
    _: KW_ONLY
    on_metrics: Callable[[EngineMetrics], None] = lambda metrics: None
    metrics_period_s: float = 0.25
    on_finished: Callable[[EngineOutput, int], None] = lambda output, num_output_tokens: None
    on_stopped: Callable[[], None] = lambda: None
    guides: GuideCompiler | None = None  # compiles grammars; None refuses requests with a guide
    beat: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._lock = threading.RLock()  # the collector may end an abandoned stream in the midst of it
        self._routes: dict[str, _Route] = {}  # by request id
        self._failure: str | None = None
        self._is_closing = self._is_refusing = False
        self._prepared: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)
        self._thread.start()
        try:
            self._prepared.result()
        except BaseException:
            self._thread.join()
            self.close()
            raise

    def subscribe(self, deliver: Deliver | None = None) -> Subscription:
        return Subscription(self, deliver)

    def submit(self, request: Request, client_id: str, subscriber: Subscription) -> None:
        with self._lock:
            if self._failure is not None or self._is_closing or self._is_refusing:
                raise UnavailableError(self._failure or SHUTTING_DOWN)
            if not self._thread.is_alive():
                raise UnavailableError("the engine runs in the process that opened it, not in a fork of it")
            if request.request_id in self._routes:
                raise FaserError(f"request id {request.request_id} is already in use")
            is_compiling = request.guide is not None and self.guides is not None
            # The route must exist before a step can answer.
            self._routes[request.request_id] = _Route(subscriber, client_id, is_compiling=is_compiling)
        try:
            if request.guide is not None and self.guides is not None:
                self.guides.compile_later(request.guide, lambda result: self._submit_guided(request, result))
            else:
                self.engine.submit(request)
        except BaseException:
            with self._lock:
                del self._routes[request.request_id]
            self._note_unstarted(EngineOutput(request.request_id, [], finish_reason=FinishReason.ERROR))
            raise

    def end(self, request_id: str, reason: FinishReason) -> None:
        """Ends a request as CANCELLED or STOPPED in any state. Does nothing if it has ended."""
        with self._lock:
            route = self._routes.get(request_id)
            if route is not None and route.is_compiling:
                self._answer_unstarted(request_id, reason)
                return
        self.engine.end(request_id, reason)

    def end_all(self, reason: FinishReason, is_meant: Callable[[_Route], bool]) -> None:
        with self._lock:
            ids = [request_id for request_id, route in self._routes.items() if is_meant(route)]
        for request_id in ids:
            self.end(request_id, reason)

    def _submit_guided(self, request: Request, result: Grammar | FaserError) -> None:
        """Submits a request whose grammar is compiled, unless it has ended. Runs on the compiler's thread."""
        with self._lock:
            route = self._routes.get(request.request_id)
            if route is None:
                return
            if isinstance(result, FaserError):
                self._answer_unstarted(request.request_id, FinishReason.ERROR, result.failure)
                return
            route.is_compiling = False
            assert self.guides is not None  # they have compiled it: answers end with one of their end tokens
            ends = (*request.end_ids, *self.guides.end_ids)
            ready = replace(request, guide=None, end_ids=ends, sampling=replace(request.sampling, grammar=result))
            try:
                self.engine.submit(ready)
            except Exception as error:
                self._answer_unstarted(request.request_id, FinishReason.ERROR, blamed(None, error))

    def _answer_unstarted(self, request_id: str, reason: FinishReason, error: Failure | None = None) -> None:
        """Sends the last output of a request that never reached the engine. Call under the lock."""
        route = self._routes.pop(request_id)
        last = EngineOutput(request_id, [], finish_reason=reason, error=error)
        self._note_unstarted(last)
        route.subscriber.deliver([last])

    def _note_unstarted(self, last: EngineOutput) -> None:
        last.stats = RequestStats()
        _notify(self.on_finished, last, 0)

    def drain(self) -> None:
        """Refuses new requests, and waits until every other one has been answered."""
        self._is_refusing = True
        while self._routes:
            time.sleep(DRAIN_POLL_S)

    def close(self, timeout_s: float = 10.0) -> None:
        """Stops after the current step. Running requests fail; blocks and sessions are freed."""
        if threading.current_thread() is self._thread:  # an observer of steps, or the collector of an abandoned LLM
            threading.Thread(target=self.close, args=(timeout_s,), name="engine-close").start()
            return
        with self._lock:
            self._is_closing = True
        self._thread.join(timeout_s)
        self._fail_all(SHUTTING_DOWN)
        if self.guides is not None:
            self.guides.close()
        if not self._thread.is_alive():
            self.engine.close()

    def _run(self) -> None:
        try:
            self.engine.prepare()
        except BaseException as error:
            self._prepared.set_exception(error)
            return
        self._prepared.set_result(None)
        next_metrics_s = 0.0
        while not self._is_closing:
            self.beat()
            try:
                outputs = self.engine.step() if self.engine.wait_for_work(IDLE_WAIT_S) else []
                run_behind(self.engine.behind)  # if the step did not wait for the device
            except Exception as error:
                # Engine.step fails single requests itself, so this error has broken the engine.
                _log.exception("the engine stopped")
                _notify(run_behind, self.engine.behind)
                self._failure = f"the engine stopped: {type(error).__name__}: {error}"
                self._fail_all(self._failure)
                self.on_stopped()
                return
            if outputs and self.engine.behind is not None and self.engine.has_work:
                # Sent once the next call is queued: the device does not wait for it, nor for threads that it wakes.
                self.engine.behind.append(partial(self._dispatch, outputs))
            elif outputs:
                self._dispatch(outputs)
            now_s = time.monotonic()
            if now_s >= next_metrics_s:
                next_metrics_s = now_s + self.metrics_period_s
                _notify(self.on_metrics, replace(self.engine.metrics()))
        run_behind(self.engine.behind)

    def _dispatch(self, outputs: list[EngineOutput]) -> None:
        batches: dict[Subscription, list[EngineOutput]] = {}
        with self._lock:
            for output in outputs:
                route = self._routes.get(output.request_id)
                if route is None:
                    continue
                batches.setdefault(route.subscriber, []).append(output)
                route.num_output_tokens += len(output.token_ids)
                if output.is_final:
                    del self._routes[output.request_id]
                    _notify(self.on_finished, output, route.num_output_tokens)
        for subscriber, batch in batches.items():
            _notify(subscriber.deliver, batch)

    def _fail_all(self, message: str) -> None:
        with self._lock:
            routes, self._routes = self._routes, {}
        error = Failure(ErrorCode.UNAVAILABLE, message)
        for request_id, route in routes.items():
            route.subscriber.deliver([EngineOutput(request_id, [], finish_reason=FinishReason.ERROR, error=error)])


def _notify(listener: Callable[..., None], *arguments: object) -> None:
    """Calls a listener. Logs its errors, so that the loop goes on."""
    try:
        listener(*arguments)
    except Exception:
        _log.exception("a listener of the engine loop failed")
