"""Engines that draft with a block drafter: what they draft equals a dense reference, what they emit plain decoding."""

from __future__ import annotations

import numpy as np
import pytest

from faser_backend.core.batch import RowBatch
from faser_backend.core.decision import WHOLE
from faser_backend.core.request import Sampling
from faser_backend.cpu.draft_runners import LlvmBlockRunner
from faser_backend.cpu.sampler import NumpySampler
from tests.pipeline.test_eagle3_drafting import checked, make_requests, prune, tokens_of
from tests.support.block_models import BLOCK_SIZE, BuiltBlocks
from tests.support.forcing import Forced, in_turns
from tests.support.harness import drive, request


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuiltBlocks:
    return BuiltBlocks(tmp_path_factory.mktemp("blocks"), options={"exit_layers": (3,)})


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((3,), {}),
        ((4,), {"num_kv_blocks": 32}),  # one full context: sequences are preempted
        ((5, 0, 2, 0, 0), {}),  # rounds without drafts: the drafter lags behind
        ((4,), {"draft": "model+ngram"}),
    ],
)
def test_every_chain_is_the_reference_s(
    built: BuiltBlocks, lengths: tuple[int, ...], options: dict[str, object]
) -> None:
    engine, checker = checked(built, "fixed:4", **options)
    scheduler = engine.step_runner.scheduler
    scheduler.policy = Forced(scheduler.policy, in_turns(*lengths))
    drive(engine, make_requests(is_greedy=True))
    assert (engine.metrics().num_preemptions > 0) == ("num_kv_blocks" in options)
    engine.close()
    assert checker.num_equal == checker.num_chains > 20


def test_a_block_is_no_longer_than_the_drafter_s(built: BuiltBlocks) -> None:
    engine, checker = checked(built, "fixed:9")
    longest = []
    engine.step_runner.observers.append(lambda record: longest.append(record.frontier.num_drafted.max(initial=0)))
    drive(engine, make_requests(is_greedy=True))
    engine.close()
    assert max(longest) == BLOCK_SIZE - 1
    assert checker.num_equal == checker.num_chains > 20


@pytest.mark.parametrize("fault", ["context", "mask"])
def test_faults_are_noticed(built: BuiltBlocks, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: another context, or another token in place of the mask, gives other chains."""
    engine, checker = checked(built, "fixed:3")
    drafter = engine.step_runner.partitions[WHOLE].draft
    assert isinstance(drafter, LlvmBlockRunner)
    features, run = drafter.pool.features, drafter.run_segment

    def run_on_others(segment: int, rows: RowBatch, hidden: np.ndarray | None) -> np.ndarray:
        drafter.pool.features = {layer: np.roll(rows_of, 1, axis=1) for layer, rows_of in features.items()}
        return run(segment, rows, hidden)

    if fault == "context":
        monkeypatch.setattr(drafter, "run_segment", run_on_others)
    else:
        drafter.mask_id = 5
    drive(engine, make_requests(is_greedy=True))
    engine.close()
    assert checker.num_equal < 0.5 * checker.num_chains


def test_rows_that_leave_at_an_exit_leave_no_hole(built: BuiltBlocks) -> None:
    requests = make_requests(is_greedy=True)
    engine, checker = checked(built, "fixed:5")
    prune(engine, prefills_draft=False)
    tokens = drive(engine, requests).tokens
    assert engine.metrics().num_pruned > 0
    engine.close()
    assert checker.num_equal == checker.num_chains > 20
    assert tokens == tokens_of(built, "none", requests)


@pytest.mark.parametrize("policy", ["fixed:4", "goodput", "survival", "faser"])
@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": 32, "draft": "model+ngram"}])
def test_tokens_equal_plain_decoding(built: BuiltBlocks, policy: str, options: dict[str, object]) -> None:
    requests = make_requests(num_shared=9)
    assert tokens_of(built, policy, requests, **options) == tokens_of(built, "none", requests)


def test_draws_that_depend_on_those_before_are_made_in_order(
    built: BuiltBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties, and beside them requests without rules: tokens equal plain decoding, and an engine that drew
    everything in order drafts the same."""
    rules = Sampling(temperature=1.0, seed=3, repetition_penalty=1.7)
    requests = [*make_requests(), request("ruled", list(range(5, 25)), 16, sampling=rules)]
    assert tokens_of(built, "fixed:4", requests) == tokens_of(built, "none", requests)

    def drafted() -> list[list[int]]:
        engine, _ = checked(built, "fixed:4")
        chains: list[list[int]] = []
        engine.step_runner.observers.append(lambda record: chains.append(record.frontier.drafted.tolist()))
        drive(engine, make_requests())
        engine.close()
        return chains

    at_once = drafted()
    monkeypatch.setattr(NumpySampler, "has_rules", lambda self, slots: True)
    assert drafted() == at_once


def test_rejection_sampling_takes_a_block_s_distributions(built: BuiltBlocks) -> None:
    greedy = make_requests(is_greedy=True)
    assert tokens_of(built, "fixed:4", greedy, acceptance="rejection") == tokens_of(built, "none", greedy)
    sampled = tokens_of(built, "fixed:4", make_requests(), acceptance="rejection")
    assert {len(tokens) for tokens in sampled.values()} == {16}
