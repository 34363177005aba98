"""Sample-and-match in trees, by enumeration: every tree of up to three nodes, cut at every row, under every draw.

Models have three tokens and distributions in quarters, so four values of a position's noise give every distribution
exactly. The noise belongs to a position: all rows that draw it use the same value, whatever tokens lead to them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from faser_backend.core.frontier import Acceptance, Frontier
from faser_backend.core.tree import Tree
from faser_backend.policy.acceptance import accept_by_rejection, accept_matches
from tests.support.trees import random_parents

NUM_TOKENS, HORIZON = 3, 4
NOISE = np.array(list(itertools.product((np.arange(4) + 0.5) / 4, repeat=HORIZON)))  # [256, HORIZON]
SHAPES = [(), (0,), (0, 0), (0, 1), *itertools.product((0,), (0, 1), (0, 1, 2))]
TREES = [(parents, tokens) for parents in SHAPES for tokens in itertools.product(range(3), repeat=len(parents))]
CASES = [(*tree, cut) for tree in TREES for cut in range(1, len(tree[0]) + 2)]
Accept = Callable[..., Acceptance]
Draws = dict[tuple[int, ...], int]  # by prefix


class TinyTarget:
    """Distributions in quarters after every prefix of up to HORIZON - 1 tokens."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        prefixes = itertools.chain.from_iterable(itertools.product(range(3), repeat=n) for n in range(HORIZON))
        self.quarters = {prefix: rng.multinomial(4, rng.dirichlet(np.ones(NUM_TOKENS))) for prefix in prefixes}

    def draws(self, noise: np.ndarray) -> Draws:
        """The token that noise [HORIZON] draws behind every prefix."""
        return {prefix: int((np.cumsum(p) / 4 <= noise[len(prefix)]).sum()) for prefix, p in self.quarters.items()}


def plain(draws: Draws, prefix: tuple[int, ...] = ()) -> tuple[int, ...]:
    """HORIZON tokens that begin with prefix."""
    while len(prefix) < HORIZON:
        prefix = (*prefix, draws[prefix])
    return prefix


def emitted(accept: Accept, draws: Draws) -> list[tuple[int, ...]]:
    """Outputs once plain decoding has gone on from what one verification emits, for every tree and cut."""
    size, width = len(CASES), 3
    drafted, parents = np.zeros((size, width), np.int64), np.zeros((size, width), np.int64)
    counts, kept = np.array([len(tokens) for _, tokens, _ in CASES]), np.array([cut for _, _, cut in CASES])
    sampled: list[int] = []
    for row, (tree_parents, tokens, cut) in enumerate(CASES):
        drafted[row, : len(tokens)], parents[row, : len(tokens)] = tokens, tree_parents
        prefixes: list[tuple[int, ...]] = [()]
        for parent, token in zip(tree_parents, tokens, strict=True):
            prefixes.append((*prefixes[parent], token))
        sampled += [draws[prefix] for prefix in prefixes[:cut]]
    frontier = Frontier.whole(drafted, counts)
    frontier.tree = Tree(parents)
    found = accept(frontier, np.array(sampled), np.concatenate([[0], np.cumsum(kept)]), num_kept=kept)
    rows = zip(found.tokens.tolist(), found.num_emitted.tolist(), strict=True)
    return [plain(draws, tuple(tokens[:count])) for tokens, count in rows]


def test_every_tree_gives_the_tokens_of_plain_decoding() -> None:
    """So the distribution of what is emitted is the target's: that of plain decoding over the noise."""
    target = TinyTarget(0)
    counts: dict[tuple[int, ...], int] = {}
    for noise in NOISE:
        draws = target.draws(noise)
        assert set(emitted(accept_matches, draws)) == {plain(draws)}
        counts[plain(draws)] = counts.get(plain(draws), 0) + 1
    p = target.quarters
    exact = {output: math.prod(p[output[:n]][output[n]] for n in range(HORIZON)) for output in counts}
    assert counts == exact and sum(counts.values()) == 4**HORIZON


def without_bonus_rule(frontier, sampled, cu_rows, *, num_kept) -> Acceptance:
    """Wrong: a row that was cut is taken to draw what its parent drew."""
    found = accept_matches(frontier, sampled, cu_rows, num_kept=num_kept)
    is_cut = found.num_accepted == found.num_emitted
    tokens = np.concatenate([found.tokens, np.zeros_like(found.tokens[:, :1])], axis=1)
    every = np.arange(is_cut.size)
    tokens[every, found.num_emitted] = tokens[every, found.num_emitted - 1]
    return Acceptance(tokens, found.num_accepted, found.num_emitted + is_cut)


def any_token_of_a_depth(frontier, sampled, cu_rows, *, num_kept) -> Acceptance:
    """Wrong: a node is tested by the draw of some row at its depth, not by its own parent's."""
    assert frontier.tree is not None
    depths = frontier.tree.lines.depths
    parents = np.argmax(depths[:, :, None] == depths[:, None, 1:] - 1, axis=1)
    wrong = Frontier.whole(frontier.drafted, frontier.num_drafted)
    wrong.tree = Tree(parents)
    return accept_matches(wrong, sampled, cu_rows, num_kept=num_kept)


def as_a_chain(frontier, sampled, cu_rows, *, num_kept) -> Acceptance:
    """Wrong: every node follows the one before it."""
    chain = Frontier.whole(frontier.drafted, frontier.num_drafted)
    return accept_matches(chain, sampled, cu_rows, num_kept=num_kept)


@pytest.mark.parametrize("wrong", [without_bonus_rule, any_token_of_a_depth, as_a_chain])
def test_the_enumeration_catches_wrong_rules(wrong: Accept) -> None:
    target = TinyTarget(0)
    assert any(set(emitted(wrong, draws)) != {plain(draws)} for draws in map(target.draws, NOISE[::16]))


def test_the_distribution_is_the_targets_and_siblings_with_noise_of_their_own_would_bend_it() -> None:
    """One position, two siblings. Each tested by a draw of its own, the distribution is not the target's."""
    quarters = np.array([1, 1, 2])
    draws = np.repeat(np.arange(3), quarters)  # of four equally likely values of the noise
    shared, own = np.zeros(3), np.zeros(3)
    for first, second in itertools.product(draws, draws):
        frontier = Frontier.whole(np.array([[0, 1]]), np.array([2]))
        frontier.tree = Tree(np.array([[0, 0]]))
        found = accept_matches(frontier, np.array([first, 0, 0]), np.array([0, 3]))
        shared[found.tokens[0, 0]] += 1
        own[0 if first == 0 else 1 if second == 1 else second] += 1
    assert (shared == 4 * quarters).all()
    assert np.abs(own - 4 * quarters).sum() / 2 / 16 > 0.05


def test_random_trees_against_a_walk_one_by_one() -> None:
    rng = np.random.default_rng(4)
    for _ in range(60):
        size, width = int(rng.integers(1, 6)), int(rng.integers(1, 30))
        counts = rng.integers(0, width + 1, size)
        parents = np.array([random_parents(rng, width) for _ in range(size)])
        drafted, kept = rng.integers(0, 3, (size, width)), rng.integers(1, counts + 2)
        cu_rows = np.concatenate([[0], np.cumsum(kept)])
        sampled = rng.integers(0, 3, cu_rows[-1])
        frontier = Frontier.whole(drafted, counts)
        frontier.tree = Tree(parents)
        found = accept_matches(frontier, sampled, cu_rows, num_kept=kept)
        assert found.path is not None
        for b in range(size):
            row, path, tokens, tested = 0, [], [], 0
            while row < kept[b]:
                path.append(row)
                tokens.append(int(sampled[cu_rows[b] + row]))
                children = [k for k in range(counts[b]) if parents[b, k] == row]
                tested += bool(children)
                row = next((k + 1 for k in children if drafted[b, k] == tokens[-1]), 10**6)
            assert found.num_emitted[b] == len(path) and found.path.num_tested[b] == tested
            assert found.tokens[b, : len(path)].tolist() == tokens
            assert found.path.rows[b, : len(path)].tolist() == path
            assert found.num_accepted[b] == len(path) - 1 + (row < 10**6)


def test_rejection_sampling_refuses_trees() -> None:
    frontier = Frontier.whole(np.zeros((1, 2), np.int64), np.array([2]))
    frontier.tree = Tree(np.zeros((1, 2), np.int64))
    with pytest.raises(ValueError, match="rejection sampling tests chains"):
        accept_by_rejection(frontier, np.ones((3, 3)), np.array([0, 3]), np.full(3, 0.5), np.full(3, 0.5))
