"""Every model family without experts in runtime torch, cut and whole, against transformers; experts are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from faser_backend.cuda.torch_weights import load_weights
from faser_backend.engines.build import build_engines
from faser_backend.engines.checkpoint import CheckpointError
from tests.support.tiny_models import VARIANTS, largest_error, random_model, write_model
from tests.support.torch_engines import CPU, open_torch_runner, write_torch_engine

MAX_ERROR = 2e-4
NUM_BLOCKS, BLOCK_SIZE = 60, 4
DENSE = [name for name in VARIANTS if "moe" not in name]


@pytest.mark.parametrize(
    ("variant", "exit_layers"), [("qwen3", ()), *((variant, (1, 2)) for variant in DENSE)], ids=str
)
def test_logits_are_those_of_transformers(variant: str, exit_layers: tuple[int, ...], tmp_path: Path) -> None:
    reference: Any = random_model(variant)
    model = write_torch_engine(write_model(reference, tmp_path / "source"), tmp_path, exit_layers=exit_layers)
    runner = open_torch_runner(model, tmp_path, NUM_BLOCKS, BLOCK_SIZE)
    assert largest_error(runner, reference, 6, NUM_BLOCKS) <= MAX_ERROR
    runner.pool.check_integrity()


def test_experts_are_refused(tmp_path: Path) -> None:
    source = write_model(random_model("qwen3_moe"), tmp_path / "source")
    with pytest.raises(CheckpointError, match=r"runtime = 'torch': does not support experts .*qwen3_moe"):
        build_engines(source, source, tmp_path / "engine", runtime="torch")


@pytest.mark.parametrize(("name", "dtype", "bound"), [("bf16", torch.bfloat16, 0.6), ("fp16", torch.float16, 0.08)])
def test_half_precision_is_that_of_the_engine_and_close(
    name: str, dtype: torch.dtype, bound: float, tmp_path: Path
) -> None:
    reference = random_model("llama_all_biases_tied")
    model = write_torch_engine(write_model(reference, tmp_path / "source"), tmp_path, dtype=name)
    weights = load_weights(tmp_path / model.segments[0].file.name, model.spec, name, CPU)
    assert weights.head.data_ptr() == weights.embedding.data_ptr() and weights.embedding.dtype == dtype
    for layer in weights.layers:
        assert layer.qkv.is_contiguous() and layer.gate_up.is_contiguous()
        assert layer.down.shape == (model.spec.hidden_size, model.spec.intermediate_size)
        assert layer.input_norm.dtype == torch.float32
        assert layer.qkv_bias is not None and layer.qkv_bias.dtype == dtype
    runner = open_torch_runner(model, tmp_path, NUM_BLOCKS, BLOCK_SIZE, dtype=name)
    assert MAX_ERROR < largest_error(runner, reference, 3, NUM_BLOCKS) < bound
