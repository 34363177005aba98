"""Engines whose matrices are stored in 16 or 8 bits: what they compute, what they take, what a build says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.arrays import CheckpointError
from engines.build import build_engines
from engines.graph import WEIGHT_ALIGNMENT
from engines.weight_formats import INT8_BLOCK, INT8_ZERO, int8_blocks
from faser_backend.config import EngineConfig
from faser_backend.core.errors import ManifestError
from faser_backend.device.onnx_runtime import OrtRunner
from faser_backend.device.partition import CorePartition
from faser_backend.manifest import MANIFEST_FILE, EngineManifest
from faser_backend.serving.compose import build_engine
from lab.bench.equality import make_requests
from plugins import host_attention
from tests.family_models import random_model, write_model
from tests.tiny_models import make_rows, run_all, write_checkpoint

DEMO = Path(__file__).resolve().parents[1] / "models/demo"
ONE_CORE = CorePartition("test", (0,))
TORCH_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def logits_of(source: Path, directory: Path, *, exit_layers: tuple[int, ...] = (), weights: str = "fp32") -> np.ndarray:
    """Logits of two ragged sequences of random tokens, [21, vocab_size]."""
    manifest = build_engines(source, source, directory, exit_layers=exit_layers, weights=weights, kv_block_size=4)
    assert EngineManifest.load(directory) == manifest
    assert manifest.target.weight_format.name == weights
    assert manifest.draft is not None and manifest.draft.weight_format.name == "fp32"
    runner = OrtRunner(manifest.target, directory, 8, 4, ONE_CORE)
    sequences = [np.random.default_rng(5).integers(0, runner.vocab_size, length) for length in (13, 8)]
    rows = make_rows(sequences, [0, 0], [13, 8], np.arange(8).reshape(2, 4))
    return run_all(runner, rows)


def round_matrices(source: Path, dtype: torch.dtype) -> None:
    """Rounds what a format rounds, in place: all matrices but routers."""
    path = source / "model.safetensors"
    tensors = load_file(path)
    is_stored = {name: tensor.ndim == 2 and not name.endswith("mlp.gate.weight") for name, tensor in tensors.items()}
    rounded = {name: t.to(dtype).float() if is_stored[name] else t for name, t in tensors.items()}
    assert any(not torch.equal(rounded[name], tensors[name]) for name in tensors)
    save_file(rounded, path, metadata={"format": "pt"})


@pytest.mark.parametrize("weights", ["fp16", "bf16"])
@pytest.mark.parametrize("config", [{"tie_word_embeddings": True}, {"tie_word_embeddings": False}])
def test_half_weights_compute_as_a_checkpoint_rounded_by_hand(tmp_path, weights: str, config: dict[str, Any]):
    source = write_checkpoint(tmp_path / "source", **config)
    logits = logits_of(source, tmp_path / "half", weights=weights, exit_layers=(1,))
    plain = logits_of(source, tmp_path / "plain", exit_layers=(1,))
    round_matrices(source, TORCH_TYPES[weights])
    np.testing.assert_array_equal(logits, logits_of(source, tmp_path / "rounded", exit_layers=(1,)))
    assert np.abs(logits - plain).max() > 1e-3


def test_experts_in_half_weights_keep_their_router(tmp_path):
    source = write_model(random_model("qwen3_moe"), tmp_path / "source")
    logits = logits_of(source, tmp_path / "half", weights="bf16")
    round_matrices(source, torch.bfloat16)
    np.testing.assert_array_equal(logits, logits_of(source, tmp_path / "rounded"))


@pytest.mark.parametrize("variant", ["llama_all_biases_tied", "qwen2", "qwen3", "qwen3_moe"])
def test_int8_logits_are_near_those_of_float32(tmp_path, variant: str):
    source = write_model(random_model(variant), tmp_path / "source")
    plain = logits_of(source, tmp_path / "plain", exit_layers=(1,))
    error = logits_of(source, tmp_path / "int8", weights="int8", exit_layers=(1,)) - plain
    assert 0 < np.sqrt((error**2).mean()) < 0.1 * plain.std()


def test_exit_scores_of_int8_rows_are_near_those_of_float32(tmp_path):
    source = write_checkpoint(tmp_path / "source", tie_word_embeddings=True, hidden_size=72)
    scores = []
    for weights in ("fp32", "int8"):
        manifest = build_engines(source, source, tmp_path / weights, exit_layers=(1,), weights=weights)
        runner = OrtRunner(manifest.target, tmp_path / weights, 2, 16, ONE_CORE)
        rows = make_rows([np.arange(9)], [0], [9], np.array([[0]]))
        candidates = np.random.default_rng(2).integers(0, runner.vocab_size, (9, 4))
        scores.append(runner.run_segment_with_scores(0, rows, None, candidates)[1].copy())
    error = scores[1] - scores[0]
    assert 0 < np.sqrt((error**2).mean()) < 0.1 * scores[0].std()


def test_int8_numbers_are_within_a_step_of_the_weights():
    weight = np.random.default_rng(1).normal(size=(5, 2 * INT8_BLOCK + 7)).astype(np.float32)
    scales = np.empty((5, 3), np.float32)
    numbers = np.concatenate(list(int8_blocks("w", weight, scales)))  # [5, 3, INT8_BLOCK]
    restored = (numbers.astype(np.float32) - INT8_ZERO) * scales[..., None]
    steps = np.repeat(np.abs(scales), INT8_BLOCK, axis=1)[:, : weight.shape[1]]
    assert (np.abs(restored.reshape(5, -1)[:, : weight.shape[1]] - weight) <= steps).all()
    assert steps.max() < 2 * np.abs(weight).max() / 255


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> dict[str, Path]:
    """Engine directories of the demo pair by the format of both models."""
    root = tmp_path_factory.mktemp("demo")
    for name in ("fp32", "fp16", "bf16", "int8"):
        build_engines(DEMO / "target", DEMO / "draft", root / name, weights=name, draft_weights=name)
    return {path.name: path for path in root.iterdir()}


def weight_bytes(manifest: EngineManifest) -> int:
    assert manifest.target.weights is not None
    return manifest.target.weights.num_bytes


def test_segments_share_one_file_of_the_size_of_its_format(demo, tmp_path):
    sizes = {name: weight_bytes(EngineManifest.load(path)) for name, path in demo.items()}
    assert sizes["fp16"] == sizes["bf16"] < 0.52 * sizes["fp32"]
    assert sizes["int8"] < 0.28 * sizes["fp32"]
    for name, size in sizes.items():
        cut = build_engines(DEMO / "target", DEMO / "draft", tmp_path / name, weights=name, exit_layers=(2, 4))
        assert abs(weight_bytes(cut) - size) < 4 * WEIGHT_ALIGNMENT  # the order differs, and so what fills pages up


def test_memory_of_half_weights_is_that_of_float32(demo):
    in_memory = {name: EngineManifest.load(path).target.num_weight_bytes for name, path in demo.items()}
    assert in_memory["fp16"] == pytest.approx(in_memory["fp32"], rel=0.05)
    assert in_memory["int8"] < 0.28 * in_memory["fp32"]


def test_int8_logits_do_not_depend_on_the_shape_of_the_call(demo):
    """A last bit that differs becomes a step of 8-bit rounding: 0.09 for this model, where nothing is done about it."""
    manifest = EngineManifest.load(demo["int8"])
    runner = OrtRunner(manifest.target, demo["int8"], 2, 16, ONE_CORE)
    text, tables = np.random.default_rng(4).integers(0, runner.vocab_size, 24), np.array([[0, 1]])
    whole = run_all(runner, make_rows([text], [0], [24], tables)).copy()
    steps = [run_all(runner, make_rows([text], [i], [1], tables)).copy() for i in range(24)]
    assert np.abs(np.concatenate(steps) - whole).max() < 1e-3


def test_an_int8_draft_changes_no_token_of_a_float32_target(demo, tmp_path):
    mixed = tmp_path / "mixed"
    build_engines(DEMO / "target", DEMO / "draft", mixed, draft_weights="int8")
    requests = make_requests(mixed, num_prompts=4, max_tokens=24, temperature=0.0)
    answers = []
    for directory in (demo["fp32"], mixed):
        engine = build_engine(directory, EngineConfig(policy="fixed:4", pipeline="serial"))
        for request in requests:
            engine.submit(request)
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        while engine.has_work:
            for output in engine.step():
                tokens[output.request_id] += output.token_ids
        engine.close()
        answers.append(tokens)
    assert answers[0] == answers[1] and all(len(tokens) > 4 for tokens in answers[0].values())


HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize(
    ("dtypes", "asked", "chosen"),
    [
        (HALVES, None, "fp16"),
        (HALVES[1:] * 2, None, "fp16"),
        ((torch.float32, torch.float16), None, "fp32"),
        ((torch.bfloat16, torch.float32), None, "fp32"),
        (HALVES, "fp32", "fp32"),
        ((torch.float32, torch.float32), "fp16", "fp16"),
    ],
)
def test_keys_and_values_are_as_precise_as_both_checkpoints_unless_one_asks(tmp_path, dtypes, asked, chosen):
    pair = [write_checkpoint(tmp_path / name, dtype=dtype) for name, dtype in zip("td", dtypes, strict=True)]
    manifest = build_engines(*pair, tmp_path / "engine", kv_cache_dtype=asked)
    assert manifest.kv_cache_dtype == chosen
    assert EngineManifest.load(tmp_path / "engine") == manifest


def test_a_target_alone_decides_for_itself_and_other_runtimes_by_their_dtype(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "source", dtype=torch.bfloat16)
    assert build_engines(source, None, tmp_path / "alone").kv_cache_dtype == "fp16"
    with monkeypatch.context() as patched:
        patched.setattr(host_attention, "has_halves", lambda: False)
        assert build_engines(source, None, tmp_path / "slow").kv_cache_dtype == "fp32", "what this CPU can serve"
    for dtype in ("fp32", "bf16"):
        built = build_engines(source, source, tmp_path / dtype, runtime="torch", dtype=dtype)
        assert built.kv_cache_dtype == dtype


def test_the_command_says_what_keys_and_values_are_kept_in(run, tmp_path):
    """Only where that is not what the engine computes in."""
    source = write_checkpoint(tmp_path / "source", dtype=torch.float16)
    command = ("build", "--target", source, "--draft", source, "--output", tmp_path / "engine")
    status, said, _ = run(*command)
    assert status == 0 and "for llvm, fp32, KV cache fp16, target weights fp16, draft weights fp16, context" in said
    status, said, _ = run(*command, "--kv-cache-dtype", "fp32")
    assert status == 0 and "KV cache" not in said
    before = EngineManifest.load(tmp_path / "engine")
    status, said, err = run(*command, "--kv-cache-dtype", "bf16")
    assert (status, said) == (1, "") and EngineManifest.load(tmp_path / "engine") == before
    assert err == "error: kv_cache_dtype = 'bf16': on 'llvm' must be one of fp32, fp16\n"


def test_the_command_names_what_compares_formats_where_one_was_asked_for(run, tmp_path):
    command = ("build", "--target", write_checkpoint(tmp_path / "source"), "--output", tmp_path / "engine")
    assert "scripts/check_weights.py" in run(*command, "--weights", "int8")[1]
    assert "scripts/check_weights.py" not in run(*command, "--weights", "fp32")[1]
    assert {path.name for path in tmp_path.iterdir()} == {"source", "engine"}


def test_formats_that_cannot_be_are_refused(tmp_path):
    source = write_checkpoint(tmp_path / "source")

    def refusal(draft: Path | None = source, **options: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            build_engines(source, draft, tmp_path / "engine", **options)
        assert not (tmp_path / "engine").exists()
        return str(caught.value)

    assert refusal(weights="q4") == "weights of target = 'q4': must be one of fp32, fp16, bf16, int8, int4"
    assert "weights of draft = 'int8': for runtimes of a CPU alone" in refusal(draft_weights="int8", runtime="torch")
    assert "weights of draft = 'fp16': there is no draft model" in refusal(None, draft_weights="fp16")
    assert refusal(kv_cache_dtype="bf16") == "kv_cache_dtype = 'bf16': on 'onnxruntime' must be one of fp32, fp16"
    assert refusal(runtime="torch", dtype="bf16", kv_cache_dtype="fp16") == (
        "kv_cache_dtype = 'fp16': on 'torch' must be one of bf16"
    )
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"][3, 4] = 70000.0
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert refusal(weights="fp16") == "lm_head: its largest weight = 70000: float16 holds at most 65504"


def test_a_manifest_with_an_unknown_format_is_malformed(demo):
    manifest = EngineManifest.load(demo["fp32"])
    path = demo["fp32"] / MANIFEST_FILE
    text = path.read_text()
    path.write_text(text.replace('"name": "fp32"', '"name": "fp31"', 1))
    with pytest.raises(ManifestError, match="weight_format = 'fp31': must be one of"):
        EngineManifest.load(demo["fp32"])
    path.write_text(text)
    assert EngineManifest.load(demo["fp32"]) == manifest
