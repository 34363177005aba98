"""Every model family and variant: packed, paged, chunked and cut runs have the logits of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from faser_backend.cpu import weights
from faser_backend.cpu.kv_pool import KvPool
from faser_backend.cpu.runner import LlvmRunner
from faser_backend.device.partition import CorePartition
from faser_backend.engines.build import build_engines
from faser_backend.engines.tensorrt_buckets import CallLimits, TensorRtOptions
from faser_backend.manifest import EngineManifest
from tests.support.gathered_runner import GatheredRunner, Padding
from tests.support.tiny_models import VARIANTS, VOCAB_SIZE, largest_error, make_rows, random_model, write_model

MAX_ERROR = 1e-4
NUM_BLOCKS = 60
BLOCK_SIZE = 4


def build(source: Path, directory: Path, exit_layers: tuple[int, ...] = (), **options: Any) -> EngineManifest:
    """Builds in float32, whatever the checkpoint's format, unless another is given."""
    options = {"weights": "fp32", "kv_cache_dtype": "fp32", "kv_block_size": BLOCK_SIZE, **options}
    manifest = build_engines(source, source, directory, exit_layers=exit_layers, **options)
    assert EngineManifest.load(directory) == manifest
    return manifest


def open_runner(manifest: EngineManifest, directory: Path) -> LlvmRunner:
    pool = KvPool(manifest.target.spec, NUM_BLOCKS, BLOCK_SIZE, dtype=manifest.kv_cache_dtype)
    return LlvmRunner(manifest.target, directory, CorePartition("test", (0, 1)), pool, compute=manifest.compute)


@pytest.mark.parametrize("exit_layers", [(), (1, 2)], ids=["whole", "cut"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(
    variant: str, exit_layers: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "ONE_THREAD_BYTES", 0)
    model = random_model(variant)
    manifest = build(write_model(model, tmp_path / "source"), tmp_path / "engine", exit_layers)
    assert manifest.target.spec.family == VARIANTS[variant][0]
    assert len(manifest.target.segments) == len(exit_layers) + 1
    runner = open_runner(manifest, tmp_path / "engine")
    assert max(largest_error(runner, model, seed) for seed in range(2)) <= MAX_ERROR
    runner.pool.check_integrity()
    runner.close()


@pytest.mark.parametrize(
    ("variant", "parameter"),
    [
        ("llama_attention_bias", "layers.0.self_attn.v_proj.bias"),
        ("llama_attention_bias", "layers.2.self_attn.o_proj.bias"),
        ("llama_all_biases_tied", "layers.1.mlp.gate_proj.bias"),
        ("llama_all_biases_tied", "layers.1.mlp.up_proj.bias"),
        ("llama_all_biases_tied", "layers.2.mlp.down_proj.bias"),
        ("qwen2", "layers.1.self_attn.k_proj.bias"),
        ("qwen3", "layers.1.self_attn.q_norm.weight"),
        ("qwen3", "layers.1.self_attn.k_norm.weight"),
        ("qwen3_moe", "layers.1.mlp.gate.weight"),
        ("qwen3_moe_plain_shares", "layers.2.mlp.gate.weight"),
    ],
)
def test_the_comparison_notices_one_wrong_tensor(variant: str, parameter: str, tmp_path: Path) -> None:
    """Negative control: each part that a variant adds changes the logits."""
    model = random_model(variant)
    manifest = build(write_model(model, tmp_path / "source"), tmp_path / "engine")
    with torch.no_grad():
        model.get_parameter(f"model.{parameter}").mul_(-0.5)
    assert largest_error(open_runner(manifest, tmp_path / "engine"), model, seed=0) > 100 * MAX_ERROR


@pytest.mark.parametrize("variant", VARIANTS)
def test_segments_for_tensorrt_rtx_give_the_same_logits(variant: str, tmp_path: Path) -> None:
    """These graphs have only standard ops, so ONNX Runtime can run them."""
    model = random_model(variant)
    source = write_model(model, tmp_path / "source")
    padding = Padding(rows=3, sequences=2, rows_per_sequence=4, blocks=3)
    runner = GatheredRunner(source, tmp_path / "fp32", exit_layers=(1, 2), num_blocks=NUM_BLOCKS, padding=padding)
    assert largest_error(runner, model, seed=4) <= MAX_ERROR
    half = GatheredRunner(source, tmp_path / "fp16", exit_layers=(1,), num_blocks=NUM_BLOCKS, dtype="fp16")
    # rounding can make a row choose another expert, which is not a small error
    assert MAX_ERROR < largest_error(half, model, seed=4) <= (2.0 if "moe" in variant else 0.5)


@pytest.mark.parametrize(("target", "draft"), [("llama_all_biases_tied", "qwen2"), ("qwen3_moe", "qwen3_tied_bias")])
def test_families_compile_with_tensorrt_rtx(target: str, draft: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    narrow = {"num_hidden_layers": 1, "hidden_size": 64, "head_dim": 32, "num_attention_heads": 2}
    sources = [
        write_model(random_model(variant, **narrow, num_key_value_heads=1), tmp_path / variant)
        for variant in (target, draft)
    ]
    manifest = build_engines(
        *sources,
        tmp_path / "engine",
        runtime="tensorrt_rtx",
        dtype="fp16",
        tensorrt=TensorRtOptions(CallLimits(max_num_seqs=4, max_context=64, max_prefill_tokens=32)),
    )
    assert EngineManifest.load(tmp_path / "engine") == manifest
    assert [model.spec.family for model in (manifest.target, manifest.draft)] == [
        VARIANTS[target][0],
        VARIANTS[draft][0],
    ]


def test_dtype_of_the_checkpoint_is_recorded_and_read(tmp_path: Path) -> None:
    for dtype, name in ((torch.bfloat16, "BF16"), (torch.float16, "F16")):
        model = random_model("qwen3").to(dtype)
        source, engine = write_model(model, tmp_path / name), tmp_path / f"engine{name}"
        manifest = build(source, engine)
        assert manifest.target.spec.checkpoint_dtype == name
        reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
        assert largest_error(open_runner(manifest, engine), reference.eval(), seed=1) <= MAX_ERROR


def test_exit_scores_of_a_family_with_norms_and_a_tied_head(tmp_path: Path) -> None:
    model = random_model("qwen3_tied_bias")
    manifest = build(write_model(model, tmp_path / "source"), tmp_path / "engine", (1,))
    rng = np.random.default_rng(2)
    sequences = [rng.integers(0, VOCAB_SIZE, length) for length in (9, 5)]
    rows = make_rows(sequences, [0, 0], [9, 5], rng.permutation(NUM_BLOCKS)[:6].reshape(2, 3))
    candidates = rng.integers(0, VOCAB_SIZE, (14, 6))
    hidden, scores = open_runner(manifest, tmp_path / "engine").run_segment_with_scores(0, rows, None, candidates)
    with torch.no_grad():
        logits = model.lm_head(model.model.norm(torch.from_numpy(hidden.copy()))).numpy()
    assert np.abs(scores - np.take_along_axis(logits, candidates, 1)).max() <= MAX_ERROR
