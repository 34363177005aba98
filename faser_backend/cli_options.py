"""Option types that commands of the `faser` command line share, and how their values are read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from faser_backend.core.errors import ConfigError
from faser_backend.policy.registry import known_policies
from faser_backend.serving.access import ALSO_RESTRICTABLE


class Contract(Enum):
    INFLIGHT_BATCHER = "inflight_batcher"
    LLMAPI = "llmapi"


class Admission(Enum):
    MAX_UTILIZATION = "max_utilization"
    GUARANTEED_NO_EVICT = "guaranteed_no_evict"


class Acceptance(Enum):
    MATCH = "match"
    REJECTION = "rejection"


class Drafting(Enum):
    AUTO = "auto"
    MODEL = "model"
    NGRAM = "ngram"
    MODEL_AND_NGRAM = "model+ngram"


class EarlyExit(Enum):
    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Pipeline(Enum):
    AUTO = "auto"
    SERIAL = "serial"
    RUN_AHEAD = "run_ahead"
    PING_PONG = "ping_pong"


class OutOfVocab(Enum):
    REJECT = "reject"
    CLAMP = "clamp"


class StopRequests(Enum):
    ON = "on"
    OFF = "off"


class LogFormat(Enum):
    TEXT = "text"
    JSON = "json"


EngineDir = Annotated[
    Path | None, typer.Option(help="Engine directory; default: the demo pair, built on first use.", show_default=False)
]
Policy = Annotated[
    str,
    typer.Option(help=f"What decides how much is drafted: {known_policies()}."),
]
Draft = Annotated[Drafting, typer.Option("--draft", help="Who drafts. Auto: the draft model where there is one.")]
AcceptanceRule = Annotated[Acceptance, typer.Option("--acceptance", help="How drafted tokens are accepted.")]
EarlyExits = Annotated[EarlyExit, typer.Option("--early-exit", help="Auto: as the policy decides.")]
PipelineMode = Annotated[Pipeline, typer.Option("--pipeline", help="Auto: as the policy decides.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads of the engine.", show_default="all cores")]
MaxTextBytes = Annotated[
    int | None,
    typer.Option("--max-text-bytes", min=1, help="Bytes of one text.", show_default="what may fit into the context"),
]
ChatTemplate = Annotated[
    Path | None, typer.Option("--chat-template", help="Jinja template instead of the checkpoint's.", show_default=False)
]

OpenAiHost = Annotated[str, typer.Option(help="Address to listen on for OpenAI's API; others than loopback need keys.")]
SpeculationMetrics = Annotated[bool, typer.Option(help="OpenAI's API tells every answer's acceptance, asked or not.")]
ModelName = Annotated[
    str | None, typer.Option(help="Name of the model in OpenAI's API.", show_default="the engine directory's")
]
AllowOrigin = Annotated[
    list[str] | None,
    typer.Option(help="Allow web pages of this origin to ask, as https://HOST. Repeatable.", show_default=False),
]
ApiKeyFile = Annotated[Path | None, typer.Option(help="File of API keys, one per line.", show_default=False)]
TlsCert = Annotated[Path | None, typer.Option(help="Certificate chain, for https.", show_default=False)]
TlsKey = Annotated[Path | None, typer.Option(help="Its private key.", show_default=False)]


OtlpEndpoint = Annotated[
    str | None, typer.Option(help="OpenTelemetry collector, http://HOST:PORT, for traces.", show_default=False)
]
Logs = Annotated[LogFormat, typer.Option("--log-format", help="JSON has an object per line, requests by their ids.")]
StopRequest = Annotated[
    StopRequests | None,
    typer.Option(
        "--stop-requests",
        help="Let `stop` = true end a request by its id, anybody's.",
        show_default="off with --expose-triton, else on",
    ),
]
Restrict = Annotated[
    str, typer.Option(help=f"What else needs the admin key, of {', '.join(ALSO_RESTRICTABLE)}.", show_default="nothing")
]
GrpcCert = Annotated[Path | None, typer.Option(help="Certificate chain of Triton's gRPC port.", show_default=False)]
GrpcKey = Annotated[Path | None, typer.Option(help="Its private key.", show_default=False)]
GrpcRoot = Annotated[
    Path | None, typer.Option(help="Root of certificates that gRPC clients must have.", show_default=False)
]
AdminKeyFile = Annotated[
    Path | None, typer.Option(help="File with the key to Triton's administration.", show_default="nobody has it")
]


PANELS = {  # of a command's help: names of parameters; all others are under "Options"
    "Ports and logs": ["http_port", "grpc_port", "metrics_port", "host", "log_format", "otlp_endpoint", "verbose"],
    "Access": [
        "expose_triton", "admin_key_file", "restrict", "stop_requests", "grpc_tls_cert", "grpc_tls_key",
        "grpc_tls_root",
    ],
    "OpenAI's API": [
        "openai_port", "openai_host", "model_name", "speculation_metrics", "api_key_file", "allow_origin", "tls_cert",
        "tls_key",
    ],
    "Sampling": ["max_tokens", "temperature", "top_k", "top_p", "seed", "stop"],
    "Speculation": ["policy", "draft", "acceptance", "early_exit", "pipeline"],
    "Capacity": [
        "max_num_seqs", "max_queue_size", "num_kv_blocks", "prefix_reuse", "admission", "num_threads", "max_text_bytes",
        "hang_timeout",
    ],
    "Triton's contract": ["contract", "decoupled", "out_of_vocab", "exclude_input_in_output"],
    "How weights and caches are stored": [
        "dtype", "weights", "draft_weights", "kv_block_size", "kv_cache_dtype",
    ],
    "TensorRT": ["max_prefill_tokens", "compute_capability"],
}  # fmt: skip


class PanelCommand(TyperCommand):
    """A command whose help has a section per panel. No name is cut, however narrow the terminal is."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panel_of = {name: panel for panel, names in PANELS.items() for name in names}
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                other = "Options" if param.param_type_name == "option" else "Arguments"
                sections.setdefault(panel_of.get(param.name or "", other), []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def parse_integers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"{option} = {text!r}: must be integers separated by commas") from None


def print_steps() -> Callable[[str, int, int], None]:
    """Prints the first report of each step of a build."""
    last_done = -1

    def report(what: str, done: int, total: int) -> None:
        nonlocal last_done
        if done != last_done:
            last_done = done
            print(f"[{done}/{total}] {what}", file=sys.stderr)

    return report
