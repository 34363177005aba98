"""Text requests to a running server over gRPC streams: how one is written, and how its answer is read.

Built on the wire messages, as light as Python allows: responses are time-stamped when they come and
read afterwards.
"""

from __future__ import annotations

import hashlib
import json
import struct
import time
from collections.abc import AsyncIterator
from typing import Any

from tritonclient.grpc.service_pb2 import ModelInferRequest  # pyright: ignore[reportAttributeAccessIssue]

from faser_backend.core.errors import FaserError
from lab.bench.workload import Job, Trace

Received = tuple[float, Any]  # seconds, and the response that came then
COUNTERS = {
    "num_tokens": "num_output_tokens",
    "num_drafted": "total_draft_tokens",
    "num_accepted": "total_accepted_draft_tokens",
}


class RefusedError(FaserError):
    """The server answered with an error."""


def make_request(job: Job, number: int, model: str = "ensemble") -> Any:
    """A text model's request for one job. end_id -1 is no token, so that only max_tokens ends a completion."""
    content = json.dumps([{"role": "user", "content": job.prompt}]) if job.is_chat else job.prompt
    prompt = content.encode()
    fields = [
        ("messages" if job.is_chat else "text_input", "BYTES", struct.pack("<I", len(prompt)) + prompt),
        ("max_tokens", "INT32", struct.pack("<i", job.max_tokens)),
        ("temperature", "FP32", struct.pack("<f", job.temperature)),
        ("top_p", "FP32", struct.pack("<f", 1.0)),  # without it or top_k, a text model decodes greedily
        ("seed", "UINT64", struct.pack("<Q", job.seed)),
        *([] if job.is_chat else [("end_id", "INT32", struct.pack("<i", -1))]),
        ("stream", "BOOL", b"\x01"),
        ("exclude_input_in_output", "BOOL", b"\x01"),
        ("return_perf_metrics", "BOOL", b"\x01"),
        ("return_num_output_tokens", "BOOL", b"\x01"),
    ]
    request = ModelInferRequest(model_name=model, id=str(number))
    for name, kind, raw in fields:
        request.inputs.add(name=name, datatype=kind, shape=[1, 1])
        request.raw_input_contents.append(raw)
    for name in ["text_output", *COUNTERS.values()]:
        request.outputs.add(name=name)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


def outputs_of(response: Any) -> dict[str, bytes]:
    return {output.name: raw for output, raw in zip(response.outputs, response.raw_output_contents, strict=True) if raw}


def read_answer(start_s: float, responses: list[Received]) -> Trace:
    """An answer from its responses. Counters are those of the last response that has them."""
    trace = Trace(start_s, [], 0, 0, 0, "")
    text = hashlib.sha256()
    for moment, response in responses:
        outputs = outputs_of(response)
        if "text_output" in outputs:
            text.update(outputs["text_output"][4:])  # after the string's length
            trace.response_s.append(moment)
        for field, name in COUNTERS.items():
            if name in outputs:
                setattr(trace, field, struct.unpack("<i", outputs[name])[0])
    trace.digest = text.hexdigest()
    return trace


async def ask(stream: Any, incoming: AsyncIterator[Any], request: Any) -> list[Received]:
    """Sends a request over an open stream; the responses up to the final one. Raises RefusedError."""
    responses: list[Received] = []
    await stream.write(request)
    while True:
        response = await anext(incoming)
        if response.error_message:
            raise RefusedError(response.error_message)
        responses.append((time.perf_counter(), response.infer_response))
        if response.infer_response.parameters["triton_final_response"].bool_param:
            return responses
