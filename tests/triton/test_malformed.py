"""Malformed checkpoints are refused with one line that names file or field and value."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.refusals import edit_json, refuses_build
from tests.support.tiny_models import random_model, write_model

Words = list[str]
WEIGHTS, SHARD = "model.safetensors", "shard.safetensors"
INDEX = "model.safetensors.index.json"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    variants = {"llama": "llama3_rope", "mistral": "mistral", "qwen2": "qwen2", "qwen3_moe": "qwen3_moe"}
    return {family: write_model(random_model(variant), root / family) for family, variant in variants.items()}


@pytest.fixture
def checkpoint(sources: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(sources["llama"], tmp_path / "checkpoint")


def refuses(checkpoint: Path, words: Words) -> None:
    refuses_build(checkpoint, checkpoint, *words)


def config(**changes: Any) -> Callable[[dict], object]:
    return lambda fields: fields.update(changes)


def rope(**changes: Any) -> Callable[[dict], object]:
    return lambda fields: fields["rope_parameters"].update(changes)


BAD_CONFIGS: dict[str, tuple[str, Callable[[dict], object], Words]] = {
    "unknown_family": ("llama", config(model_type="t5"), ["model_type", "'t5'"]),
    "fewer_layers_than_tensors": ("llama", config(num_hidden_layers=2), ["model.layers.2.", "no part"]),
    "vocabulary_below_tokenizer": ("llama", config(vocab_size=96), ["vocab_size", "96"]),
    "other_activation": ("llama", config(hidden_act="gelu_new"), ["hidden_act", "'gelu_new'", "silu"]),
    "yarn": ("llama", rope(rope_type="yarn"), ["rope_type", "'yarn'", "llama3"]),
    "partial_rotary": ("llama", config(partial_rotary_factor=0.5), ["partial_rotary_factor", "0.5"]),
    "gptq": ("llama", config(quantization_config={"quant_method": "gptq", "bits": 4}), ["quant_method", "gptq"]),
    "no_experts": ("qwen3_moe", config(num_local_experts=0), ["num_local_experts", "0"]),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_config_that_cannot_be_built(name: str, sources: dict[str, Path], tmp_path: Path) -> None:
    family, change, words = BAD_CONFIGS[name]
    checkpoint = shutil.copytree(sources[family], tmp_path / "checkpoint")
    edit_json(checkpoint / "config.json", change)
    refuses(checkpoint, ["checkpoint" if name != "vocabulary_below_tokenizer" else "target", *words])


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("end_id", [97, -1, "</s>", ["</s>"], [3, 1.5], True, {"id": 3}])
def test_an_end_id_that_is_none(name: str, end_id: object, checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").unlink()
    if name != "config.json":
        (checkpoint / name).write_text("{}")
    edit_json(checkpoint / name, config(eos_token_id=end_id))
    refuses(checkpoint, [name, "eos_token_id", repr(end_id), "96"])


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", INDEX])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"[" * 100_000, b"\xff\xfe{}"])
def test_a_json_file_that_is_none(name: str, content: bytes, checkpoint: Path) -> None:
    if name == INDEX:
        (checkpoint / WEIGHTS).unlink()
    (checkpoint / name).write_bytes(content)
    refuses(checkpoint, [name])


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", WEIGHTS])
def test_a_file_that_is_missing(name: str, checkpoint: Path) -> None:
    (checkpoint / name).unlink()
    refuses(checkpoint, [name, "missing"])
    (checkpoint / name).mkdir()
    refuses(checkpoint, [name])


NO_TOKENIZER = ["tokenizer.json: not a tokenizer.json"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"model": {}}, NO_TOKENIZER),
        ({"model": {"type": "WordLevel", "unk_token": "a", "vocab": {}}}, ["no tokens"]),
        ({"model": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": -1}}}, NO_TOKENIZER),
        ({"model": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 10**9}}}, ["vocab_size", "97", "1000000000"]),
        ({"added_tokens": [{"id": 1}]}, NO_TOKENIZER),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, NO_TOKENIZER),  # the library panics
    ],
)
def test_a_tokenizer_without_a_vocabulary(content: dict, words: Words, checkpoint: Path) -> None:
    path = checkpoint / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | content))
    refuses(checkpoint, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(UP), [UP, "missing"]),
        (lambda t: t.update({UP: t[UP].T.contiguous()}), [UP, "[32, 48]", "[48, 32]"]),
        (lambda t: t.update({UP: t[UP].to(torch.float64)}), [UP, "F64", "BF16"]),
        (lambda t: t.update({UP: t[UP].to(torch.float8_e4m3fn)}), [UP, "F8_E4M3"]),
        (lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}), ["q_norm", "no part"]),
        (lambda tensors: tensors[UP].__setitem__((47, 31), float("nan")), [WEIGHTS, f"{UP}[47, 31]", "nan"]),
        (lambda t: t.update({UP: t[UP].to(torch.bfloat16).fill_(float("nan"))}), [f"{UP}[0, 0]", "nan"]),
        (lambda t: t.update({UP: t[UP].to(torch.float16).fill_(float("inf"))}), [f"{UP}[0, 0]", "inf"]),
    ],
)
def test_tensors_that_do_not_make_the_model(
    change: Callable[[dict], object], words: Words, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error's index counts from the start of the tensor, in whichever of its blocks the number is."""
    monkeypatch.setattr("faser_backend.engines.checkpoint.BLOCK_ELEMENTS", 100)
    tensors = load_file(checkpoint / WEIGHTS)
    change(tensors)
    save_file(tensors, checkpoint / WEIGHTS)
    refuses(checkpoint, words)


@pytest.mark.parametrize("end", [0, 4, 200, -1])
def test_a_weight_file_that_is_cut_off(end: int, checkpoint: Path) -> None:
    path = checkpoint / WEIGHTS
    path.write_bytes(path.read_bytes()[:end])
    refuses(checkpoint, [WEIGHTS, "not readable as safetensors"])


def test_pickled_weights_are_not_opened(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS).rename(checkpoint / "pytorch_model.bin")
    refuses(checkpoint, [WEIGHTS, "missing", "pickled"])


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        (None, ["weight_map", "None"]),
        ({UP: "../model.safetensors"}, [UP, "../model.safetensors", "plain file name"]),
        ({UP: "model-00009-of-00009.safetensors"}, ["model-00009-of-00009.safetensors", "missing"]),
        ({"model.of.another": SHARD}, [SHARD, "model.of.another", "missing"]),
        ({UP: SHARD}, ["embed_tokens", "missing"]),
    ],
)
def test_an_index_that_leads_astray(weight_map: object, words: Words, checkpoint: Path) -> None:
    (checkpoint / WEIGHTS).rename(checkpoint / SHARD)
    (checkpoint / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    refuses(checkpoint, words)
