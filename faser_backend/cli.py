"""The `faser` command. Each command is one function; what it does lives in the rooms, what measures in `lab/`.

Every error that a user can cause or mend ends as one line on stderr and exit status 1.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from faser_backend.cli_build import build
from faser_backend.cli_options import (
    Acceptance,
    AcceptanceRule,
    Admission,
    ApiKeyFile,
    ChatTemplate,
    Contract,
    Draft,
    Drafting,
    EarlyExit,
    EarlyExits,
    EngineDir,
    MaxTextBytes,
    ModelName,
    OpenAiHost,
    OutOfVocab,
    Pipeline,
    PipelineMode,
    Policy,
    Threads,
    TlsCert,
    TlsKey,
    parse_integers,
    print_progress,
)
from faser_backend.config import DEFAULT_POLICY, EngineConfig
from faser_backend.core.errors import FaserError
from faser_backend.files import shown
from faser_backend.version import VERSION

DEMO_NAME = "demo"  # of the demo pair in OpenAI's API: its directory is named by a hash
app = typer.Typer(
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Speculative decoding behind NVIDIA Triton.",
)


@app.callback()
def _main(
    is_version: Annotated[bool, typer.Option("--version", help="Print the version and end.", is_eager=True)] = False,
) -> None:
    if is_version:
        print(f"faser {VERSION}")
        raise typer.Exit


@app.command()
def doctor(
    is_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    engine_dir: Annotated[Path | None, typer.Option(help="Print what this engine takes of memory.")] = None,
    gpu_gib: Annotated[float | None, typer.Option(help="With --engine-dir: of a GPU that is not here.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="With --engine-dir: as of `faser serve`.")] = 32,
    num_kv_blocks: Annotated[
        int | None, typer.Option(help="With --engine-dir, on a CPU: likewise.", show_default="from free memory")
    ] = None,
) -> None:
    """Say what this machine can run, and why not. Status 1 where it cannot serve at all."""
    from faser_backend.serving.doctor import examine, print_report
    from faser_backend.serving.memory_report import memory_report

    if engine_dir is not None:
        config = EngineConfig.from_options(max_num_seqs=max_num_seqs, num_kv_blocks=num_kv_blocks)
        print("\n".join(memory_report(engine_dir, gpu_gib=gpu_gib, config=config)))
        return
    findings = examine()
    if is_json:
        print(json.dumps([finding.as_dict() for finding in findings], indent=1))
    else:
        print_report(findings)
    if any(finding.is_needed and not finding.is_ok for finding in findings):
        raise typer.Exit(1)


app.command()(build)


@app.command()
def generate(
    *,
    prompt: Annotated[str | None, typer.Option(help="Text to complete.", show_default=False)] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids instead, e.g. 1,2,3.", show_default=False)] = None,
    is_chat: Annotated[bool, typer.Option("--chat", help="The prompt is a message; use the chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message before it.", show_default=False)] = None,
    messages: Annotated[
        Path | None, typer.Option(help='JSON file instead: [{"role": ..., "content": ...}].', show_default=False)
    ] = None,
    chat_template: ChatTemplate = None,
    engine_dir: EngineDir = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 decodes greedily.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Default: a fresh one.", show_default=False)] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text to stop after; may be given several times.")] = None,
    policy: Policy = DEFAULT_POLICY,
    draft: Draft = Drafting.AUTO,
    acceptance: AcceptanceRule = Acceptance.MATCH,
    early_exit: EarlyExits = EarlyExit.AUTO,
    pipeline: PipelineMode = Pipeline.AUTO,
    num_threads: Threads = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    explain: Annotated[bool, typer.Option(help="Print to stderr what the policy weighed, and when.")] = False,
) -> None:
    """Complete one prompt without a server; prints the text as it comes, then speed and acceptance."""
    from faser_backend.api.one_shot import OneShotOptions, generate_once, report_line
    from faser_backend.serving.explain import Explainer

    options = OneShotOptions(
        engine_dir=engine_dir,
        prompt=prompt,
        prompt_ids=None if prompt_ids is None else parse_integers("--prompt-ids", prompt_ids),
        is_chat=is_chat,
        system=system,
        messages_file=messages,
        chat_template_file=chat_template,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_strings=tuple(stop or ()),
        policy=policy,
        draft=draft.value,
        acceptance=acceptance.value,
        early_exit=early_exit.value,
        pipeline=pipeline.value,
        num_threads=num_threads,
    )
    on_step = Explainer(partial(print, file=sys.stderr)).observe if explain else None
    on_text = _ignore if is_json else _print_text
    result = generate_once(options, on_text=on_text, progress=print_progress, on_step=on_step)
    if is_json:
        print(json.dumps(result))
    else:
        print(f"\n{report_line(result)}")


@app.command()
def serve(
    *,
    engine_dir: EngineDir = None,
    http_port: Annotated[int, typer.Option(help="HTTP port.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC port.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="Metrics port.")] = 8002,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    expose_triton: Annotated[bool, typer.Option("--expose-triton", help="Let --host be reached by others.")] = False,
    admin_key_file: Annotated[
        Path | None, typer.Option(help="File with the key to Triton's administration.", show_default="nobody has it")
    ] = None,
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
    exclude_input_in_output: Annotated[bool, typer.Option(help="Unary answers without the prompt.")] = False,
    contract: Annotated[Contract, typer.Option(help="Names of models and tensors.")] = Contract.INFLIGHT_BATCHER,
    openai_port: Annotated[
        int | None, typer.Option(help="Serve OpenAI's API on this port as well.", show_default=False)
    ] = None,
    openai_host: OpenAiHost = "127.0.0.1",
    model_name: ModelName = None,
    api_key_file: ApiKeyFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show Triton's own log.")] = False,
) -> None:
    """Serve an engine directory behind Triton Inference Server until SIGINT or SIGTERM, then drain."""
    from faser_backend.serving.doors import check_host, random_key, read_admin_key
    from faser_backend.serving.launch import check_engine, serve_until_signalled
    from faser_backend.serving.server import LaunchOptions

    check_host(host, is_exposed=expose_triton)
    admin_key = random_key() if admin_key_file is None else read_admin_key(admin_key_file)
    if openai_port is not None:
        from faser_backend.serving.openai.door import check_exposure, check_server, read_keys

        check_server(openai_port, is_decoupled=decoupled, contract=contract.value)
        check_exposure(openai_host, read_keys(api_key_file))
    phases = {
        "policy": policy,
        "draft": draft.value,
        "acceptance": acceptance.value,
        "early_exit": early_exit.value,
        "pipeline": pipeline.value,
    }
    directory = check_engine(engine_dir, EngineConfig.from_options(**phases), chat_template, print_progress)
    parameters = {
        "engine_dir": str(directory.resolve()),
        **phases,
        "max_num_seqs": str(max_num_seqs),
        "max_queue_size": str(max_queue_size),
        "enable_kv_cache_reuse": str(prefix_reuse).lower(),
        "batch_scheduler_policy": admission.value,
        "out_of_vocab": out_of_vocab.value,
        "exclude_input_in_output": str(exclude_input_in_output).lower(),
    }
    template_file = None if chat_template is None else chat_template.resolve()
    optional = {
        "num_kv_blocks": num_kv_blocks,
        "num_threads": num_threads,
        "chat_template": template_file,
        "max_text_bytes": max_text_bytes,
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
    )
    door = None
    if openai_port is not None:
        door = [sys.executable, "-m", "faser_backend.cli", "openai", "--engine-dir", str(directory)]
        door += ["--triton", f"{host}:{grpc_port}", "--port", str(openai_port), "--host", openai_host]
        door += ["--draft", draft.value]
        files = {"api-key-file": api_key_file, "tls-cert": tls_cert, "tls-key": tls_key, "chat-template": template_file}
        given = {"model-name": model_name or (None if engine_dir else DEMO_NAME), "max-text-bytes": max_text_bytes}
        given |= files
        door += [f"--{name}={value}" for name, value in given.items() if value is not None]
    raise typer.Exit(serve_until_signalled(options, shows_log=verbose, door=door))


@app.command()
def openai(
    *,
    engine_dir: EngineDir = None,
    triton: Annotated[str, typer.Option(help="gRPC address of the Triton server.")] = "127.0.0.1:8001",
    port: Annotated[int, typer.Option(help="Port of the API.")] = 9000,
    host: OpenAiHost = "127.0.0.1",
    model_name: ModelName = None,
    api_key_file: ApiKeyFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    chat_template: ChatTemplate = None,
    draft: Draft = Drafting.AUTO,
    max_text_bytes: MaxTextBytes = None,
) -> None:
    """Serve OpenAI's API in front of a Triton server that serves the engine directory already."""
    from faser_backend.serving.demo_engine import demo_engine_dir
    from faser_backend.serving.openai.door import DoorOptions, run_door

    directory = engine_dir or demo_engine_dir(print_progress)
    name = model_name or (None if engine_dir else DEMO_NAME)
    files = (api_key_file, tls_cert, tls_key, chat_template)
    run_door(DoorOptions(directory, triton, port, host, name, *files, draft.value, max_text_bytes))


def _add_lab_commands() -> None:
    """What measures and trains: `lab/` imports this package, and this function alone imports `lab/`."""
    from lab.commands import bench, profile, replay, simulate
    from lab.train_head.command import train_head

    for command in (profile, bench, replay, simulate, train_head):
        app.command()(command)


_add_lab_commands()


def main() -> None:
    """Entry point: turns errors into one line and a status."""
    if not {"serve", "openai"} & set(
        sys.argv[1:2]
    ):  # `faser generate | head` ends quietly; a server's client may leave
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        app()
    except FaserError as error:
        fail(str(error))
    except OSError as error:  # a full disk, a folder that nobody may write to
        where = "" if error.filename is None else f"{shown(os.fsdecode(error.filename))}: "
        fail(f"{where}{error.strerror or error}")
    except MemoryError as error:
        fail(f"out of memory: {error or 'no further details'}")


def fail(message: str) -> None:
    """Ends the command with one line."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)


def _print_text(text: str) -> None:
    print(text, end="", flush=True)


def _ignore(text: str) -> None:
    """Takes streamed text where only the final object is printed."""


if __name__ == "__main__":
    main()
