"""Runs `faser replay`: sends the requests of a trace to a running server when they are due (open loop).

Times count from when a request was due, so that they include waiting for a slow client or a full server. The delay of
sending is reported beside them.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2_grpc
from tritonclient.grpc.service_pb2 import ModelConfigRequest  # pyright: ignore[reportAttributeAccessIssue]

from faser_backend.core.errors import ConfigError
from faser_backend.lab.answers import Answer, Job, summarise
from faser_backend.lab.bench.measure import trace_jobs
from faser_backend.lab.bench.wire import CONNECT_TIMEOUT_S, RefusedError, ask, connected, make_request, read_answer
from faser_backend.lab.command_options import ReplayOptions
from faser_backend.lab.progress import progress_bar
from faser_backend.lab.prompts import DEMO_PROMPTS, PromptMaker
from faser_backend.lab.tables import check_output
from faser_backend.lab.traces import Trace, fitted_to, read_trace, scaled
from faser_backend.text.prompts import read_prompts
from faser_backend.text.tokenizer import load_tokenizer
from faser_backend.triton.launch import DIRECTORY_KEY
from faser_backend.triton.server import ENGINE_MODEL

REPORT_BYTES = 1 << 20
SPARE_TOKENS = 16  # a prompt may grow by a few when it is tokenised again


@dataclass(slots=True)
class Replayed:
    """The measurements so far."""

    answers: list[Answer] = field(default_factory=list)
    lateness_ms: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    start_s: float = 0.0
    end_s: float = 0.0


def run_replay(options: ReplayOptions) -> int:
    """Replays a trace, then prints and writes figures, also after Ctrl-C. Returns the exit status."""
    _check(options)
    # The command ends quietly when its output is closed, but the end of a connection must not end it.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    trace = read_trace(options.trace, options.requests)
    rate = options.rate if options.scale is None else trace.rate * options.scale
    trace = fitted_to(trace if rate is None else scaled(trace, rate), options.max_context - SPARE_TOKENS)
    jobs = trace_jobs(trace, _maker(options), options.temperature, options.seed)
    replayed = Replayed()
    is_whole = True
    with progress_bar() as bar:
        task = bar.add_task("answers", total=len(jobs))
        try:
            asyncio.run(_replay(options, trace, jobs, replayed, lambda: bar.advance(task)))
        except KeyboardInterrupt:
            is_whole = False
    report = figures(replayed, trace) | {
        "trace": trace.description,
        "is_whole": is_whole,
        "seed": options.seed,
        "temperature": options.temperature,
    }
    print_report(report)
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return int(not report["num_answered"]) if is_whole else 130


def _check(options: ReplayOptions) -> None:
    if options.rate is not None and options.scale is not None:
        raise ConfigError("--rate and --scale: give at most one; both say how fast to replay")
    for name in ("rate", "scale", "requests", "max_concurrency"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} = {value}: must be above 0")
    if not re.fullmatch(r"[^:/\s]+:\d{1,5}", options.url):
        raise ConfigError(f"--url = {options.url!r}: must be HOST:PORT, the server's gRPC port, without a scheme")
    if options.max_context <= 2 * SPARE_TOKENS:
        raise ConfigError(f"--max-context = {options.max_context}: must be above {2 * SPARE_TOKENS}")
    if options.output is not None:
        if not options.output.parent.is_dir():
            raise ConfigError(f"--output = {str(options.output)!r}: its directory does not exist")
        check_output(options.output.parent, REPORT_BYTES)


def _maker(options: ReplayOptions) -> PromptMaker:
    path = options.tokenizer or _served_directory(options) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"--tokenizer = {str(path)!r}: no such file; give the served model's tokenizer.json")
    texts = [prompt.text for prompt in read_prompts(options.prompts or DEMO_PROMPTS)]
    return PromptMaker(load_tokenizer(path), texts)


def _served_directory(options: ReplayOptions) -> Path:
    """Asks the server for its engine directory. Raises ConfigError."""
    with grpc.insecure_channel(options.url) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelConfig
        try:
            config = call(ModelConfigRequest(name=ENGINE_MODEL), timeout=CONNECT_TIMEOUT_S).config
        except grpc.RpcError as error:
            reason = str(error.details())  # pyright: ignore[reportAttributeAccessIssue]
            raise ConfigError(f"--url = {options.url!r}: no answer from {ENGINE_MODEL} ({reason})") from None
    return Path(config.parameters[DIRECTORY_KEY].string_value)


async def _replay(
    options: ReplayOptions, trace: Trace, jobs: list[Job], replayed: Replayed, advance: Callable[[], None]
) -> None:
    requests = [make_request(job, number, options.model) for number, job in enumerate(jobs)]
    gate = asyncio.Semaphore(options.max_concurrency or len(jobs))
    async with grpc.aio.insecure_channel(options.url) as channel:
        stub = await connected(channel, options.url)
        replayed.start_s = replayed.end_s = time.perf_counter()

        async def one(due_s: float, request: Any) -> None:
            async with gate:
                replayed.lateness_ms.append((time.perf_counter() - due_s) * 1e3)
                try:
                    stream = stub.ModelStreamInfer()
                    responses = await ask(stream, aiter(stream), request)
                    await stream.done_writing()
                    replayed.answers.append(read_answer(due_s, responses))
                except (RefusedError, grpc.aio.AioRpcError) as error:
                    replayed.errors[kind_of(error)] += 1
            replayed.end_s = time.perf_counter()
            advance()

        async with asyncio.TaskGroup() as group:
            for arrival_s, request in zip(trace.arrivals_s.tolist(), requests, strict=True):
                due_s = replayed.start_s + arrival_s
                await asyncio.sleep(due_s - time.perf_counter())
                group.create_task(one(due_s, request))


def kind_of(error: Exception) -> str:
    """Returns the kind of an error: its text without numbers."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"gRPC {error.code().name}: {error.details()}"[:120]
    return re.sub(r"\d+", "N", str(error))[:120]


def figures(replayed: Replayed, trace: Trace) -> dict[str, Any]:
    """Returns counts, the lateness of sending, and percentiles if anything was answered, as plain values."""
    seconds = replayed.end_s - replayed.start_s
    found: dict[str, Any] = {
        "num_requests": len(trace),
        "num_sent": len(replayed.lateness_ms),
        "num_answered": len(replayed.answers),
        "errors": dict(replayed.errors.most_common()),
        "seconds": seconds,
        "requests_per_s_wanted": trace.rate if len(trace) > 1 else None,
    }
    if replayed.lateness_ms:
        for name, share in (("p50", 50), ("p99", 99), ("max", 100)):
            found[f"lateness_ms_{name}"] = float(np.percentile(replayed.lateness_ms, share))
    if replayed.answers:
        found |= summarise(replayed.answers, seconds)
        found["requests_per_s"] = len(replayed.answers) / seconds
    return found


def print_report(found: dict[str, Any]) -> None:
    """Prints the report on stdout."""
    state = "" if found["is_whole"] else "interrupted: "
    print(
        f"{state}{found['num_answered']} of {found['num_sent']} sent requests answered in {found['seconds']:.1f} s; "
        f"the trace has {found['num_requests']}"
    )
    print(f"trace: {found['trace']}")
    for kind, count in found["errors"].items():
        print(f"  {count} failed: {kind}")
    if found["num_sent"]:
        late = ", ".join(f"{name} {found[f'lateness_ms_{name}']:.1f} ms" for name in ("p50", "p99", "max"))
        wanted = found["requests_per_s_wanted"]
        print(f"sent late by {late}" + ("" if wanted is None else f"; {wanted:.2f} requests/s wanted"))
    if found["num_answered"]:
        print(f"{found['tokens_per_s']:.0f} tokens/s, {found['requests_per_s']:.2f} requests/s")
        for name, heading in (("ttft", "first token"), ("tpot", "per token"), ("itl", "gap"), ("e2e", "whole answer")):
            print(f"  {heading:12} p50 {found[f'{name}_ms_p50']:8.1f} ms   p99 {found[f'{name}_ms_p99']:8.1f} ms")
        print(f"  draft tokens accepted per verification {found['mean_accepted']:.2f}")
