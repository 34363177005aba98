"""The Python-backend models of model_repo/: the engine's process, its faces and the two converters.

Runs inside Triton's Python stub only. Requests are answered later through response senders, in
decoupled and in unary mode alike, so `execute` returns at once and requests run side by side.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]

from faser_backend.core.errors import FaserError
from faser_backend.serving.converters import postprocess, preprocess
from faser_backend.serving.frontend import Frontend, InflightBatcherWire, Wire
from faser_backend.serving.link import Hello, LinkServer, SocketLink, socket_path
from faser_backend.serving.llmapi import LlmApiWire
from faser_backend.serving.parameters import Parameters, read_engine_config, read_serving_options
from faser_backend.serving.tokenizer import TextTokenizer
from faser_backend.serving.triton_io import NamedArray

PARENT_POLL_S = 1.0
ENGINE_TIMEOUT_S = 60.0  # Triton accepts requests once every model is loaded: the engine is up by then
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonResponder:
    """One request's response sender (frontend.Responder).

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


def read_tensors(request: Any) -> dict[str, np.ndarray]:
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


class FaceModel:
    """`ensemble`, `tensorrt_llm` and `tensorrt_llm_bls`: front ends of the engine in model `faser`."""

    _frontend: Frontend

    def initialize(self, args: dict[str, str]) -> None:
        _prepare_process()
        config = json.loads(args["model_config"])
        self._is_decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self._is_ready = threading.Event()
        self._failure: str | None = None
        threading.Thread(target=self._connect, name="connect", daemon=True).start()

    def execute(self, requests: list[Any]) -> None:
        self._is_ready.wait()
        for request in requests:
            responder = TritonResponder(request)
            if self._failure is not None:
                responder.fail(self._failure, "UNAVAILABLE")
            else:
                self._frontend.handle(read_tensors(request), request.request_id(), responder)

    def finalize(self) -> None:
        if self._is_ready.is_set() and self._failure is None:
            self._frontend.close()

    def _connect(self) -> None:
        # Not in `initialize`: Triton may load models one by one, and `faser` may come last.
        try:
            link = SocketLink(socket_path(os.getppid()), ENGINE_TIMEOUT_S)
            tokenizer = TextTokenizer.from_file(link.hello.tokenizer_file, link.hello.prompts)
            self._frontend = Frontend(link, link.hello, tokenizer, is_decoupled=self._is_decoupled)
        except (FaserError, OSError, EOFError) as error:
            self._failure = str(error)
        self._is_ready.set()


class EngineModel:
    """`faser`: holds the engine, serves its own requests and those of the faces."""

    wire: Wire = InflightBatcherWire()

    def initialize(self, args: dict[str, str]) -> None:
        # The engine's rooms (runtimes and all) are imported by this process alone.
        from faser_backend.serving.engine_host import EngineHost
        from faser_backend.serving.metrics import MetricReporter

        _prepare_process()
        config = json.loads(args["model_config"])
        parameters = Parameters(config)
        options = read_serving_options(parameters)
        self._reporter = MetricReporter(pb_utils, args["model_name"], args["model_version"])
        try:
            self._host = EngineHost(options, read_engine_config(parameters), self._reporter)
        except FaserError as error:
            self._reporter.close()
            raise pb_utils.TritonModelException(str(error)) from None
        hello: Hello = self._host.hello
        self._server = LinkServer(self._host.loop, hello, socket_path(os.getppid()))
        is_decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self._frontend = Frontend(
            self._host.loop.subscribe(), hello, self._host.tokenizer, is_decoupled=is_decoupled, wire=self.wire
        )

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._frontend.handle(read_tensors(request), request.request_id(), TritonResponder(request))

    def finalize(self) -> None:
        self._server.close()
        self._frontend.close()
        self._host.close()
        self._reporter.close()


class LlmApiModel(EngineModel):
    """`tensorrt_llm` of the llmapi contract: the engine and its only face in one."""

    wire = LlmApiWire()


class _Converter:
    """A model that only converts: it borrows the engine's tokenizer file and answers at once."""

    def initialize(self, args: dict[str, str]) -> None:
        _prepare_process()
        self._hello: Hello | None = None

    def execute(self, requests: list[Any]) -> list[Any]:
        responses = []
        for request in requests:
            try:
                if self._hello is None:
                    link = SocketLink(socket_path(os.getppid()), ENGINE_TIMEOUT_S)
                    self._hello = link.hello
                    self._tokenizer = TextTokenizer.from_file(link.hello.tokenizer_file, link.hello.prompts)
                    link.close()
                arrays = self._convert(read_tensors(request), self._hello)
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor(*named) for named in arrays]))
            except FaserError as error:
                failure = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse(error=failure))
        return responses

    def _convert(self, tensors: dict[str, np.ndarray], hello: Hello) -> list[NamedArray]:
        raise AssertionError("a converter says what it converts")


class PreprocessingModel(_Converter):
    """`preprocessing`: text or messages -> token ids."""

    def _convert(self, tensors: dict[str, np.ndarray], hello: Hello) -> list[NamedArray]:
        return preprocess(tensors, hello, self._tokenizer)


class PostprocessingModel(_Converter):
    """`postprocessing`: token ids -> text."""

    def _convert(self, tensors: dict[str, np.ndarray], hello: Hello) -> list[NamedArray]:
        return postprocess(tensors, self._tokenizer)


def _prepare_process() -> None:
    """Logs to Triton's log, and ends this process when the server is gone, killed ones included."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    threading.Thread(target=_exit_with_server, args=(os.getppid(),), name="parent-watch", daemon=True).start()


def _exit_with_server(server_pid: int) -> None:
    # The stub blocks on shared memory that a killed server never writes: it would stay, with its engine.
    while os.getppid() == server_pid:
        time.sleep(PARENT_POLL_S)
    os._exit(1)
