"""Declares the options of served models and servers. core/config.py has those of the engine.

Names follow TensorRT-LLM's backend where it has the option. In a config.pbtxt, a value that is empty or left as
`${name}` is unset.

Who can reach Triton's ports and its administration is checked here too. The APIs of shared memory, model repository,
trace and logging could be abused (docs/security.md), so they need a key in a header. Inference, health, metadata,
configurations and statistics need none.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
import stat
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from faser_backend.core.config import CAPACITY, EngineConfig, Option, OptionTable, option
from faser_backend.core.errors import ConfigError
from faser_backend.files import FileError, read_text

RESTRICTED = ("shared-memory", "model-repository", "trace", "logging")
ALSO_RESTRICTABLE = ("metadata", "inference", "model-config", "statistics")  # health stays open, for probes
KEY_HEADER = "faser-admin-key"  # of HTTP; gRPC clients send it as metadata, with the prefix below
GRPC_PREFIX = "triton-grpc-protocol-"
MIN_KEY, MAX_KEY = 16, 256  # characters
_KEY = re.compile(rf"[A-Za-z0-9_-]{{{MIN_KEY},{MAX_KEY}}}")


def check_host(host: str, *, is_exposed: bool) -> None:
    """Raises ConfigError for a non-loopback address that was not explicitly allowed, and for anything but IPv4."""
    try:
        is_open = not ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        raise ConfigError(f"--host = {host!r}: must be an IPv4 address; Triton's ports take no other") from None
    if is_open and not is_exposed:
        raise ConfigError(
            f"--host = {host!r}: is reached from other machines, and bodies crash the HTTP port of Triton 2.51: put a "
            "proxy that limits them before 127.0.0.1, or give --expose-triton too (docs/security.md)"
        )


def is_loopback(host: str) -> bool:
    """Returns whether the address, or every address of the name, is a loopback address."""
    try:
        return all(ipaddress.ip_address(found[4][0]).is_loopback for found in socket.getaddrinfo(host, None))
    except (OSError, ValueError):
        return False


def check_address(name: str, address: str | None) -> None:
    """Raises ConfigError for an address that is not HOST:PORT. None is allowed."""
    host, _, port = (address or "x:1").rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"{name} = {address!r:.200}: must be HOST:PORT, with a port in [1, 65535]")


def read_admin_key(file: Path) -> str:
    """Reads a key from a regular file that only its owner can read. Raises ConfigError naming the file."""
    named = f"--admin-key-file = {file}"

    def check(status: os.stat_result) -> None:  # of the file that is read, not of one that has replaced it
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            found = f"mode {stat.S_IMODE(status.st_mode):04o}, owner {status.st_uid}"
            raise ConfigError(f"{named}: {found}: must belong to user {os.geteuid()} and to nobody else (chmod 600)")

    try:
        key = read_text(file, check=check).removesuffix("\n")
    except FileError as error:
        raise ConfigError(f"{named}: {error.reason}") from None
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{named}: must hold {MIN_KEY} to {MAX_KEY} letters, digits, - and _, and no more")
    return key


def restriction_options(key: str, restrict: str | None = None) -> list[str]:
    """Returns options of tritonserver. restrict: entries of ALSO_RESTRICTABLE; raises ConfigError for any other."""
    also = [name.strip() for name in (restrict or "").split(",") if name.strip()]
    for name in also:
        if name not in ALSO_RESTRICTABLE:
            raise ConfigError(f"--restrict = {name!r:.80}: must be among {', '.join(ALSO_RESTRICTABLE)}")
    rule = f"{','.join((*RESTRICTED, *also))}:{KEY_HEADER}={key}"
    return [f"--http-restricted-api={rule}", f"--grpc-restricted-protocol={rule}"]


def grpc_tls_options(cert: Path | None, key: Path | None, root: Path | None) -> list[str]:
    """Returns options of tritonserver. With a root certificate, clients need a certificate that it signed.

    Raises ConfigError for a missing option or file.
    """
    given = {"--grpc-tls-cert": cert, "--grpc-tls-key": key, "--grpc-tls-root": root}
    for name, file in given.items():
        if file is not None and not (file.is_file() and os.access(file, os.R_OK)):
            raise ConfigError(f"{name} = {file}: no file that can be read")
    if (cert is None or key is None) and any(given.values()):
        raise ConfigError("--grpc-tls-cert, --grpc-tls-key: both are needed, or none")
    named = {"server-cert": cert, "server-key": key, "root-cert": root}
    switches = ["--grpc-use-ssl=true"] * (cert is not None) + ["--grpc-use-ssl-mutual=true"] * (root is not None)
    return switches + [f"--grpc-{name}={path.resolve()}" for name, path in named.items() if path is not None]


# -- tables of options ------------------------------------------------------------------------------------------------
SERVER, ACCESS, CONTRACT, OPENAI = "Server", "Access", "Triton's contract", "OpenAI's API"
ARGUMENTS = "Arguments"  # the section of options that are given by their position
# Options that several tables have.
HOST = Option("Listen on this address.", SERVER)
ENGINE_DIR = Option("Use this engine directory.", parameter="gpt_model_path", unset="the demo pair, built on first use")
ADMIN_KEY_FILE = Option(
    "Read the key of Triton's administration from this file.", ACCESS, unset="administration is closed"
)
# 64 GB at 1 GB/s, hashed and loaded, take 128 s; kernels, graphs and the warm-up are left 472 s.
START_TIMEOUT_S = 600.0
PATHS = {"gpt_model_path", "chat_template", "policy"}
_UNSET = re.compile(r"\$\{\w+\}")


def given_parameters(model_config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the parameters that are set in a model's configuration, which Triton passes as JSON."""
    values = {name: entry.get("string_value", "").strip() for name, entry in model_config.get("parameters", {}).items()}
    given = {name: value for name, value in values.items() if value and not _UNSET.fullmatch(value)}
    # Triton's Python encodes names of files as ASCII: the bytes of other characters must be surrogates.
    return given | {name: os.fsdecode(given[name].encode()) for name in PATHS & given.keys()}


class ModelOptions(OptionTable):
    """The options of single models; model_configs.py lists the models that read each."""

    log_format: Literal["text", "json"] = option("text", "Write logs as text or as JSON lines.", SERVER)
    otlp_endpoint: str | None = option(
        None, "Send traces to this OpenTelemetry collector, as http://HOST:PORT.", SERVER
    )
    triton_max_batch_size: int = Field(default=64, ge=1)
    decoupled_mode: bool = True
    add_special_tokens: bool | None = None  # None: as the checkpoint says
    skip_special_tokens: bool = True
    accumulate_tokens: bool = False


class RunOptions(OptionTable):
    """The model that a command runs, and what drafts for it; serving/model_source.py finds both."""

    model: str | None = option(None, "Run this engine, checkpoint, GGUF file or hub model.", ARGUMENTS, values="MODEL")
    engine_dir: Path | None = option(None, ENGINE_DIR)
    draft: str = option("auto", EngineConfig.options()["draft"], values="auto|model|ngram|model+ngram|MODEL")


class ServingOptions(OptionTable):
    """The options of the engine's model, besides decoding."""

    engine_dir: Path | None = option(None, ENGINE_DIR)
    chat_template: Path | None = option(None, "Replace the checkpoint's chat template by this Jinja file.")
    model_name: str | None = option(
        None, "Name the model in OpenAI's API.", OPENAI, unset="MODEL's or the engine directory's name"
    )
    max_text_bytes: int | None = option(
        None, "Limit the bytes of one text.", CAPACITY, unset="what fits the context", ge=1
    )
    # The engine supports inflight batching only.
    gpt_model_type: Literal["inflight_batching", "inflight_fused_batching"] = "inflight_fused_batching"
    max_tokens_in_paged_kv_cache: int | None = Field(default=None, ge=1)  # bounds the KV pool
    out_of_vocab: Literal["reject", "clamp"] = option("reject", "Reject or clamp unknown token ids.", CONTRACT)
    exclude_input_in_output: bool = option(False, "Leave the prompt out of unary answers.", CONTRACT)
    add_special_tokens: bool | None = None  # None: as the checkpoint says
    stop_requests: Literal["on", "off"] | None = option(
        None, "Let clients stop any request by its id.", ACCESS, unset="off with --expose-triton, else on"
    )
    cancellation_check_period_ms: int = Field(default=100, ge=1)  # values above 100 act as 100
    stats_check_period_ms: int = Field(default=250, ge=1)


class ServeOptions(OptionTable):
    """The options of Triton's process: its addresses, and who may use them."""

    http_port: int = option(8000, "Listen for HTTP on this port.", SERVER)
    grpc_port: int = option(8001, "Listen for gRPC on this port.", SERVER)
    metrics_port: int = option(8002, "Serve metrics on this port.", SERVER)
    host: str = option("127.0.0.1", HOST)
    verbose: bool = option(False, "Show Triton's own log.", SERVER, flags="--verbose")
    expose_triton: bool = option(False, "Allow a non-loopback --host.", ACCESS, flags="--expose-triton")
    admin_key_file: Path | None = option(None, ADMIN_KEY_FILE)
    restrict: str | None = option(
        None, "Require the admin key for these APIs too.", ACCESS, values=",".join(ALSO_RESTRICTABLE)
    )
    grpc_tls_cert: Path | None = option(None, "Encrypt gRPC with this certificate chain.", ACCESS)
    grpc_tls_key: Path | None = option(None, "Use this private key with --grpc-tls-cert.", ACCESS)
    grpc_tls_root: Path | None = option(None, "Accept only gRPC clients that this root certifies.", ACCESS)
    contract: Literal["inflight_batcher", "llmapi"] = option(
        "inflight_batcher", "Choose the names of models and tensors.", CONTRACT
    )
    decoupled: bool = option(True, "Use for streaming clients; unary gRPC clients need --no-decoupled.", CONTRACT)
    start_timeout: float = option(START_TIMEOUT_S, "Wait this many seconds for the engine to start.", SERVER, ge=1)
    hang_timeout: float = option(10.0, "Kill processes stuck for this many seconds; 0: never.", SERVER, ge=0)
    openai_port: int | None = option(None, "Serve OpenAI's API on this port too.", OPENAI)
    config: Path | None = option(None, "Read options from this YAML or TOML file.")

    @cached_property
    def admin_key(self) -> str:
        """The key in --admin-key-file, else a random, secret one. Raises ConfigError."""
        return secrets.token_urlsafe(32) if self.admin_key_file is None else read_admin_key(self.admin_key_file)

    @property
    def ports(self) -> dict[str, int]:
        """The ports that are opened, by the options that choose them."""
        names = ("http-port", "grpc-port", "metrics-port", "openai-port")
        return {name: port for name in names if (port := getattr(self, name.replace("-", "_"))) is not None}


class OpenAIOptions(OptionTable):
    """The options of the OpenAI server, which `faser openai` starts, or `faser serve` beside Triton."""

    engine_socket: Path | None = option(
        None, "Reach the engine by this socket.", unset="that of this user's only engine"
    )
    triton_metrics: str | None = option(None, "Answer /metrics from Triton's metrics at HOST:PORT.")
    port: int = option(9000, "Listen on this port.")
    host: str = option("127.0.0.1", HOST, section=OPENAI)
    speculation_metrics: bool = option(False, "Report acceptance in every answer, asked or not.", OPENAI)
    api_key_file: Path | None = option(None, "Accept the API keys in this file, one per line.", OPENAI)
    allow_origin: list[str] = option([], "Allow web pages from this https://HOST; repeatable.", OPENAI)
    tls_cert: Path | None = option(None, "Serve https with this certificate chain.", OPENAI)
    tls_key: Path | None = option(None, "Use this private key with --tls-cert.", OPENAI)
