"""Builds engine directories: checkpoints -> specs -> tensors -> the runtime's builder -> manifest.

`build_engines` is the whole way. Everything is written to a temporary sibling of the output, which is then renamed.
An interrupted build therefore leaves nothing that a server would load.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from faser_backend import files
from faser_backend.core.model import COMPUTES, ONE_PART, TWO_PARTS, WEIGHT_FORMATS, ModelSpec, WeightFormat
from faser_backend.engines.checkpoint import CheckpointError
from faser_backend.engines.pairs import open_pair
from faser_backend.engines.tensorrt_buckets import CallLimits, TensorRtOptions
from faser_backend.engines.tokenizer_files import write_tokenizer
from faser_backend.engines.weights import ModelWeights
from faser_backend.engines.weights_build import WeightsBuilder, choose_kv_cache_dtype, choose_weights, format_of
from faser_backend.manifest import DTYPES, MANIFEST_FILE, EngineManifest, FileSpec, ModelEngine
from faser_backend.plugins.tensorrt_import import EXTRAS, TensorRtError, import_tensorrt
from faser_backend.runtime_spec import DEFAULT_RUNTIME, RUNTIMES
from faser_backend.version import VERSION

if TYPE_CHECKING:
    from faser_backend.engines.tensorrt_build import TensorRtCompiler

# Bytes per weight, about.
BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5}
Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class _Steps:
    """A count of the steps of a build. `report` gets the current step, the steps done and their total."""

    report: Progress | None
    total: int = 0  # set once the models are open
    done: int = 0

    def begin(self, what: str) -> None:
        self.done += 1
        self.note(what)

    def note(self, what: str) -> None:
        """Reports progress within the step that was begun last."""
        if self.report is not None:
            self.report(what, self.done - 1, self.total)


def build_engines(
    target_dir: str | Path,
    draft_dir: str | Path | None,
    output_dir: str | Path,
    *,
    runtime: str = DEFAULT_RUNTIME,
    exit_layers: tuple[int, ...] = (),
    dtype: str = "fp32",
    weights: str | None = None,
    draft_weights: str | None = None,
    kv_block_size: int = 16,
    kv_cache_dtype: str | None = None,
    compute: str | None = None,
    max_context: int | None = None,
    tensorrt: TensorRtOptions | None = None,
    progress: Progress | None = None,
) -> EngineManifest:
    """Builds both models into output_dir, replacing an engine directory there.

    draft_dir: None builds a target alone, for drafting by n-grams. runtime: a name in runtime_spec.RUNTIMES.
    exit_layers: target layers after which verification may stop, in ascending order, each in [1, num_layers).
    weights, draft_weights: formats of the matrices of target and draft, see engines.weights_build.choose_weights.
    kv_cache_dtype: dtype of keys and values, see engines.weights_build.choose_kv_cache_dtype.
    compute: arithmetic of products, one of COMPUTES, for runtime "llvm" only; None = its default.
    max_context: limit of prompt + output tokens; None = the models' limit.
    tensorrt: calls and devices to compile for, for TensorRT's runtimes only; None = its defaults.
    progress: called as progress(what, steps_done, steps_total) before each step, within long ones, and at the
    end, on any thread.
    Raises CheckpointError naming file or field, value and limit, or TensorRtError naming the stage. output_dir
    is then unchanged.
    """
    output = Path(output_dir).absolute()
    _check_choices(runtime, dtype, kv_block_size)
    compute = _choose_compute(runtime, compute)
    requested = {"target": weights, "draft": draft_weights}
    _check_formats(runtime, requested, has_draft=draft_dir is not None)
    _check_output(output)
    steps = _Steps(progress)
    compiler = None
    if RUNTIMES[runtime].tensorrt is not None:
        tensorrt = tensorrt or TensorRtOptions(CallLimits(max_context=max_context))
        compiler = _tensorrt_compiler(runtime, dtype, tensorrt, kv_block_size, steps)
        max_context = tensorrt.limits.max_context if max_context is None else max_context
    elif tensorrt is not None:
        names = ", ".join(name for name, spec in RUNTIMES.items() if spec.tensorrt)
        raise CheckpointError(f"runtime = {runtime!r}: limits and targets of TensorRT need one of {names}")
    draft = None if draft_dir is None else Path(draft_dir)
    pair = open_pair(Path(target_dir), draft, max_context, steps.note, joins_experts=not RUNTIMES[runtime].is_cpu)
    formats = {side: choose_weights(runtime, side, requested[side], found) for side, found in pair.weights.items()}
    kv_cache_dtype = choose_kv_cache_dtype(runtime, dtype, kv_cache_dtype, pair.specs)
    specs = pair.specs if tensorrt is None else {name: tensorrt.limits.apply(s) for name, s in pair.specs.items()}
    for name, spec in specs.items():
        if spec.num_experts and not RUNTIMES[runtime].has_experts:
            raise CheckpointError(f"runtime = {runtime!r}: does not support experts ({name}: {spec.family})")
        if spec.block_size and RUNTIMES[runtime].tensorrt is not None:
            raise CheckpointError(f"runtime = {runtime!r}: does not support block drafters ({name}: {spec.family})")
    _check_exit_layers(exit_layers, specs["target"], has_draft=draft is not None)
    cuts = {side: (*(exit_layers if side == "target" else ()), spec.num_layers) for side, spec in specs.items()}
    _check_room(output, sum(_num_bytes(pair.weights[side], form, dtype) for side, form in formats.items()))
    builder = compiler or WeightsBuilder(runtime, dtype, formats, steps.begin)
    steps.total = builder.num_steps(sum(map(len, cuts.values())), len(cuts), has_head=pair.head is not None) + 1
    with _partial_directory(output) as partial:
        models: dict[str, ModelEngine] = {}
        for side, spec in specs.items():  # the target first: a head may share its embedding
            if side == "draft" and pair.head is not None:
                head = replace(pair.head, spec=spec)
                models[side] = builder.write_head(head, pair.weights, models["target"], partial)
            else:
                models[side] = builder.write_model(side, spec, pair.weights[side], cuts[side], partial)
        steps.begin("tokenizer and manifest")
        tokenizer, config, prompts = write_tokenizer(
            pair.tokenizer, pair.prompts, pair.end_ids, specs["target"].max_context, partial
        )
        manifest = EngineManifest(
            runtime=runtime,
            dtype=dtype,
            kv_block_size=kv_block_size,
            kv_cache_dtype=kv_cache_dtype,
            compute=compute,
            exit_layers=tuple(exit_layers),
            target=models["target"],
            draft=models.get("draft"),
            vocab_hash=pair.tokenizer.vocab_hash,
            end_ids=pair.end_ids,
            tokenizer=FileSpec.of(tokenizer),
            tokenizer_config=FileSpec.of(config),
            prompts=FileSpec.of(prompts),
            builder_version=VERSION,
            compiler=compiler.tensorrt.title if compiler is not None else "",
            compute_capabilities=tensorrt.compute_capabilities if tensorrt is not None else (),
        )
        manifest.save(partial)
        partial.chmod(0o755)
        _publish(partial, output)
    if progress is not None:
        progress("done", steps.total, steps.total)
    return manifest


def _tensorrt_compiler(
    runtime: str, dtype: str, options: TensorRtOptions, kv_block_size: int, steps: _Steps
) -> TensorRtCompiler:
    """Returns the compiler. Raises TensorRtError if TensorRT, or the library of its graphs, is not installed."""
    flavour = import_tensorrt(RUNTIMES[runtime].tensorrt).flavour
    try:
        from faser_backend.engines.tensorrt_build import TensorRtCompiler  # imports onnx, an optional dependency
    except ModuleNotFoundError as error:
        raise TensorRtError(f"{error}; install it with pip install 'faser-backend[{EXTRAS[flavour]}]'") from None
    return TensorRtCompiler(runtime, dtype, options, kv_block_size, steps.begin)


@contextmanager
def _partial_directory(output: Path) -> Iterator[Path]:
    """Makes a folder beside the output; removes it unless it was renamed. Raises CheckpointError if a disk fails."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        prefix, suffix = f".{output.name}.", ".partial"
        with tempfile.TemporaryDirectory(suffix, prefix, output.parent, ignore_cleanup_errors=True) as partial:
            yield Path(partial)
    except OSError as error:
        if error.errno is None:  # raised by a progress callback, not by a system call
            raise
        free = shutil.disk_usage(output.parent).free
        raise CheckpointError(f"output_dir = {output}: {error.strerror}; {free} bytes of disk are free") from None


def _publish(partial: Path, output: Path) -> None:
    """Replaces the old directory by the finished one. A reader sees the old one, the new one, or none."""
    if output.exists():
        retired = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".retired", dir=output.parent))
        os.rename(output, retired / output.name)
        os.rename(partial, output)
        shutil.rmtree(retired, ignore_errors=True)
    else:
        os.rename(partial, output)


def _check_choices(runtime: str, dtype: str, kv_block_size: int) -> None:
    for field, value, choices in (("runtime", runtime, RUNTIMES), ("dtype", dtype, DTYPES)):
        if value not in choices:
            raise CheckpointError(f"{field} = {value!r}: must be one of {', '.join(choices)}")
    if dtype not in (built := RUNTIMES[runtime].dtypes):
        raise CheckpointError(f"dtype = {dtype!r}: runtime {runtime!r} supports only {built[0]!r}")
    if not 1 <= kv_block_size <= 1024:
        raise CheckpointError(f"kv_block_size = {kv_block_size}: must lie in [1, 1024]")


def _choose_compute(runtime: str, requested: str | None) -> str:
    if not RUNTIMES[runtime].is_cpu:
        if requested is not None:
            raise CheckpointError(f"compute = {requested!r}: applies to runtimes of CPUs only")
        return TWO_PARTS
    if requested not in {None, *COMPUTES}:
        raise CheckpointError(f"compute = {requested!r}: must be one of {', '.join(COMPUTES)}")
    return requested or ONE_PART


def _check_formats(runtime: str, formats: dict[str, str | None], *, has_draft: bool) -> None:
    for side, weight_format in formats.items():
        if weight_format is None:
            continue
        field = f"weights of {side} = {weight_format!r}"
        if weight_format not in WEIGHT_FORMATS:
            raise CheckpointError(f"{field}: must be one of {', '.join(WEIGHT_FORMATS)}")
        if weight_format == "fp32":
            continue
        if not RUNTIMES[runtime].is_cpu:
            raise CheckpointError(f"{field}: only for runtimes of a CPU; for {runtime!r} choose the dtype")
        if side == "draft" and not has_draft:
            raise CheckpointError(f"{field}: there is no draft model to build")


def _check_output(output: Path) -> None:
    """Refuses to replace anything except an engine directory or an empty one, and unwritable paths."""
    _check_room(output, 0)
    if not output.exists():
        return
    if output.is_mount():
        raise CheckpointError(f"output_dir = {output}: is a mount point; name a directory in it")
    if not output.is_dir() or (any(output.iterdir()) and not (output / MANIFEST_FILE).is_file()):
        raise CheckpointError(f"output_dir = {output}: has files that are no engines; name a new or an empty directory")


def _num_bytes(weights: ModelWeights, weight_format: WeightFormat, dtype: str) -> int:
    """Returns about how many bytes a model takes in its files."""
    formats = {name: format_of(name, weight_format) if dtype == "fp32" else dtype for name in weights}
    return round(sum(BYTES[form] * math.prod(weights.shape(name)) for name, form in formats.items()))


def _check_room(output: Path, num_bytes: int) -> None:
    """Raises CheckpointError if the engine directory cannot be written, or the disk has too little room."""
    try:
        files.check_room(output.parent, num_bytes, "the engine directory")
    except files.FileError as error:
        raise CheckpointError(f"output_dir = {error}") from None


def _check_exit_layers(exit_layers: tuple[int, ...], spec: ModelSpec, *, has_draft: bool) -> None:
    if exit_layers and not has_draft:
        raise CheckpointError(f"exit_layers = {list(exit_layers)}: early exits need a draft model")
    for layer in exit_layers:
        if not 1 <= layer < spec.num_layers:
            raise CheckpointError(f"exit_layers = {layer}: must lie in [1, {spec.num_layers - 1}]")
    if list(exit_layers) != sorted(set(exit_layers)):
        raise CheckpointError(f"exit_layers = {list(exit_layers)}: must be in ascending order")
