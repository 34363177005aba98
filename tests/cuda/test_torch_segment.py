"""The torch segments on a CPU: pools, cut and pruned runs against runtime llvm, every family against transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from faser_backend.core.errors import ConfigError
from faser_backend.cpu.kv_pool import KvPool
from faser_backend.cpu.runner import LlvmRunner
from faser_backend.cuda.torch_weights import load_weights
from faser_backend.device.partition import CorePartition
from faser_backend.engines.build import build_engines
from faser_backend.engines.checkpoint import CheckpointError
from faser_backend.manifest import EngineManifest
from faser_backend.pipeline.rows import keep_rows
from tests.support.tiny_models import (
    VARIANTS,
    largest_error,
    make_rows,
    random_model,
    run_all,
    write_checkpoint,
    write_model,
)
from tests.support.torch_engines import CPU, open_torch_runner, write_torch_engine

MAX_ERROR = 2e-4
NUM_BLOCKS, BLOCK_SIZE = 60, 4


class Pair:
    """One checkpoint under both runtimes."""

    def __init__(self, root: Path, exit_layers: tuple[int, ...]) -> None:
        source = write_checkpoint(root / "source")
        build_engines(source, source, root / "llvm", exit_layers=exit_layers, kv_block_size=BLOCK_SIZE)
        target = EngineManifest.load(root / "llvm").target
        pool = KvPool(target.spec, NUM_BLOCKS, BLOCK_SIZE)
        self.llvm = LlvmRunner(target, root / "llvm", CorePartition("test", (0,)), pool)
        model = write_torch_engine(source, root / "torch", exit_layers=exit_layers)
        self.torch = open_torch_runner(model, root / "torch", NUM_BLOCKS, BLOCK_SIZE)


def test_pools_hold_the_same_keys_and_values_whichever_rows_have_logits(tmp_path: Path) -> None:
    pair = Pair(tmp_path, (1,))
    assert pair.torch.num_layers == pair.llvm.num_layers and pair.torch.exits == pair.llvm.exits
    rng = np.random.default_rng(5)
    sequences = [rng.integers(0, 97, 20) for _ in range(2)]
    tables = rng.permutation(NUM_BLOCKS)[:10].reshape(2, 5)
    for starts, counts in (([0, 0], [7, 11]), ([7, 11], [5, 1])):
        rows = make_rows(sequences, starts, counts, tables, logit_rows=np.zeros(0, np.int64))  # a prefill: no logits
        assert run_all(pair.torch, rows).shape == (0, 97)
        run_all(pair.llvm, rows)
    difference = np.abs(pair.torch.pool.storage.numpy()[:, :, :, :NUM_BLOCKS] - pair.llvm.pool.storage)
    assert difference.max() <= MAX_ERROR
    assert pair.llvm.pool.storage[:, :, :, :NUM_BLOCKS].any()
    every, some = (make_rows(sequences, [12, 12], [6, 5], tables, chosen) for chosen in (None, np.array([2, 10, 5])))
    np.testing.assert_allclose(run_all(pair.torch, some), run_all(pair.torch, every)[[2, 10, 5]], atol=1e-5)


@pytest.mark.parametrize("num_kept", [[4, 5, 3], [2, 5, 1]])
def test_exit_scores_and_rows_that_left(num_kept: list[int], tmp_path: Path) -> None:
    pair = Pair(tmp_path, (1,))
    rng = np.random.default_rng(2)
    sequences = [rng.integers(0, 97, 12) for _ in range(3)]
    tables, starts = np.array([[5, 9, 0], [7, 1, 20], [2, 0, 0]]), [3, 6, 0]
    candidates = rng.integers(0, 97, (12, 4))
    results = []
    runners: tuple[Any, Any] = pair.llvm, pair.torch
    for runner in runners:
        for sequence, start, table in zip(sequences, starts, tables, strict=True):
            if start:
                rows = make_rows([sequence], [0], [start], table[None])
                runner.run_segment(1, rows, runner.run_segment(0, rows, None))
        rows = make_rows(sequences, starts, [4, 5, 3], tables)
        hidden, scores = runner.run_segment_with_scores(0, rows, None, candidates)
        hidden, scores = np.array(hidden), np.array(scores)
        again, _ = runner.run_segment_with_scores(0, rows, None, candidates)
        shorter, kept = keep_rows(rows, np.array(num_kept))
        logits = np.array(runner.run_segment(1, shorter, runner.take_rows(again, kept)))
        results.append((hidden, scores, logits))
    for wanted, got in zip(*results, strict=True):
        assert wanted.shape == got.shape
        np.testing.assert_allclose(got, wanted, atol=MAX_ERROR)
    got, wanted = pair.torch.pool.storage.numpy(), pair.llvm.pool.storage
    np.testing.assert_allclose(got[:, :, :, :NUM_BLOCKS], wanted[:, :, :, :NUM_BLOCKS], atol=MAX_ERROR)


def test_weight_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = write_torch_engine(write_checkpoint(tmp_path / "source"), tmp_path)
    path = tmp_path / model.segments[0].file.name
    with pytest.raises(ConfigError, match=r"embedding has dtype torch.float32, the engine's wants torch.bfloat16"):
        load_weights(path, model.spec, "bf16", CPU)
    tensors = load_file(path)
    save_file({**tensors, "layers.0.sinks": torch.zeros(4)}, path)
    with pytest.raises(ConfigError, match=r"holds layers\.0\.sinks, which runtime torch does not know"):
        load_weights(path, model.spec, "fp32", CPU)
    del tensors["layers.1.down"]
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=r"tensor layers\.1\.down is missing"):
        load_weights(path, model.spec, "fp32", CPU)


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
