"""LoRA adapters in PEFT's layout: what is read, and what is refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from faser_backend.core.model import ModelSpec
from faser_backend.engines.checkpoint import CheckpointError
from faser_backend.engines.lora import read_adapter
from tests.engines.test_families import build
from tests.support.adapters import EVERY_MODULE, WEIGHTS, write_adapter
from tests.support.tiny_models import write_checkpoint

PREFIX = "base_model.model.model.layers."
QUERIES = f"{PREFIX}0.self_attn.q_proj.lora_"
Base = tuple[Path, ModelSpec]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    folder = tmp_path_factory.mktemp("base")
    return write_checkpoint(folder / "source"), build(folder / "source", folder / "engine").target.spec


@pytest.mark.parametrize(
    ("fields", "scale"), [({}, 1.5), ({"use_rslora": True}, 3.0), ({"init_lora_weights": "eva", "bias": None}, 1.5)]
)
def test_the_scale_is_part_of_b(base: Base, fields: Any, scale: float, tmp_path: Path) -> None:
    directory = write_adapter(base[0], tmp_path / "a", lora_alpha=6.0, layers=(1,), **fields)
    matrices, tensors = read_adapter(directory, base[1], 4), load_file(directory / WEIGHTS)
    names = ("q", "k", "v", "attention_out", "gate", "up", "down")
    assert sorted(matrices) == sorted((1, name) for name in names)
    for module, name in zip(EVERY_MODULE, names, strict=True):
        (prefix,) = {key.rpartition(".lora_")[0] for key in tensors if f".{module}." in key}
        a, b = matrices[1, name]
        np.testing.assert_array_equal(a, tensors[f"{prefix}.lora_A.weight"].T)
        np.testing.assert_allclose(b, scale * tensors[f"{prefix}.lora_B.weight"].T, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("peft_type", "IA3", "peft_type = 'IA3'"),
        ("r", 65, r"r = 65: must be an integer in \[1, 64\]"),
        ("lora_alpha", None, "lora_alpha = None"),
        ("lora_alpha", 1e6, r"lora_B.weight: its scaled numbers must be finite, and at most 65504"),
        ("use_dora", True, "use_dora = True"),
        (f"{QUERIES}A.weight", np.ones((4, 40)), r"has shape \[4, 40\]: must be \[4, 32\]"),
        (f"{QUERIES}A.weight", np.full((4, 32), np.nan, np.float32), "must be finite"),
        (f"{QUERIES}B.weight", None, "A or B of q of layer 0 is missing"),
        (f"{QUERIES}magnitude_vector", np.ones(32), "magnitude_vector"),
        (f"{PREFIX}3.self_attn.q_proj.lora_A.weight", np.ones((4, 32)), "must be A or B of a linear module"),
    ],
)
def test_a_field_or_tensor_is_refused(base: Base, name: str, value: Any, message: str, tmp_path: Path) -> None:
    is_field = "." not in name
    directory = write_adapter(base[0], tmp_path / "a", **({name: value} if is_field else {}))
    tensors = load_file(directory / WEIGHTS) | ({} if is_field else {name: value})
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, directory / WEIGHTS)
    with pytest.raises(CheckpointError, match=message):
        read_adapter(directory, base[1], 64)
