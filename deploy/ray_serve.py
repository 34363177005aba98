"""Replicas of an engine on Ray Serve, behind one port of OpenAI's API (docs/scaling.md).

    serve run deploy.ray_serve:app engine_dir=engines_out min_replicas=2 max_replicas=4

Each replica starts a `faser serve` as a child on free loopback ports, and forwards requests to its OpenAI server. So
cancelling, draining and readiness work as on one machine. An ingress receives all requests and reads of each only the
text that the router compares.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from faser_backend.openai.bodies import MAX_BODY_BYTES
from faser_backend.openai.errors import ApiError
from faser_backend.serving.processes import die_with_parent

# Ray offers it as ray.serve.llm.request_router.PrefixCacheAffinityRouter, whose package wants vLLM or SGLang installed.
PREFIX_ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
ROUTED_CHARACTERS = 8192  # of a prompt: what the router compares and remembers
DRAIN_S = 75.0  # longer than `faser serve` gives running requests
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 2.0, 5.0
MAX_UNHEALTHY = 3  # checks in a row; Serve's own limit
NUM_TRIES = 5  # per request, before its answer begins
RETRY_S = 0.25  # between tries: a replica's requests fail before the router notices its end
PASSED_HEADERS = ("accept", "authorization", "content-type")
RETURNED_HEADERS = ("cache-control", "content-type", "retry-after")


class Options(BaseModel):
    """Options of `serve run`, as NAME=VALUE. Raises pydantic's error, which names the option, for anything else."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine_dir: Path | None = None  # None: the demo pair; the same path on every node
    serve_options: str = ""  # further options of `faser serve`, as on its command line
    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(default=1, ge=1)
    target_ongoing_requests: float = Field(default=16, gt=0)  # per replica, waiting or running; more add replicas
    max_ongoing_requests: int = Field(default=64, ge=1)  # per replica; others wait at the ingress
    max_queued_requests: int = Field(default=256, ge=0)  # at the ingress; others get 429
    num_ingresses: int = Field(default=1, ge=1)  # every request passes through one of them
    num_cpus: float = Field(default=1, gt=0)  # per replica, as Ray counts them
    num_gpus: float = Field(default=0, ge=0)
    is_prefix_aware: bool = True  # equal prompt beginnings go to one replica and share KV blocks
    imbalanced_threshold: int = Field(default=8, ge=0)  # difference in requests above which load decides

    @model_validator(mode="after")
    def _check_range(self) -> Options:
        if self.max_replicas < self.min_replicas:
            limit = f"must be at least min_replicas = {self.min_replicas}"
            raise ValueError(f"max_replicas = {self.max_replicas}: {limit}")
        return self


@dataclass(frozen=True, slots=True)
class Call:
    """A request as it crosses Ray. prompt: never empty; the router reads it by this name."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    prompt: str


@dataclass(frozen=True, slots=True)
class Head:
    """The status and headers of an answer."""

    status: int
    headers: dict[str, str]


class Replica:
    """A `faser serve` as a child process, with a connection to its OpenAI server. Each ends with the other."""

    async def __init__(self, options: Options) -> None:
        """Returns once the server is ready. Raises RuntimeError; the replica's log has the reason."""
        with ExitStack() as stack:  # four free ports
            opened = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
            http, grpc, metrics, openai = (each.getsockname()[1] for each in opened)
        command = [sys.executable, "-m", "faser_backend.cli", "serve", "--openai-port", str(openai)]
        command += ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
        command += ["--engine-dir", str(options.engine_dir)] if options.engine_dir is not None else []
        # The loop's thread starts it and lasts as long as the replica: the kernel ends the child with this thread.
        self._process = subprocess.Popen(
            [*command, *shlex.split(options.serve_options)],
            stdout=subprocess.PIPE,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - one system call, no lock and no allocation
        )
        assert self._process.stdout is not None
        if not (await asyncio.to_thread(self._process.stdout.readline)).startswith(b"ready: "):
            raise RuntimeError(f"faser serve ended with status {self._process.wait()}; its error is above")
        self._url = f"http://127.0.0.1:{openai}"
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0), auto_decompress=False
        )
        self._num_unhealthy = 0
        self._watch = asyncio.create_task(self._end_with_child())

    async def answer(self, call: Call) -> AsyncIterator[Head | bytes]:
        """Yields a Head, then the body. Closing the iterator closes the connection, which cancels the request."""
        request = self._session.request(call.method, self._url + call.path, headers=call.headers, data=call.body)
        async with request as response:
            yield Head(response.status, {name: response.headers[name] for name in _known(response.headers)})
            async for chunk in response.content.iter_any():
                yield chunk

    async def check_health(self) -> None:
        """Raises if Triton's model is not ready, and ends the replica after MAX_UNHEALTHY failures in a row.

        Serve would drain the replica first and wait for requests that will never be answered.
        """
        limit = aiohttp.ClientTimeout(HEALTH_TIMEOUT_S)
        try:
            async with self._session.get(f"{self._url}/health", timeout=limit) as health:
                health.raise_for_status()
        except (aiohttp.ClientError, TimeoutError):
            self._num_unhealthy += 1
            if self._num_unhealthy == MAX_UNHEALTHY:
                _end(f"faser serve was not ready {MAX_UNHEALTHY} times in a row")
            raise
        self._num_unhealthy = 0

    async def _end_with_child(self) -> None:
        """Ends the replica with its server; otherwise it would answer with errors until the next health check."""
        _end(f"faser serve ended with status {await asyncio.to_thread(self._process.wait)}")

    def __del__(self) -> None:
        """Stops the server. Serve calls it when running requests have ended."""
        if hasattr(self, "_watch"):
            self._watch.cancel()
        if hasattr(self, "_process"):
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(DRAIN_S)


def _end(reason: str) -> None:
    """Ends this process and its child. Serve starts another replica."""
    print(f"{reason}; the replica ends", file=sys.stderr, flush=True)
    os._exit(1)


class Ingress:
    """The common port. It asks a replica, and another one if that fails before its answer begins."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas: Any = replicas.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        if len(body) > MAX_BODY_BYTES:
            return _refusal(ApiError(f"the body is larger than {MAX_BODY_BYTES} bytes", status=413))
        headers = {name: request.headers[name] for name in PASSED_HEADERS if name in request.headers}
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        call = Call(request.method, path, headers, body, routed_text(body))
        for attempt in range(NUM_TRIES):
            await asyncio.sleep(RETRY_S * attempt)
            pieces: DeploymentResponseGenerator = self._replicas.answer.remote(call)
            try:
                head = await anext(pieces)
            except BackPressureError:
                return _refusal(ApiError("the queue is full", status=429, code="queue_full"))
            except (RayError, RayServeException, aiohttp.ClientError):
                continue
            return StreamingResponse(_rest(pieces, head), head.status, head.headers)
        return _refusal(ApiError("unavailable: no replica answers", status=503, code="unavailable"))


async def _rest(pieces: DeploymentResponseGenerator, head: Head) -> AsyncIterator[bytes]:
    """Yields the rest of the body. If the replica ends, an event stream gets an error event, as from the server."""
    try:
        async for piece in pieces:
            yield piece
    except (RayError, RayServeException, aiohttp.ClientError):
        if not head.headers.get("content-type", "").startswith("text/event-stream"):
            raise
        error = ApiError("unavailable: the replica is gone", status=503, code="unavailable")
        yield f"data: {json.dumps(error.body())}\n\n".encode()
    finally:
        pieces.cancel()  # does nothing after a complete answer


def routed_text(body: bytes) -> str:
    """Returns the beginning of a body's prompt or conversation, by which requests share KV blocks.

    It is never empty, and arbitrary for a body that the OpenAI server will refuse.
    """
    text = ""
    with suppress(ValueError, RecursionError):
        fields = json.loads(body)
        if isinstance(fields, dict):
            text = _text_of(fields.get("messages") or fields.get("prompt") or fields.get("input"))
    return text[:ROUTED_CHARACTERS] or "-"


def _text_of(value: Any) -> str:
    """Returns the text without its JSON, which is alike in all conversations."""
    if isinstance(value, dict):
        value = value.get("content") or value.get("text")
    if isinstance(value, list):
        return "\n".join(map(_text_of, value))
    return "" if value is None else str(value)


def _known(headers: Any) -> list[str]:
    return [name for name in RETURNED_HEADERS if name in headers]


def _refusal(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, {"retry-after": "1"} if error.status in (429, 503) else None)


def app(options: Options | dict[str, str]) -> serve.Application:
    """Returns the application for `serve run deploy.ray_serve:app NAME=VALUE ...` or `serve.run(app(Options(...)))`."""
    options = Options.model_validate(options)
    router: dict[str, Any] = {}  # Serve's default: the less loaded of two
    if options.is_prefix_aware:
        kept = {"imbalanced_threshold": options.imbalanced_threshold, "do_eviction": True}
        router = {"request_router_class": PREFIX_ROUTER, "request_router_kwargs": kept}
    replicas = serve.deployment(
        Replica,
        autoscaling_config=AutoscalingConfig(
            min_replicas=options.min_replicas,
            max_replicas=options.max_replicas,
            target_ongoing_requests=options.target_ongoing_requests,
        ),
        max_ongoing_requests=options.max_ongoing_requests,
        max_queued_requests=options.max_queued_requests,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        request_router_config=RequestRouterConfig(**router),
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=2 * HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=DRAIN_S,
    )
    num_answers = options.max_replicas * options.max_ongoing_requests + options.max_queued_requests
    ingress = serve.deployment(
        Ingress,
        num_replicas=options.num_ingresses,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=num_answers + 1,  # so that the ingress refuses the excess, not Serve
    )
    return ingress.bind(replicas.bind(options))
