"""TorchDraftLoop on torch's CPU device, against alternating calls of the runner and the sampler."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from faser_backend.core.ports import DraftTokens
from faser_backend.core.request import Sampling
from faser_backend.cuda.call_shapes import CallBounds
from faser_backend.cuda.draft_loop import TorchDraftLoop
from faser_backend.cuda.runner import CudaRunner
from faser_backend.cuda.sampler import TorchSampler
from faser_backend.cuda.segment import PreparedCall
from faser_backend.manifest import ModelEngine
from faser_backend.pipeline.rows import run_model
from tests.cuda.test_draft_loop import FakeLoop
from tests.support.tiny_models import VOCAB_SIZE, make_rows, write_checkpoint
from tests.support.torch_engines import CPU, open_torch_runner, write_torch_engine

NUM_BLOCKS, BLOCK_SIZE, MAX_SEQS = 90, 4, 11
KINDS = [
    Sampling(),
    Sampling(temperature=0.8, seed=5),
    Sampling(temperature=1.0, top_k=8, top_p=0.9, seed=6),
    Sampling(temperature=1.2, min_p=0.05, seed=2**64 - 1),
]


@pytest.fixture(scope="module", params=[(), (1,)], ids=["one segment", "two segments"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelEngine, Path]:
    root = tmp_path_factory.mktemp("draft_loop")
    return write_torch_engine(write_checkpoint(root / "source"), root, exit_layers=request.param), root


def open_runner(built: tuple[ModelEngine, Path], limits: CallBounds | None = None) -> CudaRunner:
    return open_torch_runner(*built, NUM_BLOCKS, BLOCK_SIZE, limits=limits)


def open_sampler(kinds: list[Sampling]) -> TorchSampler:
    sampler = TorchSampler(VOCAB_SIZE, MAX_SEQS, CPU)
    for slot, sampling in enumerate(kinds):
        sampler.add(slot, sampling, np.array([1]), 1, (0,))
    return sampler


class Drafting:
    """Sequences with a context each; rows feed what the draft has not read."""

    def __init__(self, seed: int, size: int, most_tokens: int = 6) -> None:
        rng = np.random.default_rng(seed)
        self.seen = rng.integers(0, 30, size)
        self.num_rows = rng.integers(1, 5, size)
        self.lengths = rng.integers(1, most_tokens + 1, size)
        self.tokens = [rng.integers(0, VOCAB_SIZE, int(n)) for n in self.seen + self.num_rows]
        width = -(-(30 + 5 + most_tokens) // BLOCK_SIZE)
        needed = -(-(self.seen + self.num_rows + self.lengths - 1) // BLOCK_SIZE)
        blocks = iter(rng.permutation(NUM_BLOCKS).tolist())
        # Blocks end with their chain: a write past it would go to block 0, which another sequence uses.
        self.tables = np.array([[next(blocks) if i < n else 0 for i in range(width)] for n in needed.tolist()])
        self.slots = rng.permutation(MAX_SEQS)[:size]

    def prefill(self, runner: CudaRunner) -> None:
        who = np.flatnonzero(self.seen)
        if who.size:
            tokens = [self.tokens[i] for i in who]
            rows = make_rows(tokens, [0] * who.size, self.seen[who].tolist(), self.tables[who], np.zeros(0, np.int64))
            run_model(runner, rows)

    def rows(self):
        last = np.cumsum(self.num_rows) - 1
        return make_rows(self.tokens, self.seen.tolist(), self.num_rows.tolist(), self.tables, last)


def assert_equal_chains(drawn: DraftTokens, expected: DraftTokens, lengths: np.ndarray) -> None:
    is_token = np.arange(expected.tokens.shape[1]) < lengths[:, None]
    assert drawn.tokens.shape == expected.tokens.shape
    assert np.array_equal(drawn.tokens[is_token], expected.tokens[is_token])
    np.testing.assert_allclose(drawn.margins[is_token], expected.margins[is_token], atol=1e-3)
    assert (drawn.candidates is None) == (expected.candidates is None)
    if drawn.candidates is not None and expected.candidates is not None:
        assert np.array_equal(drawn.candidates[is_token], expected.candidates[is_token])


@pytest.mark.parametrize("num_candidates", [0, 1, 4])
@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS[:2], KINDS], ids=["greedy", "temperature", "filters"])
def test_chains_are_those_of_calls_in_turn(built, kinds: list[Sampling], num_candidates: int) -> None:
    runner, host = open_runner(built), open_runner(built)
    sampler = open_sampler((kinds * MAX_SEQS)[:MAX_SEQS])
    loop = TorchDraftLoop(runner, sampler)
    for seed in range(5):
        drafting = Drafting(seed, size=1 + (seed * 7) % MAX_SEQS, most_tokens=1 + seed)
        for each in (runner, host):
            each.pool.storage.zero_()
            drafting.prefill(each)
        assert loop.can_draft(drafting.slots)
        drawn = loop.draft(drafting.rows(), drafting.slots, drafting.lengths, num_candidates)
        stepwise = FakeLoop(host, sampler).draft(drafting.rows(), drafting.slots, drafting.lengths, num_candidates)
        assert_equal_chains(drawn, stepwise, drafting.lengths)
        own, expected = (each.pool.storage[:, :, :, :-1] for each in (runner, host))  # the last is for padding rows
        torch.testing.assert_close(own, expected, atol=1e-4, rtol=0, msg="K/V of other positions was written")
        again = loop.draft(drafting.rows(), drafting.slots, drafting.lengths, num_candidates)
        assert_equal_chains(again, drawn, drafting.lengths)


def test_limits_of_programs_bound_sequences_and_tables(built) -> None:
    """Compiled engines take padding rows that belong to no sequence; chains do not change, nor do shapes by length."""
    runner, unlimited = open_runner(built, CallBounds(64, 6, 8, 10, 64, 0)), open_runner(built)
    prepared, prepare = [], runner.prepare_decode

    def spied(bounds: CallBounds) -> PreparedCall:
        prepared.append(bounds)
        return prepare(bounds)

    runner.prepare_decode = spied  # type: ignore[method-assign]
    drafting = Drafting(1, size=5)
    drafting.seen[:], drafting.num_rows[:] = 0, 1
    drafting.tables = np.arange(50).reshape(5, 10)
    loops = [TorchDraftLoop(each, open_sampler(KINDS[:1] * MAX_SEQS)) for each in (runner, unlimited)]
    for length in (30, 39):
        drafting.lengths[:] = length
        drawn, wanted = (loop.draft(drafting.rows(), drafting.slots, drafting.lengths, 0) for loop in loops)
        assert_equal_chains(drawn, wanted, drafting.lengths)
    assert prepared == [CallBounds(8, 6, 8, 10, 8, 0)]


def test_a_warmed_up_menu_leaves_pools_alone(built) -> None:
    runner = open_runner(built)
    runner.pool.storage.fill_(3.0)
    before = runner.pool.storage.clone()
    loop = TorchDraftLoop(runner, open_sampler(KINDS))
    runner.capture_menu(0)
    loop.capture_menu(5, 2)
    assert torch.equal(runner.pool.storage[:, :, :, :-1], before[:, :, :, :-1])


def test_rules_are_left_to_the_host(built) -> None:
    kinds = [*KINDS[:3], Sampling(temperature=1.0, repetition_penalty=1.2)]
    loop = TorchDraftLoop(open_runner(built), open_sampler(kinds))
    assert loop.can_draft(np.array([0, 1, 2]))
    assert not loop.can_draft(np.array([0, 3]))


def with_nan(runner: CudaRunner, row: int, at_launch: int) -> CudaRunner:
    """Makes logits of `row` NaN after one launch of each chain of four tokens."""
    prepare = runner.prepare_decode

    def prepare_decode(bounds: CallBounds) -> PreparedCall:
        call, launches = prepare(bounds), itertools.cycle([1, 2, 3])

        def launch() -> None:
            call.launch()
            if next(launches) == at_launch:
                call.tensors["logits"][row] = torch.nan

        return replace(call, launch=launch)

    runner.prepare_decode = prepare_decode  # type: ignore[method-assign]
    return runner


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_unusable_logits_change_their_own_chain_alone(built, kind: int) -> None:
    drafting = Drafting(3, size=4)
    drafting.seen[1], drafting.num_rows[1] = 7, 1
    drafting.tokens[1] = np.arange(8)
    drafting.tables = np.arange(4 * 12).reshape(4, 12)
    drafting.lengths[:] = 4
    sampler = open_sampler(KINDS[kind : kind + 1] * MAX_SEQS)

    def draft(runner: CudaRunner) -> DraftTokens:
        return TorchDraftLoop(runner, sampler).draft(drafting.rows(), drafting.slots, drafting.lengths, 2)

    poisoned = open_runner(built)
    poisoned.pool.storage[:, :, :, drafting.tables[1, 0], 2] = torch.nan
    expected = draft(open_runner(built))
    for runner, step in (
        (with_nan(open_runner(built), 1, 1), 1),
        (with_nan(open_runner(built), 1, 3), 3),
        (poisoned, 0),
    ):
        drawn = draft(runner)
        for got, want in zip(drawn[:2], expected[:2], strict=True):
            assert np.array_equal(got[[0, 2, 3]], want[[0, 2, 3]]) and np.array_equal(got[1, :step], want[1, :step])
        assert (drawn.tokens[1, step], drawn.margins[1, step]) == (0, 0)
