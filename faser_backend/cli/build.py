"""The command `faser build`: its options, its progress bar and what it says at the end. The work is in engines."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from faser_backend.cli.options import STORAGE, TENSORRT, parse_integers, print_steps
from faser_backend.core.errors import ConfigError
from faser_backend.files import FileError, read_bytes, shown
from faser_backend.runtime_spec import DEFAULT_RUNTIME, RUNTIMES

if TYPE_CHECKING:
    from faser_backend.engines.build import Progress as Report
    from faser_backend.engines.tensorrt_buckets import SplitStreams, TensorRtOptions
    from faser_backend.manifest import EngineManifest, ModelEngine

MIB = 1 << 20
FORMATS = "fp32, fp16, bf16, int8 or int4"
WHERE = "For CPUs alone, which compute in fp32 (--dtype)."
MIN_CONTEXT = 32  # in which a profile can be taken
NGRAM = "ngram"  # in place of a draft checkpoint; a directory of that name can be given as ./ngram


def build(
    *,
    target: Annotated[Path, typer.Option(help="Target: a Hugging Face or TensorRT-LLM directory, or a GGUF file.")],
    output: Annotated[Path, typer.Option(help="Engine directory to write.")],
    draft: Annotated[
        str, typer.Option(help="Draft checkpoint with the same vocabulary, or EAGLE-3 head; ngram for no model.")
    ] = NGRAM,
    runtime: Annotated[str, typer.Option(help="llvm (CPU), tensorrt_rtx, tensorrt or torch (GPU).")] = DEFAULT_RUNTIME,
    exit_layers: Annotated[str, typer.Option(help="Target layers to cut at, e.g. 2,4.")] = "",
    dtype: Annotated[
        str, typer.Option(help="fp32, fp16 or bf16; CPUs take fp32 alone.", rich_help_panel=STORAGE)
    ] = "fp32",
    weights: Annotated[
        str | None,
        typer.Option(
            help=f"How the target's matrices are stored: {FORMATS}. {WHERE}",
            show_default="llvm: as the checkpoint has them (GGUF's K and Q5: fp16); else fp32",
            rich_help_panel=STORAGE,
        ),
    ] = None,
    draft_weights: Annotated[
        str | None,
        typer.Option(
            help="The same for the draft.", show_default="as its checkpoint has them", rich_help_panel=STORAGE
        ),
    ] = None,
    kv_block_size: Annotated[int, typer.Option(help="Tokens per KV block.", rich_help_panel=STORAGE)] = 16,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(
            help="fp32 or fp16 keys and values. For CPUs; elsewhere they have the dtype.",
            show_default="fp16 where both checkpoints hold 16 bits a number and this CPU converts them, else fp32",
            rich_help_panel=STORAGE,
        ),
    ] = None,
    max_context: Annotated[
        int | None,
        typer.Option(help="Tokens of a sequence, prompt and output.", show_default="the models'; TensorRT: 4096"),
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Sequences in one call.", show_default="32", rich_help_panel=TENSORRT)
    ] = None,
    max_prefill_tokens: Annotated[
        int | None, typer.Option(help="Prompt tokens in one call.", show_default="256", rich_help_panel=TENSORRT)
    ] = None,
    compute_capability: Annotated[
        str,
        typer.Option(
            help="TensorRT-RTX: GPUs to compile for, e.g. 8.9,12.0.",
            show_default="its own choice",
            rich_help_panel=TENSORRT,
        ),
    ] = "",
) -> None:
    """Compile a target and a draft checkpoint into an engine directory."""
    from faser_backend.engines.build import build_engines
    from faser_backend.manifest import MANIFEST_FILE

    _check_source("--target", str(target))
    if draft != NGRAM:
        _check_source("--draft", draft)
    if max_context is not None and max_context < MIN_CONTEXT:
        raise ConfigError(f"--max-context = {max_context}: must be at least {MIN_CONTEXT} tokens of prompt and output")

    asked = {
        "--max-num-seqs": max_num_seqs,
        "--max-prefill-tokens": max_prefill_tokens,
        "--compute-capability": compute_capability or None,
    }
    given = [option for option, value in asked.items() if value is not None]
    compiled = [name for name, spec in RUNTIMES.items() if spec.tensorrt]
    if given and runtime not in compiled:
        raise ConfigError(f"{given[0]} = {asked[given[0]]}: for --runtime {' or '.join(compiled)} alone")
    with ExitStack() as handles:
        options = None
        if runtime in compiled:
            limits = {"max_num_seqs": max_num_seqs, "max_prefill_tokens": max_prefill_tokens}
            limits["max_context"] = max_context
            streams = _open_split_streams(handles) if RUNTIMES[runtime].tensorrt == "full" else {}
            options = _tensorrt_options(limits, compute_capability, streams)
        profile = _profile_of(output)
        was_built = (output / MANIFEST_FILE).is_file()
        manifest = build_engines(
            target,
            None if draft == NGRAM else draft,
            output,
            runtime=runtime,
            exit_layers=parse_integers("--exit-layers", exit_layers),
            dtype=dtype,
            weights=weights,
            draft_weights=draft_weights,
            kv_block_size=kv_block_size,
            kv_cache_dtype=kv_cache_dtype,
            max_context=max_context,
            tensorrt=options,
            progress=handles.enter_context(progress_display()),
        )
    print(summary(output, manifest) + "; replaces the engines that were there" * was_built)
    if manifest.draft is not None and manifest.draft.num_weight_bytes > manifest.target.num_weight_bytes:
        print(_large_draft_warning(manifest.target, manifest.draft), file=sys.stderr)
    if profile is not None:
        print(_restore_profile(output, manifest, profile))
    if {weights, draft_weights} - {None, "fp32"}:
        print("what these formats of weights do to answers: scripts/check_weights.py")


def _check_source(option: str, given: str) -> None:
    """Raises ConfigError where there is nothing of that name, with what was probably meant."""
    if os.path.isdir(given):
        return
    if os.path.isfile(given):
        if given.endswith(".safetensors"):
            folder = shown(os.path.dirname(given) or ".")
            raise ConfigError(
                f"{option} = {shown(given)!r}: holds weights alone; give its directory: {option} {folder}"
            )
        if not given.endswith(".gguf") and not _begins_as_gguf(given):
            raise ConfigError(f"{option} = {shown(given)!r}: must be a checkpoint's directory or a GGUF file")
        return
    if os.path.exists(given):
        raise ConfigError(f"{option} = {shown(given)!r}: must be a directory or a regular file")
    remedy = ""
    if option == "--draft" and get_close_matches(given, [NGRAM]):
        remedy = f"; for n-grams of the text say {NGRAM}"
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", given):
        remedy = f"; if it is a model of the Hugging Face hub: `hf download {given} --local-dir DIR`, then {option} DIR"
    raise ConfigError(f"{option} = {shown(given)!r}: no such file or directory{remedy}")


def _begins_as_gguf(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"GGUF"


def _large_draft_warning(target: ModelEngine, draft: ModelEngine) -> str:
    sizes = [model.num_weight_bytes / MIB for model in (draft, target)]
    return (
        f"warning: the draft has {sizes[0]:.1f} MiB of weights, its target {sizes[1]:.1f} MiB: a draft that costs more "
        "than its target cannot speed it up; are --target and --draft swapped?"
    )


def _profile_of(output: Path) -> bytes | None:
    """The profile of the engines that are about to be replaced."""
    from faser_backend.serving.profile_store import PROFILE_FILE

    try:
        return read_bytes(output / PROFILE_FILE)
    except FileError:
        return None


def _restore_profile(output: Path, manifest: EngineManifest, profile: bytes) -> str:
    """Puts a profile back if it holds for the new engines too. Returns what became of it, in words."""
    from faser_backend.serving.profile_store import PROFILE_FILE, load_profile

    path = output / PROFILE_FILE
    path.write_bytes(profile)
    try:
        load_profile(output, manifest)
    except ConfigError as error:
        path.unlink()
        return f"the profile that was here is gone, for it does not hold for the new engines: {error}"
    return f"kept {PROFILE_FILE}: it holds for the new engines too"


@contextmanager
def progress_display() -> Iterator[Report]:
    """A bar on a terminal, which follows what a compiler does within a step; else a line per step."""
    if not sys.stderr.isatty():
        yield print_steps()
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=escape(what), completed=done, total=total)


def summary(output: Path, manifest: EngineManifest) -> str:
    """One line on what was built."""
    parts = [f"built {output} for {manifest.runtime}, {manifest.dtype}"]
    if manifest.draft is None:
        parts.append("no draft model: n-grams draft")
    if manifest.kv_cache_dtype != manifest.dtype:
        parts.append(f"KV cache {manifest.kv_cache_dtype}")
    for side, model in (("target", manifest.target), ("draft", manifest.draft)):
        if model is None:
            continue
        stored = model.weight_format
        if stored.title != "fp32":
            parts.append(f"{side} weights {stored.title}")
        if stored.rounded:
            parts.append(f"of which rounded once more: {stored.rounded}")
    if manifest.exit_layers:
        parts.append(f"exit layers {', '.join(map(str, manifest.exit_layers))}")
    if manifest.compiler:
        parts.append(manifest.compiler)
    parts.append(f"context {manifest.target.spec.max_context}")
    parts.append(f"{sum(file.num_bytes for file in manifest.files) / MIB:.0f} MiB")
    return ", ".join(parts)


def _tensorrt_options(
    limits: dict[str, int | None], compute_capability: str, streams: dict[str, SplitStreams]
) -> TensorRtOptions:
    from faser_backend.engines.tensorrt_buckets import CallLimits, TensorRtOptions

    targets = tuple(part.strip() for part in compute_capability.split(",") if part.strip())
    given = {name: value for name, value in limits.items() if value is not None}
    return TensorRtOptions(CallLimits(**given), targets, streams)


def _open_split_streams(handles: ExitStack) -> dict[str, SplitStreams]:
    """Streams of the SM splits that a server will open on this GPU; none where it has no green contexts or where
    TensorRT cannot build for a split. Raises TensorRtError where TensorRT or a GPU is missing."""
    from faser_backend.cuda.identity import load_driver
    from faser_backend.device.partition import split_name
    from faser_backend.engines.tensorrt_buckets import SplitStreams
    from faser_backend.engines.tensorrt_build import require_gpu
    from faser_backend.plugins.tensorrt_import import import_tensorrt

    tensorrt = import_tensorrt("full")
    require_gpu(tensorrt.title)
    if not tensorrt.has_profile_streams:  # older than 11
        return {}
    import torch

    from faser_backend.cuda.streams import open_menu

    torch.cuda.init()
    opened = open_menu(torch.cuda, torch.cuda.current_device(), load_driver)
    handles.callback(opened.close)
    if opened.choice.kind != "green_contexts":
        return {}
    return {
        split_name(draft, target): SplitStreams(draft.stream.cuda_stream, target.stream.cuda_stream)
        for draft, target in opened.menu.splits
    }
