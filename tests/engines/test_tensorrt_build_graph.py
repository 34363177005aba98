"""Graphs for TensorRT: RTX's in ONNX Runtime (test_families.py compares logits), the plugin's; limits and buckets."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from faser_backend.core.errors import ManifestError
from faser_backend.core.model import ModelSpec
from faser_backend.engines.build import build_engines
from faser_backend.engines.checkpoint import CheckpointError
from faser_backend.engines.decoder import GraphForm, build_segment
from faser_backend.engines.families import read_spec
from faser_backend.engines.graph import WeightStore
from faser_backend.engines.pairs import open_checkpoint
from faser_backend.engines.tensorrt_buckets import MAX_ELEMENTS, CallLimits, call_buckets, narrowed, shapes_of
from faser_backend.engines.weights import ModelWeights
from faser_backend.manifest import BucketSpec, EngineManifest, TensorSpec
from faser_backend.plugins.tensorrt_contract import ATTEND_OP, NAMESPACE
from tests.plugins.test_tensorrt_plugin_network import GEOMETRY
from tests.support.gathered_runner import GatheredRunner
from tests.support.tiny_models import make_rows, reference_logits, reference_model, run_all, write_checkpoint

MAX_ERROR = 1e-4
NUM_BLOCKS = 40


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source"))


@pytest.mark.parametrize("block_size", [1, 16, 5])
def test_any_block_size(block_size: int, source: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    sequence = rng.integers(0, 97, 20)
    tables = rng.permutation(NUM_BLOCKS)[:20][None]
    runner = GatheredRunner(source, tmp_path, block_size=block_size)
    found = [run_all(runner, make_rows([sequence], [start], [num], tables)) for start, num in ((0, 13), (13, 7))]
    wanted = reference_logits(reference_model(source), sequence)
    assert np.abs(np.concatenate(found) - wanted).max() <= MAX_ERROR


def test_half_precision_segments_have_logits_and_scores_in_float32(source: Path, tmp_path: Path) -> None:
    runner = GatheredRunner(source, tmp_path, dtype="fp16", exit_layers=(1,))
    types = {tensor.name: tensor.dtype for graph in runner.graphs for tensor in (*graph.inputs, *graph.outputs)}
    assert {types[name] for name in ("hidden", "hidden_out", "k_pool.0", "v_new.2")} == {"float16"}
    assert {types[name] for name in ("logits", "exit_scores")} == {"float32"}


def test_a_weight_that_the_dtype_cannot_hold_is_refused(source: Path, tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "weights")
    store.add("small", np.array([6e4, -1.0], np.float32), "float16")
    with pytest.raises(CheckpointError, match=r"layers\.0\.up: its largest .* = 70000: float16 holds at most 65504"):
        store.add("layers.0.up", np.array([1.0, -7e4], np.float32), "float16")
    store.add("layers.0.up", np.array([1.0, -7e4], np.float32), "bfloat16")
    store.close()


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_layer_of_the_plugin_body_reads_and_writes_its_pools(dtype: str, source: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(source)
    spec = read_spec(checkpoint.fields)
    store = WeightStore(tmp_path / "weights")
    form = GraphForm("tensorrt", dtype, 4, GEOMETRY)
    graph = build_segment(spec, ModelWeights(checkpoint, spec), store, 1, 3, form=form)
    store.close()
    model = graph.model
    path = tmp_path / "segment.onnx"
    path.write_bytes(model.SerializeToString())
    onnx.checker.check_model(path)
    assert not model.functions
    nodes = [node for node in model.graph.node if node.op_type == ATTEND_OP]
    assert len(nodes) == 2 and {node.domain for node in nodes} == {NAMESPACE}
    assert list(nodes[0].input[3:]) == [
        "k_pool.1",
        "v_pool.1",
        "block_table",
        "cu_rows",
        "context_lens",
        "slot_mapping",
    ]
    assert list(nodes[0].output[2:]) == ["k_pool_out.1", "v_pool_out.1"]
    integers = {tensor.name: tensor.dtype for tensor in graph.inputs if tensor.dtype.startswith("int")}
    assert integers == {
        "positions": "int64",
        "logit_rows": "int64",
        **dict.fromkeys(["slot_mapping", "cu_rows", "context_lens", "block_table"], "int32"),
    }


SPEC = ModelSpec(2, 32, 4, 2, 8, 48, 97, 1000, 1e4, 1e-5, True)


def test_every_bucket_lies_within_the_last() -> None:
    for limits in (CallLimits(), CallLimits(1, 64, 1), CallLimits(3, 100, 2000), CallLimits(64, None, 7)):
        *inner, last = call_buckets(SPEC, 16, limits)
        assert [bucket.name for bucket in (*inner, last)] == ["decode", "verify", "prefill"]
        for bucket in (*inner, last):
            assert all(0 <= least <= usual <= most for least, usual, most in bucket.ranges.values())
            for dimension, (least, _, most) in bucket.ranges.items():
                assert last.ranges[dimension][0] <= least and most <= last.ranges[dimension][2]


def test_buckets_hold_the_largest_calls_of_their_limits() -> None:
    decode, verify, prefill = call_buckets(SPEC, 16, CallLimits(max_num_seqs=4, max_prefill_tokens=200))
    assert decode.ranges["T"] == decode.ranges["B"] == (1, 4, 4) and decode.ranges["Q"] == (1, 1, 1)
    assert verify.ranges["Q"][2] == 16 and verify.ranges["T"][2] == verify.ranges["R"][2] == 64
    assert prefill.ranges["Q"] == (1, 200, 200) and prefill.ranges["T"] == (1, 200, 200)
    assert prefill.ranges["MB"][2] == 63 and prefill.ranges["S"] == (16, 512, 1008)
    assert prefill.ranges["B + 1"] == (2, 2, 5)
    assert all(bucket.ranges["R"][0] == bucket.ranges["K"][0] == 0 for bucket in (decode, verify, prefill))


def test_a_pool_has_no_more_elements_than_a_tensor_can() -> None:
    (bucket, *_) = call_buckets(replace(SPEC, num_kv_heads=8, head_dim=128), 16, CallLimits())
    blocks = bucket.ranges["NB"][2]
    assert blocks * 8 * 16 * 128 <= MAX_ELEMENTS < (blocks + 1) * 8 * 16 * 128


def test_splits_have_buckets_of_their_own() -> None:
    buckets = call_buckets(SPEC, 16, CallLimits(), splits=("", "16/116"))
    assert [(bucket.split, bucket.name) for bucket in buckets] == [
        (split, name) for split in ("", "16/116") for name in ("decode", "verify", "prefill")
    ]
    assert buckets[0].ranges == buckets[3].ranges


def test_shapes_follow_the_dimensions_of_a_tensor() -> None:
    (bucket, *_) = call_buckets(SPEC, 16, CallLimits(max_num_seqs=4))
    pool = TensorSpec("k_pool.0", "float16", (2, "NB", 16, 8))
    table = TensorSpec("block_table", "int64", ("B", "MB"))
    assert shapes_of(table, bucket) == ((1, 1), (4, 32), (4, 63))
    assert shapes_of(pool, bucket)[0] == (2, 1, 16, 8)
    assert set(narrowed(bucket, [pool, table]).ranges) == {"NB", "B", "MB"}


def test_the_context_is_the_models_up_to_a_limit() -> None:
    long = replace(SPEC, max_context=40960)
    assert CallLimits().apply(long).max_context == 4096
    assert CallLimits().apply(SPEC).max_context == 1000
    assert CallLimits(max_context=8192).apply(long).max_context == 8192


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = write_checkpoint(tmp_path_factory.mktemp("source"))
    directory = tmp_path_factory.mktemp("engines") / "engine"
    build_engines(source, source, directory)
    return directory


def edited(engine: Path, directory: Path, change: dict[str, object], bucket: dict[str, object] | None = None) -> Path:
    """Copies the manifest with changed fields and a bucket of the draft, and links the files."""
    directory.mkdir()
    for path in engine.iterdir():
        (directory / path.name).symlink_to(path)
    fields = json.loads((engine / "manifest.json").read_text())
    fields.update(change)
    if bucket is not None:
        fields["draft"]["segments"][0]["buckets"] = [bucket]
    (directory / "manifest.json").unlink()
    (directory / "manifest.json").write_text(json.dumps(fields))
    return directory


def test_buckets_and_targets_round_trip(engine: Path, tmp_path: Path) -> None:
    bucket = {"name": "decode", "ranges": {"T": [1, 8, 32]}, "split": "16/116"}
    directory = edited(engine, tmp_path / "new", {"compute_capabilities": ["8.9"], "compiler": "TensorRT 11.4"}, bucket)
    manifest = EngineManifest.load(directory)
    assert manifest.draft.segments[0].buckets == (BucketSpec("decode", {"T": (1, 8, 32)}, "16/116"),)
    assert (manifest.compiler, manifest.compute_capabilities) == ("TensorRT 11.4", ("8.9",))
    assert len({manifest.draft, manifest.draft}) == 1, "models are keys of what was loaded for them"


def test_ranges_of_two_numbers_are_refused(engine: Path, tmp_path: Path) -> None:
    bucket = {"name": "decode", "ranges": {"T": [1, 2]}, "split": ""}
    with pytest.raises(ManifestError, match="malformed"):
        EngineManifest.load(edited(engine, tmp_path / "bad", {}, bucket))
