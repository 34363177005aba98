"""Runtime torch on a GPU: graphs and chains equal eager calls, tokens equal the host's, and nothing waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from faser_backend.core.batch import RowBatch
from faser_backend.core.request import Sampling
from faser_backend.cpu.sampler import NumpySampler
from faser_backend.cuda.draft_loop import TorchDraftLoop
from faser_backend.cuda.runner import CudaRunner
from faser_backend.cuda.sampler import TorchSampler
from faser_backend.manifest import ModelEngine
from tests.cpu.test_sampler import one_row_each
from tests.cuda import test_torch_draft_loop as drafts
from tests.cuda.test_device_sampler import KINDS as ALL_KINDS
from tests.support.tiny_models import VOCAB_SIZE, make_rows, run_segments, write_checkpoint
from tests.support.torch_engines import open_torch_runner, write_torch_engine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU with torch for CUDA")

NUM_BLOCKS, BLOCK_SIZE = 80, 16
NEAR_TIE = 1e-4  # leads within which a logarithm's last bit may change a token
SLEEP_CYCLES = 50_000_000  # about 30 ms


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
    run_segments(runner, rows[0]).clone()
    storage = runner.pool.storage.clone()
    results = []
    for _ in range(4):  # eager, captured, replayed twice
        runner.pool.storage.copy_(storage)
        results.append(run_segments(runner, rows[1]).clone())
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], atol=0, rtol=0)


def test_a_warm_call_waits_for_nothing(runner: CudaRunner) -> None:
    steps = list(ragged_steps(3))
    candidates = np.zeros((steps[1].num_rows, 4), np.int64)
    for warm in range(4):
        with never_waiting() if warm == 3 else torch.cuda.device(torch.cuda.current_device()):
            for rows in steps:
                run_segments(runner, rows).clone()
            hidden, _ = runner.run_segment_with_scores(0, steps[1], None, candidates)
            runner.take_rows(hidden, np.array([0, 2]))


def test_the_host_may_run_far_ahead(runner: CudaRunner) -> None:
    """Queues more calls than there are staging areas behind a stream that sleeps."""
    rng = np.random.default_rng(4)
    table = rng.permutation(NUM_BLOCKS)[None, :6]
    calls = [make_rows([rng.integers(0, 97, 90)], [0], [3], table) for _ in range(12)]
    expected = [run_segments(runner, rows).clone() for rows in calls]
    torch.cuda._sleep(SLEEP_CYCLES)
    results = [run_segments(runner, rows).clone() for rows in calls]
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, atol=0, rtol=0)


# -- sampling and draft loops ------------------------------------------------------------------------------------------
@pytest.fixture
def device() -> Iterator[torch.device]:
    """Yields the device with its own stream; torch raises when it waits for the device."""
    with torch.cuda.stream(torch.cuda.Stream()):
        yield torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="module")
def draft_built(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelEngine, Path]:
    root = tmp_path_factory.mktemp("draft_loop")
    source = write_checkpoint(root / "source", hidden_size=64, head_dim=16)
    return write_torch_engine(source, root, exit_layers=(1,)), root


def open_runner(built: tuple[ModelEngine, Path], device: torch.device) -> CudaRunner:
    return open_torch_runner(*built, drafts.NUM_BLOCKS, drafts.BLOCK_SIZE, device=device)


def open_sampler(kinds: list[Sampling], device: torch.device) -> TorchSampler:
    sampler = TorchSampler(VOCAB_SIZE, drafts.MAX_SEQS, device)
    for slot, sampling in enumerate(kinds):
        sampler.add(slot, sampling, np.array([1]), 1, (0,))
    return sampler


@pytest.mark.parametrize("vocab_size", [1001, 151_936])
def test_tokens_are_the_hosts_but_for_near_ties(device: torch.device, vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    host, sampler = NumpySampler(vocab_size, len(ALL_KINDS)), TorchSampler(vocab_size, len(ALL_KINDS), device)
    for slot, sampling in enumerate(ALL_KINDS.values()):
        for each in (host, sampler):
            each.add(slot, sampling, np.arange(9), 4, (0,))
    slots = rng.permutation(np.repeat(np.arange(len(ALL_KINDS)), 16))
    rows = one_row_each(slots, rng.integers(9, 500, slots.size))
    logits = rng.normal(0, 2, (slots.size, vocab_size)).astype(np.float32)
    on_device = torch.from_numpy(logits).to(device)
    expected = host.sample_draft(logits, rows, 4)
    drawn = sampler.sample_draft(on_device, rows, 4)
    is_clear = expected.margins > NEAR_TIE
    assert is_clear.mean() > 0.99
    assert np.array_equal(drawn.tokens[is_clear], expected.tokens[is_clear])
    np.testing.assert_allclose(drawn.margins, expected.margins, atol=1e-3)
    torch.cuda.set_sync_debug_mode("error")
    assert np.array_equal(sampler.sample(on_device, rows), drawn.tokens)


@pytest.mark.parametrize(
    "kinds", [drafts.KINDS[:1], drafts.KINDS[:2], drafts.KINDS], ids=["greedy", "temperature", "filters"]
)
def test_graphs_give_what_eager_chains_gave(draft_built, device: torch.device, kinds: list[Sampling]) -> None:
    runner, host = open_runner(draft_built, device), open_runner(draft_built, device)
    sampler = open_sampler((kinds * drafts.MAX_SEQS)[: drafts.MAX_SEQS], device)
    loop = TorchDraftLoop(runner, sampler)
    for seed in range(6):
        drafting = drafts.Drafting(seed, size=1 + (seed * 7) % drafts.MAX_SEQS)
        for each in (runner, host):
            each.pool.storage.zero_()
            drafting.prefill(each)
        eager = loop.draft(drafting.rows(), drafting.slots, drafting.lengths, 3)
        stepwise = drafts.FakeLoop(host, sampler).draft(drafting.rows(), drafting.slots, drafting.lengths, 3)
        drafts.assert_equal_chains(eager, stepwise, drafting.lengths)
        loop.draft(drafting.rows(), drafting.slots, drafting.lengths, 3)  # captures
        torch.cuda.set_sync_debug_mode("error")
        replayed = loop.draft(drafting.rows(), drafting.slots, drafting.lengths, 3)
        torch.cuda.set_sync_debug_mode("default")
        drafts.assert_equal_chains(replayed, eager, drafting.lengths)
        torch.testing.assert_close(runner.pool.storage, host.pool.storage, atol=1e-4, rtol=0)
    runner.close()
    host.close()
