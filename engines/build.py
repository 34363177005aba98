"""Checkpoints -> engine directory. The directory appears whole or not at all.

Everything is written to a temporary sibling, then renamed, so that an interrupted build leaves
nothing that a server would load. Knows which runtime takes which files; compilers know the rest.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from engines.arrays import CheckpointError
from engines.build_checks import check_choices, check_exit_layers, check_experts, check_output, check_room, num_bytes_of
from engines.decoder import build_segment
from engines.eagle3 import Eagle3Head
from engines.eagle3_graph import write_head
from engines.eagle3_llvm import write_llvm_head
from engines.graph import WeightStore
from engines.llvm_build import check_llvm, write_llvm_model
from engines.pairs import CheckpointPair, open_pair
from engines.prompts import read_prompts
from engines.tensorrt_build import TensorRtCompiler, TensorRtOptions
from engines.tokenizer_config import write_tokenizer
from engines.torch_build import write_torch_head, write_torch_model
from engines.weight_formats import check_formats, choose_kv_cache_dtype, choose_weights
from engines.weights import ModelWeights
from faser_backend.core.model import ModelSpec, WeightFormat
from faser_backend.manifest import (
    EngineManifest,
    FileSpec,
    ModelEngine,
    SegmentSpec,
)
from faser_backend.runtime_spec import RUNTIMES
from faser_backend.version import VERSION

Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class _Steps:
    """Counts work done; tells `report` (what is done now, steps done, steps in all)."""

    report: Progress | None
    total: int = 0  # known once the models are
    done: int = 0

    def begin(self, what: str) -> None:
        self.done += 1
        self.note(what)

    def note(self, what: str) -> None:
        """Tells how far the step is that was begun last."""
        if self.report is not None:
            self.report(what, self.done - 1, self.total)


@dataclass(frozen=True, slots=True)
class _Format:
    """How models are written."""

    runtime: str
    dtype: str
    kv_block_size: int
    compiler: TensorRtCompiler | None  # None where graphs or weights are served as they are
    weights: dict[str, WeightFormat]  # of the matrices by side

    def num_steps(self, num_models: int, num_segments: int, *, has_head: bool) -> int:
        """Steps of writing all models. num_segments: a head's counted as one, for it is written in one step."""
        if RUNTIMES[self.runtime].is_weights_only:
            return num_models
        return num_segments if self.compiler is None else 2 * num_segments + has_head

    @contextmanager
    def onnx_dir(self, directory: Path) -> Iterator[Path]:
        """Where graphs are written to: a folder for the while in `directory` where they are compiled."""
        if self.compiler is None:
            yield directory
            return
        with tempfile.TemporaryDirectory(suffix=".onnx", dir=directory) as onnx_dir:
            yield Path(onnx_dir)

    def compiled(self, model: ModelEngine, onnx_dir: Path, directory: Path, steps: _Steps) -> ModelEngine:
        """A model whose graphs are in onnx_dir, as it is served from `directory`."""
        if self.compiler is None:
            return model
        return self.compiler.compile_model(model, onnx_dir, directory, self.kv_block_size, steps.begin)


def build_engines(
    target_dir: str | Path,
    draft_dir: str | Path | None,
    output_dir: str | Path,
    *,
    runtime: str = "onnxruntime",
    exit_layers: tuple[int, ...] = (),
    dtype: str = "fp32",
    weights: str | None = None,
    draft_weights: str | None = None,
    kv_block_size: int = 16,
    kv_cache_dtype: str | None = None,
    max_context: int | None = None,
    tensorrt: TensorRtOptions | None = None,
    progress: Progress | None = None,
) -> EngineManifest:
    """Builds both models into output_dir, replacing an engine directory that was there.

    draft_dir: None builds a target alone, for which n-grams of its text will draft.
    runtime: of runtime_spec.RUNTIMES; without it the CPU's reference. `faser build` has runtime_spec.DEFAULT_RUNTIME.
    exit_layers: target layers after which verification may stop, rising, each in [1, num_layers).
    weights, draft_weights: how matrices of target and draft are stored, see engines.weight_formats.choose_weights.
    kv_cache_dtype: of keys and values, see engines.weight_formats.choose_kv_cache_dtype.
    max_context: prompt + output tokens that the engines take, where that is to be less than the models could.
    tensorrt: what engines are compiled for, for the runtimes of TensorRT alone; None = its defaults.
    progress: called as progress(what, steps_done, steps_total) before each step, within long ones, and at the
    end; on any thread.
    Raises CheckpointError naming file or field, value and limit, or TensorRtError naming the stage; output_dir
    is then as it was.
    """
    output = Path(output_dir).absolute()
    check_choices(runtime, dtype, kv_block_size)
    asked = {"target": weights, "draft": draft_weights}
    check_formats(runtime, asked, has_draft=draft_dir is not None)
    check_output(output)
    flavour = RUNTIMES[runtime].tensorrt
    if tensorrt is not None and flavour is None:
        able = ", ".join(name for name, spec in RUNTIMES.items() if spec.tensorrt)
        raise CheckpointError(f"runtime = {runtime!r}: limits and targets of TensorRT are for {able}")
    steps = _Steps(progress)
    compiler = None
    if flavour is not None:
        tensorrt = tensorrt or TensorRtOptions()
        compiler = TensorRtCompiler(runtime, dtype, tensorrt, steps.note)
    if tensorrt is not None and max_context is None:
        max_context = tensorrt.limits.max_context
    draft = None if draft_dir is None else Path(draft_dir)
    pair = open_pair(Path(target_dir), draft, max_context, steps.note, joins_experts=not RUNTIMES[runtime].is_cpu)
    check_formats(runtime, asked, has_head=pair.head is not None)
    formats = {side: choose_weights(runtime, asked[side], weights) for side, weights in pair.weights.items()}
    kv_cache_dtype = choose_kv_cache_dtype(runtime, dtype, kv_cache_dtype, pair.specs)
    written = _Format(runtime, dtype, kv_block_size, compiler, formats)
    prompts = read_prompts(pair.tokenizer)
    last_ids = pair.end_ids or prompts.end_ids
    specs = pair.specs if tensorrt is None else {name: tensorrt.limits.apply(s) for name, s in pair.specs.items()}
    check_experts(runtime, specs)
    if runtime == "llvm":
        check_llvm(specs)
    check_exit_layers(exit_layers, specs["target"], has_draft=draft is not None)
    cuts = {side: (*(exit_layers if side == "target" else ()), spec.num_layers) for side, spec in specs.items()}
    check_room(output, sum(num_bytes_of(pair.weights[side], form, dtype) for side, form in formats.items()))
    num_segments = sum(map(len, cuts.values()))
    steps.total = written.num_steps(len(cuts), num_segments, has_head=pair.head is not None) + 1
    with _partial_directory(output) as partial:
        models = _build_models(pair, specs, cuts=cuts, written=written, directory=partial, steps=steps)
        steps.begin("tokenizer and manifest")
        tokenizer, config = write_tokenizer(pair.tokenizer, prompts, last_ids, specs["target"].max_context, partial)
        manifest = EngineManifest(
            runtime=runtime,
            dtype=dtype,
            kv_block_size=kv_block_size,
            kv_cache_dtype=kv_cache_dtype,
            exit_layers=tuple(exit_layers),
            target=models["target"],
            draft=models.get("draft"),
            vocab_hash=pair.vocab_hash,
            end_ids=last_ids,
            tokenizer=FileSpec.of(tokenizer),
            tokenizer_config=FileSpec.of(config),
            prompts=FileSpec.of(prompts.save(partial)),
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


@contextmanager
def _partial_directory(output: Path) -> Iterator[Path]:
    """A new folder beside the output, which goes if it is not renamed. Raises CheckpointError where a disk fails."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent))
        try:
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        if error.errno is None:  # not of a system call: no disk's, but of whoever is told of the progress
            raise
        free = shutil.disk_usage(output.parent).free
        raise CheckpointError(f"output_dir = {output}: {error.strerror}; {free} bytes of disk are free") from None


def _build_models(
    pair: CheckpointPair,
    specs: dict[str, ModelSpec],
    *,
    cuts: dict[str, tuple[int, ...]],
    written: _Format,
    directory: Path,
    steps: _Steps,
) -> dict[str, ModelEngine]:
    """Both models, the target first: a draft head may share its embedding."""
    models = {}
    for name, spec in specs.items():  # the target first
        weights = pair.weights[name]
        if name == "draft" and pair.head is not None:
            head = replace(pair.head, spec=spec)
            models[name] = _build_head(head, pair.weights, models["target"], written, directory, steps)
            continue
        models[name] = _build_model(
            name, spec, weights, cuts=cuts[name], written=written, directory=directory, steps=steps
        )
    return models


def _build_head(  # noqa: PLR0917
    head: Eagle3Head,
    weights: Mapping[str, ModelWeights],
    target: ModelEngine,
    written: _Format,
    directory: Path,
    steps: _Steps,
) -> ModelEngine:
    steps.begin("draft: EAGLE-3 head")
    own = weights["draft"]
    if written.runtime == "llvm":
        return write_llvm_head(head, own, target, directory, written.weights["draft"])
    if written.runtime == "torch":
        return write_torch_head(head, own, target, directory, written.dtype)
    with written.onnx_dir(directory) as onnx_dir:
        model = write_head(
            head,
            own,
            target,
            onnx_dir,
            kv_block_size=written.kv_block_size,
            runtime=written.runtime,
            dtype=written.dtype,
            lender=weights["target"] if written.compiler is not None else None,
        )
        return written.compiled(model, onnx_dir, directory, steps)


def _build_model(
    name: str,
    spec: ModelSpec,
    weights: ModelWeights,
    *,
    cuts: tuple[int, ...],
    written: _Format,
    directory: Path,
    steps: _Steps,
) -> ModelEngine:
    if RUNTIMES[written.runtime].is_weights_only:
        what = f"{name}: layers 0 to {spec.num_layers}"
        if written.runtime == "llvm":
            steps.begin(f"{what}, weights {written.weights[name].title}")
            return write_llvm_model(name, spec, weights, cuts, directory, written.weights[name])
        steps.begin(what)
        return write_torch_model(name, spec, weights, cuts, directory, written.dtype)
    with written.onnx_dir(directory) as onnx_dir:
        model = _write_onnx(name, spec, weights, cuts=cuts, written=written, directory=onnx_dir, steps=steps)
        return written.compiled(model, onnx_dir, directory, steps)


def _write_onnx(
    name: str,
    spec: ModelSpec,
    weights: ModelWeights,
    *,
    cuts: tuple[int, ...],
    written: _Format,
    directory: Path,
    steps: _Steps,
) -> ModelEngine:
    """One graph per segment, and the weights that they share."""
    store = WeightStore(directory / f"{name}.weights")
    segments: list[SegmentSpec] = []
    first = 0
    for last in cuts:
        steps.begin(f"{name}: layers {first} to {last}")
        graph = build_segment(
            spec,
            weights,
            store,
            first,
            last,
            kv_block_size=written.kv_block_size,
            has_exit_scores=last < spec.num_layers,
            runtime=written.runtime,
            dtype=written.dtype,
            weight_format=written.weights[name].name,
        )
        files = graph.write(directory, f"{name}.{len(segments)}")
        segments.append(SegmentSpec(files[0], first, last, graph.inputs, graph.outputs, parts=files[1:]))
        first = last
    store.close()
    return ModelEngine(spec, FileSpec.of(store.path), tuple(segments), written.weights[name])


def _publish(partial: Path, output: Path) -> None:
    """Puts the finished directory in place of the old one; a reader sees the old or the new, or none."""
    if output.exists():
        retired = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".retired", dir=output.parent))
        os.rename(output, retired / output.name)
        os.rename(partial, output)
        shutil.rmtree(retired, ignore_errors=True)
    else:
        os.rename(partial, output)
