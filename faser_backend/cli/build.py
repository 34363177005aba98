"""The command `faser build`: its options and its summary. Room `engines` builds."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from faser_backend.cli.options import MAX_CONTEXT, OUTPUT, STORAGE, TARGET, TENSORRT, parse_integers, takes
from faser_backend.core.config import MAX_NUM_SEQS, OptionTable, option
from faser_backend.core.errors import ConfigError
from faser_backend.files import shown
from faser_backend.runtime_spec import DEFAULT_RUNTIME, RUNTIMES

if TYPE_CHECKING:
    from faser_backend.engines.tensorrt_buckets import SplitStreams, TensorRtOptions
    from faser_backend.manifest import EngineManifest

Split = TypeVar("Split")
MIB = 1 << 20
FORMATS = "fp32|fp16|bf16|int8|int4"
MIN_CONTEXT = 32  # a profile needs it
NGRAM = "ngram"  # instead of a draft checkpoint; ./ngram names a directory
PASSED_ON = {"runtime", "dtype", "weights", "draft_weights", "kv_block_size", "kv_cache_dtype"}
PASSED_ON |= {"compute", "max_context"}


class BuildOptions(OptionTable):
    """The options of `faser build`."""

    target: Path = option(..., TARGET)
    output: Path = option(..., OUTPUT)
    draft: str = option(NGRAM, "Draft with this checkpoint, head or block drafter, or ngram.", values="path|ngram")
    runtime: str = option(DEFAULT_RUNTIME, "Choose the runtime; llvm is for CPUs.", values="|".join(RUNTIMES))
    exit_layers: str = option("", "Allow early exits after these target layers, as 2,4.")
    max_context: int | None = option(None, MAX_CONTEXT, unset="the models'; TensorRT: 4096", ge=MIN_CONTEXT)
    dtype: str = option("fp32", "Compute in this format; CPUs need fp32.", STORAGE, values="fp32|fp16|bf16")
    weights: str | None = option(
        None,
        "Store the target's matrices in this format, for CPUs.",
        STORAGE,
        values=FORMATS,
        unset="llvm: the checkpoint's, but fp16 for GGUF's K, IQ and Q5; others: fp32",
    )
    draft_weights: str | None = option(
        None,
        "Store the draft's matrices in this format, for CPUs.",
        STORAGE,
        values=FORMATS,
        unset="the draft checkpoint's; int8 for 16 bits",
    )
    compute: str | None = option(
        None, "Multiply inputs as one or two bfloat16 numbers, on CPUs.", STORAGE, values="bf16|bf16x2", unset="bf16"
    )
    kv_block_size: int = option(16, "Put this many tokens into a KV block.", STORAGE)
    kv_cache_dtype: str | None = option(
        None,
        "Store keys and values in this format, for CPUs.",
        STORAGE,
        values="fp32|fp16",
        unset="fp16 for 16-bit checkpoints if this CPU converts it, else fp32",
    )
    max_num_seqs: int | None = option(
        None, "Compile for at most this many sequences per call.", TENSORRT, unset="32", ge=1, le=MAX_NUM_SEQS
    )
    max_prefill_tokens: int | None = option(
        None,
        "Compile for at most this many prompt tokens per call.",
        TENSORRT,
        unset="1024; TensorRT-RTX 256",
        ge=1,
        le=65536,
    )
    compute_capability: str = option("", "Compile TensorRT-RTX engines for these GPUs, as 8.9,12.0.", TENSORRT)

    # Each split adds three profiles to every engine.
    splits: str | None = option(
        None,
        "Compile for these SM splits too, as 16/116,32/100.",
        TENSORRT,
        values="all|none|NAMES",
        unset="the best guess",
    )
    pool_copies: Literal["refuse", "allow"] = option("refuse", "Refuse engines that copy KV pools, or allow.", TENSORRT)

    def check(self) -> None:
        """Raises ConfigError for a checkpoint that is not there, or an option that cannot apply."""
        _check_source("--target", str(self.target))
        if self.draft != NGRAM:
            _check_source("--draft", self.draft)
        compiled = [name for name, spec in RUNTIMES.items() if spec.tensorrt]
        for name in ("max_num_seqs", "max_prefill_tokens", "compute_capability"):
            if (value := getattr(self, name)) not in (None, "") and self.runtime not in compiled:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} = {value}: applies to --runtime {' and '.join(compiled)} only")
        if self.splits not in (None, "none") and (self.runtime != "tensorrt" or self.draft == NGRAM):
            raise ConfigError(f"--splits = {self.splits}: applies to --runtime tensorrt with a draft model only")


@takes(options=BuildOptions)
def build(*, options: BuildOptions) -> None:
    """Compile target and draft checkpoints into an engine directory."""
    from faser_backend.engines.build import build_engines
    from faser_backend.manifest import MANIFEST_FILE
    from faser_backend.serving.loading import shown_phases

    options.check()
    output = options.output
    with ExitStack() as handles:
        phases = handles.enter_context(shown_phases())
        was_built = (output / MANIFEST_FILE).is_file()
        manifest = build_engines(
            options.target,
            None if options.draft == NGRAM else options.draft,
            output,
            exit_layers=parse_integers("--exit-layers", options.exit_layers),
            **options.model_dump(include=PASSED_ON),
            tensorrt=_tensorrt_options(options, handles),
            progress=lambda what, done, total: phases.begin(f"step {min(done + 1, total)} of {total}: {what}"),
        )
    print(summary(output, manifest) + "; replaces the engines that were there" * was_built)
    sizes = [model.num_weight_bytes / MIB for model in manifest.models.values()]
    if sizes[-1] > sizes[0]:
        print(
            f"warning: the draft has {sizes[-1]:.1f} MiB of weights, the target only {sizes[0]:.1f} MiB, so drafting "
            "cannot help; are --target and --draft swapped?",
            file=sys.stderr,
        )


def _check_source(option: str, given: str) -> None:
    """Raises ConfigError, with what was probably meant, if `given` cannot be a checkpoint."""
    if given.endswith(".safetensors") and os.path.isfile(given):
        folder = shown(os.path.dirname(given) or ".")
        raise ConfigError(f"{option} = {shown(given)!r}: holds only weights; name its directory: {option} {folder}")
    if not os.path.exists(given):
        is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", given)
        hub = f"; if it is a model of the Hugging Face hub: `hf download {given} --local-dir DIR`, then {option} DIR"
        raise ConfigError(f"{option} = {shown(given)!r}: no such file or directory{hub if is_name else ''}")


def summary(output: Path, manifest: EngineManifest) -> str:
    """Returns one line about the engines in a directory."""
    parts = [f"built {output} for {manifest.runtime}, {manifest.dtype}"]
    if manifest.draft is None:
        parts.append("no draft model (n-grams draft)")
    if manifest.runtime_spec.is_cpu:
        parts.append(f"products {manifest.compute}")
    if manifest.kv_cache_dtype != manifest.dtype:
        parts.append(f"KV cache {manifest.kv_cache_dtype}")
    for side, model in manifest.models.items():
        stored = model.weight_format
        if stored.title != "fp32":
            parts.append(f"{side} weights {stored.title}")
        if stored.rounded:
            parts.append(f"rounded again: {stored.rounded}")
    if manifest.exit_layers:
        parts.append(f"exit layers {', '.join(map(str, manifest.exit_layers))}")
    if manifest.compiler:
        parts.append(manifest.compiler)
    parts.append(f"context {manifest.target.spec.max_context}")
    parts.append(f"{sum(file.num_bytes for file in manifest.files) / MIB:.0f} MiB")
    return ", ".join(parts)


def _tensorrt_options(options: BuildOptions, handles: ExitStack) -> TensorRtOptions | None:
    """Returns None for runtimes without TensorRT. handles: closes the streams after the build."""
    flavour = RUNTIMES[options.runtime].tensorrt if options.runtime in RUNTIMES else ""
    if not flavour:
        return None
    from faser_backend.engines.tensorrt_buckets import CallLimits, TensorRtOptions

    limits: dict[str, int] = {"max_prefill_tokens": RUNTIMES[options.runtime].num_prefill_tokens}
    limits |= options.model_dump(include={"max_num_seqs", "max_prefill_tokens", "max_context"}, exclude_none=True)
    capabilities = tuple(part.strip() for part in options.compute_capability.split(",") if part.strip())
    streams = _open_split_streams(options, handles) if flavour == "full" else {}
    return TensorRtOptions(CallLimits(**limits), capabilities, streams, options.pool_copies == "allow")


def chosen_splits(wanted: str | None, offered: Mapping[str, Split]) -> dict[str, Split]:
    """Returns the splits that --splits names. offered: by name, the best guess first. Raises ConfigError."""
    default = {None: list(offered)[:1], "all": list(offered), "none": []}
    names = default[wanted] if wanted in default else [name.strip() for name in str(wanted).split(",")]
    if unknown := [name for name in names if name not in offered]:
        raise ConfigError(f"--splits = {unknown[0]}: this GPU offers {', '.join(offered) or 'none'}")
    return {name: offered[name] for name in names}


def _checkpoint_bytes(place: Path) -> int:
    return sum(file.stat().st_size for file in ([place] if place.is_file() else place.glob("*.safetensors")))


def _open_split_streams(options: BuildOptions, handles: ExitStack) -> dict[str, SplitStreams]:
    """Opens a stream per SM split that --splits names on this GPU. Closed with `handles`.

    Returns {} without green contexts or a draft, or if TensorRT cannot build for a split. Raises TensorRtError if
    TensorRT or a GPU is missing.
    """
    from faser_backend.cuda.green_contexts import load_driver
    from faser_backend.device.partition import split_name
    from faser_backend.engines.tensorrt_buckets import SplitStreams
    from faser_backend.engines.tensorrt_build import require_gpu
    from faser_backend.plugins.tensorrt_import import import_tensorrt

    tensorrt = import_tensorrt("full")
    require_gpu(tensorrt.title)
    if not tensorrt.has_profile_streams or options.draft == NGRAM:
        chosen_splits(options.splits, {})  # TensorRT older than 11 has none to offer
        return {}
    import torch

    from faser_backend.cuda.runtime import best_first
    from faser_backend.cuda.streams import open_menu

    torch.cuda.init()
    opened = open_menu(torch.cuda, torch.cuda.current_device(), load_driver)
    handles.callback(opened.close)
    sizes = _checkpoint_bytes(Path(options.draft)), _checkpoint_bytes(options.target)
    offered: dict[str, Any] = {split_name(*split): split for split in best_first(opened.menu.splits, *sizes)}
    return {
        name: SplitStreams(draft.stream.cuda_stream, target.stream.cuda_stream)
        for name, (draft, target) in chosen_splits(options.splits, offered).items()
    }
