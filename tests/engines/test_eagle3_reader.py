"""EAGLE-3 checkpoints: accepted ones, and one error naming file, field and value for all others."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from faser_backend.core.model import EAGLE3
from faser_backend.engines.build import build_engines
from faser_backend.engines.eagle3 import is_eagle3
from faser_backend.manifest import MANIFEST_FILE
from tests.support.eagle3_models import (
    DRAFT_VOCAB_SIZE,
    FEATURE_LAYERS,
    HEAD,
    NUM_TARGET_LAYERS,
    head_tensors,
    write_head,
)
from tests.support.refusals import refuses_build
from tests.support.tiny_models import VOCAB_SIZE, write_checkpoint, write_tokenizer

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), num_hidden_layers=NUM_TARGET_LAYERS)


def test_heads_are_told_from_decoders() -> None:
    assert is_eagle3({"architectures": ["LlamaForCausalLMEagle3"]})
    assert is_eagle3({"architectures": ["Eagle3LlamaForCausalLM"]})
    assert is_eagle3({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000})
    assert not is_eagle3({"architectures": ["LlamaForCausalLM"]})
    assert not is_eagle3({"architecture": "LlamaForCausalLM", "draft_vocab_size": None})


CONFIGS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"num_hidden_layers": 2}, ("num_hidden_layers = 2", "only 1")),
    ({"model_type": "qwen3"}, ("model_type = 'qwen3'", "'llama'")),
    ({"tie_word_embeddings": True}, ("tie_word_embeddings = True",)),
    ({"attention_bias": True}, ("attention_bias = True",)),
    ({"norm_before_residual": True}, ("norm_before_residual = True",)),
    ({"logit_scale": 0.5}, ("logit_scale = 0.5",)),
    ({"sliding_window": 512}, ("sliding_window = 512",)),
    ({"vocab_size": 96}, ("vocab_size = 96", "the target's, 97")),
    ({"target_hidden_size": 64}, ("target_hidden_size = 64", "the target's, 32")),
    ({"hidden_size": 48}, ("hidden_size = 48", "the target's, 32", "no embedding")),
    ({"draft_vocab_size": 98}, ("draft_vocab_size = 98", "[1, 97]")),
    ({"draft_vocab_size": "40"}, ("draft_vocab_size = '40'", "an integer")),
    ({"eagle_config": {"use_aux_hidden_state": False}}, ("use_aux_hidden_state = False",)),
    ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, ("eagle_aux_hidden_state_layer_ids = [2, 4, 5]", "no value")),
    ({"quantization_config": {"quant_method": "fp8"}}, ("quantization_config.quant_method = 'fp8'",)),
]


@pytest.mark.parametrize(("changes", "words"), CONFIGS, ids=lambda value: next(iter(value)))
def test_configs_of_other_models(changes: dict[str, Any], words: tuple[str, ...], target: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", head_tensors(HEAD), **changes)
    refuses_build(target, head, "head/config.json", *words)


@pytest.mark.parametrize("layers", [[1, 3], [3, 1, 4], [1, 1, 4], [-1, 3, 4], [1, 3, 7], [1, 3, True], "1,3,4"])
def test_layers_that_the_target_cannot_give(layers: object, target: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", eagle_config={"eagle_aux_hidden_state_layer_ids": layers})
    name = "eagle_config.eagle_aux_hidden_state_layer_ids"
    refuses_build(target, head, f"{name} = {layers!r}", "ascending layers of the target in [0, 6]")


def test_targets_too_shallow_for_the_default_layers(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target", num_hidden_layers=6)
    refuses_build(target, write_head(tmp_path / "head"), "eagle_aux_hidden_state_layer_ids = [1, 2, 2]", "[0, 4]")


def shift(tensors: Tensors, index: int, value: int) -> None:
    tensors["d2t"][index] = value


TENSORS: dict[str, tuple[Callable[[Tensors], object], tuple[str, ...]]] = {
    "no_fc": (lambda t: t.pop("fc.weight"), ("fc.weight", "missing")),
    "narrow_qkv": (
        lambda t: t.update({"midlayer.self_attn.k_proj.weight": torch.zeros(16, 32)}),
        ("midlayer.self_attn.k_proj.weight", "[16, 32]", "[16, 64]"),
    ),
    "unknown": (lambda t: t.update({"fc.bias": torch.zeros(32)}), ("fc.bias", "no part")),
    "not_finite": (lambda t: t["fc.weight"].fill_(float("nan")), ("fc.weight[0, 0]", "finite")),
    "no_map": (lambda t: (t.pop("d2t"), t.pop("t2d")), ("d2t is missing", "40 of 97")),
    "short_map": (lambda t: t.update(d2t=torch.zeros(39, dtype=torch.int64)), ("d2t", "[39]", "[40]")),
    "map_of_floats": (lambda t: t.update(d2t=torch.zeros(DRAFT_VOCAB_SIZE)), ("d2t", "F32", "I64")),
    "outside": (lambda t: shift(t, 0, -1), ("d2t[0]", "id -1", "[0, 96]")),
    "far_outside": (lambda t: shift(t, 39, 2**63 - 1), ("d2t[39]", "[0, 96]")),
    "twice": (lambda t: shift(t, 39, int(t["d2t"][0]) - 39), ("d2t", "listed more than once")),
}


@pytest.mark.parametrize("name", TENSORS)
def test_malformed_tensors(name: str, target: Path, tmp_path: Path) -> None:
    change, words = TENSORS[name]
    tensors = head_tensors(HEAD)
    change(tensors)
    refuses_build(target, write_head(tmp_path / "head", tensors), "head", *words)


def test_pickled_heads_are_never_opened(target: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head")
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    refuses_build(target, head, "model.safetensors", "missing")


def test_a_tokenizer_that_a_head_brings_has_to_be_its_target_s(target: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head")
    write_tokenizer(head, VOCAB_SIZE, first="[UNK]")
    refuses_build(target, head, "vocabulary of target", "'token0'")
    write_tokenizer(head)
    build_engines(target, head, tmp_path / "out")


def test_a_head_has_the_context_of_its_target(target: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head")
    assert json.loads((head / "config.json").read_text())["max_position_embeddings"] == 32
    manifest = build_engines(target, head, tmp_path / "out")
    assert manifest.draft is not None and manifest.draft.spec.family == EAGLE3
    assert manifest.target.spec.feature_layers == FEATURE_LAYERS
    assert (manifest.target.spec.max_context, manifest.draft.spec.max_context) == (128, 128)
    manifest = build_engines(target, head, tmp_path / "out", max_context=48)
    assert manifest.draft is not None and manifest.draft.spec.max_context == 48
    assert (tmp_path / "out" / MANIFEST_FILE).is_file()
