"""The GPU runner on torch's CPU device: buckets, static tensors, shared pools, decode calls filled on the device."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from faser_backend.core.errors import ConfigError
from faser_backend.cuda.call_shapes import MAX_PROMPT_ROWS, CallBounds
from faser_backend.cuda.pool import CudaKvPool
from faser_backend.cuda.runner import CudaRunner
from faser_backend.cuda.segment import Launch
from faser_backend.manifest import ModelEngine, SegmentSpec
from faser_backend.pipeline.rows import run_model
from tests.support.tiny_models import make_rows, write_checkpoint
from tests.support.torch_engines import CPU, open_torch_runner, write_torch_engine

NUM_BLOCKS, BLOCK_SIZE = 40, 4


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelEngine, Path]:
    root = tmp_path_factory.mktemp("torch_runner")
    source = write_checkpoint(root / "source", max_position_embeddings=1024)
    return write_torch_engine(source, root, exit_layers=(1, 2)), root


@pytest.fixture
def runner(built: tuple[ModelEngine, Path]) -> CudaRunner:
    return open_torch_runner(*built, NUM_BLOCKS, BLOCK_SIZE)


class SpyProgram:
    """A program that records its arguments and counts its launches."""

    packs_tables = True

    def __init__(self, spec: SegmentSpec) -> None:
        self.spec = spec
        self.prepared: list[tuple[Mapping[str, torch.Tensor], CallBounds]] = []
        self.num_launches = 0

    def prepare(self, tensors: Mapping[str, torch.Tensor], bounds: CallBounds, *, is_kept: bool = True) -> Launch:
        self.prepared.append((dict(tensors), bounds))

        def launch() -> None:
            self.num_launches += 1

        return launch


def spied(model: ModelEngine) -> tuple[CudaRunner, list[SpyProgram]]:
    pool = CudaKvPool(model.spec, NUM_BLOCKS, BLOCK_SIZE, dtype="fp32", device=CPU)
    programs = [SpyProgram(segment) for segment in model.segments]
    return CudaRunner(model, programs, pool, CPU), programs


def test_programs_are_given_every_tensor_of_the_manifest(built: tuple[ModelEngine, Path]) -> None:
    runner, programs = spied(built[0])
    rows = make_rows([np.arange(9)], [2], [5], np.array([[7, 3, 1]]))
    hidden, _ = runner.run_segment_with_scores(0, rows, None, np.zeros((5, 3), np.int64))
    hidden = runner.run_segment(1, rows, hidden)
    runner.run_segment(2, rows, hidden)
    for program in programs:
        (tensors, bounds), spec = program.prepared[0], program.spec
        assert {tensor.name for tensor in (*spec.inputs, *spec.outputs)} == set(tensors) - {"table_width"}
        for tensor in (*spec.inputs, *spec.outputs):
            assert str(tensors[tensor.name].dtype) == f"torch.{tensor.dtype}", tensor.name
            assert tensors[tensor.name].ndim == len(tensor.shape), tensor.name
        assert bounds == CallBounds(8, 8, 8, 256, 8, 3 if spec is programs[0].spec else 0), "rows alone"
        for layer in range(spec.first_layer, spec.last_layer):
            assert tensors[f"k_pool.{layer}"].data_ptr() == runner.pool.keys(layer).data_ptr()
            assert tensors[f"v_pool.{layer}"].data_ptr() == runner.pool.values(layer).data_ptr()
    given = [program.prepared[0][0] for program in programs]
    for before, after in pairwise(given):
        assert before["hidden_out"].data_ptr() == after["hidden"].data_ptr(), "nothing is copied between segments"
        assert after.get("hidden_out", after["slot_mapping"]).data_ptr() != after["hidden"].data_ptr()


def test_calls_of_one_bucket_are_prepared_once_and_large_ones_each_time(built: tuple[ModelEngine, Path]) -> None:
    runner, programs = spied(built[0])
    sequence, table = [np.zeros(MAX_PROMPT_ROWS + 9, np.int64)], np.arange(260)[None] % NUM_BLOCKS
    for count in (5, 6, 7, 8, 5):
        runner.run_segment(0, make_rows(sequence, [0], [count], table), None)
    assert len(programs[0].prepared) == 1 and programs[0].num_launches == 5
    for _ in range(2):
        rows = make_rows(sequence, [0], [MAX_PROMPT_ROWS + 1], table)
        assert runner.run_segment(0, rows, None).shape == (MAX_PROMPT_ROWS + 1, 32)
    assert len(programs[0].prepared) == 3
    assert programs[0].prepared[2][1].num_rows == MAX_PROMPT_ROWS + 8


def test_padding_changes_nothing(built: tuple[ModelEngine, Path], runner: CudaRunner) -> None:
    """The same rows in buckets of different sizes: exact bounds, rounded ones, and a batch with other sequences."""
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 97, 12) for _ in range(3)]
    tables = np.array([[4, 9, 2], [30, 11, 12], [21, 20, 6]])
    counts = [5, 1, 3]
    together = run_model(runner, make_rows(sequences, [0, 0, 0], counts, tables)).clone()
    storage = runner.pool.storage.clone()
    exact = open_torch_runner(*built, NUM_BLOCKS, BLOCK_SIZE, limits=CallBounds(9, 3, 5, 3, 9, 0))
    torch.testing.assert_close(run_model(exact, make_rows(sequences, [0, 0, 0], counts, tables)).clone(), together)
    torch.testing.assert_close(exact.pool.storage, storage)
    alone = [run_model(exact, make_rows([sequences[i]], [0], [counts[i]], tables[i : i + 1])).clone() for i in range(3)]
    torch.testing.assert_close(torch.cat(alone), together, atol=1e-4, rtol=0)
    assert not exact.pool.storage[:, :, :, -1].any(), "not even the scratch block is written"


def test_results_are_static_and_survive_calls_of_other_shapes(runner: CudaRunner) -> None:
    sequence, table = [np.arange(30)], np.array([[0, 1, 2, 3, 4, 5, 6, 7]])
    four = make_rows(sequence, [0], [4], table)
    hidden = runner.run_segment(0, four, None)
    kept = hidden.clone()
    runner.run_segment(0, make_rows(sequence, [4], [20], table), None)
    torch.testing.assert_close(hidden, kept, rtol=0, atol=0)
    assert runner.run_segment(0, four, None).data_ptr() == hidden.data_ptr()


def test_wrong_use_is_refused(built: tuple[ModelEngine, Path], runner: CudaRunner) -> None:
    rows = make_rows([np.arange(3)], [0], [3], np.array([[1]]))
    with pytest.raises(AssertionError, match="segment 2 has no exit scores"):
        runner.run_segment_with_scores(2, rows, torch.zeros(3, 32), np.zeros((3, 2), np.int64))
    with pytest.raises(AssertionError, match="segment 1 needs the hidden states"):
        runner.run_segment(1, rows, None)
    with pytest.raises(ConfigError, match=r"num_kv_blocks = 1000000000000: .* bytes do not fit on cpu"):
        CudaKvPool(built[0].spec, 10**12, BLOCK_SIZE, dtype="bf16", device=CPU)
    runner.pool.storage[1, 0, 0, 3, 2, 1] = float("nan")
    with pytest.raises(AssertionError, match="layer 1"):
        runner.pool.check_integrity()
