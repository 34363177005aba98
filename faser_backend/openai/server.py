"""`faser openai`: starts the OpenAI server, a separate process beside a Triton server of this machine.

Its HTTP connections are uvicorn's, with limits on their number, heads and chunks.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import resource
import socket
import ssl
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from faser_backend.core.errors import ConfigError
from faser_backend.files import FileError, read_text
from faser_backend.openai.app import Callers, make_app
from faser_backend.openai.errors import ApiError, to_json
from faser_backend.serving.parameters import ModelOptions, OpenAIOptions, check_address, is_loopback
from faser_backend.serving.request_reports import Listener, Tracing, log_request
from faser_backend.triton.link import only_socket
from faser_backend.triton.server import check_ports

MAX_KEYS = 1000
DRAIN_S = 60  # time for streams in flight to end
BACKLOG = 1024  # below MAX_CONNECTIONS: a new connection is read before it can be closed to make room
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


def run_openai(options: OpenAIOptions, logs: ModelOptions) -> None:
    """Serves until SIGINT or SIGTERM, then lets the requests in flight end. Raises ConfigError.

    logs: of requests that do not pass through Triton.
    """
    callers = callers_of(options)
    check_ports(options.host, {"port": options.port})
    check_address("triton-metrics", options.triton_metrics)
    listeners: list[Listener] = [log_request] if logs.log_format == "json" else []
    if logs.otlp_endpoint is not None:
        tracing = Tracing(logs.otlp_endpoint)
        atexit.register(tracing.close)
        listeners.append(tracing.trace)
    app = make_app(
        options.engine_socket or only_socket(),
        callers,
        metrics_address=options.triton_metrics,
        listeners=listeners,
        shows_speculation=options.speculation_metrics,
    )
    open_files()
    config = uvicorn.Config(
        app, http=Connection, ws="none", host=options.host, port=options.port, log_level="warning", access_log=False,
        backlog=BACKLOG, timeout_graceful_shutdown=DRAIN_S, ssl_certfile=options.tls_cert, ssl_keyfile=options.tls_key,
        server_header=False,
    )  # fmt: skip
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    _AnnouncedServer(config).run()


class _AnnouncedServer(uvicorn.Server):
    """A server that prints its addresses once it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            scheme = "https" if self.config.is_ssl else "http"
            host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
            origin = f"{scheme}://{host}:{self.config.port}"
            print(f"OpenAI's API {origin}/v1, chat page {origin}/", flush=True)


def callers_of(options: OpenAIOptions) -> Callers:
    """Returns the clients that may send requests. Raises ConfigError, for the files of TLS too."""
    keys = read_keys(options.api_key_file)
    if not keys and not is_loopback(options.host):
        raise ConfigError(f"openai-host = {options.host}: needs --api-key-file FILE, as other machines can reach it")
    if (options.tls_cert is None) != (options.tls_key is None):
        raise ConfigError("tls-cert, tls-key: give both or neither")
    if options.tls_cert is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.tls_cert, options.tls_key)
        except OSError as error:  # ssl's errors are OSErrors
            raise ConfigError(f"tls-cert = {options.tls_cert}: no certificate chain with its key ({error})") from None
    return Callers(keys, options.host, check_origins(options.allow_origin))


def read_keys(file: Path | None) -> list[str]:
    """Reads the API keys, one per line. Raises ConfigError naming the file."""
    if file is None:
        return []
    try:
        keys = [line.strip() for line in read_text(file).splitlines() if line.strip()]
    except FileError as error:
        raise ConfigError(f"api-key-file = {file}: {error.reason}") from None
    if not 1 <= len(keys) <= MAX_KEYS:
        raise ConfigError(f"api-key-file = {file}: has {len(keys)} keys: must have 1 to {MAX_KEYS}, one per line")
    return keys


def check_origins(origins: Sequence[str]) -> tuple[str, ...]:
    """Returns the origins as browsers write them. Raises ConfigError."""
    for origin in origins:
        parts = urlsplit(origin.rstrip("/"))
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.path or parts.query or parts.fragment:
            raise ConfigError(f"allow-origin = {origin!r}: must be SCHEME://HOST[:PORT], with http or https")
    return tuple(origin.rstrip("/").lower() for origin in origins)
