"""`faser openai`: starts the OpenAI server, a separate process beside a Triton server of this machine."""

from __future__ import annotations

import atexit
import logging
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn

from faser_backend.core.errors import ConfigError
from faser_backend.files import FileError, read_text
from faser_backend.openai.app import Callers, make_app
from faser_backend.openai.connections import Connection, open_files
from faser_backend.serving.access import check_address, is_loopback
from faser_backend.serving.log_format import log_request
from faser_backend.serving.parameters import ModelOptions, OpenAIOptions
from faser_backend.serving.request_life import Listener
from faser_backend.serving.tracing import Tracing
from faser_backend.triton.link import only_socket
from faser_backend.triton.server import check_ports

MAX_KEYS = 1000
DRAIN_S = 60  # time for streams in flight to end
BACKLOG = 1024  # below MAX_CONNECTIONS: a new connection is read before it can be closed to make room


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
        app,
        http=Connection,
        ws="none",
        host=options.host,
        port=options.port,
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=DRAIN_S,
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
        server_header=False,
    )
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
