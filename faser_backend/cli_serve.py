"""`faser serve`, `faser openai` and `faser reload`: options become what the serving room is told."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from faser_backend.cli_options import (
    Acceptance,
    AcceptanceRule,
    AdminKeyFile,
    Admission,
    AllowOrigin,
    ApiKeyFile,
    ChatTemplate,
    Contract,
    Draft,
    Drafting,
    EarlyExit,
    EarlyExits,
    EngineDir,
    GrpcCert,
    GrpcKey,
    GrpcRoot,
    LogFormat,
    Logs,
    MaxTextBytes,
    ModelName,
    OpenAiHost,
    OtlpEndpoint,
    OutOfVocab,
    Pipeline,
    PipelineMode,
    Policy,
    Restrict,
    SpeculationMetrics,
    StopRequest,
    StopRequests,
    Threads,
    TlsCert,
    TlsKey,
    print_steps,
)
from faser_backend.config import DEFAULT_POLICY, EngineConfig

DEMO_NAME = "demo"  # of the demo pair in OpenAI's API: its directory is named by a hash


def serve(
    *,
    engine_dir: EngineDir = None,
    http_port: Annotated[int, typer.Option(help="HTTP port.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC port.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="Metrics port.")] = 8002,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    expose_triton: Annotated[bool, typer.Option("--expose-triton", help="Let --host be reached by others.")] = False,
    admin_key_file: AdminKeyFile = None,
    restrict: Restrict = "",
    grpc_tls_cert: GrpcCert = None,
    grpc_tls_key: GrpcKey = None,
    grpc_tls_root: GrpcRoot = None,
    otlp_endpoint: OtlpEndpoint = None,
    log_format: Logs = LogFormat.TEXT,
    decoupled: Annotated[bool, typer.Option(help="Streaming clients need it; unary ones its opposite.")] = True,
    policy: Policy = DEFAULT_POLICY,
    draft: Draft = Drafting.AUTO,
    acceptance: AcceptanceRule = Acceptance.MATCH,
    early_exit: EarlyExits = EarlyExit.AUTO,
    pipeline: PipelineMode = Pipeline.AUTO,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that decode side by side.")] = 32,
    max_queue_size: Annotated[int, typer.Option(help="Requests that may wait; 0 is unbounded.")] = 256,
    num_kv_blocks: Annotated[int | None, typer.Option(help="KV blocks.", show_default="from free memory")] = None,
    prefix_reuse: Annotated[bool, typer.Option(help="Share the KV blocks of equal prompt beginnings.")] = True,
    admission: Annotated[Admission, typer.Option(help="When waiting requests may start.")] = Admission.MAX_UTILIZATION,
    num_threads: Threads = None,
    out_of_vocab: Annotated[OutOfVocab, typer.Option(help="What to do with unknown token ids.")] = OutOfVocab.REJECT,
    chat_template: ChatTemplate = None,
    max_text_bytes: MaxTextBytes = None,
    stop_requests: StopRequest = None,
    exclude_input_in_output: Annotated[bool, typer.Option(help="Unary answers without the prompt.")] = False,
    contract: Annotated[Contract, typer.Option(help="Names of models and tensors.")] = Contract.INFLIGHT_BATCHER,
    openai_port: Annotated[
        int | None, typer.Option(help="Serve OpenAI's API on this port as well.", show_default=False)
    ] = None,
    openai_host: OpenAiHost = "127.0.0.1",
    model_name: ModelName = None,
    speculation_metrics: SpeculationMetrics = False,
    api_key_file: ApiKeyFile = None,
    allow_origin: AllowOrigin = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    hang_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds without progress after which a process is killed. 0: never.")
    ] = 10.0,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show Triton's own log.")] = False,
) -> None:
    """Serve an engine directory behind Triton Inference Server until SIGINT or SIGTERM, then drain."""
    from faser_backend.serving.access import GrpcTls, check_host, random_key, read_admin_key
    from faser_backend.serving.launch import check_engine, serve_until_signalled
    from faser_backend.serving.server import LaunchOptions
    from faser_backend.serving.tracing import check_endpoint

    check_host(host, is_exposed=expose_triton)
    admin_key = random_key() if admin_key_file is None else read_admin_key(admin_key_file)
    restricted = tuple(name.strip() for name in restrict.split(",") if name.strip())
    tls = GrpcTls.of(grpc_tls_cert, grpc_tls_key, grpc_tls_root)
    if openai_port is not None:
        from faser_backend.serving.openai.callers import check_origins
        from faser_backend.serving.openai.server import check_exposure, check_server, read_keys

        check_origins(allow_origin or ())
        check_server(
            openai_port,
            is_decoupled=decoupled,
            contract=contract.value,
            is_encrypted=tls is not None,
            restricted=restricted,
        )
        check_exposure(openai_host, read_keys(api_key_file))
    phases = {
        "policy": policy,
        "draft": draft.value,
        "acceptance": acceptance.value,
        "early_exit": early_exit.value,
        "pipeline": pipeline.value,
    }
    config = EngineConfig.from_options(**phases)
    directory = check_engine(engine_dir, config, chat_template, print_steps())
    parameters = {
        "engine_dir": str(directory.resolve()),
        **phases,
        "max_num_seqs": str(max_num_seqs),
        "max_queue_size": str(max_queue_size),
        "enable_kv_cache_reuse": str(prefix_reuse).lower(),
        "batch_scheduler_policy": admission.value,
        "out_of_vocab": out_of_vocab.value,
        "exclude_input_in_output": str(exclude_input_in_output).lower(),
        "log_format": log_format.value,
        "stop_requests": (stop_requests or (StopRequests.OFF if expose_triton else StopRequests.ON)).value,
    }
    template_file = None if chat_template is None else chat_template.resolve()
    optional = {
        "num_kv_blocks": num_kv_blocks,
        "num_threads": num_threads,
        "chat_template": template_file,
        "max_text_bytes": max_text_bytes,
        "otlp_endpoint": None if otlp_endpoint is None else check_endpoint(otlp_endpoint),
    }
    parameters |= {name: str(value) for name, value in optional.items() if value is not None}
    options = LaunchOptions(
        http_port,
        grpc_port,
        metrics_port,
        host,
        decoupled,
        contract=contract.value,
        parameters=parameters,
        exposes_triton=expose_triton,
        admin_key=admin_key,
        also_restricted=restricted,
        grpc_tls=tls,
        has_model_control=admin_key_file is not None,
    )
    command = None
    if openai_port is not None:
        command = [sys.executable, "-m", "faser_backend.cli", "openai", "--engine-dir", str(directory)]
        command += ["--triton", f"{host}:{grpc_port}", "--port", str(openai_port), "--host", openai_host]
        command += ["--draft", draft.value, "--log-format", log_format.value]
        command += ["--triton-metrics", f"{host}:{metrics_port}", *["--speculation-metrics"] * speculation_metrics]
        files = {"api-key-file": api_key_file, "tls-cert": tls_cert, "tls-key": tls_key, "chat-template": template_file}
        given = {"model-name": model_name or (None if engine_dir else DEMO_NAME), "max-text-bytes": max_text_bytes}
        given |= files
        command += [f"--{name}={value}" for name, value in given.items() if value is not None]
        command += [f"--allow-origin={origin}" for origin in allow_origin or ()]
    status = serve_until_signalled(
        options, shows_log=verbose, log_format=log_format.value, openai=command, hang_timeout_s=hang_timeout
    )
    raise typer.Exit(status)


def reload(
    engine_dir: Annotated[Path, typer.Option(help="Engine directory to serve from now on.", show_default=False)],
    admin_key_file: Annotated[Path, typer.Option(help="That of `faser serve`.", show_default=False)],
    http: Annotated[str, typer.Option(help="HOST:PORT of the server's HTTP port.")] = "127.0.0.1:8000",
    timeout: Annotated[float, typer.Option(help="Seconds that the new engine may take to be ready.")] = 600.0,
) -> None:
    """Have a running server change its engines; requests that it has begun end with the old ones."""
    from faser_backend.serving.access import read_admin_key
    from faser_backend.serving.admin import Administration
    from faser_backend.serving.reload import reload_engine

    before = reload_engine(Administration(http, read_admin_key(admin_key_file)), engine_dir, timeout)
    print(f"served from now on: {engine_dir.resolve()}; before: {before}")


def openai(
    *,
    engine_dir: EngineDir = None,
    triton: Annotated[str, typer.Option(help="gRPC address of the Triton server.")] = "127.0.0.1:8001",
    triton_metrics: Annotated[
        str | None, typer.Option(help="Address of its metrics, for /metrics.", show_default=False)
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the API.")] = 9000,
    host: OpenAiHost = "127.0.0.1",
    model_name: ModelName = None,
    speculation_metrics: SpeculationMetrics = False,
    api_key_file: ApiKeyFile = None,
    allow_origin: AllowOrigin = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    chat_template: ChatTemplate = None,
    draft: Draft = Drafting.AUTO,
    max_text_bytes: MaxTextBytes = None,
    log_format: Logs = LogFormat.TEXT,
) -> None:
    """Serve OpenAI's API in front of a Triton server that serves the engine directory already."""
    from faser_backend.serving.demo_engine import demo_engine_dir
    from faser_backend.serving.log_format import set_up_logging
    from faser_backend.serving.openai.server import OpenAIOptions, run_openai

    set_up_logging(log_format.value, "openai", logging.WARNING)
    directory = engine_dir or demo_engine_dir(print_steps())
    name = model_name or (None if engine_dir else DEMO_NAME)
    files = (api_key_file, tls_cert, tls_key, chat_template)
    told = {"metrics_address": triton_metrics, "shows_speculation": speculation_metrics}
    told["allowed_origins"] = tuple(allow_origin or ())
    run_openai(OpenAIOptions(directory, triton, port, host, name, *files, draft.value, max_text_bytes, **told))
