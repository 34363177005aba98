"""Trees through the real scheduler, step and sampler: tokens are those of plain decoding, whatever is proposed.

Fake models read every position that a row sees. After each step the pools of both hold what counts as known.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from faser_backend.core.frontier import Acceptance
from faser_backend.core.request import FinishReason, Sampling
from faser_backend.core.tree import Tree
from faser_backend.pipeline import commit, rows, step
from faser_backend.pipeline.commit import RoundCounts
from faser_backend.policy import acceptance
from tests.pipeline.test_engine import alone, random_requests
from tests.support.forced_engine import check_what_is_in_flight
from tests.support.harness import FakeEngine, drive, fake_engine, open_fake, request
from tests.support.trees import SPOILS, spoil_trees


@pytest.fixture(scope="module")
def cases():
    return [(requests, alone(requests)) for requests in (random_requests(seed, 12) for seed in range(2))]


def open_trees(policy: str = "tree:8", **options) -> FakeEngine:
    fake = open_fake(policy, num_layers=(2, 2), **options)
    check_what_is_in_flight(fake)
    return fake


@pytest.mark.parametrize("policy", ["tree:1", "tree:2", "tree:5", "tree:12", "tree:63"])
@pytest.mark.parametrize("num_blocks", [200, 26])
def test_tokens_equal_plain_decoding(cases, policy: str, num_blocks: int) -> None:
    num_preemptions = 0
    for seed, (requests, expected) in enumerate(cases):
        fake = open_trees(policy, num_blocks=num_blocks)
        assert drive(fake.engine, requests, seed=seed).tokens == expected
        num_preemptions += fake.engine.metrics().num_preemptions
    assert (num_preemptions > 0) == (num_blocks < 200), "the small pools must force preemptions"


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("spoil", SPOILS)
def test_no_tree_changes_a_token(cases, spoil: str, is_cut: bool) -> None:
    for seed, (requests, expected) in enumerate(cases):
        fake = open_trees("tree:9", num_blocks=40)
        spoil_trees(fake, SPOILS[spoil], expected, seed, is_cut=is_cut)
        assert drive(fake.engine, requests, seed=seed).tokens == expected
        kept = fake.engine.metrics().num_accepted
        assert (kept == 0) == (spoil == "all wrong")


def test_a_tree_of_one_node_is_a_chain_of_one_token(cases) -> None:
    """The same calls, the same counts."""
    requests, _ = cases[0]
    stats = []
    for policy in ("fixed:1", "tree:1"):
        fake = open_fake(policy, can_reuse=False)  # so that no draft lags
        result = drive(fake.engine, requests)
        counts = [(s.num_drafted, s.num_tested, s.num_accepted, s.num_steps) for s in _stats(result)]
        stats.append((counts, fake.targets[0].num_calls, fake.drafts[0].num_calls))
    assert stats[0] == stats[1]


def _stats(result):
    return [output.stats for _, output in sorted(result.final.items())]


def test_log_probabilities_and_logits_are_those_of_plain_decoding(cases) -> None:
    requests = [replace(r, wants_log_probs=True, wants_generation_logits=True) for r in cases[0][0]]
    found = []
    for policy in ("none", "tree:8"):
        engine, _ = fake_engine(policy)
        for r in requests:
            engine.submit(r)
        logits: dict[str, list] = {r.request_id: [] for r in requests}
        log_probs: dict[str, list] = {r.request_id: [] for r in requests}
        while engine.has_work:
            for output in engine.step():
                logits[output.request_id] += list(output.generation_logits)
                log_probs[output.request_id] += output.log_probs
        found.append((logits, log_probs))
    for r in requests:
        for plain, tree in zip(*(each[r.request_id] for each in (found[0][0], found[1][0])), strict=True):
            np.testing.assert_array_equal(plain, tree)
        assert found[0][1][r.request_id] == found[1][1][r.request_id]


def test_cancelled_requests_give_everything_back(cases) -> None:
    requests, expected = cases[1]
    fake = open_trees(num_blocks=60)
    cancel = {r.request_id: 3 for r in requests[::2]}
    result = drive(fake.engine, requests, seed=5, cancel=cancel)
    for request_id, tokens in result.tokens.items():
        assert tokens == expected[request_id][: len(tokens)]
        reason = result.final[request_id].finish_reason
        assert reason is FinishReason.CANCELLED or tokens == expected[request_id]


def test_blocks_of_a_tree_are_reused(cases) -> None:
    """Blocks published behind accepted paths are those that plain decoding would have published."""
    prompt = list(range(1, 18))
    fake = open_trees(draft_noise=0.1)
    first = request("a", prompt, 40, sampling=Sampling(temperature=0.7, seed=3))
    tokens = drive(fake.engine, [first]).tokens["a"]
    second = request("b", prompt + tokens[:30], 10, sampling=Sampling(temperature=0.7, seed=3))
    result = drive(fake.engine, [second])
    stats = result.final["b"].stats
    assert stats is not None and stats.num_reused_tokens >= 40
    assert result.tokens["b"] == tokens[30:40]


def test_clients_chains_go_beside_trees(cases) -> None:
    """Chains that are longer than any tree, right and wrong ones, verified in one batch with trees."""
    requests, expected = cases[0]
    for seed, is_right in ((1, True), (2, False)):
        fake = open_trees()
        with_drafts = []
        for index, r in enumerate(requests):
            guess = expected[r.request_id] if is_right else [(t + 1) % 24 for t in expected[r.request_id]]
            with_drafts.append(replace(r, draft_ids=tuple(guess + [3] * 60)) if index % 2 else r)
        assert drive(fake.engine, with_drafts, seed=seed).tokens == expected


# -- what a mistake looks like: every test above would fail ------------------------------------------


def spoilt_move(*_) -> None:
    """Accepted keys and values stay where they were computed."""


def all_before(batch, frontier):
    """The mask and the positions of a chain: siblings see each other."""
    built = VERIFY_ROWS(batch, frontier)
    if built.tree is None:
        return built
    causal = [np.array([-1 if n == 63 else (1 << n + 1) - 1 for n in range(j - i)]) for i, j in pairwise(built.cu_rows)]
    built.tree.ancestors[:], built.tree.positions[:] = np.concatenate(causal), built.kv_positions
    return built


def first_rows(frontier, sampled, cu_rows, *, num_kept=None) -> Acceptance:
    """Emitted tokens are looked for in the first rows, as in a chain."""
    found = ACCEPT(frontier, sampled, cu_rows, num_kept=num_kept)
    tokens = sampled[np.minimum(cu_rows[:-1, None] + np.arange(found.tokens.shape[1]), sampled.size - 1)]
    return replace(found, tokens=tokens)


def takes_pruned(frontier, sampled, cu_rows, *, num_kept=None) -> Acceptance:
    """The bonus token of a row that was not computed is taken from the row before it."""
    found = ACCEPT(frontier, sampled, cu_rows, num_kept=num_kept)
    is_pruned = found.num_accepted == found.num_emitted
    tokens = np.concatenate([found.tokens, found.tokens[:, -1:]], axis=1)
    return replace(found, tokens=tokens, num_emitted=found.num_emitted + is_pruned)


def leaf_is_run(frontier, verification, acceptance) -> list[RoundCounts]:
    """The draft is taken to know all that was accepted."""
    return [counts._replace(num_run=counts.num_accepted) for counts in ROUND_COUNTS(frontier, verification, acceptance)]


VERIFY_ROWS, ACCEPT, ROUND_COUNTS = rows.verify_rows, acceptance.accept_matches, step.round_counts
MISTAKES = {
    "keys stay": ("step.move_accepted", spoilt_move),
    "siblings see each other": ("verify.verify_rows", all_before),
    "tokens of the first rows": ("verify.accept_matches", first_rows),
    "bonus of a cut row": ("verify.accept_matches", takes_pruned),
    "the draft knows its leaves": ("step.round_counts", leaf_is_run),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(cases, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, expected = [replace(r, wants_log_probs=False) for r in cases[0][0]], cases[0][1]
    place, wrong = MISTAKES[mistake]
    monkeypatch.setattr(f"faser_backend.pipeline.{place}", wrong)
    fake = open_fake("tree:8")
    spoil_trees(fake, SPOILS["shuffled"], expected, 3, is_cut=mistake == "bonus of a cut row")
    if mistake != "the draft knows its leaves":
        result = drive(fake.engine, requests, seed=1)
        assert result.tokens != expected
        errors = {output.error for output in result.final.values()} - {None}
        assert all("was never written" in str(error) for error in errors), "the mistake is not what was meant"
        return
    # What the draft knows changes no token, but what it proposes.
    check_what_is_in_flight(fake)
    result = drive(fake.engine, requests, seed=1)
    assert any(output.error for output in result.final.values())


def test_mistaken_logits_are_noticed(cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities of the first rows in the place of the path's."""

    def wrong(sequence, sampler, verification, found, index):
        return EXTRAS_OF(sequence, sampler, verification, replace(found, path=None), index)

    EXTRAS_OF = commit.extras_of
    monkeypatch.setattr(step, "extras_of", wrong)
    with pytest.raises(AssertionError):
        test_log_probabilities_and_logits_are_those_of_plain_decoding(cases)


def test_lines_of_a_tree() -> None:
    tree = Tree(np.array([[0, 0, 1, 3], [0, 1, 2, 3]]))
    assert tree.lines.depths.tolist() == [[0, 1, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert tree.lines.ancestors[0].tolist() == [0b1, 0b11, 0b101, 0b1011, 0b11011]
    assert tree.lines.paths[0, 4, :3].tolist() == [0, 2, 3]
    assert tree.is_chain(np.array([4, 4])).tolist() == [False, True]
    assert tree.is_chain(np.array([1, 4])).tolist() == [True, True]
