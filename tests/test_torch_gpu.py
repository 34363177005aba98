"""Runtime torch on a GPU: graphs give what eager calls give, nothing waits, and staging survives a busy stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from faser_backend.core.batch import RowBatch
from faser_backend.core.graph_counts import GraphCounts
from faser_backend.device.cuda.buffers import NUM_AREAS, StagingRing
from faser_backend.device.cuda.graphs import GraphCapturer
from faser_backend.device.cuda.runner import CudaRunner
from faser_backend.manifest import ModelEngine
from tests.tiny_models import make_rows, write_checkpoint
from tests.torch_engines import open_torch_runner, write_torch_engine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU with torch for CUDA")

NUM_BLOCKS, BLOCK_SIZE = 80, 16
MAX_ERROR = {"fp32": 2e-4, "bf16": 0.6}  # tests/test_torch_segment.py has the same for a CPU
SLEEP_CYCLES = 50_000_000  # some 30 ms


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


@pytest.fixture
def eager(built: tuple[ModelEngine, Path, str]) -> CudaRunner:
    """The same model on the CPU."""
    model, directory, dtype = built
    return open_torch_runner(model, directory, NUM_BLOCKS, BLOCK_SIZE, dtype=dtype)


@contextmanager
def never_waiting() -> Iterator[None]:
    """Raises where torch would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run_all(runner: CudaRunner, rows: RowBatch) -> torch.Tensor:
    hidden = None
    for segment in range(runner.num_segments):
        hidden = runner.run_segment(segment, rows, hidden)
    assert hidden is not None
    return hidden.clone()


def ragged_steps(seed: int) -> Iterator[RowBatch]:
    """A prefill and decode steps of three sequences, whose buckets come again with other contents."""
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, 97, 90) for _ in range(3)]
    tables = rng.permutation(NUM_BLOCKS)[:18].reshape(3, 6)
    starts = rng.integers(1, 30, 3)
    yield make_rows(sequences, [0, 0, 0], starts.tolist(), tables, np.zeros(0, np.int64))
    for _ in range(8):
        counts = rng.integers(1, 5, 3)
        yield make_rows(sequences, starts.tolist(), counts.tolist(), tables)
        starts += counts


def test_replayed_graphs_give_the_logits_of_the_cpu(runner: CudaRunner, eager: CudaRunner, built) -> None:
    largest = MAX_ERROR[built[2]]
    for rows in ragged_steps(1):
        torch.testing.assert_close(run_all(runner, rows).cpu(), run_all(eager, rows), atol=largest, rtol=0)
    on_gpu, on_cpu = runner.pool.storage.float().cpu(), eager.pool.storage.float()
    torch.testing.assert_close(on_gpu, on_cpu, atol=largest, rtol=0)


def test_a_graph_gives_bit_for_bit_what_the_eager_call_gave(runner: CudaRunner) -> None:
    rows = list(ragged_steps(2))
    run_all(runner, rows[0])
    storage = runner.pool.storage.clone()
    results = []
    for _ in range(4):  # eager, captured, replayed twice
        runner.pool.storage.copy_(storage)
        results.append(run_all(runner, rows[1]))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], atol=0, rtol=0)


def test_a_warm_call_waits_for_nothing(runner: CudaRunner) -> None:
    steps = list(ragged_steps(3))
    candidates = np.zeros((steps[1].num_rows, 4), np.int64)
    for warm in range(4):
        with never_waiting() if warm == 3 else torch.cuda.device(torch.cuda.current_device()):
            for rows in steps:
                run_all(runner, rows)
            hidden, _ = runner.run_segment_with_scores(0, steps[1], None, candidates)
            runner.take_rows(hidden, np.array([0, 2]))


def test_the_host_may_run_far_ahead(runner: CudaRunner) -> None:
    """More calls than there are staging areas are queued behind a stream that sleeps."""
    rng = np.random.default_rng(4)
    table = rng.permutation(NUM_BLOCKS)[None, :6]
    calls = [make_rows([rng.integers(0, 97, 90)], [0], [3], table) for _ in range(3 * NUM_AREAS)]
    expected = [run_all(runner, rows) for rows in calls]
    torch.cuda._sleep(SLEEP_CYCLES)
    results = [run_all(runner, rows) for rows in calls]
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, atol=0, rtol=0)


def test_staged_copies_are_not_overtaken() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        ring = StagingRing(torch.device("cuda", torch.cuda.current_device()))
        torch.cuda._sleep(SLEEP_CYCLES)
        copies = [ring.upload_array(np.full(1000, index)) for index in range(4 * NUM_AREAS)]
        assert [int(copy.sum()) for copy in copies] == [1000 * index for index in range(4 * NUM_AREAS)]


def test_decode_steps_under_one_graph(runner: CudaRunner, eager: CudaRunner, built) -> None:
    """Two steps that the device feeds itself, captured as one: the second continues behind the first."""
    table = np.array([[5, 9, 2, 30]])
    for each in (runner, eager):
        run_all(each, make_rows([np.arange(90)], [0], [20], table, np.zeros(0, np.int64)))
    call = runner.prepare_decode(runner.shapes.of_decode(1, 1))
    tensors = call.tensors

    def two_steps() -> None:
        for _ in range(2):
            call.launch()
            for name in ("token_ids", "positions", "context_lens", "slot_mapping"):
                tensors[name].add_(1)

    def start() -> None:
        call.fill_tables(table)
        for name, value in (("token_ids", 20), ("positions", 20), ("context_lens", 20), ("slot_mapping", 9 * 16 + 4)):
            tensors[name].fill_(value)

    start()
    two_steps()
    assert runner.capturer is not None
    replay = runner.capturer.capture(two_steps, "two steps")
    start()
    tensors["logits"].zero_()
    replay()
    run_all(eager, make_rows([np.arange(90)], [20], [1], table))
    wanted = run_all(eager, make_rows([np.arange(90)], [21], [1], table))
    torch.testing.assert_close(tensors["logits"].cpu(), wanted, atol=MAX_ERROR[built[2]], rtol=0)
    assert tensors["positions"].tolist() == [22]


def test_what_cannot_be_captured_runs_without_a_graph_and_spoils_nothing(caplog: pytest.LogCaptureFixture) -> None:
    numbers = torch.arange(4, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        capturer = GraphCapturer(GraphCounts())
        sums: list[int] = []
        launch = capturer.capture(lambda: sums.append(int(numbers.sum())), "this call")
        assert "this call: cannot be captured as a CUDA graph and runs without" in caplog.text
        launch()
        assert sums == [6] and capturer.counts == GraphCounts(0, 1)
        total = torch.zeros(1, dtype=torch.int64, device="cuda")

        def add() -> None:
            total.add_(numbers.sum())

        add()
        replay = capturer.capture(add, "a sound call")
        replay()
        replay()
        assert total.item() == 18, "the stream can be used and captured again"
