"""The ASGI application: routes, access, and a request's way from its body to the response that generates its answer."""

from __future__ import annotations

import asyncio
import http.client
import ipaddress
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from faser_backend.core.errors import ErrorCode, Failure
from faser_backend.openai.bodies import Body, ChatBody, CompletionBody, ResponsesBody, read_body
from faser_backend.openai.errors import ApiError
from faser_backend.openai.replies import Answer, ApiReply, ChatReply, CompletionReply, ResponsesReply
from faser_backend.openai.requests import generations
from faser_backend.openai.sending import GeneratedResponse, Json, error_response
from faser_backend.openai.triton_client import TokenClient
from faser_backend.serving.served_model import ServedModel

PAGE = Path(__file__).with_name("page.html")
METRICS_TIMEOUT_S = 5.0


def make_app(
    model: ServedModel,
    triton_url: str,
    callers: Callers,
    *,
    metrics_address: str | None = None,
    shows_speculation: bool = False,
) -> Starlette:
    """metrics_address: HOST:PORT of Triton's metrics. shows_speculation: in every answer, even if not requested."""
    endpoints = _Endpoints(model, metrics_address, shows_speculation)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        endpoints.client = TokenClient(triton_url, model.limits.vocab_size)
        yield
        await endpoints.client.close()
        model.tokenizer.close()

    def checked(endpoint: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Any]]:
        """Wraps an endpoint: checks access and answers errors in the API's form."""

        async def answer(request: Request) -> Any:
            try:
                callers.check(request)
                return await endpoint(request)
            except Exception as error:
                return error_response(error)

        return answer

    routes = [
        Route("/", endpoints.page),
        Route("/health", endpoints.health),
        Route("/metrics", checked(endpoints.metrics)),
        Route("/v1/models", checked(endpoints.models)),
        Route("/v1/models/{name:path}", checked(endpoints.model)),
        Route("/v1/completions", checked(endpoints.completions), methods=["POST"]),
        Route("/v1/chat/completions", checked(endpoints.chat), methods=["POST"]),
        Route("/v1/responses", checked(endpoints.responses), methods=["POST"]),
    ]
    handlers = {404: _not_found, 405: _not_found, Exception: lambda _, error: error_response(error)}
    pages = Middleware(CORSMiddleware, allow_origins=callers.origins, allow_methods=["*"], allow_headers=["*"])
    middleware = [pages] if callers.origins else []
    app = Starlette(routes=routes, middleware=middleware, lifespan=lifespan, exception_handlers=handlers)
    app.router.redirect_slashes = False  # a redirect would name the host that the client sent
    return app


class _Endpoints:
    """The endpoints. Those that generate read the body, tokenise beside the event loop, and return the response."""

    client: TokenClient

    def __init__(self, model: ServedModel, metrics_address: str | None, shows_speculation: bool) -> None:
        self._model, self._metrics_address, self._shows_speculation = model, metrics_address, shows_speculation
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
            text = await asyncio.to_thread(_fetch, self._metrics_address, "/metrics")
        except (OSError, http.client.HTTPException):
            message = "Triton's metrics port does not answer"
            raise ApiError.of(Failure(ErrorCode.UNAVAILABLE, message)) from None
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, _: Request) -> Response:
        return Json({"object": "list", "data": [self._shown_model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return Json(self._shown_model())

    async def completions(self, request: Request) -> GeneratedResponse:
        return await self._generate(CompletionBody, request, CompletionReply)

    async def chat(self, request: Request) -> GeneratedResponse:
        return await self._generate(ChatBody, request, ChatReply)

    async def responses(self, request: Request) -> GeneratedResponse:
        return await self._generate(ResponsesBody, request, ResponsesReply)

    async def _generate(
        self, kind: type[Body], request: Request, reply: Callable[[Any, Sequence[Answer]], ApiReply]
    ) -> GeneratedResponse:
        body = await read_body(kind, request)
        self._check_model(body.model)
        if self._shows_speculation and body.spec_decode_metrics is None:
            body.spec_decode_metrics = "summary"
        answers = await asyncio.to_thread(self._answers, body)
        return GeneratedResponse(self.client, reply(body, answers))

    def _answers(self, body: Body) -> list[Answer]:
        return [Answer(wanted, self._model) for wanted in generations(body, self._model)]

    def _shown_model(self) -> dict[str, Any]:
        model = self._model
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "faser",
            "max_model_len": model.limits.max_context,
            "has_chat_template": model.tokenizer.chat_template is not None,
        }

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model.name:
            limit = f"is not served here; the model is {self._model.name!r}"
            raise ApiError(f"model = {name[:80]!r}: {limit}", status=404, param="model", code="model_not_found")


class Callers:
    """The clients that may send requests: with keys, those that have one; without, all that are not foreign web pages.

    A page in a browser of the same machine reaches loopback ports too, under any name (DNS rebinding). Browsers send
    headers that show the page's origin and the name; other clients send none of these headers and need none.
    """

    def __init__(self, keys: Sequence[str] = (), host: str = "127.0.0.1", origins: Sequence[str] = ()) -> None:
        """keys: empty to allow every client. host: the listening address. origins: allowed beside the server's own."""
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
        if not self._is_own(_name_of(host)):
            raise _forbidden(f"Host = {host[:80]!r}: a browser must use a name of this server")
        origin, site = (request.headers.get(name) for name in ("origin", "sec-fetch-site"))
        if (origin is not None and _netloc_of(origin) != host) or site not in (None, "same-origin", "none"):
            raise _forbidden(f"Origin = {origin and origin[:80]!r}: pages of other origins are refused")
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
    if netloc.startswith("["):
        return netloc[1:].partition("]")[0]
    return netloc.partition(":")[0].lower()


def _forbidden(message: str) -> ApiError:
    return ApiError(f"{message}; see --allow-origin", status=403, code="forbidden_origin")


def _fetch(address: str, path: str) -> bytes:
    connection = http.client.HTTPConnection(address, timeout=METRICS_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        if response.status != 200:
            raise ConnectionError(response.reason)
        return response.read()
    finally:
        connection.close()


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    message = f"{request.method} {request.scope['path']}: there is no such endpoint"
    return error_response(ApiError(message, status=status))
