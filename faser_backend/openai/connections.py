"""The HTTP connections of the OpenAI server: uvicorn's protocol with limits on their number, heads and chunks."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from faser_backend.openai.errors import ApiError, to_json

MAX_CONNECTIONS = 2048
SPARE_FILES = 128  # open files besides connections
MAX_HEAD_BYTES = 16 << 10
MAX_CHUNKS = 2048  # per body: a chunk of one byte costs as much as one of a mebibyte
HEAD_S = 10.0  # for a request's head, and for the rest of a body that has been answered


def open_files() -> None:
    """Raises the limit of open files for MAX_CONNECTIONS; allows fewer connections if that is forbidden."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + SPARE_FILES
    if 0 <= soft < wanted:  # below 0: no limit
        soft = wanted if hard < 0 else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        Connection.most = soft - SPARE_FILES


class _Reader(h11.Connection):
    """h11's reader, which also refuses requests that only attackers send."""

    refusal: str | None = None  # uvicorn drops the message
    _num_chunks = 0

    def _refuse(self, message: str) -> None:
        self.refusal = message
        raise h11.RemoteProtocolError(message)

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = 0
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                # Request smuggling: a proxy that uses the other header would see a second request.
                self._refuse("both Content-Length and Transfer-Encoding are given")
        elif isinstance(event, h11.Data) and event.chunk_end:
            self._num_chunks += 1
            if self._num_chunks > MAX_CHUNKS:
                self._refuse(f"the body comes in more than {MAX_CHUNKS} chunks")
        return event


class Connection(H11Protocol):
    """uvicorn's connection with limits. Beyond `most`, those that have been idle longest are closed."""

    most = MAX_CONNECTIONS

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn: _Reader = _Reader(h11.SERVER, MAX_HEAD_BYTES)
        self.idle_since_s = time.monotonic()
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > self.most:
            self._make_room()

    def _make_room(self) -> None:
        """Closes several idle connections at once, so that the search is rare."""
        others = (one for one in self.connections if isinstance(one, Connection) and one is not self and one.is_idle)
        oldest = sorted(others, key=lambda one: one.idle_since_s)[: 1 + self.most // 16]
        if not oldest:
            self._refuse(503, f"{self.most} connections are open, all with requests; retry later")
        for one in oldest:
            one.transport.abort()
            self.connections.discard(one)  # else it counts until the next iteration of the event loop

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        self.idle_since_s = time.monotonic()
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._watch()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, self.conn.refusal or msg)

    def _watch(self) -> None:
        """Limits the time for a request that has begun to HEAD_S; uvicorn limits idle connections."""
        is_awaited = self.is_idle and self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        is_limited = is_awaited and self.timeout_keep_alive_task is None and not self.transport.is_closing()
        if not is_limited and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        elif is_limited and self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_S, self.transport.abort)

    def _refuse(self, status: int, message: str) -> None:
        body = to_json(ApiError(message, status=status).body())
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        with contextlib.suppress(h11.LocalProtocolError):  # a response has begun
            self.transport.write(self.conn.send(h11.Response(status_code=status, headers=headers)) or b"")
            self.transport.write(self.conn.send(h11.Data(data=body)) or b"")
        self.transport.close()
