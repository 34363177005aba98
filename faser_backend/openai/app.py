"""The ASGI application: routes, access, and the response that generates an answer while it is sent.

A request passes from its body (bodies.py) to the engine's requests (requests.py), and to the engine
(engine_client.py). The outputs that come back become JSON or events (replies.py), which are sent here.
"""

from __future__ import annotations

import asyncio
import http.client
import ipaddress
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from faser_backend.core.errors import ErrorCode, Failure
from faser_backend.openai.bodies import Body, ChatBody, CompletionBody, ResponsesBody, read_body
from faser_backend.openai.engine_client import EngineClient
from faser_backend.openai.errors import ApiError, Json, as_api_error, error_response, to_json
from faser_backend.openai.replies import ApiReply, ChatReply, CompletionReply, Event, ResponsesReply
from faser_backend.openai.requests import Generation, generations
from faser_backend.serving.request_reports import CONTEXT_HEADERS, Listener
from faser_backend.serving.served_model import ServedModel
from faser_backend.triton.server import fetch

PAGE = Path(__file__).with_name("page.html")
METRICS_TIMEOUT_S = 5.0
_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


def make_app(
    engine_socket: Path,
    callers: Callers,
    *,
    metrics_address: str | None = None,
    listeners: Sequence[Listener] = (),
    shows_speculation: bool = False,
) -> Starlette:
    """engine_socket, listeners: see EngineClient. metrics_address: of Triton. shows_speculation: in every answer."""
    endpoints = _Endpoints(metrics_address, shows_speculation)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        endpoints.client = EngineClient(engine_socket, listeners)
        yield
        await endpoints.client.close()

    def checked(endpoint: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Any]]:
        """Wraps an endpoint: checks access and answers errors in the API's form."""

        async def answer(request: Request) -> Any:
            try:
                callers.check(request)
                return await endpoint(request)
            except Exception as error:
                return error_response(error)

        return answer

    generate = endpoints.generate
    routes = [
        Route("/", endpoints.page),
        Route("/health", endpoints.health),
        Route("/metrics", checked(endpoints.metrics)),
        Route("/v1/models", checked(endpoints.models)),
        Route("/v1/models/{name:path}", checked(endpoints.model)),
        Route("/v1/completions", checked(partial(generate, CompletionBody, CompletionReply)), methods=["POST"]),
        Route("/v1/chat/completions", checked(partial(generate, ChatBody, ChatReply)), methods=["POST"]),
        Route("/v1/responses", checked(partial(generate, ResponsesBody, ResponsesReply)), methods=["POST"]),
    ]
    handlers = {404: _not_found, 405: _not_found, Exception: lambda _, error: error_response(error)}
    pages = Middleware(CORSMiddleware, allow_origins=callers.origins, allow_methods=["*"], allow_headers=["*"])
    middleware = [pages] if callers.origins else []
    app = Starlette(routes=routes, middleware=middleware, lifespan=lifespan, exception_handlers=handlers)
    app.router.redirect_slashes = False  # a redirect would name the host that the client sent
    return app


class _Endpoints:
    """The endpoints. Those that generate read the body, tokenise off the event loop, and return the response."""

    client: EngineClient

    def __init__(self, metrics_address: str | None, shows_speculation: bool) -> None:
        self._metrics_address, self._shows_speculation = metrics_address, shows_speculation
        self._created = int(time.time())

    async def page(self, _: Request) -> Response:
        """A chat in the browser."""
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))

    async def health(self, _: Request) -> Response:
        is_ready = await self.client.is_ready()
        return Json({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)

    async def metrics(self, _: Request) -> Response:
        """Triton's metrics. They describe the requests of all clients, so they need a key too."""
        if self._metrics_address is None:
            raise ApiError("/metrics: start this server with --triton-metrics HOST:PORT", status=404)
        try:
            text = await asyncio.to_thread(fetch, f"http://{self._metrics_address}/metrics", METRICS_TIMEOUT_S)
        except (OSError, http.client.HTTPException):
            message = "Triton's metrics port does not answer"
            raise ApiError.of(Failure(ErrorCode.UNAVAILABLE, message)) from None
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, _: Request) -> Response:
        model = self.client.model
        names = (model.name, *model.adapters)
        return Json({"object": "list", "data": [self._shown(self._named(name)) for name in names]})

    async def model(self, request: Request) -> Response:
        return Json(self._shown(self._named(request.path_params["name"])))

    async def generate(self, kind: type[Body], reply: Callable[..., ApiReply], request: Request) -> GeneratedResponse:
        """reply: called with the body, its generations and the model."""
        body = await read_body(kind, request)
        model = self._named(body.model)
        if self._shows_speculation and body.spec_decode_metrics is None:
            body.spec_decode_metrics = "summary"
        wanted = await asyncio.to_thread(generations, body, model)
        return GeneratedResponse(self.client, wanted, reply(body, wanted, model), is_streamed=bool(body.stream))

    def _shown(self, model: ServedModel) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "faser",
            "max_model_len": model.limits.max_context,
            "has_chat_template": model.tokenizer.prompts.chat_template is not None,
            "parent": self.client.model.name if model.lora_name else None,
        }

    def _named(self, name: str | None) -> ServedModel:
        """Returns the model with the adapter of this name, or without one for its own name. Raises ApiError."""
        model = self.client.model
        if name in model.adapters:
            return replace(model, name=name, lora_name=name)
        if name is not None and name != model.name:
            known = ", with adapter ".join(map(repr, (model.name, *model.adapters)))
            limit = f"is not served here; the model is {known}"
            raise ApiError(f"model = {name[:80]!r}: {limit}", status=404, param="model", code="model_not_found")
        return model


@dataclass(eq=False)
class GeneratedResponse:
    """An ASGI response that generates while it is sent. A client that disconnects ends its request in the engine."""

    client: EngineClient
    wanted: Sequence[Generation]
    reply: ApiReply
    is_streamed: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_reply = self._stream if self.is_streamed else self._send_whole
        await _while_connected(receive, send_reply(scope, receive, send))

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events(scope)) as events:
                async for _ in events:
                    pass
            response: Response = Json(self.reply.whole())
        except Exception as error:
            response = error_response(error)
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The status waits for the first token, so that it can still report an error until then."""
        has_begun = False
        try:
            async with aclosing(self._events(scope)) as new_events:
                async for events in new_events:
                    if not has_begun:
                        has_begun = True
                        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                    await _send_events(send, events)
            await _send_events(send, self.reply.end())
        except Exception as error:
            shown = as_api_error(error)
            if not has_begun:
                await error_response(shown)(scope, receive, send)
                return
            await _send_events(send, self.reply.fail(shown))
        done = b"data: [DONE]\n\n" if self.reply.has_done else b""
        await send({"type": "http.response.body", "body": done, "more_body": False})

    async def _events(self, scope: Scope) -> AsyncGenerator[list[Event], None]:
        """Yields the events of all choices as they come. Closing it ends the choices in the engine.

        Raises the error of the first choice that fails. A slow client's outputs wait in the client of the engine.
        """
        headers = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        trace = {name: value for name, value in headers if name in CONTEXT_HEADERS}
        stopped: set[int] = set()  # by a stop string; the engine ends the others itself
        async with aclosing(self.client.generate(self.wanted, trace, stopped)) as outputs:
            async for index, output in outputs:
                events = self.reply.add(index, output)
                if self.reply.answers[index].stream.is_stopped:
                    stopped.add(index)
                if events is not None:
                    yield events


async def _send_events(send: Send, events: list[Event]) -> None:
    lines = [
        (f"event: {name}\n".encode() if name else b"") + b"data: " + to_json(data) + b"\n\n" for name, data in events
    ]
    if lines:
        await send({"type": "http.response.body", "body": b"".join(lines), "more_body": True})


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs work until it ends or the client disconnects."""

    async def end_with_connection() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    task, watch = asyncio.create_task(work), asyncio.create_task(end_with_connection())
    try:
        await task
    except asyncio.CancelledError:
        if not watch.done():
            raise
    finally:
        watch.cancel()


class Callers:
    """The clients that may send requests: with keys, those that have one; without, all that are not foreign web pages.

    A page in a browser of the same machine reaches loopback ports too, under any name (DNS rebinding). Browsers send
    headers that show the page's origin and the name; other clients send none of these headers and need none.
    """

    def __init__(self, keys: Sequence[str] = (), host: str = "127.0.0.1", origins: Sequence[str] = ()) -> None:
        """keys: empty to allow every client. host: the listening address. origins: allowed besides the server's own."""
        self.origins = tuple(origins)
        self._keys = [key.encode() for key in keys]
        self._names = {host, *(_name_of(urlsplit(origin).netloc) for origin in origins)}

    def check(self, request: Request) -> None:
        """Raises ApiError."""
        if self._keys:
            self._check_key(request)
        elif _is_browser(request) and request.headers.get("origin") not in self.origins:
            self._check_origin(request)

    def _check_key(self, request: Request) -> None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        # Every key is compared, so that response times reveal nothing.
        matches = [secrets.compare_digest(key.strip().encode(), known) for known in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError("an API key is needed: Authorization: Bearer KEY", status=401, code="invalid_api_key")

    def _check_origin(self, request: Request) -> None:
        host = request.headers.get("host", "")
        origin, site = (request.headers.get(name) for name in ("origin", "sec-fetch-site"))
        refusal = ""
        if not self._is_own(_name_of(host)):
            refusal = f"Host = {host[:80]!r}: a browser must use a name of this server"
        elif (origin is not None and _netloc_of(origin) != host) or site not in (None, "same-origin", "none"):
            refusal = f"Origin = {origin and origin[:80]!r}: pages of other origins are refused"
        if refusal:
            raise ApiError(f"{refusal}; see --allow-origin", status=403, code="forbidden_origin")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind != "application/json":
            limit = "a browser must send application/json"
            raise ApiError(f"Content-Type = {kind[:80]!r}: {limit}", status=415, code="unsupported_media_type")

    def _is_own(self, name: str) -> bool:
        if name in self._names or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False


def _is_browser(request: Request) -> bool:
    agent = request.headers.get("user-agent", "")
    return any(name in request.headers for name in ("origin", "sec-fetch-site")) or agent.startswith("Mozilla/")


def _netloc_of(origin: str) -> str | None:
    """Returns None for a page without an origin, which browsers write as null."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def _name_of(netloc: str) -> str:
    """Returns the host without port and brackets."""
    return netloc[1:].partition("]")[0] if netloc.startswith("[") else netloc.partition(":")[0].lower()


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    limit = "this endpoint has another method" if status == 405 else "there is no such endpoint"
    return error_response(ApiError(f"{request.method} {request.scope['path']}: {limit}", status=status))
