"""Sends text requests to a running server over gRPC streams.

It uses the wire messages directly, to keep the client light: responses get a time stamp on arrival and are read later.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import grpc
import numpy as np
from tritonclient.grpc import service_pb2_grpc
from tritonclient.grpc.service_pb2 import ModelInferRequest  # pyright: ignore[reportAttributeAccessIssue]
from tritonclient.utils import triton_to_np_dtype

from faser_backend.core.errors import ConfigError, FaserError
from faser_backend.lab.answers import Answer, Job
from faser_backend.triton.tensors import LLMAPI_INPUTS, PREPROCESSING_INPUTS, TEXT_INPUTS, TOKEN_INPUTS

CONNECT_TIMEOUT_S = 10.0
TYPES = {spec.name: spec.data_type for spec in (*TEXT_INPUTS, *TOKEN_INPUTS, *LLMAPI_INPUTS, *PREPROCESSING_INPUTS)}
Received = tuple[float, Any]  # arrival in seconds, and the response
NUM_TOKENS = "num_output_tokens"  # of a response
COUNTERS = {  # of the request so far
    "num_drafted": "total_draft_tokens",
    "num_accepted": "total_accepted_draft_tokens",
}


class RefusedError(FaserError):
    """The server answered with an error."""


class Tensor(NamedTuple):
    """An input of a request; kind: Triton's data type without its prefix."""

    kind: str
    shape: list[int]
    values: list[Any]

    def head(self, name: str) -> dict[str, Any]:
        """Returns the tensor without its values, as messages over gRPC and HTTP carry it."""
        return {"name": name, "datatype": "BYTES" if self.kind == "STRING" else self.kind, "shape": self.shape}

    @property
    def raw(self) -> bytes:
        if self.kind != "STRING":
            return np.array(self.values, triton_to_np_dtype(self.kind)).tobytes()
        texts = [value if isinstance(value, bytes) else str(value).encode() for value in self.values]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def tensors_of(prompts: Sequence[Mapping[str, Any]], *, has_batch: bool = True) -> dict[str, Tensor]:
    """Returns the tensors of prompts. Each prompt maps the same names to a value or a list of values."""
    found = {}
    for name in prompts[0]:
        rows = [values[name] if isinstance(values[name], list) else [values[name]] for values in prompts]
        shape = [len(rows), len(rows[0])] if has_batch else [len(rows[0])]
        found[name] = Tensor(TYPES[name], shape, [value for row in rows for value in row])
    return found


def as_request(tree: Mapping[str, Any]) -> Any:
    """Returns a gRPC message of these fields that requests a countable end."""
    request = ModelInferRequest(**tree)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


def tensor_request(model: str, *prompts: Mapping[str, Any], request_id: str = "", has_batch: bool = True) -> Any:
    """Returns the request for prompts as tensors_of takes them."""
    tensors = tensors_of(prompts, has_batch=has_batch)
    inputs, raw = [tensor.head(name) for name, tensor in tensors.items()], [tensor.raw for tensor in tensors.values()]
    return as_request({"model_name": model, "id": request_id, "inputs": inputs, "raw_input_contents": raw})


def make_request(job: Job, number: int, model: str = "ensemble") -> Any:
    """Returns a text model's request for a job. end_id -1 is no token, so that only max_tokens ends a completion."""
    flags = ("stream", "exclude_input_in_output", "return_perf_metrics", f"return_{NUM_TOKENS}")
    values = {"max_tokens": job.max_tokens, "temperature": job.temperature, "seed": job.seed}
    values |= {"top_p": 1.0}  # without it or top_k, a text model decodes greedily
    values |= dict.fromkeys(flags, True)
    if job.is_chat:
        values["messages"] = json.dumps([{"role": "user", "content": job.prompt}])
    else:
        values |= {"text_input": job.prompt, "end_id": -1}
    request = tensor_request(model, values, request_id=str(number))
    for name in ["text_output", NUM_TOKENS, *COUNTERS.values()]:
        request.outputs.add(name=name)
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
    stub: Any, jobs: Iterator[tuple[int, Any]], answers: dict[int, tuple[float, list[Received]]]
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
    answers: dict[int, tuple[float, list[Received]]] = {}
    async with grpc.aio.insecure_channel(url) as channel:
        stub = await connected(channel, url)
        start = time.perf_counter()
        await asyncio.gather(*(run_client(stub, requests, answers) for _ in range(num_clients)))
        seconds = time.perf_counter() - start
    return [read_answer(*answers[number]) for number in range(len(jobs))], seconds
