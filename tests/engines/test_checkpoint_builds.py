"""Builds as processes: memory while reading, files after an interruption, mapped files."""

import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from faser_backend.core.errors import ManifestError
from faser_backend.engines.build import build_engines
from faser_backend.engines.checkpoint import BFLOAT16, CheckpointError, converted_blocks
from faser_backend.engines.families import read_spec
from faser_backend.engines.graph import WeightStore
from faser_backend.engines.pairs import open_checkpoint
from faser_backend.engines.safetensors_checkpoint import SafetensorsFile
from faser_backend.engines.weights import ModelWeights
from faser_backend.engines.weights_build import NewTensor, write_safetensors
from faser_backend.manifest import EngineManifest
from tests.support.tiny_models import random_model, write_model

# Builds argv[1] into argv[2] and hangs for good once progress says argv[3].
CHILD = """
import sys, time
from faser_backend.engines.build import build_engines
def report(what, done, total):
    if what == sys.argv[3]:
        print("there", flush=True)
        time.sleep(1000)
build_engines(sys.argv[1], sys.argv[1], sys.argv[2], exit_layers=(1,), progress=report)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(random_model("qwen3"), tmp_path_factory.mktemp("source"))


def end_child_at(moment: str, number: signal.Signals, source: Path, output: Path) -> int:
    """Ends a build with a signal at a point of its progress, and returns its status."""
    command = [sys.executable, "-c", CHILD, str(source), str(output), moment]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "there\n"
        child.send_signal(number)
        try:
            return child.wait(timeout=60)
        finally:
            child.kill()  # a child that outlives its signal fails a test; it does not stop all others


@pytest.mark.parametrize("moment", ["target: layers.2.down", "tokenizer and manifest"])
def test_an_interrupted_build_leaves_nothing(moment: str, source: Path, tmp_path: Path) -> None:
    assert end_child_at(moment, signal.SIGINT, source, tmp_path / "out") != 0
    assert list(tmp_path.iterdir()) == []


def test_a_killed_build_leaves_nothing_that_loads(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    before = build_engines(source, source, output)
    assert end_child_at("draft: norm", signal.SIGKILL, source, output) == -signal.SIGKILL
    left = [path for path in tmp_path.iterdir() if path != output]
    assert len(left) == 1
    with pytest.raises(ManifestError):
        EngineManifest.load(left[0])
    assert EngineManifest.load(output) == before
    shutil.rmtree(output)
    assert build_engines(source, source, output) == before


def test_weights_are_views_of_the_file_and_nothing_is_kept(source: Path) -> None:
    checkpoint = open_checkpoint(source)
    read: list[str] = []
    weights = ModelWeights(checkpoint, read_spec(checkpoint.fields), read.append)
    assert read == []
    first, again = weights["layers.1.up"], weights["layers.1.up"]
    assert read == ["layers.1.up"] * 2 and first is not again
    for name in ("embedding", "layers.1.up", "layers.0.input_norm", "lm_head"):
        base = weights[name]
        while isinstance(base.base, np.ndarray):
            base = base.base
        assert isinstance(base, np.memmap), name
        with pytest.raises(ValueError, match="read-only"):
            weights[name][...] = 0
    assert set(weights) == set(weights.sources) and len(weights) == len(list(weights))


def test_sharded_checkpoints_give_the_same_engine(source: Path, tmp_path: Path) -> None:
    sharded = write_model(random_model("qwen3"), tmp_path / "sharded", max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    single, parts = (build_engines(path, path, tmp_path / f"engine{i}") for i, path in enumerate((source, sharded)))
    assert single == parts
    shutil.copy(source / "model.safetensors", sharded)  # beside the index of weights that are gone
    for shard in sharded.glob("model-*.safetensors"):
        shard.unlink()
    assert build_engines(sharded, sharded, tmp_path / "engine") == single


def test_tensors_that_mean_nothing_are_passed_over(tmp_path: Path) -> None:
    """Old checkpoints have rotary buffers, and some have a copy of a tied head."""
    plain = write_model(random_model("qwen2_tied"), tmp_path / "plain")
    laden = shutil.copytree(plain, tmp_path / "laden")
    tensors = load_file(laden / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(tensors, laden / "model.safetensors")
    assert build_engines(plain, plain, tmp_path / "a") == build_engines(laden, laden, tmp_path / "b")
    tensors["lm_head.weight"][3, 4] += 1
    save_file(tensors, laden / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not the embedding: tie_word_embeddings is wrong"):
        build_engines(laden, laden, tmp_path / "c")


@pytest.mark.parametrize("block", [1, 7, 1 << 23])
def test_blocks_change_nothing(block: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Arrays are written row by row, some rows at a time, or whole, with equal results."""
    monkeypatch.setattr("faser_backend.engines.checkpoint.BLOCK_ELEMENTS", block)
    monkeypatch.setattr("faser_backend.engines.checkpoint.COPIED_COLUMNS", 3)
    rng = np.random.default_rng(0)
    arrays = {
        "matrix": rng.standard_normal((5, 3)).astype(np.float32),
        "transposed": rng.standard_normal((4, 6)).astype(BFLOAT16).T,
        "vector": rng.standard_normal(9).astype(np.float16),
    }
    for title, stored in (("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16")):
        dtype = np.dtype(title)
        wanted = {name: array.astype(dtype) for name, array in arrays.items()}
        path = tmp_path / f"{title}.safetensors"
        tensors = [
            NewTensor(name, stored, array.shape, partial(converted_blocks, name, array, dtype))
            for name, array in arrays.items()
        ]
        write_safetensors(path, tensors)
        for name, array in load_file(path).items():
            assert array.dtype == dtype and np.array_equal(array, wanted[name])
            assert np.array_equal(SafetensorsFile(path).read(name), wanted[name])
        store = WeightStore(tmp_path / f"{title}.weights")
        for name, array in arrays.items():
            store.add(name, array, title)
        store.close()
        content = store.path.read_bytes()
        for name, array in wanted.items():
            place = {entry.key: entry.value for entry in store.references[name].external_data}
            first, length = int(place["offset"]), int(place["length"])
            assert content[first : first + length] == np.ascontiguousarray(array).tobytes()
