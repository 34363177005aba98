"""Parts that all models of model_repo/ share: process, configuration, and the sender of a request's answers.

Runs inside Triton's Python stub only.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]

from faser_backend.core.errors import ErrorCode, Failure, FaserError
from faser_backend.serving.log_format import set_up_logging
from faser_backend.serving.parameters import ModelOptions, given_parameters
from faser_backend.serving.processes import PARENT_POLL_S, die_with_parent, is_child_of_main_thread
from faser_backend.triton.model_configs import BATCH_SIZE_KEY, DECOUPLED_KEY
from faser_backend.triton.tensor_io import NamedArray
from faser_backend.triton.tensors import refuse_undeclared

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
    """One request's response sender (wire.Responder).

    The server frees a request's state with its last response and does not check: a cancellation
    poll that meets it crashes the whole server. The lock keeps the two apart.
    """

    def __init__(self, request: Any, *, sends_json: bool = False) -> None:
        """sends_json: errors are for a program of ours, which reads more than a text."""
        self._sends_json = sends_json
        self.requested_outputs = request.requested_output_names()
        self._sender = request.get_response_sender()
        self._lock = threading.Lock()
        self._is_done = False

    def send(self, arrays: list[NamedArray], *, is_final: bool) -> None:
        tensors = [pb_utils.Tensor(name, array) for name, array in arrays]
        self._send(pb_utils.InferenceResponse(tensors), is_final)

    def fail(self, failure: Failure) -> None:
        message = failure.to_json() if self._sends_json else failure.message
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, TRITON_CODES[failure.code]))
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
    """Parts that all models share: their parameters decide about batches and, but for converters, streaming.

    `faser serve` has written both into the configuration; a server that was started otherwise asks here.
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
        """Reads what every model needs of its configuration, and makes this process one that ends with the server.

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
                f"{self._name}: no max_batch_size. Start tritonserver without --disable-auto-complete-config, or write "
                "max_batch_size and model_transaction_policy into config.pbtxt"
            )
        return parameters

    def _read(self, request: Any, parameters: dict[str, Any] | None = None) -> dict[str, np.ndarray]:
        """The tensors of a request. Raises RequestError for an input that this model does not declare."""
        given = parameters_of(request) if parameters is None else parameters
        refuse_undeclared(list(given), self._name)
        return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def _engines_policy(config: dict[str, Any]) -> dict[str, str]:
    """`ensemble` has no transaction policy of its own in NVIDIA's templates: it follows tensorrt_llm beside it."""
    beside = Path(pb_utils.get_model_dir()).parents[1] / "tensorrt_llm" / "config.pbtxt"
    if config["name"] != "ensemble" or not beside.is_file():
        return {}
    found = re.search(rf'key:\s*"{DECOUPLED_KEY}"\s*value:?\s*{{\s*string_value:\s*"([^"]*)"', beside.read_text())
    return given_parameters({"parameters": {DECOUPLED_KEY: {"string_value": found[1]}}}) if found else {}


def parameters_of(request: Any) -> dict[str, Any]:
    """Returns what came with a request beside its tensors, by name."""
    return json.loads(request.parameters() or "{}")


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
