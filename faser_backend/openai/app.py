"""The ASGI application: routes, keys, limits, and the way of one request from its body to its answer."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from faser_backend.core.errors import ErrorCode, Failure
from faser_backend.openai import requests
from faser_backend.openai.answer import Answer
from faser_backend.openai.bodies import read_body
from faser_backend.openai.callers import Callers
from faser_backend.openai.errors import ApiError
from faser_backend.openai.fields import AnyBody, ChatBody, CompletionBody, ResponsesBody
from faser_backend.openai.replies import ChatReply, CompletionReply
from faser_backend.openai.requests import Generation, ServedModel
from faser_backend.openai.responses import ResponsesReply
from faser_backend.openai.sending import Generated, Json, error_response
from faser_backend.openai.tools import form_of
from faser_backend.openai.triton_client import TokenClient

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
    """metrics_address: HOST:PORT of Triton's metrics. shows_speculation: with every answer, not only where the request
    asks for it."""
    endpoints = _Endpoints(model, metrics_address, shows_speculation)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        endpoints.client = TokenClient(triton_url, model.limits.vocab_size)
        yield
        await endpoints.client.close()
        model.tokenizer.close()

    def checked(endpoint: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Any]]:
        """The endpoint for those who may use it, its errors in the API's form."""

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
    app.router.redirect_slashes = False  # to a host that the client names
    return app


class _Endpoints:
    """Each reads its body, tokenises it beside the event loop, and returns a `Generated`."""

    client: TokenClient

    def __init__(self, model: ServedModel, metrics_address: str | None, shows_speculation: bool) -> None:
        self._model, self._metrics_address, self._shows_speculation = model, metrics_address, shows_speculation

    async def page(self, _: Request) -> Response:
        """A chat in the browser."""
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))

    async def health(self, _: Request) -> Response:
        is_ready = await self.client.is_ready()
        return Json({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)

    async def metrics(self, _: Request) -> Response:
        """Triton's own text: its counters are about others' requests, so keys hold here as well."""
        if self._metrics_address is None:
            raise ApiError("/metrics: this server was not told where Triton's metrics are", status=404)
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

    async def completions(self, request: Request) -> Generated:
        body = await self._read(CompletionBody, request)
        answers = await asyncio.to_thread(self._answers, requests.completions, body)
        return Generated(self.client, CompletionReply(body, answers))

    async def chat(self, request: Request) -> Generated:
        return await self._converse(ChatBody, ChatReply, request)

    async def responses(self, request: Request) -> Generated:
        return await self._converse(ResponsesBody, ResponsesReply, request)

    async def _converse(self, kind: Any, reply: type[ChatReply | ResponsesReply], request: Request) -> Generated:
        body = await self._read(kind, request)
        form = form_of(self._model.tokenizer.chat_template) if body.offered_tools else None
        answers = await asyncio.to_thread(self._answers, requests.conversation, body, form)
        return Generated(self.client, reply(body, answers, form))

    async def _read(self, kind: type[AnyBody], request: Request) -> AnyBody:
        body = await read_body(kind, request)
        self._check_model(body.model)
        if self._shows_speculation and body.spec_decode_metrics is None:
            body.spec_decode_metrics = "summary"
        return body

    def _answers(self, read: Callable[..., Iterator[Generation]], body: Any, *form: Any) -> list[Answer]:
        return [Answer(wanted, self._model) for wanted in read(body, self._model, *form)]

    def _shown_model(self) -> dict[str, Any]:
        model = self._model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "faser",
            "max_model_len": model.limits.max_context,
            "has_chat_template": model.tokenizer.chat_template is not None,
        }

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model.name:
            limit = f"is not served here; the model is {self._model.name!r}"
            raise ApiError(f"model = {name[:80]!r}: {limit}", status=404, param="model", code="model_not_found")


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
