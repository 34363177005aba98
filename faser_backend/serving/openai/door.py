"""`faser openai`: the door as a process of its own, beside a Triton server that is already there."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from faser_backend.config import EngineConfig
from faser_backend.core.errors import ConfigError
from faser_backend.manifest import EngineManifest
from faser_backend.serving.doors import is_loopback
from faser_backend.serving.drafting import served_models
from faser_backend.serving.openai.app import Served, make_app
from faser_backend.serving.openai.callers import Callers, check_origins
from faser_backend.serving.openai.connections import Connection, open_files
from faser_backend.serving.prompts import PromptFormat
from faser_backend.serving.tensor_values import default_text_bytes
from faser_backend.serving.tokenizer import TextTokenizer

MAX_KEYS = 1000
DRAIN_S = 60  # for streams in flight
BACKLOG = 1024  # below MAX_CONNECTIONS: who is accepted is read from before it could be closed for others


@dataclass(frozen=True, slots=True)
class DoorOptions:
    """Where the door listens, and what stands behind it. api_key_file: a key per line."""

    engine_dir: Path
    triton_url: str = "127.0.0.1:8001"
    port: int = 9000
    host: str = "127.0.0.1"
    model_name: str | None = None
    api_key_file: Path | None = None
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    chat_template_file: Path | None = None
    draft: str = "auto"  # as the server has it: a draft model may limit the context
    max_text_bytes: int | None = None  # None: as much as may fit into the context
    metrics_address: str | None = None  # of app.Served, as the next one
    tells_speculation: bool = False
    allowed_origins: tuple[str, ...] = ()  # of web pages that may ask, beside the chat page


def run_door(options: DoorOptions) -> None:
    """Answers requests until SIGINT or SIGTERM, then until those in flight have ended. Raises ConfigError."""
    keys = read_keys(options.api_key_file)
    check_exposure(options.host, keys)
    if (options.tls_cert_file is None) != (options.tls_key_file is None):
        raise ConfigError("tls-cert, tls-key: both are needed, or none")
    callers = Callers(keys, options.host, check_origins(options.allowed_origins))
    app = make_app(describe(options), options.triton_url, callers)
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
        ssl_certfile=options.tls_cert_file,
        ssl_keyfile=options.tls_key_file,
        server_header=False,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    Announced(config).run()


class Announced(uvicorn.Server):
    """Says on stdout, once, that it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            scheme = "https" if self.config.is_ssl else "http"
            host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
            origin = f"{scheme}://{host}:{self.config.port}"
            print(f"OpenAI's API {origin}/v1, chat page {origin}/", flush=True)


def describe(options: DoorOptions) -> Served:
    """What an engine directory says of its model. Raises ManifestError or ConfigError."""
    manifest = EngineManifest.load(options.engine_dir)
    models = served_models(manifest, EngineConfig.from_options(draft=options.draft))
    prompts = PromptFormat.load(options.engine_dir, manifest, chat_template_file=options.chat_template_file)
    tokenizer = TextTokenizer.from_file(options.engine_dir / manifest.tokenizer.name, prompts)
    return Served(
        name=options.model_name or options.engine_dir.resolve().name,
        tokenizer=tokenizer,
        end_ids=manifest.end_ids,
        vocab_size=models.vocab_size,
        max_context=models.max_context,
        kv_block_size=manifest.kv_block_size,
        max_text_bytes=options.max_text_bytes or default_text_bytes(models.max_context, tokenizer.longest_token),
        metrics_address=options.metrics_address,
        tells_speculation=options.tells_speculation,
    )


def check_server(port: int, *, is_decoupled: bool, contract: str) -> None:
    """Raises ConfigError where the door cannot stand before a server that is started like this."""
    if not is_decoupled:
        raise ConfigError(f"openai-port = {port}: it streams from the server: leave out --no-decoupled")
    if contract != "inflight_batcher":
        raise ConfigError(f"openai-port = {port}: asks the models of contract inflight_batcher, not of {contract}")


def check_way(port: int, *, is_encrypted: bool, restricted: tuple[str, ...]) -> None:
    """Raises ConfigError where the server would not hear the door, which asks over gRPC, in the clear, with no key."""
    if is_encrypted:
        raise ConfigError(f"openai-port = {port}: asks Triton's gRPC port in the clear: leave out --grpc-tls-cert")
    if "inference" in restricted:
        raise ConfigError(f"openai-port = {port}: has no admin key: leave inference out of --restrict")


def read_keys(file: Path | None) -> list[str]:
    """Raises ConfigError naming the file."""
    if file is None:
        return []
    try:
        keys = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api-key-file = {file}: not readable as text ({error})") from None
    if not 1 <= len(keys) <= MAX_KEYS:
        raise ConfigError(f"api-key-file = {file}: holds {len(keys)} keys: must hold 1 to {MAX_KEYS}, one per line")
    return keys


def check_exposure(host: str, keys: list[str]) -> None:
    """Raises ConfigError where strangers could use the door without a key."""
    if is_loopback(host) or keys:
        return
    raise ConfigError(f"openai-host = {host}: others than this machine can reach it: needs --api-key-file FILE")
