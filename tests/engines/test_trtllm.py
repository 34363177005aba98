"""TensorRT-LLM checkpoints: for every sharding of a model, engines equal those of the whole model."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from faser_backend.engines.families import read_spec
from faser_backend.engines.pairs import open_checkpoint
from faser_backend.engines.weights import ModelWeights
from tests.engines.test_families import MAX_ERROR, build, open_runner
from tests.support.refusals import edit_json, refuses_build
from tests.support.tiny_models import VARIANTS, largest_error, random_model, write_model
from tests.support.trtllm_models import write_trtllm

FC = "transformer.layers.1.mlp.fc.weight"
Change = Callable[[dict], object]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    model = random_model(variant)
    manifest = build(write_trtllm(model, tmp_path / "source", tp=2), tmp_path / "engine", (1,))
    assert manifest.target.spec.family == VARIANTS[variant][0]
    assert largest_error(open_runner(manifest, tmp_path / "engine"), model, seed=3) <= MAX_ERROR


@pytest.mark.parametrize(
    ("variant", "changes", "shared"),
    [
        ("llama3_rope", {"num_key_value_heads": 1}, {"tp": 2}),
        ("llama_attention_bias", {"num_key_value_heads": 2}, {"tp": 4}),
        ("qwen2", {"num_key_value_heads": 1}, {"tp": 4, "embedding_axis": 0}),
        ("qwen3", {"num_key_value_heads": 2}, {"tp": 4, "pp": 3, "embedding_axis": 1}),
        ("qwen3", {"num_hidden_layers": 4}, {"pp": 3}),
        ("qwen2", {}, {"tp": 2, "pp": 2, "embedding_axis": 0}),
        ("qwen3_moe", {"num_key_value_heads": 1}, {"tp": 4, "pp": 2}),
    ],
)
def test_any_way_of_sharing_a_model_gives_its_tensors_back(
    variant: str, changes: dict, shared: dict, tmp_path: Path
) -> None:
    """97 tokens are padded to 98 or 100 rows; with fewer KV heads than ranks, each is held more than once."""
    model = random_model(variant, **changes)
    whole, parts = write_model(model, tmp_path / "whole"), write_trtllm(model, tmp_path / "shared", **shared)
    edit_json(parts / "config.json", lambda config: config["moe"].pop("normalization_mode"))  # shares then sum to 1
    opened = [open_checkpoint(path) for path in (whole, parts)]
    weights = [ModelWeights(checkpoint, read_spec(checkpoint.fields)) for checkpoint in opened]
    specs = [read_spec(open_checkpoint(path).fields) for path in (whole, parts)]
    assert specs[0] == specs[1]
    assert list(weights[0]) == list(weights[1])
    for name in weights[0]:
        assert weights[0].shape(name) == weights[0][name].shape
        assert (weights[0][name] == weights[1][name]).all(), name


def test_a_checkpoint_without_a_head_uses_the_embedding(tmp_path: Path) -> None:
    model = random_model("qwen2_tied")
    source = write_trtllm(model, tmp_path / "source")
    tensors = load_file(source / "rank0.safetensors")
    save_file({name: t for name, t in tensors.items() if name != "lm_head.weight"}, source / "rank0.safetensors")
    manifest = build(source, tmp_path / "engine")
    assert manifest.target.spec.tie_word_embeddings
    assert largest_error(open_runner(manifest, tmp_path / "engine"), model, seed=3) <= MAX_ERROR


def test_half_precision_ranks_are_read(tmp_path: Path) -> None:
    model = random_model("qwen2")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    manifest = build(write_trtllm(model, tmp_path / "source", tp=2, dtype=torch.bfloat16), tmp_path / "engine")
    assert manifest.target.spec.checkpoint_dtype == "BF16"
    assert largest_error(open_runner(manifest, tmp_path / "engine"), model, seed=3) <= MAX_ERROR


def edit_rank(source: Path, rank: int, change: Change) -> None:
    path = source / f"rank{rank}.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(architecture="GPTForCausalLM"), ["architecture", "GPTForCausalLM"]),
        (lambda c: c["quantization"].update(quant_algo="FP8"), ["quant_algo", "FP8"]),
        (lambda c: c["quantization"].update(kv_cache_quant_algo="INT8"), ["kv_cache_quant_algo", "INT8"]),
        (lambda c: c.update(quantization="FP8"), ["quantization", "FP8"]),
        (lambda c: c.update(position_embedding_type="alibi"), ["position_embedding_type", "alibi"]),
        (lambda c: c.update(hidden_act="gelu"), ["hidden_act", "gelu"]),
        (lambda c: c.update(embedding_multiplier=12.0), ["embedding_multiplier", "12.0"]),
        (lambda c: c.update(rotary_scaling={"rope_type": "yarn", "factor": 4.0}), ["rope_type", "yarn"]),
        (lambda c: c["mapping"].update(cp_size=2), ["cp_size", "2"]),
        (lambda c: c["mapping"].update(tp_size=3, world_size=3), ["tp_size", "3"]),
        (lambda c: c["mapping"].update(world_size=4), ["world_size", "4", "2"]),
        (lambda c: c["mapping"].update(tp_size=4, world_size=4), ["rank2.safetensors", "missing"]),
        (lambda c: c.update(mapping=[2]), ["mapping", "[2]"]),
        (lambda c: c.update(num_hidden_layers=4), ["layers.3", "missing"]),
        (lambda c: c.update(num_hidden_layers=2), ["layers.2", "no part"]),
        (lambda c: c.update(head_size=16), ["shape"]),
        (lambda c: c.update(head_size=None, rotary_embedding_dim=4), ["rotary_embedding_dim = 4", "only 8"]),
        (lambda c: c.update(use_parallel_embedding=True), ["embed_tokens", "shape"]),
        (lambda c: c.update(embedding_sharding_dim=3, use_parallel_embedding=True), ["embedding_sharding_dim", "3"]),
        (lambda c: c.update(num_attention_heads=0), ["num_attention_heads", "0"]),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_merged_is_named(change: Change, words: list[str], tmp_path: Path) -> None:
    source = write_trtllm(random_model("llama3_rope"), tmp_path / "source", tp=2)
    edit_json(source / "config.json", change)
    refuses_build(source, source, *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(FC), ["rank1", "layers.1.mlp.fc.weight", "missing"]),
        (lambda t: t.update({FC: torch.zeros(5, 32)}), ["rank1", "mlp.fc.weight", "[5, 32]", "[24, 32]"]),
        (lambda t: t.update({FC: t[FC].to(torch.int8)}), ["rank1", "mlp.fc.weight", "I8"]),
        (lambda t: t.update({FC: t[FC].half()}), ["mlp.fc.weight", "F16", "F32"]),
        (lambda t: t["transformer.layers.0.attention.qkv.weight"].fill_(float("nan")), ["rank1", "qkv.weight", "nan"]),
        (lambda t: t.update(surprise=torch.zeros(1)), ["rank0", "surprise", "missing"]),
    ],
)
def test_ranks_that_do_not_fit_together_are_named(change: Change, words: list[str], tmp_path: Path) -> None:
    source = write_trtllm(random_model("llama3_rope"), tmp_path / "source", tp=2)
    edit_rank(source, 1, change)
    refuses_build(source, source, *words)


def test_tensors_that_no_model_has_are_named(tmp_path: Path) -> None:
    source = write_trtllm(random_model("llama3_rope"), tmp_path / "source")
    scale = "transformer.layers.0.attention.qkv.weights_scaling_factor"
    edit_rank(source, 0, lambda tensors: tensors.update({scale: torch.ones(1)}))
    refuses_build(source, source, "rank0.safetensors", scale)
    (source / "tokenizer.json").unlink()
