"""Runtime torch on a GPU: graphs equal eager calls, and nothing waits. gpu_check.py compares chains and tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from faser_backend.core.batch import RowBatch
from faser_backend.cuda.runner import CudaRunner
from faser_backend.manifest import ModelEngine
from faser_backend.pipeline.rows import run_model
from tests.support.tiny_models import make_rows, write_checkpoint
from tests.support.torch_engines import open_torch_runner, write_torch_engine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU with torch for CUDA")

NUM_BLOCKS, BLOCK_SIZE = 80, 16


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelEngine, Path, str]:
    root = tmp_path_factory.mktemp("torch_gpu")
    source = write_checkpoint(root / "source", max_position_embeddings=1024, hidden_size=64, head_dim=16)
    return write_torch_engine(source, root, exit_layers=(1,), dtype=request.param), root, request.param


@pytest.fixture
def runner(built: tuple[ModelEngine, Path, str]) -> Iterator[CudaRunner]:
    model, directory, dtype = built
    with torch.cuda.stream(torch.cuda.Stream()):
        device = torch.device("cuda", torch.cuda.current_device())
        runner = open_torch_runner(model, directory, NUM_BLOCKS, BLOCK_SIZE, dtype=dtype, device=device)
        yield runner
        runner.close()


@contextmanager
def never_waiting() -> Iterator[None]:
    """Raises when torch waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def ragged_steps(seed: int) -> Iterator[RowBatch]:
    """Yields a prefill and decode steps of three sequences, whose buckets recur with other contents."""
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, 97, 90) for _ in range(3)]
    tables = rng.permutation(NUM_BLOCKS)[:18].reshape(3, 6)
    starts = rng.integers(1, 30, 3)
    yield make_rows(sequences, [0, 0, 0], starts.tolist(), tables, np.zeros(0, np.int64))
    for _ in range(8):
        counts = rng.integers(1, 5, 3)
        yield make_rows(sequences, starts.tolist(), counts.tolist(), tables)
        starts += counts


def test_a_graph_gives_bit_for_bit_what_the_eager_call_gave(runner: CudaRunner) -> None:
    rows = list(ragged_steps(2))
    run_model(runner, rows[0]).clone()
    storage = runner.pool.storage.clone()
    results = []
    for _ in range(4):  # eager, captured, replayed twice
        runner.pool.storage.copy_(storage)
        results.append(run_model(runner, rows[1]).clone())
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], atol=0, rtol=0)


def test_a_warm_call_waits_for_nothing(runner: CudaRunner) -> None:
    steps = list(ragged_steps(3))
    candidates = np.zeros((steps[1].num_rows, 4), np.int64)
    for warm in range(4):
        with never_waiting() if warm == 3 else torch.cuda.device(torch.cuda.current_device()):
            for rows in steps:
                run_model(runner, rows).clone()
            hidden, _ = runner.run_segment_with_scores(0, steps[1], None, candidates)
            runner.take_rows(hidden, np.array([0, 2]))
