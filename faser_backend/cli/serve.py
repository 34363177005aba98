"""`faser serve`, `faser openai` and `faser reload`: options become what the serving room is told."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from faser_backend.cli.options import print_steps, takes
from faser_backend.core.config import EngineConfig
from faser_backend.serving.parameters import ModelOptions, OpenAIOptions, ServeOptions, ServingOptions

DEMO_NAME = "demo"  # of the demo pair in OpenAI's API: its directory is named by a hash
LOGS = "log_format otlp_endpoint"
OPENAI = "model_name speculation_metrics api_key_file allow_origin tls_cert tls_key"


@takes(
    serving=ServingOptions,
    where=ServeOptions,
    model=(ModelOptions, LOGS),
    engine=EngineConfig,
    openai=(OpenAIOptions, f"host:openai_host {OPENAI}"),
)
def serve(
    *, serving: ServingOptions, where: ServeOptions, model: ModelOptions, engine: EngineConfig, openai: OpenAIOptions
) -> None:
    """Serve an engine directory behind Triton Inference Server until SIGINT or SIGTERM, then drain."""
    from faser_backend.serving.access import GrpcTls, check_host, random_key, read_admin_key
    from faser_backend.serving.tracing import check_endpoint
    from faser_backend.triton.launch import check_engine, serve_until_signalled
    from faser_backend.triton.server import LaunchOptions

    check_host(where.host, is_exposed=where.expose_triton)
    admin_key = random_key() if where.admin_key_file is None else read_admin_key(where.admin_key_file)
    restricted = tuple(name.strip() for name in (where.restrict or "").split(",") if name.strip())
    tls = GrpcTls.of(where.grpc_tls_cert, where.grpc_tls_key, where.grpc_tls_root)
    if where.openai_port is not None:
        from faser_backend.openai.server import check_exposure, check_origins, check_server, read_keys

        check_origins(openai.allow_origin)
        check_server(
            where.openai_port,
            is_decoupled=where.decoupled,
            contract=where.contract,
            is_encrypted=tls is not None,
            restricted=restricted,
        )
        check_exposure(openai.host, read_keys(openai.api_key_file))
    directory = check_engine(serving.engine_dir, engine, serving.chat_template, print_steps())
    resolved = {
        "engine_dir": directory.resolve(),
        "chat_template": None if serving.chat_template is None else serving.chat_template.resolve(),
        "stop_requests": serving.stop_requests or ("off" if where.expose_triton else "on"),
    }
    if model.otlp_endpoint is not None:
        model = model.model_copy(update={"otlp_endpoint": check_endpoint(model.otlp_endpoint)})
    parameters = serving.model_copy(update=resolved).as_parameters() | engine.as_parameters() | model.as_parameters()
    options = LaunchOptions(
        where.http_port,
        where.grpc_port,
        where.metrics_port,
        where.host,
        where.decoupled,
        contract=where.contract,
        parameters=parameters,
        exposes_triton=where.expose_triton,
        admin_key=admin_key,
        also_restricted=restricted,
        grpc_tls=tls,
        has_model_control=where.admin_key_file is not None,
    )
    command = None
    if where.openai_port is not None:
        triton = {"triton": f"{where.host}:{where.grpc_port}", "triton_metrics": f"{where.host}:{where.metrics_port}"}
        name = openai.model_name or (None if serving.engine_dir else DEMO_NAME)
        own = {"port": where.openai_port, "model_name": name}
        shared = {"draft": engine.draft, "log_format": model.log_format, "max_text_bytes": serving.max_text_bytes}
        given = openai.model_dump() | resolved | triton | own | shared
        del given["stop_requests"]
        command = [sys.executable, "-m", "faser_backend.cli", "openai", *_as_arguments(given)]
    status = serve_until_signalled(
        options, shows_log=where.verbose, log_format=model.log_format, openai=command, hang_timeout_s=where.hang_timeout
    )
    raise typer.Exit(status)


def _as_arguments(options: Mapping[str, object]) -> list[str]:
    """A command line that gives these options. None and False are left out, a list is an option for each."""
    arguments = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            arguments.append(flag)
        elif value is not None and value is not False:
            arguments += [f"{flag}={each}" for each in (value if isinstance(value, list) else [value])]
    return arguments


def reload(
    engine_dir: Annotated[Path, typer.Option(help="Engine directory to serve from now on.", show_default=False)],
    admin_key_file: Annotated[Path, typer.Option(help="That of `faser serve`.", show_default=False)],
    http: Annotated[str, typer.Option(help="HOST:PORT of the server's HTTP port.")] = "127.0.0.1:8000",
    timeout: Annotated[float, typer.Option(help="Seconds that the new engine may take to be ready.")] = 600.0,
) -> None:
    """Have a running server change its engines; requests that it has begun end with the old ones."""
    from faser_backend.serving.access import read_admin_key
    from faser_backend.triton.admin import Administration
    from faser_backend.triton.reload import reload_engine

    before = reload_engine(Administration(http, read_admin_key(admin_key_file)), engine_dir, timeout)
    print(f"served from now on: {engine_dir.resolve()}; before: {before}")


@takes(
    serving=(ServingOptions, "engine_dir"),
    openai=OpenAIOptions,
    engine=(EngineConfig, "draft"),
    model=(ModelOptions, "log_format"),
)
def openai(*, serving: ServingOptions, openai: OpenAIOptions, engine: EngineConfig, model: ModelOptions) -> None:
    """Serve OpenAI's API in front of a Triton server that serves the engine directory already."""
    from faser_backend.openai.server import run_openai
    from faser_backend.serving.demo_engine import demo_engine_dir
    from faser_backend.serving.log_format import set_up_logging

    set_up_logging(model.log_format, "openai", logging.WARNING)
    if serving.engine_dir is None and openai.model_name is None:
        openai = openai.model_copy(update={"model_name": DEMO_NAME})
    run_openai(openai, serving.engine_dir or demo_engine_dir(print_steps()), engine.draft)
