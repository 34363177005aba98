"""Clients of a running server for the end-to-end tests: gRPC streams, HTTP posts, metrics."""

from __future__ import annotations

import json
import queue
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as triton

KINDS = {"max_tokens": np.int32, "request_output_len": np.int32, "input_ids": np.int32, "input_lengths": np.int32}
KINDS |= {"seed": np.uint64, "beam_width": np.int32, "end_id": np.int32, "num_draft_tokens": np.int32}
KINDS |= {"sampling_param_max_tokens": np.int32, "sampling_param_seed": np.uint64, "draft_input_ids": np.int32}
KINDS |= {"num_return_sequences": np.int32, "top_k": np.int32, "runtime_top_k": np.int32}
TRITON_TYPES = {"O": "BYTES", "i": "INT32", "f": "FP32", "u": "UINT64", "b": "BOOL"}


def inputs_of(*, has_batch: bool = True, **tensors: Any) -> list[triton.InferInput]:
    """Python values -> request tensors of shape [1, n], or [n] without a batch dimension."""
    inputs = []
    for name, value in tensors.items():
        values = value if isinstance(value, list) else [value]
        if isinstance(values[0], str):
            array = np.array([[text.encode() for text in values]], dtype=object)
        elif isinstance(values[0], bool):
            array = np.array([values])
        else:
            array = np.array([values], KINDS.get(name, np.float32))
        array = array if has_batch else array[0]
        tensor = triton.InferInput(name, list(array.shape), TRITON_TYPES[array.dtype.kind])
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


@dataclass
class Answer:
    """The answer that one request got."""

    deltas: list[str] = field(default_factory=list)  # under llmapi each holds all text so far
    token_ids: list[int] = field(default_factory=list)
    last: Any = None
    error: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.deltas)


class Stream:
    """One gRPC stream carrying one request at a time."""

    def __init__(self, url: str, *, has_batch: bool = True) -> None:
        self._has_batch = has_batch
        self.client = triton.InferenceServerClient(url)
        self._received: queue.Queue = queue.Queue()
        self.client.start_stream(lambda result, error: self._received.put((result, error)))

    def send(self, model: str, request_id: str = "", **tensors: Any) -> None:
        self.client.async_stream_infer(
            model,
            inputs_of(has_batch=self._has_batch, **tensors),
            request_id=request_id,
            enable_empty_final_response=True,
        )

    def receive(self, timeout_s: float = 60.0) -> tuple[Any, str | None, bool]:
        """The next response, its error, and whether it is the last one."""
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
                # As strictly as TensorRT-LLM's own clients: text has one dimension, ids have three.
                text, ids = result.as_numpy("text_output"), result.as_numpy("output_ids")
                if text is not None:
                    answer.deltas.append(text[0].decode())
                if ids is not None:
                    answer.token_ids += list(ids[0][0])
                    assert result.as_numpy("sequence_length")[0][0] == len(ids[0][0])
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
    """HTTP status and body."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def events_of(body: str) -> list[dict[str, Any]]:
    """The JSON objects of a server-sent event stream."""
    return [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line.startswith("data: ")]


def metric(port: int, family: str, value: str) -> float:
    """The gauge of `family` whose label holds `value`."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        for line in response.read().decode().splitlines():
            if line.startswith(f"{family}{{") and f'="{value}"' in line:
                return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"{family} has no {value}")


def wait_for_free_blocks(port: int, timeout_s: float = 15.0) -> None:
    """Waits until no request is active; then every block must be free."""
    deadline = time.monotonic() + timeout_s
    while metric(port, "nv_trt_llm_request_metrics", "active") > 0:
        assert time.monotonic() < deadline, "requests are still active"
        time.sleep(0.05)
    blocks = "nv_trt_llm_kv_cache_block_metrics"
    while (free := metric(port, blocks, "free")) != (total := metric(port, blocks, "max")):
        assert time.monotonic() < deadline, f"{free:.0f} of {total:.0f} blocks are free"
        time.sleep(0.05)
