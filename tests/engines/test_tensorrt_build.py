"""Engines of TensorRT-RTX by the real compiler: tensors, profiles, sizes, determinism, progress."""

import json
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from faser_backend.engines.build import build_engines
from faser_backend.engines.tensorrt_buckets import (
    CallLimits,
    SplitStreams,
    TensorRtOptions,
    call_buckets,
    narrowed,
    shapes_of,
)
from faser_backend.engines.tensorrt_build import TensorRtCompiler, parse_network
from faser_backend.manifest import BucketSpec, EngineManifest, FileSpec, ModelEngine, SegmentSpec, TensorSpec
from faser_backend.plugins.tensorrt_import import ErrorLog, import_tensorrt
from tests.support.gathered_runner import GatheredRunner
from tests.support.tiny_models import write_checkpoint

DEMO = Path(__file__).parents[2] / "models" / "demo"
TYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT64": "int64"}
EXIT_LAYER = 3
CODE_BYTES = 13 << 20  # kernels of an engine of a few layers, for three profiles


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source"), num_hidden_layers=2, max_position_embeddings=8192)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the demo pair, its target cut once."""
    directory = tmp_path_factory.mktemp("demo") / "engine"
    options = {"runtime": "tensorrt_rtx", "dtype": "fp16", "exit_layers": (EXIT_LAYER,)}
    build_engines(DEMO / "target", DEMO / "draft", directory, **options)  # type: ignore[arg-type]
    return directory


def build_tiny(source: Path, directory: Path, **options: object) -> EngineManifest:
    return build_engines(source, source, directory, runtime="tensorrt_rtx", dtype="fp16", **options)  # type: ignore[arg-type]


def test_the_demo_pairs_manifest_says_what_was_built(demo: Path) -> None:
    manifest = EngineManifest.load(demo)
    assert (manifest.runtime, manifest.dtype, manifest.exit_layers) == ("tensorrt_rtx", "fp16", (EXIT_LAYER,))
    assert manifest.compiler == import_tensorrt("rtx").title
    first, last = manifest.target.segments
    (draft,) = manifest.draft.segments
    assert [s.file.name for s in (first, last, draft)] == ["target.0.engine", "target.1.engine", "draft.0.engine"]
    assert manifest.target.weights is manifest.draft.weights is None
    names = {path.name for path in demo.iterdir()}
    assert names == {file.name for file in manifest.files} | {"manifest.json"}
    exits = {"hidden_out", "exit_scores"}
    check_tensors(first, range(EXIT_LAYER), inputs={"token_ids", "exit_candidates"}, outputs=exits)
    check_tensors(last, range(EXIT_LAYER, 6), inputs={"hidden", "logit_rows"}, outputs={"logits"})
    check_tensors(draft, range(2), inputs={"token_ids", "logit_rows"}, outputs={"logits"})


def check_tensors(segment: SegmentSpec, layers: range, *, inputs: set[str], outputs: set[str]) -> None:
    """Asserts the tensors that the manifest's docstring lists for this runtime."""
    shared = {"positions", "pad_idx", "unpad_idx", "block_table", "columns", "context_lens"}
    by_name = {tensor.name: tensor for tensor in (*segment.inputs, *segment.outputs)}
    pools = {f"{name}_pool.{layer}" for layer in layers for name in "kv"}
    news = {f"{name}_new.{layer}" for layer in layers for name in "kv"}
    assert {tensor.name for tensor in segment.inputs} == shared | inputs | pools
    assert {tensor.name for tensor in segment.outputs} == outputs | news
    halves = pools | news | ({"hidden", "hidden_out"} & set(by_name))
    assert {by_name[name].dtype for name in halves} == {"float16"}
    assert {by_name[name].dtype for name in outputs - {"hidden_out"}} == {"float32"}
    assert by_name[f"k_pool.{layers[0]}"].shape[1:] == ("NB", 16, 64)
    dimensions = {size for tensor in segment.inputs for size in tensor.shape if isinstance(size, str)}
    assert [bucket.name for bucket in segment.buckets] == ["decode", "verify", "prefill"]
    assert all(set(bucket.ranges) == dimensions for bucket in segment.buckets)


def test_half_precision_engines_hold_half_the_weights(demo: Path) -> None:
    """Matrices stay in the dtype, though products are summed in float32. The head, whose logits are float32, does not;
    so the test takes the target's first segment, which has no head."""
    config = json.loads((DEMO / "target" / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    num_weights = EXIT_LAYER * (4 * hidden * hidden + 3 * hidden * inner) + config["vocab_size"] * hidden
    num_bytes = EngineManifest.load(demo).target.segments[0].file.num_bytes
    assert 2 * num_weights < num_bytes < 2 * num_weights + CODE_BYTES


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_networks_have_the_tensors_and_profiles_of_the_manifest(dtype: str, tmp_path: Path) -> None:
    runner = GatheredRunner(DEMO / "target", tmp_path, exit_layers=(EXIT_LAYER,), block_size=16, dtype=dtype)
    compiler = TensorRtCompiler("tensorrt_rtx", dtype, TensorRtOptions(), 4, print)
    tensorrt, log = compiler.tensorrt, ErrorLog(compiler.tensorrt)
    builder = tensorrt.module.Builder(log.logger)
    for index, graph in enumerate(runner.graphs):
        path = tmp_path / f"{index}.onnx"
        network = parse_network(tensorrt, builder, log, path)
        for ours, count, get in (
            (graph.inputs, network.num_inputs, network.get_input),
            (graph.outputs, network.num_outputs, network.get_output),
        ):
            theirs = [TensorSpec(t.name, TYPES[t.dtype.name], tuple(t.shape)) for t in map(get, range(count))]
            assert theirs == [replace(t, shape=tuple(-1 if isinstance(n, str) else n for n in t.shape)) for t in ours]
        segment = SegmentSpec(FileSpec.of(path), 0, EXIT_LAYER, graph.inputs, graph.outputs)
        for bucket in call_buckets(runner.spec, 16, CallLimits()):
            profile = compiler.make_profile(builder, segment, narrowed(bucket, graph.inputs))
            for tensor in graph.inputs:
                assert tuple(map(tuple, profile.get_shape(tensor.name))) == shapes_of(tensor, bucket)
        layers = [network.get_layer(i) for i in range(network.num_layers)]
        attention = [layer for layer in layers if layer.type == tensorrt.module.LayerType.ATTENTION_OUTPUT]
        assert len(attention) == 3
        for layer in attention:
            layer.__class__ = tensorrt.module.IAttentionOutputLayer
            assert layer.attention.decomposable
    log.check("networks")


def test_profiles_of_a_split_get_the_stream_of_their_models_share() -> None:
    """TensorRT-RTX also has the attribute, though only full TensorRT is built for splits."""
    compiler = TensorRtCompiler("tensorrt_rtx", "fp16", TensorRtOptions(), 4, print)
    compiler.options = TensorRtOptions(split_streams={"16/116": SplitStreams(draft=1234, target=5678)})
    builder = compiler.tensorrt.module.Builder(ErrorLog(compiler.tensorrt).logger)
    for name, split, stream in (("draft", "16/116", 1234), ("target", "16/116", 5678), ("target", "", 0)):
        segment = SegmentSpec(FileSpec(f"{name}.0.onnx", "", 0), 0, 1, (), ())
        assert compiler.make_profile(builder, segment, BucketSpec("decode", {}, split)).profile_stream == stream


def without_hashes(engine: ModelEngine) -> ModelEngine:
    return replace(engine, segments=tuple(replace(s, file=replace(s.file, sha256="")) for s in engine.segments))


def test_the_same_inputs_give_the_same_engine_and_progress_counts_steps(source: Path, tmp_path: Path) -> None:
    """Only the engines' hashes differ: TensorRT-RTX writes other bytes in every build, of equal number."""
    calls: list[tuple[str, int, int]] = []
    first = build_tiny(source, tmp_path / "first", max_context=5000, progress=lambda *call: calls.append(call))
    assert EngineManifest.load(tmp_path / "first") == first and first.target.spec.max_context == 5000
    second = build_engines(source, None, tmp_path / "second", runtime="tensorrt_rtx", dtype="fp16", max_context=5000)
    assert without_hashes(first.target) == without_hashes(second.target)
    done = [call[1] for call in calls]
    assert done == sorted(done) and set(done) == set(range(calls[-1][2] + 1)) and calls[-1][0] == "done"


def test_an_interrupt_stops_the_compiler_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    """SIGINT arrives while TensorRT runs on its thread and the main thread waits."""
    seen = []

    def report(what: str, done: int, total: int) -> None:
        seen.append(what)
        if what.startswith("target.0: compile"):
            threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident or 0, signal.SIGINT)).start()

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            build_tiny(source, tmp_path / "engine", progress=report)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert list(tmp_path.iterdir()) == []
    assert not any("draft.0" in what for what in seen)
