"""Quantised checkpoints: their numbers, engines of them, negative controls, and malformed ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import PreTrainedModel

from faser_backend.engines import quantised_checkpoint
from faser_backend.engines.build import build_engines
from faser_backend.engines.checkpoint import CheckpointError
from faser_backend.engines.pairs import open_checkpoint
from tests.cpu.test_gguf import OUTSIDE, build, expected, restored
from tests.engines.test_families import open_runner
from tests.support.cpu_products import UNIT_ERROR, restore_matrix
from tests.support.gguf_models import with_weights
from tests.support.quantised_models import CASES, PACKED, Tensors, compressed, write_quantised
from tests.support.tiny_models import largest_error, random_model, write_model

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 16, "num_key_value_heads": 4}
SIZES |= {"num_hidden_layers": 2}
UP = "model.layers.1.mlp.up_proj"


def write(directory: Path, name: str, **options: Any) -> PreTrainedModel:
    return write_quantised(random_model("llama", **SIZES), directory, CASES[name], **options)


def is_read(source: Path, reference: PreTrainedModel) -> bool:
    """Returns whether the matrices that are read are those of the model."""
    checkpoint = open_checkpoint(source)
    return all(np.array_equal(checkpoint.read(name), array) for name, array in expected(reference).items())


@pytest.mark.parametrize("name", CASES)
def test_engines_hold_the_weights_that_the_checkpoint_encodes(name: str, tmp_path: Path) -> None:
    """Exactly, or with minimums or numbers rounded as the manifest says; zero points are exact in int8."""
    case, source = CASES[name], tmp_path / "source"
    reference = write(source, name)
    assert is_read(source, reference)
    weights = {matrix: array.copy() for matrix, array in expected(reference).items()}
    shapes = {matrix: array.shape for matrix, array in weights.items()}
    for asked in (None, "int8") if case.rounded == "Q4_ZP" else (None,):
        directory, exactness = tmp_path / f"engine.{asked}", 0.0 if asked else case.exactness
        manifest = build(source, directory, weights=asked, compute="bf16x2")
        stored = manifest.target.weight_format
        assert asked or (case.rounded in stored.rounded and stored.formats == (case.stored, "fp32", "fp32"))
        assert bool(stored.rounded) == bool(exactness)
        found = restored(manifest.target, directory, shapes)
        for matrix in set(weights) - (set(OUTSIDE.values()) if asked else set()):
            bound = 0.0 if matrix in OUTSIDE.values() else exactness * (np.abs(weights[matrix]).max() + 2.0**-14)
            assert np.abs(found[matrix] - weights[matrix]).max() <= bound, matrix
        if stored.formats[0] in ("bf16", "fp16"):
            continue  # cases whose kernels no other test needs
        others = {matrix: tensor.numpy() for matrix, tensor in reference.state_dict().items()}
        runner, held = open_runner(manifest, directory), with_weights(reference, others | found)
        assert largest_error(runner, held, seed=0) <= UNIT_ERROR


@pytest.mark.parametrize("runtime", ["llvm", "torch"])
def test_builds_in_float32_equal_those_of_the_dequantised_model(runtime: str, tmp_path: Path) -> None:
    for name in CASES if runtime == "torch" else ("awq_32", "gptq_act_order"):
        write_model(write(tmp_path / name, name), tmp_path / f"{name}.plain")
        weights = "fp32" if runtime == "llvm" else None
        quantised, plain = (
            build_engines(tmp_path / end, None, tmp_path / "out" / end, runtime=runtime, weights=weights)
            for end in (name, f"{name}.plain")
        )
        assert quantised.target.weights == plain.target.weights, name


def test_modules_that_are_left_out_stay_as_they_are_and_biases_of_zeros_are_dropped(tmp_path: Path) -> None:
    """Tools of GPTQ write such biases for models that have none. Others are refused."""
    for value in (0.0, 0.5):
        source, bias = tmp_path / str(value), {f"{UP}.bias": torch.full((256,), value)}
        reference = write(source, "gptq_4", ignored=("lm_head", "k_proj"), edit=lambda t, own=bias: t.update(own))
        assert is_read(source, reference)
        if value == 0.0:
            assert build(source, tmp_path / "engine").target.weight_format.name == "fp32", "holds both types"
        else:
            with pytest.raises(CheckpointError, match=r"up_proj\.bias belongs to no part"):
                build(source, tmp_path / "engine")


def test_experts_are_quantised_one_by_one(tmp_path: Path) -> None:
    model = random_model("qwen3_moe", **{**SIZES, "moe_intermediate_size": 64})
    reference = write_quantised(model, tmp_path / "source", CASES["gptq_4"]).state_dict()
    manifest = build(tmp_path / "source", tmp_path / "engine", compute="bf16x2")
    assert manifest.target.weight_format.formats == ("int4", "fp32", "fp32") and manifest.target.weights is not None
    stored = load_file(tmp_path / "engine" / manifest.target.weights.name)
    for layer, expert in np.ndindex(2, 8):
        gate, up, down = (
            restore_matrix(stored[f"layers.{layer}.experts.{expert}.{part}"], *sizes, "int4").T
            for part, sizes in (("gate", (128, 64)), ("up", (128, 64)), ("down", (64, 128)))
        )
        for name, found in (("gate_up_proj", np.concatenate([gate, up])), ("down_proj", down)):
            wanted = reference[f"model.layers.{layer}.mlp.experts.{name}"][expert].numpy()
            np.testing.assert_allclose(found, wanted, rtol=0, atol=CASES["gptq_4"].exactness * np.abs(wanted).max())


def retitle(source: Path, **changes: Any) -> None:
    path = source / "config.json"
    content = json.loads(path.read_text())
    content["quantization_config"] |= changes
    path.write_text(json.dumps(content))


def change(end: str, made: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({UP + end: made(tensors[UP + end])})


@pytest.mark.parametrize("control", ["nibbles", "zeros", "groups"])
def test_controls_that_must_differ(control: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another order of nibbles, zero points off by one, a shuffled index: each makes another model."""
    source, engine = tmp_path / "source", tmp_path / "engine"
    if control == "nibbles":
        reference = write(source, "awq_32")
        monkeypatch.setattr(quantised_checkpoint, "AWQ_ORDER", tuple(range(8)))
    elif control == "zeros":
        reference = write(source, "gptq_4")
        retitle(source, checkpoint_format="gptq_v2")
    else:
        reference = write(source, "gptq_act_order", edit=change(".g_idx", lambda index: index.roll(1)))
    manifest = build(source, engine, weights="fp32")  # whose kernel other tests need too
    assert largest_error(open_runner(manifest, engine), reference, seed=0) > 100 * UNIT_ERROR


def without(end: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(UP + end)


MALFORMED: list[tuple[str, Callable[[Tensors], object], str]] = [
    ("awq_32", without(".scales"), f"tensor {UP}.scales is missing"),
    ("awq_32", change(".qweight", lambda t: t[:64]), f"{UP}.scales has shape"),
    ("awq_32", change(".qweight", lambda t: t.flatten()), f"{UP}.qweight has shape [4096]: must be a matrix"),
    ("awq_32", change(".qzeros", lambda t: t.to(torch.int8)), f"{UP}.qzeros has dtype I8"),
    ("awq_32", change(".scales", lambda t: t * torch.nan), f"{UP}.scales[0, 0] = nan: must be finite"),
    ("gptq_4", change(".g_idx", lambda t: t + 1), f"{UP}.g_idx[0] = 1: must lie in [0, 0]"),
    ("gptq_act_order", without(".g_idx"), f"{UP}.g_idx is missing, but quantization_config says"),
    ("packed_4_zeros", without(".weight_zero_point"), f"{UP}.weight_zero_point is missing, but"),
    ("packed_8", change(".weight_shape", lambda t: t * 2), f"{UP}.weight_packed has shape"),
    ("packed_4_byte_zeros", change(".weight_zero_point", lambda t: t[1:]), f"{UP}.weight_zero_point has shape"),
    ("fp8_channels", change(".weight_scale", lambda t: t[:1]), f"{UP}.weight_scale has shape"),
    ("hugging_face_fp8", change(".weight", lambda t: (t.float() * torch.nan).to(t.dtype)), f"{UP}.weight[0, 0] = nan"),
]


@pytest.mark.parametrize(("name", "edit", "said"), MALFORMED)
def test_malformed_tensors_are_refused_by_name(name, edit, said, tmp_path: Path) -> None:
    write(tmp_path / "source", name, edit=edit)
    with pytest.raises(CheckpointError) as caught:
        build(tmp_path / "source", tmp_path / "engine")
    assert said in str(caught.value) and "\n" not in str(caught.value) and not (tmp_path / "engine").exists()


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("awq_32", {"quant_method": "bitsandbytes"}, "quant_method = 'bitsandbytes': must be one of awq, gptq"),
    ("awq_32", {"bits": 8}, "quantization_config.bits = 8: only 4"),
    ("awq_32", {"group_size": 48}, "group_size = 48: must be -1 or a multiple of 32"),
    ("awq_32", {"group_size": 64}, "scales has shape"),
    ("gptq_4", {"bits": 3}, "bits = 3: only 4 or 8"),
    ("gptq_4", {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
    ("gptq_4", {"dynamic": {"-:.*up.*": {}}}, "dynamic = "),
    ("packed_8", compressed(PACKED, 8, "channel", actorder="group"), "weight_g_idx is missing, but"),
    ("packed_8", {"format": "marlin-24"}, "format = 'marlin-24': must be one of pack-"),
    ("packed_8", {"config_groups": {}}, "config_groups = {}: hold 0 schemes: must be one"),
    ("fp8_blocks", {"config_groups": {"a": {"input_activations": {"num_bits": 4}}}}, "num_bits = 4: only 8"),
    ("hugging_face_fp8", {"weight_block_size": [128]}, "weight_block_size = .128.: must be two integers"),
    ("hugging_face_fp8", {"fmt": "e5m2"}, "fmt = 'e5m2': only 'e4m3'"),
]


@pytest.mark.parametrize(("name", "changes", "said"), REFUSED)
def test_schemes_that_would_be_another_model_are_refused(name, changes, said, tmp_path: Path) -> None:
    write(tmp_path / "source", name)
    retitle(tmp_path / "source", **changes)
    with pytest.raises(CheckpointError, match=said):
        build(tmp_path / "source", tmp_path / "engine")
