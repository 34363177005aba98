"""The options of served models, beside those of the engine (config.py), and what a config.pbtxt gives of them.

The names are those that users of TensorRT-LLM's backend know, and ours. A value left as `${name}` or empty is unset;
parameters that mean nothing here (GPU ids on a CPU) are accepted without effect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from faser_backend.core.config import CAPACITY, Option, OptionTable
from faser_backend.serving.access import ALSO_RESTRICTABLE

PORTS, ACCESS, CONTRACT, OPENAI = "Ports and logs", "Access", "Triton's contract", "OpenAI's API"
_UNSET = re.compile(r"\$\{\w+\}")


def given_parameters(model_config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the parameters that are set in a model's configuration, as Triton hands it over in JSON."""
    values = {name: entry.get("string_value", "").strip() for name, entry in model_config.get("parameters", {}).items()}
    return {name: value for name, value in values.items() if value and not _UNSET.fullmatch(value)}


class ModelOptions(OptionTable):
    """Options of single models; model_configs.py says which model reads which."""

    log_format: Annotated[
        Literal["text", "json"], Option("JSON has an object per line, requests by their ids.", PORTS)
    ] = "text"
    otlp_endpoint: Annotated[str | None, Option("OpenTelemetry collector, http://HOST:PORT, for traces.", PORTS)] = None
    triton_max_batch_size: Annotated[int, Field(ge=1)] = 64
    decoupled_mode: bool = True
    add_special_tokens: bool | None = None  # None: as the checkpoint says
    skip_special_tokens: bool = True
    accumulate_tokens: bool = False


class PromptOptions(OptionTable):
    """Options of all that read texts: the engine's model and the OpenAI server."""

    chat_template: Annotated[Path | None, Option("Jinja template instead of the checkpoint's.")] = None
    max_text_bytes: Annotated[
        int | None,
        Field(ge=1),
        Option("Bytes of one text.", CAPACITY, shown_default="what may fit into the context"),
    ] = None


class ServingOptions(PromptOptions):
    """Options of the engine's model, besides decoding."""

    engine_dir: Annotated[
        Path | None,
        Option("Engine directory; default: the demo pair, built on first use.", parameter="gpt_model_path"),
    ] = None
    # This engine batches in flight and does nothing else.
    gpt_model_type: Literal["inflight_batching", "inflight_fused_batching"] = "inflight_fused_batching"
    max_tokens_in_paged_kv_cache: Annotated[int | None, Field(ge=1)] = None  # bounds the KV pool
    out_of_vocab: Annotated[Literal["reject", "clamp"], Option("What to do with unknown token ids.", CONTRACT)] = (
        "reject"
    )
    exclude_input_in_output: Annotated[bool, Option("Unary answers without the prompt.", CONTRACT)] = False
    add_special_tokens: bool | None = None  # None: as the checkpoint says
    stop_requests: Annotated[
        Literal["on", "off"] | None,
        Option(
            "Let `stop` = true end a request by its id, anybody's.",
            ACCESS,
            shown_default="off with --expose-triton, else on",
        ),
    ] = None
    cancellation_check_period_ms: Annotated[int, Field(ge=1)] = 100  # 100 at most take effect
    stats_check_period_ms: Annotated[int, Field(ge=1)] = 250


class ServeOptions(OptionTable):
    """Options of `faser serve` alone: where the server listens, and to whom."""

    http_port: Annotated[int, Option("HTTP port.", PORTS)] = 8000
    grpc_port: Annotated[int, Option("gRPC port.", PORTS)] = 8001
    metrics_port: Annotated[int, Option("Metrics port.", PORTS)] = 8002
    host: Annotated[str, Option("Address to listen on.", PORTS)] = "127.0.0.1"
    verbose: Annotated[bool, Option("Show Triton's own log.", PORTS, "--verbose")] = False
    expose_triton: Annotated[bool, Option("Allow a non-loopback --host.", ACCESS, "--expose-triton")] = False
    admin_key_file: Annotated[
        Path | None,
        Option("File with the key to Triton's administration.", ACCESS, shown_default="nobody has it"),
    ] = None
    restrict: Annotated[
        str | None,
        Option(f"What else needs the admin key, of {', '.join(ALSO_RESTRICTABLE)}.", ACCESS, shown_default="nothing"),
    ] = None
    grpc_tls_cert: Annotated[Path | None, Option("Certificate chain of Triton's gRPC port.", ACCESS)] = None
    grpc_tls_key: Annotated[Path | None, Option("Its private key.", ACCESS)] = None
    grpc_tls_root: Annotated[Path | None, Option("Root of certificates that gRPC clients must have.", ACCESS)] = None
    contract: Annotated[Literal["inflight_batcher", "llmapi"], Option("Names of models and tensors.", CONTRACT)] = (
        "inflight_batcher"
    )
    decoupled: Annotated[
        bool, Option("Use for streaming clients; unary gRPC clients need --no-decoupled.", CONTRACT)
    ] = True
    hang_timeout: Annotated[
        float, Field(ge=0), Option("Seconds without progress after which a process is killed. 0: never.", CAPACITY)
    ] = 10.0
    openai_port: Annotated[int | None, Option("Serve OpenAI's API on this port as well.", OPENAI)] = None


class OpenAIOptions(PromptOptions):
    """Options of the OpenAI server, which `faser openai` starts, or `faser serve` beside Triton."""

    triton: Annotated[str, Option("gRPC address of the Triton server.")] = "127.0.0.1:8001"
    triton_metrics: Annotated[str | None, Option("Address of its metrics, for /metrics.")] = None
    port: Annotated[int, Option("Port of the API.")] = 9000
    host: Annotated[str, Option("Address to listen on for OpenAI's API; others than loopback need keys.", OPENAI)] = (
        "127.0.0.1"
    )
    model_name: Annotated[
        str | None, Option("Name of the model in OpenAI's API.", OPENAI, shown_default="the engine directory's")
    ] = None
    speculation_metrics: Annotated[
        bool, Option("OpenAI's API tells every answer's acceptance, asked or not.", OPENAI)
    ] = False
    api_key_file: Annotated[Path | None, Option("File of API keys, one per line.", OPENAI)] = None
    allow_origin: Annotated[
        list[str], Option("Allow web pages of this origin to ask, as https://HOST. Repeatable.", OPENAI)
    ] = []  # noqa: RUF012 - copied for each
    tls_cert: Annotated[Path | None, Option("Certificate chain, for https.", OPENAI)] = None
    tls_key: Annotated[Path | None, Option("Its private key.", OPENAI)] = None
