"""Generates and sends a reply: `GeneratedResponse` reads a request's outputs from Triton and sends JSON or events.

Errors become responses here too, in OpenAI's form.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from faser_backend.openai.errors import as_api_error
from faser_backend.openai.replies import Answer, ApiReply, Event
from faser_backend.openai.triton_client import TokenClient
from faser_backend.serving.tracing import CONTEXT_HEADERS

MAX_WAITING_EVENTS = 64  # lists of events per request, for a slow client; beyond that its stream from Triton waits
_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Json(JSONResponse):
    def render(self, content: Any) -> bytes:
        return to_json(content)


class GeneratedResponse:
    """An ASGI response that generates while it is sent. A client that disconnects ends its request in the engine."""

    def __init__(self, client: TokenClient, reply: ApiReply) -> None:
        self._client, self._reply = client, reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_reply = self._stream if self._reply.body.stream else self._send_whole
        await _while_connected(receive, send_reply(scope, receive, send))

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events(scope)) as events:
                async for _ in events:
                    pass
            response: Response = Json(self._reply.whole())
        except Exception as error:
            response = error_response(error)
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The status waits for the first token, so that it can still report an error until then."""
        reply, has_begun = self._reply, False
        try:
            async with aclosing(self._events(scope)) as new_events:
                async for events in new_events:
                    if not has_begun:
                        has_begun = True
                        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                    await _send_events(send, events)
            await _send_events(send, reply.end())
        except Exception as error:
            shown = as_api_error(error)
            if not has_begun:
                await error_response(shown)(scope, receive, send)
                return
            await _send_events(send, [(None, shown.body())])
        done = b"data: [DONE]\n\n" if reply.has_done else b""
        await send({"type": "http.response.body", "body": done, "more_body": False})

    async def _events(self, scope: Scope) -> AsyncGenerator[list[Event], None]:
        """Yields the events of all choices as they come. Closing it ends the choices in the engine.

        Raises the error of the first choice that fails.
        """
        headers = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        trace = {name: value for name, value in headers if name in CONTEXT_HEADERS}
        queue: asyncio.Queue[list[Event] | Exception | None] = asyncio.Queue(MAX_WAITING_EVENTS)

        async def run(index: int, answer: Answer) -> None:
            try:
                async with aclosing(self._client.generate(answer.wanted, trace)) as outputs:
                    async for output, is_drafted in outputs:
                        events = self._reply.add(index, output, is_drafted)
                        if events is not None:
                            await queue.put(events)
                        # Only a stop string leaves the stream early. Otherwise it is read to its end: a cancellation
                        # that crosses the end of a request can make Triton wait for that request for ever.
                        if answer.stop_reason is not None:
                            break
                await queue.put(None)
            except Exception as error:
                await queue.put(error)

        tasks = [asyncio.create_task(run(index, answer)) for index, answer in enumerate(self._reply.answers)]
        try:
            num_open = len(tasks)
            while num_open:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _send_events(send: Send, events: list[Event]) -> None:
    lines = [
        (f"event: {name}\n".encode() if name else b"") + b"data: " + to_json(data) + b"\n\n" for name, data in events
    ]
    if lines:
        await send({"type": "http.response.body", "body": b"".join(lines), "more_body": True})


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs work until it ends or the client disconnects."""

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.create_task(work), asyncio.create_task(wait_for_disconnect())
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
    """Writes any data as JSON: NaN and infinity become null, half surrogate pairs become question marks."""
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
