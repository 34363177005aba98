"""A load client in a process of its own: many gRPC streams in one event loop, as light as Python allows.

Reads one JSON object per line, {"url", "num_clients", "jobs"}, and answers each with one line,
{"seconds", "traces"}. Responses are only time-stamped while the loop runs and read afterwards.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc
from tritonclient.grpc.service_pb2 import ModelInferRequest  # pyright: ignore[reportAttributeAccessIssue]

COUNTERS = {
    "num_tokens": "num_output_tokens",
    "num_drafted": "total_draft_tokens",
    "num_accepted": "total_accepted_draft_tokens",
}
Received = tuple[float, list[tuple[float, Any]]]  # start, [(time, response)]


def make_request(job: dict[str, Any], number: int) -> Any:
    """The ensemble's request for one job. end_id -1 is no token, so that only max_tokens ends it."""
    prompt = job["prompt"].encode()
    fields = [
        ("text_input", "BYTES", struct.pack("<I", len(prompt)) + prompt),
        ("max_tokens", "INT32", struct.pack("<i", job["max_tokens"])),
        ("temperature", "FP32", struct.pack("<f", job["temperature"])),
        ("seed", "UINT64", struct.pack("<Q", job["seed"])),
        ("end_id", "INT32", struct.pack("<i", -1)),
        ("stream", "BOOL", b"\x01"),
        ("exclude_input_in_output", "BOOL", b"\x01"),
        ("return_perf_metrics", "BOOL", b"\x01"),
        ("return_num_output_tokens", "BOOL", b"\x01"),
    ]
    request = ModelInferRequest(model_name="ensemble", id=str(number))
    for name, kind, raw in fields:
        request.inputs.add(name=name, datatype=kind, shape=[1, 1])
        request.raw_input_contents.append(raw)
    for name in ["text_output", *COUNTERS.values()]:
        request.outputs.add(name=name)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


async def run_client(stub: Any, jobs: Iterator[tuple[int, Any]], received: list[Received | None]) -> None:
    """One client: takes the next job when the one before is answered."""
    stream = stub.ModelStreamInfer()
    incoming = aiter(stream)
    for index, request in jobs:
        responses = []
        start = time.perf_counter()
        await stream.write(request)
        while True:
            response = await anext(incoming)
            if response.error_message:
                raise RuntimeError(response.error_message)
            responses.append((time.perf_counter(), response.infer_response))
            if response.infer_response.parameters["triton_final_response"].bool_param:
                break
        received[index] = (start, responses)
    await stream.done_writing()


def outputs_of(response: Any) -> dict[str, bytes]:
    return {output.name: raw for output, raw in zip(response.outputs, response.raw_output_contents, strict=True) if raw}


def read_trace(start: float, responses: list[tuple[float, Any]]) -> dict[str, Any]:
    """Fields of bench.workload.Trace. Counters are those of the last response that has them."""
    trace: dict[str, Any] = {"start_s": start, "response_s": [], **dict.fromkeys(COUNTERS, 0)}
    text = hashlib.sha256()
    for moment, response in responses:
        outputs = outputs_of(response)
        if "text_output" in outputs:
            text.update(outputs["text_output"][4:])  # after the string's length
            trace["response_s"].append(moment)
        for field, name in COUNTERS.items():
            if name in outputs:
                trace[field] = struct.unpack("<i", outputs[name])[0]
    return trace | {"digest": text.hexdigest()}


async def run_jobs(url: str, num_clients: int, jobs: list[dict[str, Any]]) -> dict[str, Any]:
    requests = iter(list(enumerate(make_request(job, number) for number, job in enumerate(jobs))))
    received: list[Received | None] = [None] * len(jobs)
    async with grpc.aio.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        await channel.channel_ready()
        start = time.perf_counter()
        await asyncio.gather(*(run_client(stub, requests, received) for _ in range(num_clients)))
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "traces": [read_trace(*answer) for answer in received if answer is not None]}


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(asyncio.run(run_jobs(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
