"""The ASGI application: routes, keys, limits, and the way of one request from its body to its answer."""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from faser_backend.core.errors import ErrorCode, Failure
from faser_backend.serving.openai import prompts
from faser_backend.serving.openai.answer import Answer
from faser_backend.serving.openai.bodies import read_body
from faser_backend.serving.openai.callers import Callers
from faser_backend.serving.openai.errors import ApiError
from faser_backend.serving.openai.fields import AnyBody, ChatBody, CompletionBody, ResponsesBody
from faser_backend.serving.openai.replies import ChatReply, CompletionReply
from faser_backend.serving.openai.responses import ResponsesReply
from faser_backend.serving.openai.sampling import Generation, Guide, plan_generation
from faser_backend.serving.openai.sending import Generated, Json, error_response
from faser_backend.serving.openai.tools import answer_guide, form_of
from faser_backend.serving.openai.triton_client import TokenClient
from faser_backend.serving.tokenizer import TextTokenizer

PAGE = Path(__file__).with_name("page.html")
METRICS_TIMEOUT_S = 5.0
MAX_PREDICTED_TOKENS = 32  # of `prediction`: what the engine takes of a client's draft


@dataclass(frozen=True, slots=True)
class Served:
    """The model behind the door."""

    name: str
    tokenizer: TextTokenizer
    end_ids: tuple[int, ...]
    vocab_size: int
    max_context: int
    kv_block_size: int
    max_text_bytes: int  # of a prompt or a conversation, before it is tokenised
    metrics_address: str | None = None  # HOST:PORT of Triton's metrics
    tells_speculation: bool = False  # with every answer, not only where the request asks for it
    created: int = field(default_factory=lambda: int(time.time()))


def make_app(served: Served, triton_url: str, callers: Callers | None = None) -> Starlette:
    """callers: who may ask; None: whoever reaches the port."""
    callers = callers or Callers()
    door = Door(served, callers)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        door.client = TokenClient(triton_url, served.vocab_size)
        yield
        await door.client.close()
        served.tokenizer.close()

    routes = [
        Route("/", door.page),
        Route("/health", door.health),
        Route("/metrics", door.answering(door.metrics)),
        Route("/v1/models", door.answering(door.models)),
        Route("/v1/models/{name:path}", door.answering(door.model)),
        Route("/v1/completions", door.answering(door.completions), methods=["POST"]),
        Route("/v1/chat/completions", door.answering(door.chat), methods=["POST"]),
        Route("/v1/responses", door.answering(door.responses), methods=["POST"]),
    ]
    handlers = {404: _not_found, 405: _not_found, Exception: _failed}
    pages = Middleware(CORSMiddleware, allow_origins=callers.origins, allow_methods=["*"], allow_headers=["*"])
    middleware = [pages] if callers.origins else []
    app = Starlette(routes=routes, middleware=middleware, lifespan=lifespan, exception_handlers=handlers)
    app.router.redirect_slashes = False  # to a host that the client names
    return app


class Door:
    """The endpoints. Each reads its body, tokenises it beside the event loop, and returns a `Generated`."""

    client: TokenClient

    def __init__(self, served: Served, callers: Callers) -> None:
        self._served, self._callers = served, callers

    def answering(self, endpoint: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Any]]:
        """The endpoint for those who may use it, its errors in the API's form."""

        async def answer(request: Request) -> Any:
            try:
                self._callers.check(request)
                return await endpoint(request)
            except Exception as error:
                return error_response(error)

        return answer

    async def page(self, _: Request) -> Response:
        """A chat in the browser."""
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))

    async def health(self, _: Request) -> Response:
        is_ready = await self.client.is_ready()
        return Json({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)

    async def metrics(self, _: Request) -> Response:
        """Triton's own text: its counters tell of others' requests, so keys hold here as well."""
        address = self._served.metrics_address
        if address is None:
            raise ApiError("/metrics: this server was not told where Triton's metrics are", status=404)
        try:
            text = await asyncio.to_thread(_fetch, address, "/metrics")
        except (OSError, http.client.HTTPException):
            message = "Triton's metrics port does not answer"
            raise ApiError.of(Failure(ErrorCode.UNAVAILABLE, message)) from None
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, _: Request) -> Response:
        return Json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return Json(self._model())

    async def completions(self, request: Request) -> Generated:
        body = await self._read(CompletionBody, request)
        answers = await asyncio.to_thread(self._completion_answers, body)
        reply = CompletionReply(body, self._served.name, answers, self._served.kv_block_size)
        return Generated(self.client, reply, is_streamed=bool(body.stream))

    async def chat(self, request: Request) -> Generated:
        body = await self._read(ChatBody, request)
        served = self._served
        form = form_of(served.tokenizer.chat_template) if body.offered_tools else None
        guide = answer_guide(body, form, body.response_format.schema_of_answer if body.response_format else None)
        ids = await asyncio.to_thread(prompts.chat_prompt, body, served.tokenizer, served.max_text_bytes)
        draft = await asyncio.to_thread(self._predicted, body)
        answers = self._answers(body, ids, body.num_choices, guide, draft)
        reply = ChatReply(body, served.name, answers, served.kv_block_size, form)
        return Generated(self.client, reply, is_streamed=bool(body.stream))

    async def _read(self, kind: type[AnyBody], request: Request) -> AnyBody:
        body = await read_body(kind, request)
        self._check_model(body.model)
        if self._served.tells_speculation and body.spec_decode_metrics is None:
            body.spec_decode_metrics = "summary"
        return body

    async def responses(self, request: Request) -> Generated:
        body = await self._read(ResponsesBody, request)
        served = self._served
        wanted = body.text.format if body.text else None
        if wanted is not None and wanted.type == "json_schema" and wanted.json_schema is None:
            raise ApiError("text.format.schema: is required with type json_schema", param="text.format.schema")
        form = form_of(served.tokenizer.chat_template) if body.offered_tools else None
        guide = answer_guide(body, form, wanted.schema_of_answer if wanted else None)
        ids = await asyncio.to_thread(prompts.responses_prompt, body, served.tokenizer, served.max_text_bytes)
        [answer] = self._answers(body, ids, 1, guide)
        reply = ResponsesReply(body, served.name, answer, served.kv_block_size, form)
        return Generated(self.client, reply, is_streamed=bool(body.stream), has_done=False)

    def _completion_answers(self, body: CompletionBody) -> list[Answer]:
        """Prompt by prompt: one that is too long ends it."""
        served = self._served
        ids = prompts.completion_prompts(body, served.tokenizer, served.vocab_size, served.max_text_bytes)
        return [answer for one in ids for answer in self._answers(body, one, body.num_choices)]

    def _answers(
        self,
        body: CompletionBody | ChatBody | ResponsesBody,
        prompt_ids: list[int],
        count: int,
        guide: Guide | None = None,
        draft_ids: tuple[int, ...] = (),
    ) -> list[Answer]:
        served = self._served
        limits = {"vocab_size": served.vocab_size, "max_context": served.max_context}
        first: Generation = plan_generation(body, prompt_ids, **limits, guide=guide, draft_ids=draft_ids)
        return [Answer(first.nth(index), served.tokenizer, served.end_ids) for index in range(count)]

    def _predicted(self, body: ChatBody) -> tuple[int, ...]:
        if body.prediction is None:
            return ()
        prompts.check_text("prediction", body.prediction.text, self._served.max_text_bytes)
        return tuple(self._served.tokenizer.encode(body.prediction.text)[:MAX_PREDICTED_TOKENS])

    def _model(self) -> dict[str, Any]:
        served = self._served
        return {
            "id": served.name,
            "object": "model",
            "created": served.created,
            "owned_by": "faser",
            "max_model_len": served.max_context,
            "has_chat_template": served.tokenizer.chat_template is not None,
        }

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._served.name:
            limit = f"is not served here; the model is {self._served.name!r}"
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


async def _failed(_: Request, error: Exception) -> Response:
    return error_response(error)
