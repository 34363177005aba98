"""The Python-backend models of model_repo/: the engine's, the text models and the two converters.

Runs inside Triton's Python stub only. Requests are answered later through response senders, in
decoupled and in unary mode alike, so `execute` returns at once and requests run side by side.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]

from faser_backend.core.errors import FaserError
from faser_backend.serving.composing_counters import ComposingCounters
from faser_backend.serving.converters import postprocess, preprocess
from faser_backend.serving.draining import drain_when_asked
from faser_backend.serving.frontend import Frontend
from faser_backend.serving.link import Hello, LinkServer, SocketLink, socket_path
from faser_backend.serving.llmapi import LlmApiWire
from faser_backend.serving.long_texts import LongTexts
from faser_backend.serving.metrics import MetricReporter
from faser_backend.serving.model_configs import BATCH_SIZE_KEY, DECOUPLED_KEY, read_batch_size
from faser_backend.serving.parameters import Parameters, read_engine_config, read_serving_options
from faser_backend.serving.processes import PARENT_POLL_S, die_with_parent, is_child_of_main_thread
from faser_backend.serving.tensors import refuse_undeclared
from faser_backend.serving.tokenizer import TextTokenizer
from faser_backend.serving.triton_io import NamedArray
from faser_backend.serving.wire import InflightBatcherWire, Wire

_log = logging.getLogger(__name__)
MAX_LONG_TEXTS = 256  # that wait for a converter
TELL_S = 0.5  # for the requests of a broken engine to be answered
ENGINE_TIMEOUT_S = 60.0  # Triton accepts requests once every model is loaded: the engine is up by then
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonResponder:
    """One request's response sender (wire.Responder).

    The server frees a request's state with its last response and does not check: a cancellation
    poll that meets it crashes the whole server. The lock keeps the two apart.
    """

    def __init__(self, request: Any) -> None:
        self.requested_outputs = request.requested_output_names()
        self._sender = request.get_response_sender()
        self._lock = threading.Lock()
        self._is_done = False

    def send(self, arrays: list[NamedArray], *, is_final: bool) -> None:
        tensors = [pb_utils.Tensor(name, array) for name, array in arrays]
        self._send(pb_utils.InferenceResponse(tensors), is_final)

    def fail(self, message: str, code: str) -> None:
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
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
    """What all models share: their parameters decide about batches and, but for converters, streaming.

    `faser serve` has written both into the configuration; a server that was started otherwise asks here.
    """

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        config = auto_complete_model_config.as_dict()
        parameters = Parameters(config)
        if BATCH_SIZE_KEY in config["parameters"] and not config["max_batch_size"]:
            auto_complete_model_config.set_max_batch_size(read_batch_size(parameters.text(BATCH_SIZE_KEY)))
        if DECOUPLED_KEY in config["parameters"] and "model_transaction_policy" not in config:
            is_decoupled = _engines_parameters(config, parameters).boolean(DECOUPLED_KEY)
            auto_complete_model_config.set_model_transaction_policy({"decoupled": is_decoupled is not False})
        return auto_complete_model_config

    def _configure(self, args: dict[str, str]) -> Parameters:
        """Reads what every model needs of its configuration, and makes this process one that ends with the server."""
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        threading.Thread(target=_exit_with_server, args=(os.getppid(),), name="parent-watch", daemon=True).start()
        config = json.loads(args["model_config"])
        self._name = args["model_name"]
        self._is_decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        if BATCH_SIZE_KEY in config["parameters"] and not config["max_batch_size"]:
            raise pb_utils.TritonModelException(
                f"{self._name}: no max_batch_size. Start tritonserver without --disable-auto-complete-config, or write "
                "max_batch_size and model_transaction_policy into config.pbtxt"
            )
        return Parameters(config)

    def _read(self, request: Any) -> dict[str, np.ndarray]:
        """The tensors of a request. Raises RequestError for an input that this model does not declare."""
        parameters = request.parameters()
        if parameters:
            refuse_undeclared(list(json.loads(parameters)), self._name)
        return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def _engines_parameters(config: dict[str, Any], parameters: Parameters) -> Parameters:
    """`ensemble` has no transaction policy of its own in NVIDIA's templates: it follows tensorrt_llm beside it."""
    if config["name"] != "ensemble" or parameters.text(DECOUPLED_KEY) is not None:
        return parameters
    beside = Path(pb_utils.get_model_dir()).parents[1] / "tensorrt_llm" / "config.pbtxt"
    text = beside.read_text() if beside.is_file() else ""
    found = re.search(rf'key:\s*"{DECOUPLED_KEY}"\s*value:?\s*{{\s*string_value:\s*"([^"]*)"', text)
    return Parameters({"parameters": {DECOUPLED_KEY: {"string_value": found[1]}}}) if found else parameters


class ServingModel(ConfiguredModel):
    """A model whose frontend answers requests."""

    _frontend: Frontend

    def _serve(self, requests: list[Any]) -> None:
        for request in requests:
            responder = TritonResponder(request)
            try:
                tensors = self._read(request)
            except FaserError as error:
                responder.fail(str(error), "INVALID_ARG")
            else:
                self._frontend.handle(tensors, request.request_id(), responder)


class TextModel(ServingModel):
    """`ensemble` and `tensorrt_llm_bls`: text in, text out, by the engine in model `tensorrt_llm`."""

    def initialize(self, args: dict[str, str]) -> None:
        parameters = self._configure(args)
        self._wire = InflightBatcherWire(accumulates_text=parameters.boolean("accumulate_tokens") or False)
        self._counters = ComposingCounters(pb_utils, args["model_version"])
        self._is_ready = threading.Event()
        self._failure: str | None = None
        threading.Thread(target=self._connect, name="connect", daemon=True).start()

    def execute(self, requests: list[Any]) -> None:
        self._is_ready.wait()
        if self._failure is None:
            self._serve(requests)
            return
        for request in requests:
            TritonResponder(request).fail(self._failure, "UNAVAILABLE")

    def finalize(self) -> None:
        if self._is_ready.is_set() and self._failure is None:
            self._frontend.drain()
            self._frontend.close()
        self._counters.close()

    def _connect(self) -> None:
        # Not in `initialize`: Triton may load models one by one, and `tensorrt_llm` may come last.
        try:
            link = SocketLink(socket_path(os.getppid()), ENGINE_TIMEOUT_S)
            tokenizer = TextTokenizer.from_file(link.hello.tokenizer_file, link.hello.prompts)
            self._frontend = Frontend(
                link,
                link.hello,
                tokenizer,
                is_decoupled=self._is_decoupled,
                wire=self._wire,
                on_answered=self._counters.count,
            )
        except (FaserError, OSError, EOFError) as error:
            self._failure = str(error)
        self._is_ready.set()


class EngineModel(ServingModel):
    """`tensorrt_llm`: holds the engine, serves its own requests and those of the other models."""

    wire: Wire = InflightBatcherWire()

    def initialize(self, args: dict[str, str]) -> None:
        # The engine's rooms (runtimes and all) are imported by this process alone.
        from faser_backend.serving.engine_host import EngineHost

        parameters = self._configure(args)
        self._reporter = MetricReporter(pb_utils, args["model_name"], args["model_version"])
        try:
            options = read_serving_options(parameters)
            self._host = EngineHost(options, read_engine_config(parameters), self._reporter, on_stopped=_end_soon)
        except FaserError as error:
            self._reporter.close()
            raise pb_utils.TritonModelException(str(error)) from None
        hello: Hello = self._host.hello
        self._server = LinkServer(self._host.loop, hello, socket_path(os.getppid()))
        self._frontend = Frontend(
            self._host.loop.subscribe(), hello, self._host.tokenizer, is_decoupled=self._is_decoupled, wire=self.wire
        )
        launch_folder = Path(args["model_repository"]).parents[1]
        threading.Thread(target=drain_when_asked, args=(launch_folder, self._drain), name="drain", daemon=True).start()

    def execute(self, requests: list[Any]) -> None:
        self._serve(requests)

    def finalize(self) -> None:
        # Triton unloads a decoupled model without waiting for its answers, and the engine beside its frontends.
        self._drain()
        self._server.close()
        self._frontend.close()
        self._host.close()
        self._reporter.close()

    def _drain(self) -> None:
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
        self._parameters = self._configure(args)
        self._hello: Hello | None = None
        self._long_texts = LongTexts(MAX_LONG_TEXTS)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            responder = TritonResponder(request)
            try:
                if self._hello is None:
                    self._connect()
                tensors = self._read(request)
                self._long_texts.run(tensors, partial(self._answer, tensors, responder))
            except FaserError as error:
                responder.fail(str(error), "INVALID_ARG")

    def finalize(self) -> None:
        self._long_texts.close()

    def _answer(self, tensors: dict[str, np.ndarray], responder: TritonResponder) -> None:
        try:
            responder.send(self._convert(tensors), is_final=True)
        except FaserError as error:
            responder.fail(str(error), "INVALID_ARG")
        except Exception as error:
            _log.exception("a request could not be converted")
            responder.fail(f"internal error: {type(error).__name__}: {error}", "INTERNAL")

    def _connect(self) -> None:
        link = SocketLink(socket_path(os.getppid()), ENGINE_TIMEOUT_S)
        prompts = link.hello.prompts
        adds_special_tokens = self._parameters.boolean("add_special_tokens")
        if adds_special_tokens is not None:
            prompts = prompts.adding_special_tokens(adds_special_tokens)
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
        skips = self._parameters.boolean("skip_special_tokens")
        return postprocess(tensors, self._tokenizer, skips_special_tokens=skips is not False)


def _end_soon() -> None:
    # A broken engine that stays looks alive to whoever supervises.
    threading.Timer(TELL_S, os._exit, (1,)).start()


def _exit_with_server(server_pid: int) -> None:
    # The stub blocks on shared memory that a killed server never writes: it would stay, with its engine. The thread of
    # the server that started it ends before the server does, and must not take it along: only then can the kernel
    # watch, which needs no turn of the interpreter.
    is_watched = False
    while os.getppid() == server_pid:
        if not is_watched and is_child_of_main_thread(server_pid):
            die_with_parent()
            is_watched = True
        time.sleep(PARENT_POLL_S)
    os._exit(1)
