"""Sampling and draft loops on a GPU: the host's tokens, graphs that give what eager chains gave, one wait per call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from faser_backend.core.request import SamplingParams
from faser_backend.device.cuda.draft_loop import TorchDraftLoop
from faser_backend.device.cuda.runner import CudaRunner
from faser_backend.device.cuda.sampler import TorchSampler
from faser_backend.device.sampler import NumpySampler
from faser_backend.manifest import ModelEngine
from tests.test_device_sampler import KINDS as ALL_KINDS
from tests.test_sampler_edges import one_row_each
from tests.test_torch_draft_loop import BLOCK_SIZE, KINDS, MAX_SEQS, NUM_BLOCKS, Drafting, assert_equal_chains, in_turn
from tests.tiny_models import VOCAB_SIZE, write_checkpoint
from tests.torch_engines import open_torch_runner, write_torch_engine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU with torch for CUDA")

NEAR_TIE = 1e-4  # leads within which a last bit of a logarithm may turn a token


@pytest.fixture
def device() -> Iterator[torch.device]:
    """With a stream of its own, as a share has; torch raises where it would wait for the device."""
    with torch.cuda.stream(torch.cuda.Stream()):
        yield torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelEngine, Path]:
    root = tmp_path_factory.mktemp("draft_loop")
    source = write_checkpoint(root / "source", hidden_size=64, head_dim=16)
    return write_torch_engine(source, root, exit_layers=(1,)), root


def open_runner(built: tuple[ModelEngine, Path], device: torch.device) -> CudaRunner:
    return open_torch_runner(*built, NUM_BLOCKS, BLOCK_SIZE, device=device)


def open_sampler(kinds: list[SamplingParams], device: torch.device) -> TorchSampler:
    sampler = TorchSampler(VOCAB_SIZE, MAX_SEQS, device)
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


@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS[:2], KINDS], ids=["greedy", "temperature", "filters"])
def test_graphs_give_what_eager_chains_gave(built, device: torch.device, kinds: list[SamplingParams]) -> None:
    runner, host = open_runner(built, device), open_runner(built, device)
    sampler = open_sampler((kinds * MAX_SEQS)[:MAX_SEQS], device)
    loop = TorchDraftLoop(runner, sampler)
    for seed in range(6):
        drafting = Drafting(seed, size=1 + (seed * 7) % MAX_SEQS)
        for each in (runner, host):
            each.pool.storage.zero_()
            drafting.prefill(each)
        eager = loop.draft(drafting.rows(), drafting.slots, drafting.lengths, 3)
        assert_equal_chains(eager, in_turn(host, sampler, drafting, 3), drafting.lengths)
        loop.draft(drafting.rows(), drafting.slots, drafting.lengths, 3)  # captures
        torch.cuda.set_sync_debug_mode("error")
        replayed = loop.draft(drafting.rows(), drafting.slots, drafting.lengths, 3)
        torch.cuda.set_sync_debug_mode("default")
        assert_equal_chains(replayed, eager, drafting.lengths)
        torch.testing.assert_close(runner.pool.storage, host.pool.storage, atol=1e-4, rtol=0)
    runner.close()
    host.close()
