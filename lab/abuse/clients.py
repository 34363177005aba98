"""Clients of a server under abuse: requests as tensors or JSON, and replies that remember all that was sent back.

A gRPC call carries one request and is read to its end, so that an answer that comes twice, or never, is seen.
"""

from __future__ import annotations

import http.client
import json
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2_grpc
from tritonclient.grpc.service_pb2 import ModelInferRequest  # pyright: ignore[reportAttributeAccessIssue]

from faser_backend.serving.tensors import LLMAPI_INPUTS, PREPROCESSING_INPUTS, TEXT_INPUTS, TOKEN_INPUTS

TIMEOUT_S = 60.0  # of an answer: nothing that is asked here takes a tenth of it
REFUSAL = "Maximum queue size"  # in the error of a request that finds the queue full
TYPES = {spec.name: spec.data_type for spec in (*TEXT_INPUTS, *TOKEN_INPUTS, *LLMAPI_INPUTS, *PREPROCESSING_INPUTS)}
NUMPY_TYPES = {
    "INT32": np.int32, "INT64": np.int64, "UINT64": np.uint64, "UINT8": np.uint8,
    "FP32": np.float32, "FP16": np.float16, "BOOL": np.bool_,
}  # fmt: skip
Values = Mapping[str, Any]


@dataclass
class Reply:
    """Everything that one request got back."""

    texts: dict[int, str] = field(default_factory=dict)  # by prompt of the batch; what was streamed is joined
    ids: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    num_finals: int = 0  # ends that the server announced: an error, a final response, a whole HTTP body
    is_cut: bool = False  # this client left early
    is_lost: bool = False  # no end within TIMEOUT_S, or the connection broke
    seconds: float = 0.0

    @property
    def text(self) -> str:
        return self.texts.get(0, "")


def raw_strings(values: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def raw_tensor(kind: str, values: Sequence[Any]) -> bytes:
    if kind == "STRING":
        return raw_strings([value if isinstance(value, bytes) else str(value).encode() for value in values])
    return np.array(values, NUMPY_TYPES[kind]).tobytes()


def make_request(model: str, prompts: Sequence[Values], request_id: str = "", *, has_batch: bool = True) -> Any:
    """prompts: of each the tensors by name, a value or a list of values; all have the same names."""
    request = ModelInferRequest(model_name=model, id=request_id)
    for name in prompts[0]:
        rows = [values[name] if isinstance(values[name], list) else [values[name]] for values in prompts]
        shape = [len(rows), len(rows[0])] if has_batch else [len(rows[0])]
        kind = TYPES[name]
        request.inputs.add(name=name, datatype="BYTES" if kind == "STRING" else kind, shape=shape)
        request.raw_input_contents.append(raw_tensor(kind, [value for row in rows for value in row]))
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


class GrpcClient:
    """One connection. Threads may share it."""

    def __init__(self, url: str) -> None:
        self._channel = grpc.insecure_channel(url, [("grpc.use_local_subchannel_pool", 1)])
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def ask(
        self, request: Any, *, leave_after: int | None = None, on_first: Callable[[], None] = lambda: None
    ) -> Reply:
        """leave_after: cancels the call after so many responses, unless that was the last.

        on_first: called when something has come.
        """
        reply, start_s = Reply(), time.monotonic()
        call = self.stub.ModelStreamInfer(iter([request]), timeout=TIMEOUT_S)
        num_seen = 0
        try:
            if leave_after == 0:
                reply.is_cut = call.cancel()
            for response in call:
                read_response(response, reply)
                num_seen += 1
                if num_seen == 1:
                    on_first()
                if num_seen == leave_after and not reply.num_finals:
                    reply.is_cut = True
                    call.cancel()
        except grpc.RpcError as error:
            if not reply.is_cut:
                code = error.code()  # pyright: ignore[reportAttributeAccessIssue]
                reply.errors.append(f"{code.name}: {error.details()}")  # pyright: ignore[reportAttributeAccessIssue]
                reply.is_lost = code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
                reply.num_finals += not reply.is_lost
        reply.seconds = time.monotonic() - start_s
        return reply

    def close(self) -> None:
        """Breaks off what is under way."""
        self._channel.close()


def read_response(response: Any, reply: Reply) -> None:
    """Adds one message of a stream to the reply."""
    if response.error_message:
        reply.errors.append(response.error_message)
        reply.num_finals += 1
        return
    inner = response.infer_response
    reply.num_finals += inner.parameters["triton_final_response"].bool_param
    raw = {output.name: content for output, content in zip(inner.outputs, inner.raw_output_contents, strict=False)}
    index = int(np.frombuffer(raw["batch_index"], np.int32)[0]) if raw.get("batch_index") else 0
    if raw.get("text_output"):
        reply.texts[index] = reply.texts.get(index, "") + raw["text_output"][4:].decode(errors="replace")
    if raw.get("output_ids"):
        reply.ids += np.frombuffer(raw["output_ids"], np.int32).tolist()


def fetch(
    port: int,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    method: str | None = None,
    *,
    leave_after: int | None = None,
) -> tuple[int, dict[str, str], str]:
    """Status, headers and body of an HTTP answer. leave_after: bytes of it, then the socket is closed; after 0 it is
    not waited for, and the status is 0. Raises OSError or HTTPException where none comes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        kind = {} if body is None else {"content-type": "application/json"}
        connection.request(method or ("GET" if body is None else "POST"), path, body, {**kind, **(headers or {})})
        if leave_after == 0:
            return 0, {}, ""
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read(leave_after).decode(errors="replace")
    finally:
        connection.close()


def post(
    port: int,
    path: str,
    body: bytes,
    headers: Mapping[str, str] | None = None,
    method: str = "POST",
    *,
    leave_after: int | None = None,
) -> Reply:
    """What Triton's HTTP port answers. Arguments as of `fetch`."""
    reply, start_s = Reply(is_cut=leave_after is not None), time.monotonic()
    try:
        status, _, text = fetch(port, path, body, headers, method, leave_after=leave_after)
        if not reply.is_cut:
            read_body(text, status, reply)
    except (OSError, http.client.HTTPException) as error:
        reply.errors.append(f"{type(error).__name__}: {error}")
        reply.is_lost, reply.is_cut = True, False
    reply.seconds = time.monotonic() - start_s
    return reply


def read_body(text: str, status: int, reply: Reply) -> None:
    """Adds a whole HTTP answer, one object or a stream of events, to the reply."""
    reply.num_finals += 1
    if status != 200:
        reply.errors.append(text)
        return
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")] or [text]
    for event in events:
        try:
            content = json.loads(event)
        except ValueError:
            reply.errors.append(f"not JSON: {event[:200]}")
            continue
        if not isinstance(content, dict):
            reply.errors.append(f"not an object: {event[:200]}")
        elif "error" in content:
            reply.errors.append(str(content["error"]))
        else:
            reply.texts[0] = reply.text + str(content.get("text_output", ""))
