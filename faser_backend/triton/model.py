"""The Python-backend models of model_repo/: the engine's, the text models and the two converters.

Runs inside Triton's Python stub only. Requests are answered later through response senders, in
decoupled and in unary mode alike, so `execute` returns at once and requests run side by side.
"""

from __future__ import annotations

import logging
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]

from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import ErrorCode, Failure, FaserError
from faser_backend.serving.loading import log, written_phases
from faser_backend.serving.log_format import log_request
from faser_backend.serving.parameters import ServingOptions
from faser_backend.serving.request_life import Listener
from faser_backend.serving.tracing import Tracing, context_of
from faser_backend.text.tokenizer import TextTokenizer
from faser_backend.triton.converters import postprocess, preprocess
from faser_backend.triton.frontend import Frontend
from faser_backend.triton.heartbeat import Heartbeat
from faser_backend.triton.launch_folder import drain_when_asked
from faser_backend.triton.link import Hello, LinkServer, SocketLink, socket_id, socket_path
from faser_backend.triton.llmapi import LlmApiWire
from faser_backend.triton.long_texts import LongTexts
from faser_backend.triton.metrics import ComposingCounters, MetricReporter
from faser_backend.triton.process import ConfiguredModel, TritonResponder, parameters_of
from faser_backend.triton.tensor_io import NamedArray
from faser_backend.triton.tensors import JSON_ERRORS
from faser_backend.triton.wire import InflightBatcherWire

_log = logging.getLogger(__name__)
MAX_LONG_TEXTS = 256  # that wait for a converter
TELL_S = 0.5  # for the requests of a broken engine to be answered
FOLLOW_POLL_S = 0.1  # between two looks for a new engine
MOVE_S = 60.0  # for frontends to have their last answers from an engine that another one replaces
RETIRE_S = 5.0  # for Triton to turn to an engine that says it is ready: until then requests come to the old one
ENGINE_TIMEOUT_S = 60.0  # Triton accepts requests once every model is loaded: the engine is up by then


class ServingModel(ConfiguredModel):
    """A model whose frontend answers requests, with traces and a log in JSON of them where these are wanted."""

    _frontend: Frontend
    _tracing: Tracing | None = None

    def _open_listeners(self, hello: Hello) -> list[Listener]:
        """Raises ConfigError."""
        listeners: list[Listener] = [log_request] if self._options.log_format == "json" else []
        endpoint = self._options.otlp_endpoint
        if endpoint is not None and self._tracing is None:
            self._tracing = Tracing(endpoint, hello.tokenizer_file.parent.name)
        return [*listeners, self._tracing.tell] if self._tracing is not None else listeners

    def _serve(self, requests: list[Any]) -> None:
        for request in requests:
            parameters = parameters_of(request)
            responder = TritonResponder(request, sends_json=JSON_ERRORS in parameters)
            try:
                tensors = self._read(request, parameters)
            except FaserError as error:
                responder.fail(error.failure)
            else:
                self._frontend.handle(tensors, request.request_id(), responder, context_of(parameters))

    def _close_tracing(self) -> None:
        if self._tracing is not None:
            self._tracing.close()


class TextModel(ServingModel):
    """`ensemble` and `tensorrt_llm_bls`: text in, text out, by the engine in model `tensorrt_llm`.

    Where that is loaded anew, requests from then on go to the new engine, and the old one answers what it has.
    """

    def initialize(self, args: dict[str, str]) -> None:
        self._configure(args)
        self._wire = InflightBatcherWire(accumulates_text=self._options.accumulate_tokens)
        self._counters = ComposingCounters(pb_utils, args["model_version"])
        self._socket, self._socket_id = socket_path(os.getppid()), ()
        self._launch_folder = launch_folder(args)
        self._serving = threading.Lock()  # held while a request enters a frontend
        self._is_ready, self._is_closing = threading.Event(), threading.Event()
        self._failure: str | None = None
        self._follower = threading.Thread(target=self._follow_engine, name="connect", daemon=True)
        self._follower.start()

    def execute(self, requests: list[Any]) -> None:
        self._is_ready.wait()
        if self._failure is None:
            with self._serving:
                self._serve(requests)
            return
        for request in requests:
            TritonResponder(request).fail(Failure(ErrorCode.UNAVAILABLE, self._failure))

    def finalize(self) -> None:
        self._is_closing.set()
        if self._is_ready.is_set() and self._failure is None:
            self._follower.join(ENGINE_TIMEOUT_S)
            self._frontend.drain()
            self._frontend.close()
            self._beat.close()
        self._counters.close()
        self._close_tracing()

    def _follow_engine(self) -> None:
        # Not in `initialize`: Triton may load models one by one, and `tensorrt_llm` may come last.
        try:
            self._frontend, self._beat = self._connect()
        except (FaserError, OSError, EOFError) as error:
            self._failure = str(error)
        self._is_ready.set()
        while self._failure is None and not self._is_closing.wait(FOLLOW_POLL_S):
            if socket_id(self._socket) not in ((), self._socket_id):
                self._move()

    def _move(self) -> None:
        try:
            fresh, beat = self._connect()
        except (FaserError, OSError, EOFError) as error:
            _log.warning("the new engine cannot be reached yet: %s", error)
            return
        with self._serving:
            old, self._frontend, old_beat, self._beat = self._frontend, fresh, self._beat, beat
        old.drain()
        old.close()
        old_beat.close()

    def _connect(self) -> tuple[Frontend, Heartbeat]:
        before = socket_id(self._socket)  # should a new engine come meanwhile, it is seen
        link = SocketLink(self._socket, ENGINE_TIMEOUT_S)
        self._socket_id = before or socket_id(self._socket)  # the first engine of all came while the link waited
        tokenizer = TextTokenizer.from_file(link.hello.tokenizer_file, link.hello.prompts)
        beat = Heartbeat(self._launch_folder)
        frontend = Frontend(
            link,
            link.hello,
            tokenizer,
            is_decoupled=self._is_decoupled,
            wire=self._wire,
            on_answered=self._counters.count,
            listeners=self._open_listeners(link.hello),
            beat=beat.beat,
        )
        return frontend, beat


class EngineModel(ServingModel):
    """`tensorrt_llm`: holds the engine, serves its own requests and those of the other models."""

    wire = InflightBatcherWire()

    def initialize(self, args: dict[str, str]) -> None:
        # The engine's rooms (runtimes and all) are imported by this process alone.
        from faser_backend.triton.engine_host import EngineHost

        parameters = self._configure(args)
        folder = launch_folder(args)
        self._beats = Heartbeat(folder), Heartbeat(folder)  # of the engine's loop, and of the frontend here
        self._reporter = MetricReporter(pb_utils, args["model_name"], args["model_version"])
        try:
            options = ServingOptions.from_parameters(parameters)
            with written_phases(folder):
                self._host = EngineHost(
                    options,
                    EngineConfig.from_parameters(parameters),
                    self._reporter,
                    on_stopped=_end_soon,
                    beat=self._beats[0].beat,
                )
                log.info("starting the text models")
            listeners = self._open_listeners(self._host.hello)
        except FaserError as error:
            self._reporter.close()
            raise pb_utils.TritonModelException(str(error)) from None
        hello: Hello = self._host.hello
        self._frontend = Frontend(
            self._host.loop.subscribe(),
            hello,
            self._host.tokenizer,
            is_decoupled=self._is_decoupled,
            wire=self.wire,
            listeners=listeners,
            beat=self._beats[1].beat,
        )
        self._server = LinkServer(self._host.loop, hello, socket_path(os.getppid()))
        threading.Thread(target=drain_when_asked, args=(folder, self._drain), name="drain", daemon=True).start()
        self._is_finalizing, self._retiring, self._is_retired = threading.Event(), threading.Lock(), False
        threading.Thread(target=self._retire_when_replaced, name="retire", daemon=True).start()

    def execute(self, requests: list[Any]) -> None:
        self._serve(requests)

    def finalize(self) -> None:
        # Triton unloads a decoupled model without waiting for its answers, and the engine beside its frontends.
        self._is_finalizing.set()
        self._retire()

    def _retire_when_replaced(self) -> None:
        # Not in `finalize` alone: a client's open stream keeps Triton from calling that, and with it both engines here.
        while not self._is_finalizing.wait(FOLLOW_POLL_S):
            if self._server.is_superseded:
                _log.info("another engine takes this one's place; what it has begun it answers")
                self._is_finalizing.wait(RETIRE_S)
                self._retire()
                return

    def _retire(self) -> None:
        """Answers what there is, and gives back what the engine holds."""
        with self._retiring:
            if self._is_retired:
                return
            if self._server.is_superseded:
                self._server.wait_left(MOVE_S)
            self._drain()
            self._server.close()
            self._frontend.close()
            self._host.close()
            for beat in self._beats:
                beat.close()
            self._reporter.close()
            self._close_tracing()
            self._is_retired = True
            del self._host

    def _drain(self) -> None:
        if not self._is_retired:
            self._host.loop.refuse()
            self._host.loop.drain()
            self._frontend.drain()


class LlmApiModel(EngineModel):
    """`tensorrt_llm` of the llmapi contract: the engine and its only frontend in one."""

    wire = LlmApiWire()

    def initialize(self, args: dict[str, str]) -> None:
        super().initialize(args)
        self._host.tokenizer.encode("")  # starts its process, which the first client need not wait for


class _Converter(ConfiguredModel):
    """A model that only converts: it borrows the engine's tokenizer file and answers by itself."""

    def initialize(self, args: dict[str, str]) -> None:
        self._configure(args)
        self._hello: Hello | None = None
        self._socket, self._socket_id = socket_path(os.getppid()), ()
        self._long_texts = LongTexts(MAX_LONG_TEXTS)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            responder = TritonResponder(request)
            try:
                if self._hello is None or socket_id(self._socket) not in ((), self._socket_id):
                    self._connect()
                tensors = self._read(request)
                self._long_texts.run(tensors, partial(self._answer, tensors, responder))
            except FaserError as error:
                responder.fail(error.failure)

    def finalize(self) -> None:
        self._long_texts.drain()
        self._long_texts.close()

    def _answer(self, tensors: dict[str, np.ndarray], responder: TritonResponder) -> None:
        try:
            responder.send(self._convert(tensors), is_final=True)
        except FaserError as error:
            responder.fail(error.failure)
        except Exception as error:
            _log.exception("a request could not be converted")
            responder.fail(Failure(ErrorCode.INTERNAL, f"internal error: {type(error).__name__}: {error}"))

    def _connect(self) -> None:
        before = socket_id(self._socket)
        link = SocketLink(self._socket, ENGINE_TIMEOUT_S)
        self._socket_id = before or socket_id(self._socket)
        prompts = link.hello.prompts
        if self._options.add_special_tokens is not None:
            prompts = prompts.adding_special_tokens(self._options.add_special_tokens)
        self._tokenizer = TextTokenizer.from_file(link.hello.tokenizer_file, prompts)
        self._hello = link.hello
        link.close()

    def _convert(self, tensors: dict[str, np.ndarray]) -> list[NamedArray]:
        raise AssertionError("a converter says what it converts")


class PreprocessingModel(_Converter):
    """`preprocessing`: text or messages -> token ids."""

    def _convert(self, tensors: dict[str, np.ndarray]) -> list[NamedArray]:
        assert self._hello is not None
        return preprocess(tensors, self._hello, self._tokenizer)


class PostprocessingModel(_Converter):
    """`postprocessing`: token ids -> text."""

    def _convert(self, tensors: dict[str, np.ndarray]) -> list[NamedArray]:
        return postprocess(tensors, self._tokenizer, skips_special_tokens=self._options.skip_special_tokens)


def launch_folder(args: dict[str, str]) -> Path:
    """Returns the folder that `faser serve` has made for this server, or what stands in its place for another."""
    return Path(args["model_repository"]).parents[1]


def _end_soon() -> None:
    # A broken engine that stays looks alive to whoever supervises.
    threading.Timer(TELL_S, os._exit, (1,)).start()
