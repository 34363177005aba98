"""Sends text requests to a running server over gRPC streams.

It uses the wire messages directly, to keep the client light: responses get a time stamp on arrival and are read later.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc
from tritonclient.grpc.service_pb2 import ModelInferRequest  # pyright: ignore[reportAttributeAccessIssue]

from faser_backend.core.errors import ConfigError, FaserError
from faser_backend.lab.answers import Answer, Job

CONNECT_TIMEOUT_S = 10.0
Received = tuple[float, Any]  # arrival in seconds, and the response
NUM_TOKENS = "num_output_tokens"  # of a response
COUNTERS = {  # of the request so far
    "num_drafted": "total_draft_tokens",
    "num_accepted": "total_accepted_draft_tokens",
}


class RefusedError(FaserError):
    """The server answered with an error."""


def make_request(job: Job, number: int, model: str = "ensemble") -> Any:
    """Returns a text model's request for a job. end_id -1 is no token, so that only max_tokens ends a completion."""
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
        (f"return_{NUM_TOKENS}", "BOOL", b"\x01"),
    ]
    request = ModelInferRequest(model_name=model, id=str(number))
    for name, kind, raw in fields:
        request.inputs.add(name=name, datatype=kind, shape=[1, 1])
        request.raw_input_contents.append(raw)
    for name in ["text_output", NUM_TOKENS, *COUNTERS.values()]:
        request.outputs.add(name=name)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


def outputs_of(response: Any) -> dict[str, bytes]:
    return {output.name: raw for output, raw in zip(response.outputs, response.raw_output_contents, strict=True) if raw}


def read_answer(start_s: float, responses: list[Received]) -> Answer:
    """Returns the answer in these responses. Counters come from the last response that has them."""
    answer = Answer(start_s, [], 0, 0, 0, "")
    text = hashlib.sha256()
    for moment, response in responses:
        outputs = outputs_of(response)
        if "text_output" in outputs:
            text.update(outputs["text_output"][4:])  # after the string's length
            answer.response_s.append(moment)
        if NUM_TOKENS in outputs:
            num_tokens = struct.unpack("<i", outputs[NUM_TOKENS])[0]
            answer.num_tokens += num_tokens
            answer.num_steps += num_tokens > 0
        for field, name in COUNTERS.items():
            if name in outputs:
                setattr(answer, field, struct.unpack("<i", outputs[name])[0])
    answer.digest = text.hexdigest()
    return answer


async def connected(channel: grpc.aio.Channel, url: str) -> Any:
    """Returns the stub of a channel once the server is there. Raises ConfigError if it is not."""
    try:
        await asyncio.wait_for(channel.channel_ready(), CONNECT_TIMEOUT_S)
    except TimeoutError:
        raise ConfigError(f"--url = {url!r}: no server answers there by gRPC") from None
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)


async def ask(stream: Any, incoming: AsyncIterator[Any], request: Any) -> list[Received]:
    """Sends a request over an open stream. Returns all responses, the final one included. Raises RefusedError."""
    responses: list[Received] = []
    await stream.write(request)
    while True:
        response = await anext(incoming)
        if response.error_message:
            raise RefusedError(response.error_message)
        responses.append((time.perf_counter(), response.infer_response))
        if response.infer_response.parameters["triton_final_response"].bool_param:
            return responses


async def run_client(
    stub: Any, jobs: Iterator[tuple[int, Any]], answers: list[tuple[float, list[Received]] | None]
) -> None:
    """Runs one client, which sends its next job when the previous one is answered."""
    stream = stub.ModelStreamInfer()
    incoming = aiter(stream)
    for index, request in jobs:
        start = time.perf_counter()
        answers[index] = (start, await ask(stream, incoming, request))
    await stream.done_writing()


async def run_jobs(url: str, jobs: list[Job], num_clients: int) -> tuple[list[Answer], float]:
    """Runs num_clients streams until all jobs are answered. Returns answers and seconds."""
    requests = iter(list(enumerate(make_request(job, number) for number, job in enumerate(jobs))))
    answers: list[tuple[float, list[Received]] | None] = [None] * len(jobs)
    async with grpc.aio.insecure_channel(url) as channel:
        stub = await connected(channel, url)
        start = time.perf_counter()
        await asyncio.gather(*(run_client(stub, requests, answers) for _ in range(num_clients)))
        seconds = time.perf_counter() - start
    return [read_answer(*answer) for answer in answers if answer is not None], seconds
