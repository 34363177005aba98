"""Engine directories that load, damaged ones that are refused, and builds that are refused."""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from faser_backend.core.errors import ManifestError
from faser_backend.engines.build import build_engines
from faser_backend.engines.checkpoint import CheckpointError
from faser_backend.manifest import EngineManifest
from tests.support.refusals import edit_json, refuses_build
from tests.support.tiny_models import VOCAB_SIZE, write_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def pristine(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("engines") / "engine"
    build_engines(source, source, directory, exit_layers=(1,))
    return directory


@pytest.fixture
def engine(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "engine")


def refuses(engine: Path, *words: str) -> None:
    with pytest.raises(ManifestError) as caught:
        EngineManifest.load(engine).verify_weights(engine)
    message = str(caught.value)
    assert len(message) < 500 and [word for word in words if word not in message] == [], message


def test_a_directory_round_trips(engine: Path) -> None:
    manifest = EngineManifest.load(engine)
    assert [(s.first_layer, s.last_layer) for s in manifest.target.segments] == [(0, 1), (1, 3)]
    assert [s.has_exit_scores for s in manifest.target.segments] == [True, False]
    assert manifest.exit_layers == (1,) and manifest.end_ids == (3,)
    manifest.save(engine)
    assert EngineManifest.load(engine) == manifest
    assert {file.name for file in manifest.files} == {p.name for p in engine.iterdir()} - {"manifest.json"}
    assert manifest.kv_cache_dtype == "fp32"
    replace(manifest, kv_cache_dtype="fp16").save(engine)
    assert EngineManifest.load(engine) == replace(manifest, kv_cache_dtype="fp16")


def test_a_missing_or_unreadable_manifest(engine: Path, tmp_path: Path) -> None:
    refuses(tmp_path / "nowhere", "manifest.json", "missing")
    (engine / "manifest.json").write_text("{not json")
    refuses(engine, "manifest.json", "JSON")
    for content in ("[]", "null", '{"format_version": 99}'):
        (engine / "manifest.json").write_text(content)
        refuses(engine, "manifest.json", "format_version")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda m: m.pop("draft"), "draft"),
        (lambda m: m.update(surprise=1), "surprise"),
        (lambda m: m["target"].update(segments="all"), "malformed"),
        (lambda m: m["target"]["spec"].update(num_heads="four"), "malformed"),
        (lambda m: m["target"]["spec"].update(num_heads=0), "malformed"),
        (lambda m: m["target"]["spec"].update(max_context="512"), "max_context = '512'"),
        (lambda m: m["target"]["spec"].update(max_context=10**12), "max_context = 1000000000000: Input should be less"),
        (lambda m: m["target"]["spec"].update(max_context=True), "max_context = True"),
        (lambda m: m["target"]["spec"].update(hidden_size=10**9), "hidden_size = 1000000000: Input should be less"),
        (lambda m: m["target"]["spec"].update(num_layers=10**400), "num_layers = 1000"),
        (lambda m: m["target"]["spec"].update(rope_theta=math.nan), "rope_theta = nan: Input should be a finite"),
        (lambda m: m["target"]["spec"].update(rope_theta="1e4"), "rope_theta = '1e4'"),
        (lambda m: m["target"]["spec"].update(rms_eps=math.inf), "rms_eps = inf"),
        (lambda m: m["target"]["spec"].update(rope_scaling={"kind": "linear", "factor": 0}), "rope_scaling.factor = 0"),
        (lambda m: m.update(end_ids=None), "malformed"),
        (lambda m: m.update(end_ids=[VOCAB_SIZE]), "end_ids"),
        (lambda m: m.update(runtime="abacus"), "abacus"),
        (lambda m: m.update(dtype="fp7"), "fp7"),
        (lambda m: m.pop("kv_cache_dtype"), "kv_cache_dtype"),
        (lambda m: m.update(kv_cache_dtype="fp7"), "kv_cache_dtype = 'fp7': must be one of fp32, fp16"),
        (lambda m: m.update(kv_cache_dtype="bf16"), "kv_cache_dtype = 'bf16': must be one of fp32, fp16"),
        (lambda m: m.update(runtime="torch", kv_cache_dtype="fp16"), "kv_cache_dtype = 'fp16': must be one of fp32"),
        (lambda m: m.update(kv_block_size=0), "kv_block_size"),
        (lambda m: m["target"]["segments"].pop(), "segments"),
        (lambda m: m["target"]["segments"].reverse(), "segments"),
        (lambda m: m["draft"]["spec"].update(vocab_size=98), "98"),
        (lambda m: m["tokenizer"].update(name="../tokenizer.json"), "plain name"),
        (lambda m: m["tokenizer"].update(name="x" * 5000), "plain name of at most 255 bytes"),
    ],
)
def test_a_malformed_manifest_is_refused(change: Callable[[dict], object], word: str, engine: Path) -> None:
    edit_json(engine / "manifest.json", change)
    refuses(engine, "manifest.json", word)


@pytest.mark.parametrize(
    "name", ["target.safetensors", "draft.safetensors", "tokenizer.json", "tokenizer_config.json", "prompts.json"]
)
def test_a_file_that_is_not_the_built_one_is_refused(name: str, engine: Path) -> None:
    path = engine / name
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle])
    refuses(engine, name, "truncated")
    path.write_bytes(content + b"x")
    refuses(engine, name, "changed")
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    refuses(engine, name, "changed", "sha256")
    path.unlink()
    refuses(engine, name, "missing")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"runtime": "abacus"}, ["runtime", "abacus"]),
        ({"dtype": "fp7"}, ["dtype", "fp7"]),
        ({"kv_block_size": 0}, ["kv_block_size", "0"]),
        ({"exit_layers": (3,)}, ["exit_layers", "3", "[1, 2]"]),
        ({"exit_layers": (0,)}, ["exit_layers", "0"]),
        ({"exit_layers": (2, 1)}, ["exit_layers", "ascending"]),
    ],
)
def test_options_out_of_range_are_refused(options: dict, words: list[str], source: Path) -> None:
    refuses_build(source, source, *words, **options)


def test_a_rebuild_replaces_engines_and_nothing_else(source: Path, engine: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    rebuilt = build_engines(source, source, engine, progress=lambda *call: calls.append(call))
    assert EngineManifest.load(engine) == rebuilt and rebuilt.exit_layers == ()
    num_done = [done for _, done, _ in calls]
    assert num_done == sorted(num_done) and set(num_done) == set(range(calls[-1][2] + 1))
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="has files that are no engines"):
        build_engines(source, source, precious)
    assert (precious / "thesis.txt").read_text() == "years of work"
