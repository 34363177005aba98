"""Acceptance against slow references that follow the rule row by row."""

from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_backend.core.frontier import Acceptance, Frontier
from faser_backend.pipeline.acceptance import accept_by_rejection, accept_matches, draw


class RaggedCase:
    """A random ragged batch, pruned or not; drafts often equal the target's draws."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.vocab_size = int(rng.integers(2, 7))
        num_sequences = int(rng.integers(1, 6))
        self.num_drafted = rng.integers(0, 5, num_sequences)
        width = int(self.num_drafted.max())
        self.num_kept = rng.integers(1, self.num_drafted + 2) if rng.random() < 0.5 else self.num_drafted + 1
        self.cu_rows = np.concatenate([[0], np.cumsum(self.num_kept)])
        self.num_rows = int(self.cu_rows[-1])
        self.sampled = rng.integers(0, self.vocab_size, self.num_rows)
        drafted = rng.integers(0, self.vocab_size, (num_sequences, width))
        for b, count in enumerate(self.num_kept.tolist()):
            agree = rng.random(width) < 0.7
            for j in range(min(width, count)):
                if agree[j]:
                    drafted[b, j] = self.sampled[self.cu_rows[b] + j]
        drafted *= np.arange(width) < self.num_drafted[:, None]
        draft_probs = rng.dirichlet(np.ones(self.vocab_size), (num_sequences, width))
        self.frontier = Frontier(drafted, self.num_drafted, draft_probs=draft_probs.astype(np.float32))
        self.target_probs = rng.dirichlet(np.ones(self.vocab_size), self.num_rows).astype(np.float32)
        self.accept_uniforms, self.sample_uniforms = rng.random((2, self.num_rows))


def match_by_hand(case: RaggedCase, b: int) -> tuple[list[int], int]:
    """(emitted tokens, number accepted) of sequence b, row by row."""
    emitted: list[int] = []
    for j in range(case.num_drafted[b] + 1):
        if j == case.num_kept[b]:
            return emitted, len(emitted)  # row j was pruned: what survived its tests is all
        own = int(case.sampled[case.cu_rows[b] + j])
        emitted.append(own)
        if j == case.num_drafted[b] or case.frontier.drafted[b, j] != own:
            return emitted, j
    raise AssertionError


def draw_by_hand(weights: list[float], uniform: float) -> int:
    target = uniform * sum(weights)
    for token_id, weight in enumerate(weights):
        if weight > target:
            return token_id
        target -= weight
    return max(token_id for token_id, weight in enumerate(weights) if weight > 0)


def reject_by_hand(case: RaggedCase, b: int) -> tuple[list[int], int]:
    emitted: list[int] = []
    for j in range(case.num_drafted[b] + 1):
        if j == case.num_kept[b]:
            return emitted, len(emitted)
        row = int(case.cu_rows[b]) + j
        p = case.target_probs[row].astype(float)
        if j == case.num_drafted[b]:
            return [*emitted, draw_by_hand(p.tolist(), case.sample_uniforms[row])], j
        assert case.frontier.draft_probs is not None
        q = case.frontier.draft_probs[b, j].astype(float)
        x = int(case.frontier.drafted[b, j])
        if not case.accept_uniforms[row] < p[x] / q[x]:
            return [*emitted, draw_by_hand(np.maximum(p - q, 0).tolist(), case.sample_uniforms[row])], j
        emitted.append(x)
    raise AssertionError


def check(case: RaggedCase, result: Acceptance, by_hand: Callable[[RaggedCase, int], tuple[list[int], int]]) -> None:
    for b in range(case.num_drafted.size):
        emitted, num_accepted = by_hand(case, b)
        assert result.tokens[b, : result.num_emitted[b]].tolist() == emitted
        assert result.num_accepted[b] == num_accepted
        assert result.num_emitted[b] == len(emitted)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_matches_follow_the_rule(seed: int) -> None:
    case = RaggedCase(seed)
    check(case, accept_matches(case.frontier, case.sampled, case.cu_rows), match_by_hand)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_rejection_follows_the_rule(seed: int) -> None:
    case = RaggedCase(seed)
    result = accept_by_rejection(
        case.frontier, case.target_probs, case.cu_rows, case.accept_uniforms, case.sample_uniforms
    )
    check(case, result, reject_by_hand)


def test_a_chain_without_its_last_rows_emits_what_the_others_test() -> None:
    frontier = Frontier(np.array([[1, 2, 3]]), np.array([3]))
    whole = accept_matches(frontier, np.array([1, 2, 3, 4]), np.array([0, 4]))
    pruned = accept_matches(frontier, np.array([1, 2]), np.array([0, 2]))
    assert (whole.tokens.tolist(), whole.num_accepted.tolist()) == ([[1, 2, 3, 4]], [3])
    assert (pruned.tokens[0, : pruned.num_emitted[0]].tolist(), pruned.num_accepted.tolist()) == ([1, 2], [2])


def test_draw_never_returns_a_token_without_weight() -> None:
    weights = np.array([[0.0, 0.3, 0.0, 0.7, 0.0]] * 4)
    extremes = np.array([np.nextafter(0.0, 1.0), 0.3 - 1e-12, 0.3 + 1e-12, np.nextafter(1.0, 0.0)])
    assert draw(weights, extremes).tolist() == [1, 1, 3, 3]
