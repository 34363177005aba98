"""The ASGI application: routes, keys, limits, and the way of one request from its body to its answer."""

from __future__ import annotations

import asyncio
import http.client
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from faser_backend.core.errors import RequestError
from faser_backend.serving.openai import prompts
from faser_backend.serving.openai.answer import Answer, follow_all
from faser_backend.serving.openai.errors import ApiError
from faser_backend.serving.openai.fields import AnyBody, ChatBody, CompletionBody, ResponsesBody, read_body
from faser_backend.serving.openai.replies import ChatReply, CompletionReply, Event, Reply
from faser_backend.serving.openai.responses import ResponsesReply
from faser_backend.serving.openai.sampling import Generation, Guide, plan_generation
from faser_backend.serving.openai.tools import answer_guide, form_of
from faser_backend.serving.openai.triton_client import TokenClient
from faser_backend.serving.tokenizer import TextTokenizer
from faser_backend.serving.tracing import context_of

PAGE = Path(__file__).with_name("page.html")
MAX_BODY_BYTES = 4 << 20
BODY_TIMEOUT_S = 30.0
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


def make_app(served: Served, triton_url: str, api_keys: Sequence[str] = ()) -> Starlette:
    """api_keys: one of them must come with every request under /v1; none: everybody may ask."""
    door = Door(served, api_keys)

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
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={404: _not_found, 405: _not_found})


class Door:
    """The endpoints. Each reads its body, tokenises it beside the event loop, and returns a `Generated`."""

    client: TokenClient

    def __init__(self, served: Served, api_keys: Sequence[str]) -> None:
        self._served = served
        self._keys = [key.encode() for key in api_keys]

    def answering(self, endpoint: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Any]]:
        """The endpoint for those who may use it, its errors in the API's form."""

        async def answer(request: Request) -> Any:
            try:
                self._check_key(request)
                return await endpoint(request)
            except ApiError as error:
                return _error_response(error)
            except RequestError as error:
                return _error_response(ApiError.of_request(error))

        return answer

    async def page(self, _: Request) -> Response:
        """A chat in the browser."""
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))

    async def health(self, _: Request) -> Response:
        is_ready = await self.client.is_ready()
        return JSONResponse({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)

    async def metrics(self, _: Request) -> Response:
        """Triton's own text: its counters tell of others' requests, so keys hold here as well."""
        address = self._served.metrics_address
        if address is None:
            raise ApiError("/metrics: this server was not told where Triton's metrics are", status=404)
        try:
            text = await asyncio.to_thread(_fetch, address, "/metrics")
        except (OSError, http.client.HTTPException):
            raise ApiError("Triton's metrics port does not answer", status=503, code="unavailable") from None
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def completions(self, request: Request) -> Generated:
        body = await self._read(CompletionBody, request)
        served = self._served
        limits = served.vocab_size, served.max_text_bytes
        ids = await asyncio.to_thread(prompts.completion_prompts, body, served.tokenizer, *limits)
        answers = [answer for one in ids for answer in self._answers(body, one, body.num_choices)]
        echoed = None
        if body.echo:
            echoed = [served.tokenizer.decode(answer.wanted.prompt_ids) for answer in answers]
        reply = CompletionReply(body, served.name, answers, served.kv_block_size, echoed)
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
        body = read_body(kind, await _read_json(request))
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

    def _check_key(self, request: Request) -> None:
        if not self._keys:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        # Every key is compared, so that the time tells nothing.
        matches = [secrets.compare_digest(key.strip().encode(), known) for known in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError("an API key is needed: Authorization: Bearer KEY", status=401, code="invalid_api_key")


class Generated:
    """An ASGI response that generates while it is sent; it ends in the engine as soon as its client goes away.

    has_done: whether a stream ends with the line [DONE].
    """

    def __init__(self, client: TokenClient, reply: Reply, *, is_streamed: bool, has_done: bool = True) -> None:
        self._client, self._reply = client, reply
        self._is_streamed, self._has_done = is_streamed, has_done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        if trace := context_of(dict(given)):
            self._client = self._client.carrying(trace)
        await _while_connected(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_streamed:
            await self._stream(scope, receive, send)
            return
        try:
            async with aclosing(follow_all(self._client, self._reply.answers)) as pieces:
                async for index, piece in pieces:
                    self._reply.add(index, piece)
            response: Response = JSONResponse(self._reply.whole())
        except ApiError as error:
            response = _error_response(error)
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The status waits for the first piece: until then a refusal can still be told by it."""
        reply, has_begun = self._reply, False
        try:
            async with aclosing(follow_all(self._client, reply.answers)) as pieces:
                async for index, piece in pieces:
                    if not has_begun:
                        has_begun = True
                        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                        await _send_events(send, reply.begin())
                    await _send_events(send, reply.chunk(index, piece))
            await _send_events(send, reply.end())
        except ApiError as error:
            if not has_begun:
                await _error_response(error)(scope, receive, send)
                return
            await _send_events(send, [(None, error.body())])
        done = b"data: [DONE]\n\n" if self._has_done else b""
        await send({"type": "http.response.body", "body": done, "more_body": False})


_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


async def _send_events(send: Send, events: list[Event]) -> None:
    lines = [
        (f"event: {name}\n" if name else "") + f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
        for name, data in events
    ]
    if lines:
        await send({"type": "http.response.body", "body": "".join(lines).encode(), "more_body": True})


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs work to its end or the client's going away."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watch.cancel()
        is_left = not task.done()
        if is_left:
            task.cancel()
        results = await asyncio.gather(task, watch, return_exceptions=True)
    if not is_left and isinstance(results[0], Exception):
        raise results[0]


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


async def _read_json(request: Request) -> Any:
    """The body, of limited size, depth and time. Raises ApiError."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise ApiError(f"the body is larger than {MAX_BODY_BYTES} bytes", status=413)
    except TimeoutError:
        raise ApiError(f"the body took longer than {BODY_TIMEOUT_S:.0f} s", status=408) from None
    except ClientDisconnect:
        raise ApiError("the client is gone", status=400) from None
    try:
        return json.loads(body)
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from None


def _error_response(error: ApiError) -> JSONResponse:
    headers = {"retry-after": "1"} if error.status in (429, 503) else None
    return JSONResponse(error.body(), error.status, headers)


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    message = f"{request.method} {request.url.path}: there is no such endpoint"
    return _error_response(ApiError(message, status=status))
