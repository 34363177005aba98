"""The Python-backend models of model_repo: the engine's model, the text models and the two converters.

Triton's Python stub runs each model in its own process. `execute` returns at once; response senders answer later, in
decoupled and in unary mode, so requests run concurrently.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]

from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import ErrorCode, Failure, FaserError, UnavailableError, blamed
from faser_backend.serving.loading import log, written_phases
from faser_backend.serving.parameters import ModelOptions, ServingOptions, given_parameters
from faser_backend.serving.processes import PARENT_POLL_S, children, die_with_parent
from faser_backend.serving.request_reports import Listener, Tracing, log_request, set_up_logging
from faser_backend.serving.served_model import ServedModel
from faser_backend.triton.contract import refuse_undeclared
from faser_backend.triton.converters import postprocess, preprocess
from faser_backend.triton.frontend import Frontend, InflightBatcherContract, LongTexts
from faser_backend.triton.launch_folder import DRAIN_FILE, MIN_BYTES, SHARED_MEMORY, Heartbeat, drain_when_asked
from faser_backend.triton.link import LinkServer, SocketLink, socket_id, socket_path
from faser_backend.triton.llmapi import LlmApiContract
from faser_backend.triton.metrics import ComposingCounters, MetricReporter
from faser_backend.triton.model_configs import BATCH_SIZE_KEY, DECOUPLED_KEY
from faser_backend.triton.tensor_io import NamedArray
from faser_backend.triton.tensors import Tensors

_log = logging.getLogger(__name__)
MAX_LONG_TEXTS = 256  # that may wait for a converter
ANSWER_S = 0.5  # time to answer the requests of a broken engine
FOLLOW_POLL_S = 0.1  # between two checks for a new engine
MOVE_S = 60.0  # time for a replaced engine to answer its last requests
RETIRE_S = 5.0  # time for Triton to send new requests to the new engine
ENGINE_TIMEOUT_S = 60.0  # time for the engine to load; Triton loads models one by one
TRITON_CODES = {
    ErrorCode.INVALID: "INVALID_ARG",
    ErrorCode.TOO_LONG: "INVALID_ARG",
    ErrorCode.QUEUE_FULL: "UNAVAILABLE",
    ErrorCode.CANCELLED: "CANCELLED",
    ErrorCode.UNAVAILABLE: "UNAVAILABLE",
    ErrorCode.INTERNAL: "INTERNAL",
}
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonResponder:
    """A response sender of one request (frontend.Responder).

    Triton frees a request's state with its last response, and polling for its cancellation at that moment would crash
    the server. The lock separates the two.
    """

    def __init__(self, request: Any) -> None:
        self.requested_outputs = request.requested_output_names()
        self._sender = request.get_response_sender()
        self._lock = threading.Lock()
        self._is_done = False

    def send(self, arrays: list[NamedArray], *, is_final: bool) -> None:
        """Raises UnavailableError if the shared memory has no room for a large response."""
        num_bytes = sum(array.nbytes for _, array in arrays)
        # A sender whose last response does not fit is closed all the same, and its client would wait for ever.
        if num_bytes > MIN_BYTES and num_bytes > shutil.disk_usage(SHARED_MEMORY).free:
            raise UnavailableError(f"the answer's {num_bytes >> 20} MiB exceed the free shared memory; retry later")
        tensors = [pb_utils.Tensor(name, array) for name, array in arrays]
        self._send(pb_utils.InferenceResponse(tensors), is_final)

    def fail(self, failure: Failure) -> None:
        error = pb_utils.TritonError(failure.message, getattr(pb_utils.TritonError, TRITON_CODES[failure.code]))
        self._send(pb_utils.InferenceResponse(error=error), is_final=True)

    def is_cancelled(self) -> bool:
        with self._lock:
            return not self._is_done and self._sender.is_cancelled()

    def _send(self, response: Any, is_final: bool) -> None:
        with self._lock:
            if not self._is_done:
                self._is_done = is_final
                self._sender.send(response, flags=_FINAL if is_final else 0)


class ConfiguredModel:
    """The base class of all models: reads their configuration.

    Parameters set the batch size and the transaction policy. `faser serve` writes both into config.pbtxt; other servers
    call `auto_complete_config`.
    """

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        config = auto_complete_model_config.as_dict()
        options = ModelOptions.from_parameters(_engines_policy(config) | given_parameters(config))
        if BATCH_SIZE_KEY in config["parameters"] and not config["max_batch_size"]:
            auto_complete_model_config.set_max_batch_size(options.triton_max_batch_size)
        if DECOUPLED_KEY in config["parameters"] and "model_transaction_policy" not in config:
            auto_complete_model_config.set_model_transaction_policy({"decoupled": options.decoupled_mode})
        return auto_complete_model_config

    def _configure(self, args: dict[str, str]) -> dict[str, str]:
        """Reads the configuration, sets up logging, and makes this process end with the server.

        Returns all parameters that are set.
        """
        threading.Thread(target=_exit_with_server, args=(os.getppid(),), name="parent-watch", daemon=True).start()
        config = json.loads(args["model_config"])
        parameters = given_parameters(config)
        try:
            self._options = ModelOptions.from_parameters(parameters)
        except FaserError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        set_up_logging(self._options.log_format, args["model_name"])
        self._name = args["model_name"]
        self._is_decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        if BATCH_SIZE_KEY in config["parameters"] and not config["max_batch_size"]:
            raise pb_utils.TritonModelException(
                f"{self._name}: max_batch_size is missing. Start tritonserver without --disable-auto-complete-config, "
                "or write max_batch_size and model_transaction_policy into config.pbtxt"
            )
        return parameters

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            responder = TritonResponder(request)
            try:
                parameters = json.loads(request.parameters() or "{}")
                refuse_undeclared(list(parameters), self._name)
                tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
                self._serve(tensors, request.request_id(), responder, parameters)
            except FaserError as error:
                responder.fail(error.failure)

    def _serve(self, tensors: Tensors, client_id: str, responder: TritonResponder, parameters: dict[str, Any]) -> None:
        """Begins to answer a request. Raises FaserError."""
        raise NotImplementedError


class ServingModel(ConfiguredModel):
    """A model whose frontend answers requests, with traces and a JSON log if they are configured."""

    _frontend: Frontend
    _tracing: Tracing | None = None

    def _open_listeners(self) -> list[Listener]:
        """Raises ConfigError."""
        listeners: list[Listener] = [log_request] if self._options.log_format == "json" else []
        if self._options.otlp_endpoint is not None and self._tracing is None:
            self._tracing = Tracing(self._options.otlp_endpoint)
        return [*listeners, self._tracing.trace] if self._tracing is not None else listeners

    def _serve(self, *given: Any) -> None:
        self._frontend.handle(*given)

    def _close_tracing(self) -> None:
        if self._tracing is not None:
            self._tracing.close()


class TextModel(ServingModel):
    """`ensemble` and `tensorrt_llm_bls`: text in, text out, by the engine in model `tensorrt_llm`.

    After a reload of that model, new requests go to the new engine, and the old engine answers its own.
    """

    def initialize(self, args: dict[str, str]) -> None:
        self._configure(args)
        self._contract = InflightBatcherContract(accumulates_text=self._options.accumulate_tokens)
        self._counters = ComposingCounters(pb_utils, args["model_version"])
        self._socket, self._socket_id = socket_path(os.getppid()), ()
        self._launch_folder = launch_folder(args)
        self._serving = threading.Lock()  # held while a request enters a frontend
        self._is_ready, self._is_closing = threading.Event(), threading.Event()
        self._failure: str | None = "the engine is not reached yet"  # None: a frontend serves
        self._drains = ThreadPoolExecutor(thread_name_prefix="replaced-engine")
        self._follower = threading.Thread(target=self._follow_engine, name="connect", daemon=True)
        self._follower.start()

    def execute(self, requests: list[Any]) -> None:
        self._is_ready.wait()
        with self._serving:
            super().execute(requests)

    def _serve(self, *given: Any) -> None:
        if self._failure is not None:
            raise UnavailableError(self._failure)
        super()._serve(*given)

    def finalize(self) -> None:
        self._is_closing.set()
        if self._failure is None:
            self._follower.join(ENGINE_TIMEOUT_S)
            self._drains.shutdown()
            self._frontend.drain()
            self._frontend.close()
        self._counters.close()
        self._close_tracing()

    def _follow_engine(self) -> None:
        # Not in `initialize`: Triton may load models one by one, and `tensorrt_llm` last.
        self._reconnect()
        self._is_ready.set()
        while not self._is_closing.wait(FOLLOW_POLL_S):  # even after a failure: large models load for minutes
            if socket_id(self._socket) not in ((), self._socket_id):
                self._reconnect()

    def _reconnect(self) -> None:
        try:
            fresh = self._connect()
        except FaserError as error:
            _log.warning("the engine cannot be reached yet: %s", error)
            self._failure = self._failure and str(error)
            return
        with self._serving:
            old = self._frontend if self._failure is None else None
            self._frontend, self._failure = fresh, None
        if old is not None:
            self._drains.submit(lambda: (old.drain(), old.close()))  # this thread follows further engines

    def _connect(self) -> Frontend:
        link = SocketLink(self._socket, ENGINE_TIMEOUT_S)
        self._socket_id = link.socket_id
        return Frontend(
            link,
            link.handshake,
            is_decoupled=self._is_decoupled,
            contract=self._contract,
            on_answered=self._counters.count,
            listeners=self._open_listeners(),
            launch_folder=self._launch_folder,
        )


class EngineModel(ServingModel):
    """`tensorrt_llm`: holds the engine, and serves its own requests and those of the text models."""

    contract = InflightBatcherContract()

    def initialize(self, args: dict[str, str]) -> None:
        # Imported here, because this process alone needs the engine's modules and runtimes.
        from faser_backend.triton.engine_host import EngineHost

        parameters = self._configure(args)
        folder = launch_folder(args)
        self._beat = Heartbeat(folder)  # of the engine's loop
        self._reporter = MetricReporter(pb_utils, args["model_name"], args["model_version"])
        try:
            options = ServingOptions.from_parameters(parameters)
            with written_phases(folder):
                self._host = EngineHost(
                    options,
                    EngineConfig.from_parameters(parameters),
                    self._reporter,
                    # A live process without an engine would look healthy to its supervisor.
                    on_stopped=lambda: threading.Timer(ANSWER_S, os._exit, (1,)).start(),
                    beat=self._beat.beat,
                )
                log.info("starting the text models")
            listeners = self._open_listeners()
        except FaserError as error:
            self._reporter.close()
            raise pb_utils.TritonModelException(str(error)) from None
        handshake = self._host.handshake
        self._frontend = Frontend(
            self._host.loop.subscribe(),
            handshake,
            is_decoupled=self._is_decoupled,
            contract=self.contract,
            listeners=listeners,
            launch_folder=folder,
        )
        self._server = LinkServer(self._host.loop, handshake, socket_path(os.getppid()))
        self._is_finalizing, self._is_retired = threading.Event(), False
        threading.Thread(target=drain_when_asked, args=(folder, self._drain), name="drain", daemon=True).start()
        self._retirement = threading.Thread(target=self._retire, name="retire", daemon=True)
        self._retirement.start()

    def finalize(self) -> None:
        # Triton unloads a decoupled model without waiting for its answers, and the engine before its frontends end.
        self._is_finalizing.set()
        self._retirement.join()

    def _retire(self) -> None:
        """Answers the requests in progress once Triton or a new engine ends this one, then frees the engine."""
        # Not in `finalize`: a client's open stream delays that call, and both engines would stay in memory.
        while not self._server.is_superseded and not self._is_finalizing.wait(FOLLOW_POLL_S):
            pass
        if self._server.is_superseded:
            _log.info("a new engine replaces this one, which closes after its last answers")
            self._reporter.is_replaced = True
            self._is_finalizing.wait(RETIRE_S)
            self._server.wait_for_disconnects(MOVE_S)
        self._drain()
        self._server.close()
        self._frontend.close()
        self._host.close()
        self._beat.close()
        self._reporter.close()
        self._close_tracing()
        self._is_retired = True
        del self._host

    def _drain(self) -> None:
        if not self._is_retired:
            self._host.loop.drain()
            self._frontend.drain()


class LlmApiModel(EngineModel):
    """`tensorrt_llm` of the llmapi contract: the engine with its only frontend."""

    contract = LlmApiContract()


class _Converter(ConfiguredModel):
    """A base class of models that only convert, with the engine's tokenizer."""

    def initialize(self, args: dict[str, str]) -> None:
        self._configure(args)
        self._launch_folder = launch_folder(args)
        self._model: ServedModel | None = None
        self._socket, self._socket_id = socket_path(os.getppid()), ()
        self._long_texts = LongTexts(MAX_LONG_TEXTS)

    def _serve(self, tensors: Tensors, client_id: str, responder: TritonResponder, parameters: Any) -> None:
        if self._model is None or socket_id(self._socket) not in ((), self._socket_id):
            self._model = self._connect()
        self._long_texts.run(tensors, partial(self._answer, tensors, self._model, responder))

    def finalize(self) -> None:
        self._long_texts.close()
        while (self._launch_folder / DRAIN_FILE).exists():  # unloaded so that readiness fails, which ends with this
            time.sleep(FOLLOW_POLL_S)

    def _answer(self, tensors: Tensors, model: ServedModel, responder: TritonResponder) -> None:
        try:
            responder.send(self._convert(tensors, model), is_final=True)
        except Exception as error:
            if not isinstance(error, FaserError):
                _log.exception("a request could not be converted")
            responder.fail(blamed(None, error))

    def _connect(self) -> ServedModel:
        link = SocketLink(self._socket, ENGINE_TIMEOUT_S)
        self._socket_id = link.socket_id
        link.close()
        model, adds = link.handshake.model, self._options.add_special_tokens
        return model if adds is None else replace(model, tokenizer=model.tokenizer.adding_special_tokens(adds))

    def _convert(self, tensors: Tensors, model: ServedModel) -> list[NamedArray]:
        raise NotImplementedError


class PreprocessingModel(_Converter):
    """`preprocessing`: text or messages -> token ids."""

    def _convert(self, tensors: Tensors, model: ServedModel) -> list[NamedArray]:
        return preprocess(tensors, model)


class PostprocessingModel(_Converter):
    """`postprocessing`: token ids -> text."""

    def _convert(self, tensors: Tensors, model: ServedModel) -> list[NamedArray]:
        return postprocess(tensors, model.tokenizer, skips_special_tokens=self._options.skip_special_tokens)


def launch_folder(args: dict[str, str]) -> Path:
    """Returns the folder above the model repository, which `faser serve` has made for its server."""
    return Path(args["model_repository"]).absolute().parents[1]


def _engines_policy(config: dict[str, Any]) -> dict[str, str]:
    """Returns tensorrt_llm's transaction policy for `ensemble`, which has none in NVIDIA's templates."""
    sibling = Path(pb_utils.get_model_dir()).parents[1] / "tensorrt_llm" / "config.pbtxt"
    if config["name"] != "ensemble" or not sibling.is_file():
        return {}
    found = re.search(rf'key:\s*"{DECOUPLED_KEY}"\s*value:?\s*{{\s*string_value:\s*"([^"]*)"', sibling.read_text())
    return given_parameters({"parameters": {DECOUPLED_KEY: {"string_value": found[1]}}}) if found else {}


def _exit_with_server(server_pid: int) -> None:
    # After a kill of the server, the stub would block on shared memory for ever and keep its engine. The kernel can end
    # it even if the interpreter does not run, but only as a child of the server's main thread: the signal comes when
    # the starting thread ends, and other threads end before the server.
    is_watched = False
    while os.getppid() == server_pid:
        if not is_watched and os.getpid() in children(server_pid):
            die_with_parent()
            is_watched = True
        time.sleep(PARENT_POLL_S)
    os._exit(1)
