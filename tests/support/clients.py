"""Clients of a running server: streams, unary calls, HTTP posts and metrics.

They read tensors as strictly as TensorRT-LLM's own scripts: by rank, position and type. Nothing is reshaped.
"""

import json
import queue
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tritonclient import grpc, http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype, triton_to_np_dtype

from faser_backend.lab.abuse.served import BLOCKS, REQUESTS, metric
from faser_backend.lab.bench.wire import TYPES

Arrays = dict[str, np.ndarray]
NO_TOKEN = 1048576  # as an end id: only the length ends an answer


# -- requests ---------------------------------------------------------------------------------------------------------


def text(*values: str) -> np.ndarray:
    """Returns strings [1, n]."""
    return np.array([[value.encode() for value in values]], dtype=object)


def one(value: Any, dtype: Any = np.int32) -> np.ndarray:
    return np.array([[value]], dtype)


def ids(*token_ids: int) -> np.ndarray:
    return np.array([token_ids], np.int32)


def token_request(*prompt: int, max_tokens: int = 4, **more: np.ndarray) -> Arrays:
    """Returns a request of `tensorrt_llm` for exactly max_tokens tokens."""
    given = {"input_ids": ids(*prompt), "input_lengths": one(len(prompt)), "request_output_len": one(max_tokens)}
    return given | {"end_id": one(NO_TOKEN)} | more


def text_request(prompt: str = "def f", max_tokens: int = 4, **more: np.ndarray) -> Arrays:
    """Returns the same for `ensemble` and `tensorrt_llm_bls`."""
    return {"text_input": text(prompt), "max_tokens": one(max_tokens), "end_id": one(NO_TOKEN)} | more


def arrays_of(*, has_batch: bool = True, **tensors: Any) -> Arrays:
    """Returns Python values as arrays [1, n], or [n] without a batch dimension."""
    arrays = {}
    for name, value in tensors.items():
        values = value if isinstance(value, list) else [value]
        is_text = isinstance(values[0], str)
        array = text(*values) if is_text else np.array([values], triton_to_np_dtype(TYPES[name]))
        arrays[name] = array if has_batch else array[0]
    return arrays


def inputs_of(arrays: Arrays, client: Any = grpc) -> list[Any]:
    inputs = []
    for name, array in arrays.items():
        tensor = client.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


# -- answers ----------------------------------------------------------------------------------------------------------


def text_of(result: Any) -> str:
    """Returns the first element of a tensor of one dimension, as text clients do."""
    return result.as_numpy("text_output")[0].decode()


def ids_of(result: Any) -> list[int]:
    """Returns the tokens of [batch, beam, tokens], as many as sequence_length says."""
    length = result.as_numpy("sequence_length")[0][0]
    return list(result.as_numpy("output_ids")[0][0])[:length]


def names_of(result: Any) -> list[str]:
    """Returns the names of a gRPC response's tensors, in order."""
    return [output.name for output in result.get_response().outputs]


def infer_grpc(port: int, model: str, arrays: Arrays, outputs: Iterable[str] = (), request_id: str = "") -> Any:
    """Makes one unary call. Raises InferenceServerException."""
    with grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
        return client.infer(model, inputs_of(arrays), outputs=_outputs(grpc, outputs), request_id=request_id)


def infer_http(port: int, model: str, arrays: Arrays, outputs: Iterable[str] = ()) -> Any:
    """Calls the infer endpoint once. Raises InferenceServerException."""
    with http.InferenceServerClient(f"127.0.0.1:{port}") as client:
        return client.infer(model, inputs_of(arrays, http), outputs=_outputs(http, outputs))


def stream_grpc(
    port: int, model: str, arrays: Arrays, outputs: Iterable[str] = (), request_id: str = "", *, at_least: int = 0
) -> list[Any]:
    """Returns all responses of one request over its own stream. Raises InferenceServerException.

    Asks again while a busy machine joins them into fewer than at_least; the timeout of tests ends it.
    """
    while True:
        received: queue.Queue = queue.Queue()
        with grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
            client.start_stream(lambda result, error, to=received: to.put(error or result))
            client.async_stream_infer(model, inputs_of(arrays), outputs=_outputs(grpc, outputs), request_id=request_id)
            client.stop_stream()  # waits for running requests, as TensorRT-LLM's clients do
        for response in received.queue:
            if isinstance(response, InferenceServerException):
                raise response
        if received.qsize() >= at_least:
            return list(received.queue)


def _outputs(client: Any, names: Iterable[str]) -> list[Any] | None:
    return [client.InferRequestedOutput(name) for name in names] or None


@dataclass
class Answer:
    """The answer to one request."""

    deltas: list[str] = field(default_factory=list)  # under llmapi each holds the whole text so far
    token_ids: list[int] = field(default_factory=list)
    last: Any = None
    error: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.deltas)


class Stream:
    """A gRPC stream that carries one request at a time."""

    def __init__(self, url: str, *, has_batch: bool = True) -> None:
        self._has_batch = has_batch
        self.client = grpc.InferenceServerClient(url)
        self._received: queue.Queue = queue.Queue()
        self.client.start_stream(lambda result, error: self._received.put((result, error)))

    def send(self, model: str, request_id: str = "", **tensors: Any) -> None:
        inputs = inputs_of(arrays_of(has_batch=self._has_batch, **tensors))
        self.client.async_stream_infer(model, inputs, request_id=request_id, enable_empty_final_response=True)

    def receive(self, timeout_s: float = 60.0) -> tuple[Any, str | None, bool]:
        """Returns the next response, its error, and whether it is the last one."""
        result, error = self._received.get(timeout=timeout_s)
        if error is not None:
            return None, str(error), True
        return result, None, result.get_response().parameters["triton_final_response"].bool_param

    def answer(self, timeout_s: float = 60.0) -> Answer:
        answer, is_last = Answer(), False
        while not is_last:
            result, answer.error, is_last = self.receive(timeout_s)
            if result is not None:
                answer.last = result
                if result.as_numpy("text_output") is not None:
                    answer.deltas.append(text_of(result))
                if result.as_numpy("output_ids") is not None:
                    answer.token_ids += ids_of(result)
                    assert result.as_numpy("sequence_length")[0][0] == result.as_numpy("output_ids").shape[2]
        return answer

    def ask(self, model: str, **tensors: Any) -> Answer:
        self.send(model, **tensors)
        return self.answer()

    def cancel(self) -> None:
        self.client.stop_stream(cancel_requests=True)

    def close(self) -> None:
        self.client.stop_stream()
        self.client.close()


def post(port: int, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """Returns the HTTP status and the body."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def events_of(body: str) -> list[dict[str, Any]]:
    """Returns the JSON objects of a stream of server-sent events."""
    return [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line.startswith("data: ")]


def wait_for_free_blocks(port: int, timeout_s: float = 15.0) -> None:
    """Waits until no request is active and every block is free."""
    deadline = time.monotonic() + timeout_s
    while metric(port, REQUESTS, "active") > 0:
        assert time.monotonic() < deadline, "requests are still active"
        time.sleep(0.05)
    while (free := metric(port, BLOCKS, "free")) != (total := metric(port, BLOCKS, "max")):
        assert time.monotonic() < deadline, f"{free:.0f} of {total:.0f} blocks are free"
        time.sleep(0.05)
