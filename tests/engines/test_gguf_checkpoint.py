"""GGUF files against transformers: architectures, types of tensors, order of rows, rotary factors."""

import gc
import tempfile
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from faser_backend.core.model import RopeScaling
from faser_backend.engines.build import build_engines
from faser_backend.engines.checkpoint import CheckpointError
from faser_backend.engines.gguf_checkpoint import TYPES, GGUFCheckpoint
from faser_backend.engines.pairs import open_checkpoint
from faser_backend.manifest import EngineManifest
from tests.engines.test_families import MAX_ERROR, build, open_runner
from tests.support.gguf_models import Edit, write_gguf
from tests.support.tiny_models import LLAMA3_ROPE, largest_error, random_model, write_model

QUANTISED = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 8}
K_QUANTISED = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 32, "head_dim": 8}
LLAMA_31 = {**LLAMA3_ROPE, "rope_theta": 5e5, "original_max_position_embeddings": 8192}


def linear(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def llama31(writer: gguf.GGUFWriter) -> None:
    frequencies = 5e5 ** (-np.arange(4) / 4)
    factors = frequencies / RopeScaling("llama3", 8.0).scaled(frequencies)
    assert factors[0] == 1.0 < factors[2] < factors[3] == 8.0
    writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))


def nothing(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


VARIANTS: dict[str, tuple[str, dict, Edit]] = {
    "llama_linear": ("linear_rope", {}, linear),
    "llama_31": ("llama3_rope", {"rope_parameters": LLAMA_31}, llama31),
    "llama_biases_tied": ("llama_all_biases_tied", {}, nothing),
    "mistral": ("mistral", {}, nothing),
    "qwen2": ("qwen2", {}, nothing),
    "qwen2_tied": ("qwen2_tied", {}, nothing),
    "qwen3": ("qwen3", {}, nothing),
    "qwen3_tied_bias": ("qwen3_tied_bias", {}, nothing),
    "qwen3moe": ("qwen3_moe", {}, nothing),
}


def error_of(file: Path, reference, directory: Path) -> float:
    manifest = build(file, directory)
    runner = open_runner(manifest, directory)
    return max(largest_error(runner, reference, seed) for seed in range(2))


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path):
    variant, changes, edit = VARIANTS[name]
    model = write_gguf(random_model(variant, **changes), tmp_path / "model.gguf", edit=edit)
    assert error_of(tmp_path / "model.gguf", model, tmp_path / "engine") <= MAX_ERROR


@pytest.mark.parametrize("kind", TYPES)
def test_logits_equal_those_of_the_dequantised_weights(kind: str, tmp_path: Path):
    sizes = K_QUANTISED if gguf.GGML_QUANT_SIZES[Type[kind]][0] > 32 else QUANTISED  # rows are whole blocks
    model = random_model("linear_rope", **sizes, num_hidden_layers=2)
    model = write_gguf(model, tmp_path / "model.gguf", kind=Type[kind], edit=linear)
    assert error_of(tmp_path / "model.gguf", model, tmp_path / "engine") <= MAX_ERROR
    spec = EngineManifest.load(tmp_path / "engine").target.spec
    assert spec.checkpoint_dtype == (kind if kind in ("F32", "BF16") else "F16")


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K"])
def test_experts_are_dequantised_one_by_one(kind: str, tmp_path: Path):
    sizes = {**(K_QUANTISED if kind == "Q6_K" else QUANTISED), "moe_intermediate_size": 256, "num_hidden_layers": 1}
    model = write_gguf(random_model("qwen3_moe", **sizes), tmp_path / "model.gguf", kind=Type[kind])
    assert error_of(tmp_path / "model.gguf", model, tmp_path / "engine") <= MAX_ERROR


def test_the_comparison_notices_rows_in_another_order(tmp_path: Path):
    model = write_gguf(random_model("linear_rope"), tmp_path / "model.gguf", edit=linear, permutes=False)
    assert error_of(tmp_path / "model.gguf", model, tmp_path / "engine") > 100 * MAX_ERROR


def test_the_comparison_notices_factors_that_are_left_out(tmp_path: Path):
    model = random_model("llama3_rope", rope_parameters=LLAMA_31)
    write_gguf(model, tmp_path / "model.gguf")
    assert error_of(tmp_path / "model.gguf", model, tmp_path / "engine") > 10 * MAX_ERROR


def test_a_directory_with_one_file_is_a_checkpoint(tmp_path: Path):
    folder = tmp_path / "folder"
    folder.mkdir()
    write_gguf(random_model("qwen2"), folder / "one.gguf")
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint, GGUFCheckpoint) and checkpoint.origin == folder / "one.gguf"
    (folder / "two.gguf").write_bytes((folder / "one.gguf").read_bytes())
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files \(one\.gguf, two\.gguf\): name one of them"):
        open_checkpoint(folder)


def test_a_file_and_a_hugging_face_directory_make_a_pair(tmp_path: Path):
    model = write_gguf(random_model("qwen2"), tmp_path / "model.gguf")
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    draft = write_model(model, tmp_path / "draft")
    (draft / "tokenizer.json").write_bytes((checkpoint.directory / "tokenizer.json").read_bytes())
    manifest = build_engines(tmp_path / "model.gguf", draft, tmp_path / "engine")
    assert manifest.draft is not None and manifest.end_ids == (3,)
    spec = manifest.draft.spec
    assert manifest.target.spec == replace(spec, rms_eps=float(np.float32(spec.rms_eps)))  # GGUF holds a float32


def test_the_tokenizers_folder_goes_with_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_gguf(random_model("qwen2"), tmp_path / "model.gguf")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    assert [path.parent for path in checkpoint.directory.iterdir()] == [checkpoint.directory] * 2
    del checkpoint
    build_engines(tmp_path / "model.gguf", None, tmp_path / "engine")
    gc.collect()
    assert list(temporary.iterdir()) == []
