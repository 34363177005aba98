"""How answers leave: JSON, or a stream of events, whatever happens while they are generated."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from faser_backend.openai.answer import follow_all
from faser_backend.openai.errors import as_api_error
from faser_backend.openai.replies import ApiReply, Event
from faser_backend.openai.triton_client import TokenClient
from faser_backend.serving.tracing import context_of


class Json(JSONResponse):
    def render(self, content: Any) -> bytes:
        return to_json(content)


class Generated:
    """An ASGI response that generates while it is sent; it ends in the engine as soon as its client goes away."""

    def __init__(self, client: TokenClient, reply: ApiReply) -> None:
        self._client, self._reply = client, reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        if trace := context_of(dict(given)):
            self._client = self._client.carrying(trace)
        answer = self._stream if self._reply.body.stream else self._answer
        await _while_connected(receive, answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(follow_all(self._client, self._reply.answers)) as pieces:
                async for index, piece in pieces:
                    self._reply.chunk(index, piece)
            response: Response = Json(self._reply.whole())
        except Exception as error:
            response = error_response(error)
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
        except Exception as error:
            shown = as_api_error(error)
            if not has_begun:
                await error_response(shown)(scope, receive, send)
                return
            await _send_events(send, [(None, shown.body())])
        done = b"data: [DONE]\n\n" if reply.has_done else b""
        await send({"type": "http.response.body", "body": done, "more_body": False})


_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


async def _send_events(send: Send, events: list[Event]) -> None:
    lines = [
        (f"event: {name}\n".encode() if name else b"") + b"data: " + to_json(data) + b"\n\n" for name, data in events
    ]
    if lines:
        await send({"type": "http.response.body", "body": b"".join(lines), "more_body": True})


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


def to_json(data: Any) -> bytes:
    """Whatever data holds: NaN and infinity become null, half surrogate pairs question marks."""
    try:
        return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_writable(data)).encode()


def _writable(data: Any) -> Any:
    if isinstance(data, dict):
        return {_writable(key): _writable(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_writable(each) for each in data]
    if isinstance(data, str):
        return data.encode(errors="replace").decode()
    return None if isinstance(data, float) and not math.isfinite(data) else data


def error_response(failure: Exception) -> Json:
    error = as_api_error(failure)
    headers = {"retry-after": "1"} if error.status in (429, 503) else None
    return Json(error.body(), error.status, headers)
