"""The commands `faser serve`, `faser openai` and `faser reload`: they check options, then start or call servers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path

import typer

from faser_backend.cli.build import MIN_CONTEXT, BuildOptions
from faser_backend.cli.options import takes
from faser_backend.core.config import EngineConfig, NamedDirectories, OptionTable, option
from faser_backend.core.errors import ConfigError
from faser_backend.serving import parameters as tables
from faser_backend.serving.parameters import ADMIN_KEY_FILE, ModelOptions, OpenAIOptions, ServeOptions, ServingOptions

DEMO_NAME = "demo"  # of the demo pair in OpenAI's API: its directory is named by a hash
LOGS = "log_format otlp_endpoint"
BUILD = BuildOptions.options()
OPENAI = "api_key_file allow_origin tls_cert tls_key speculation_metrics"


class SourceOptions(OptionTable):
    """How `faser serve` builds a checkpoint that MODEL names."""

    runtime: str | None = option(None, BUILD["runtime"], unset="torch on a GPU, else llvm")
    max_context: int | None = option(None, BUILD["max_context"], unset="the models'", ge=MIN_CONTEXT)
    dtype: str | None = option(None, BUILD["dtype"], unset="the runtime's")
    weights: str | None = option(None, BUILD["weights"], unset="as faser build")


@takes(
    run=tables.RunOptions,
    source=SourceOptions,
    serving=ServingOptions,
    where=ServeOptions,
    model=(ModelOptions, LOGS),
    engine=EngineConfig,
    openai=(OpenAIOptions, f"host:openai_host {OPENAI}"),
)
def serve(
    *,
    run: tables.RunOptions,
    source: SourceOptions,
    serving: ServingOptions,
    where: ServeOptions,
    model: ModelOptions,
    engine: EngineConfig,
    openai: OpenAIOptions,
) -> None:
    """Serve a model behind Triton Inference Server.

    SIGINT or SIGTERM drains the server: running requests finish first.
    """
    from faser_backend.serving.model_source import find_engine, shown_name
    from faser_backend.serving.request_reports import check_endpoint
    from faser_backend.text.prompts import check_template, read_template
    from faser_backend.triton.launch import check_engine, serve_until_signalled

    _check_access(where, openai)
    if serving.chat_template is not None:
        check_template(read_template(serving.chat_template))
    if model.otlp_endpoint is not None:
        model = model.model_copy(update={"otlp_endpoint": check_endpoint(model.otlp_endpoint)})
    found = find_engine(run, model.log_format, policy=engine.policy, **source.model_dump(exclude_none=True))
    engine = EngineConfig.from_options(**engine.model_dump(exclude_unset=True) | {"draft": found["draft"]})
    name = shown_name(run.model) if run.model else None if run.engine_dir else DEMO_NAME
    directory = check_engine(found["engine_dir"], engine)
    resolved = {
        "engine_dir": directory.resolve(),
        "model_name": serving.model_name or name or directory.resolve().name,
        "chat_template": None if serving.chat_template is None else serving.chat_template.resolve(),
        "stop_requests": serving.stop_requests or ("off" if where.expose_triton else "on"),
    }
    serving = serving.model_copy(update=resolved)
    command = None
    if where.openai_port is not None:
        own = {"triton_metrics": f"{where.host}:{where.metrics_port}", "port": where.openai_port}
        logs = model.model_dump(include={*LOGS.split()}, exclude_defaults=True)
        given = openai.model_dump(exclude_defaults=True) | own | logs
        command = [sys.executable, "-m", "faser_backend.cli", "openai", *_as_arguments(given)]
    parameters = serving.as_parameters() | engine.as_parameters() | model.as_parameters()
    raise typer.Exit(serve_until_signalled(where, parameters, log_format=model.log_format, openai=command))


def _check_access(where: ServeOptions, openai: OpenAIOptions) -> None:
    """Raises ConfigError for options under which a server would not start, or would be open to strangers."""
    from faser_backend.triton.server import check_ports

    tables.check_host(where.host, is_exposed=where.expose_triton)
    check_ports(where.host, where.ports)
    tables.restriction_options(where.admin_key, where.restrict)
    if where.openai_port is not None:
        from faser_backend.openai.server import callers_of

        callers_of(openai)
    elif unused := openai.model_dump(exclude_defaults=True):
        name, value = next(iter(unused.items()))
        flag = name.replace("host", "openai_host").replace("_", "-")
        raise ConfigError(f"--{flag} = {value}: is for OpenAI's API: give --openai-port too")


def _as_arguments(options: Mapping[str, object]) -> list[str]:
    """Returns the arguments that give these options, none of which is None or False."""
    arguments = []
    for name, value in options.items():
        flag, values = f"--{name.replace('_', '-')}", value if isinstance(value, list) else [value]
        arguments += [flag if each is True else f"{flag}={each}" for each in values]
    return arguments


class ReloadOptions(OptionTable):
    """The options of `faser reload`."""

    engine_dir: Path = option(..., ServingOptions.options()["engine_dir"])
    admin_key_file: Path = option(..., ADMIN_KEY_FILE)
    http: str = option("127.0.0.1:8000", "Connect to Triton's HTTP port at HOST:PORT.")
    lora: NamedDirectories = option([], EngineConfig.options()["lora"], unset="those that are loaded")
    no_lora: bool = option(False, "Serve no LoRA adapters any more.", flags="--no-lora")
    timeout: float = option(600.0, "Wait this many seconds for the new engine.")


@takes(options=ReloadOptions)
def reload(*, options: ReloadOptions) -> None:
    """Replace the engines of a running server.

    Requests in progress finish on the old engines.
    """
    from faser_backend.triton.launch import reload_engine
    from faser_backend.triton.server import Administration

    administration = Administration(options.http, tables.read_admin_key(options.admin_key_file))
    before = reload_engine(
        administration, options.engine_dir, options.timeout, options.lora if options.lora or options.no_lora else None
    )
    print(f"serving {options.engine_dir.resolve()} instead of {before}")


@takes(openai=OpenAIOptions, model=(ModelOptions, LOGS))
def openai(*, openai: OpenAIOptions, model: ModelOptions) -> None:
    """Serve OpenAI's API beside a running Triton.

    Triton must run on this machine, as this user.
    """
    from faser_backend.openai.server import run_openai
    from faser_backend.serving.request_reports import set_up_logging

    set_up_logging(model.log_format, "openai", logging.WARNING)
    run_openai(openai, model)
