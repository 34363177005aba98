"""Limits and buckets of TensorRT builds, and their checks in a manifest. TensorRT is not needed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from faser_backend.core.errors import ManifestError
from faser_backend.core.model import ModelSpec
from faser_backend.engines.build import build_engines
from faser_backend.engines.tensorrt_buckets import MAX_ELEMENTS, CallLimits, call_buckets, narrowed, shapes_of
from faser_backend.manifest import BucketSpec, EngineManifest, TensorSpec
from tests.support.tiny_models import write_checkpoint

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
