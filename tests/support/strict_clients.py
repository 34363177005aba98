"""Clients that read answers as strictly as those of strangers: by rank, by position, by data type.

Nothing here reshapes what came; an index that does not fit is an error, as it is in TensorRT-LLM's own scripts.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable
from typing import Any

import numpy as np
from tritonclient import grpc, http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

Arrays = dict[str, np.ndarray]


def text(*values: str) -> np.ndarray:
    """[1, n] strings."""
    return np.array([[value.encode() for value in values]], dtype=object)


def one(value: Any, dtype: Any = np.int32) -> np.ndarray:
    return np.array([[value]], dtype)


def ids(*token_ids: int) -> np.ndarray:
    return np.array([token_ids], np.int32)


def token_request(*prompt: int, max_tokens: int = 4, **more: np.ndarray) -> Arrays:
    """A request of `tensorrt_llm` for max_tokens tokens exactly: its end id is one that no token has."""
    given = {"input_ids": ids(*prompt), "input_lengths": one(len(prompt)), "request_output_len": one(max_tokens)}
    return given | {"end_id": one(1048576)} | more


def text_request(prompt: str = "def f", max_tokens: int = 4, **more: np.ndarray) -> Arrays:
    """The same for `ensemble` and `tensorrt_llm_bls`."""
    given = {"text_input": text(prompt), "max_tokens": one(max_tokens), "end_id": one(1048576)}
    return given | more


def text_of(result: Any) -> str:
    """As text clients read it: the first element of a tensor of one dimension is bytes."""
    return result.as_numpy("text_output")[0].decode()


def ids_of(result: Any) -> list[int]:
    """As token clients read them: batch, beam, tokens; of as many as sequence_length says."""
    length = result.as_numpy("sequence_length")[0][0]
    return list(result.as_numpy("output_ids")[0][0])[:length]


def names_of(result: Any) -> list[str]:
    """Names of the tensors of a gRPC response, in their order."""
    return [output.name for output in result.get_response().outputs]


def infer_grpc(port: int, model: str, arrays: Arrays, outputs: Iterable[str] = (), request_id: str = "") -> Any:
    """One unary call. Raises InferenceServerException."""
    with grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
        return client.infer(model, _inputs(grpc, arrays), outputs=_outputs(grpc, outputs), request_id=request_id)


def infer_http(port: int, model: str, arrays: Arrays, outputs: Iterable[str] = ()) -> Any:
    """One call of the infer endpoint. Raises InferenceServerException."""
    with http.InferenceServerClient(f"127.0.0.1:{port}") as client:
        return client.infer(model, _inputs(http, arrays), outputs=_outputs(http, outputs))


def stream_grpc(port: int, model: str, arrays: Arrays, outputs: Iterable[str] = (), request_id: str = "") -> list[Any]:
    """All responses of one request over a stream of its own. Raises InferenceServerException."""
    received: queue.Queue = queue.Queue()
    with grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
        client.start_stream(lambda result, error: received.put(error or result))
        wanted = _outputs(grpc, outputs)
        client.async_stream_infer(model, _inputs(grpc, arrays), outputs=wanted, request_id=request_id)
        client.stop_stream()  # waits for what is under way, as TensorRT-LLM's clients do
    responses = list(received.queue)
    for response in responses:
        if isinstance(response, InferenceServerException):
            raise response
    return responses


def _inputs(client: Any, arrays: Arrays) -> list[Any]:
    inputs = []
    for name, array in arrays.items():
        tensor = client.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def _outputs(client: Any, names: Iterable[str]) -> list[Any] | None:
    return [client.InferRequestedOutput(name) for name in names] or None
