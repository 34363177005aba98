"""A load client in a process of its own: many gRPC streams in one event loop, as light as Python allows.

Reads one JSON object per line, {"url", "num_clients", "jobs"}, and answers each with one line,
{"seconds", "traces"}. Responses are only time-stamped while the loop runs and read afterwards.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from lab.bench.stream_requests import Received, ask, make_request, read_answer
from lab.bench.workload import Job

Answer = tuple[float, list[Received]]  # when it was asked for, and the responses


async def run_client(stub: Any, jobs: Iterator[tuple[int, Any]], answers: list[Answer | None]) -> None:
    """One client: takes the next job when the one before is answered."""
    stream = stub.ModelStreamInfer()
    incoming = aiter(stream)
    for index, request in jobs:
        start = time.perf_counter()
        answers[index] = (start, await ask(stream, incoming, request))
    await stream.done_writing()


async def run_jobs(url: str, num_clients: int, jobs: list[Job]) -> dict[str, Any]:
    requests = iter(list(enumerate(make_request(job, number) for number, job in enumerate(jobs))))
    answers: list[Answer | None] = [None] * len(jobs)
    async with grpc.aio.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        await channel.channel_ready()
        start = time.perf_counter()
        await asyncio.gather(*(run_client(stub, requests, answers) for _ in range(num_clients)))
        seconds = time.perf_counter() - start
    traces = [read_answer(*answer) for answer in answers if answer is not None]
    for job, trace in zip(jobs, traces, strict=True):
        if job.is_chat:
            trace.cut_accepted()
    return {"seconds": seconds, "traces": [asdict(trace) for trace in traces]}


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        jobs = [Job(**job) for job in order["jobs"]]
        print(json.dumps(asyncio.run(run_jobs(order["url"], order["num_clients"], jobs))), flush=True)


if __name__ == "__main__":
    main()
