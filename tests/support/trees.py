"""Trees for tests: shapes at random, and a proposer that spoils what the draft proposed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from faser_backend.core.frontier import Frontier
from faser_backend.core.plan import PrefillChunk
from faser_backend.core.ports import Partition
from faser_backend.core.sequence import Sequence
from faser_backend.core.tree import Tree
from faser_backend.pipeline.propose import Proposal, Proposer
from faser_backend.pipeline.rows import DecodeBatch
from tests.support.harness import VOCAB, FakeEngine

Nodes = list[tuple[int, int]]  # (token, parent's row) of one tree
Spoil = Callable[[np.random.Generator, Nodes, list[int], int], Nodes]  # of (nodes, what is going to be emitted, most)


def random_parents(rng: np.random.Generator, count: int) -> list[int]:
    """Parents of a tree of `count` draft tokens: bushy or deep."""
    reach = int(rng.integers(1, count + 2))
    return [int(rng.integers(max(0, row - reach), row + 1)) for row in range(count)]


class SpoiltTrees:
    """A proposer that hands out other trees than the draft's, as many nodes at most, and cuts rows where is_cut."""

    def __init__(self, inner: Proposer, spoil: Spoil, truth: dict[str, list[int]], seed: int, *, is_cut: bool) -> None:
        self.times, self.main_source, self.max_lag = inner.times, inner.main_source, inner.max_lag
        self._inner, self._spoil, self._truth, self._is_cut = inner, spoil, truth, is_cut
        self._rng = np.random.default_rng(seed)

    def propose(self, partition: Partition, batch: DecodeBatch, proposal: Proposal) -> Frontier:
        frontier = self._inner.propose(partition, batch, proposal)
        assert frontier.tree is not None
        trees: list[Nodes] = []
        for index, sequence in enumerate(batch.sequences):
            count = int(frontier.num_drafted[index])
            arrays = (frontier.drafted, frontier.tree.parents)
            nodes = list(zip(*(array[index, :count].tolist() for array in arrays), strict=True))
            coming = self._truth[sequence.request.request_id][sequence.num_output_tokens :]
            trees.append(self._spoil(self._rng, nodes, coming, count) if count else [])
            assert len(trees[-1]) <= count
        return self._packed(trees)

    def _packed(self, trees: list[Nodes]) -> Frontier:
        counts = np.array([len(nodes) for nodes in trees], np.int64)
        packed = np.zeros((len(trees), counts.max(initial=0), 2), np.int64)
        for row, nodes in enumerate(trees):
            packed[row, : len(nodes)] = np.array(nodes, np.int64).reshape(-1, 2)
        frontier = Frontier.whole(packed[..., 0], counts)
        num_rows = self._rng.integers(1, counts + 2) if self._is_cut else counts + 1
        return replace(frontier, num_rows=num_rows, tree=Tree(packed[..., 1]))

    def prefill(self, partition: Partition, chunks: list[PrefillChunk]) -> None:
        self._inner.prefill(partition, chunks)

    def forget(self, sequence: Sequence) -> None:
        self._inner.forget(sequence)


def spoil_trees(fake: FakeEngine, spoil: Spoil, truth: dict[str, list[int]], seed: int, *, is_cut: bool) -> None:
    proposer = fake.step_runner.proposer
    assert proposer is not None
    fake.step_runner.proposer = SpoiltTrees(proposer, spoil, truth, seed, is_cut=is_cut)


def shuffled(rng: np.random.Generator, nodes: Nodes, coming: list[int], most: int) -> Nodes:
    """The draft's nodes in any order that has parents before children."""
    rows, order = {0: 0}, []
    while len(order) < len(nodes):
        open_nodes = [k for k, (_, parent) in enumerate(nodes) if parent in rows and k + 1 not in rows]
        order.append(int(rng.choice(open_nodes)))
        rows[order[-1] + 1] = len(order)
    return [(nodes[k][0], rows[nodes[k][1]]) for k in order]


def at_random(rng: np.random.Generator, nodes: Nodes, coming: list[int], most: int) -> Nodes:
    """Any shape; tokens are often those that come."""
    parents, depths, tokens = random_parents(rng, most), [0], []
    for parent in parents:
        depth = depths[parent]
        depths.append(depth + 1)
        is_true = depth < len(coming) and rng.random() < 0.6
        tokens.append(coming[depth] if is_true else int(rng.integers(VOCAB)))
    return list(zip(tokens, parents, strict=True))


def duplicates(rng: np.random.Generator, nodes: Nodes, coming: list[int], most: int) -> Nodes:
    """Every true token twice, side by side; either of the two goes on."""
    found: Nodes = []
    parent = 0
    for token in coming[: most // 2]:
        found += [(token, parent)] * 2
        parent = len(found) - int(rng.integers(2))
    return found


def all_wrong(rng: np.random.Generator, nodes: Nodes, coming: list[int], most: int) -> Nodes:
    """The first draw is no node behind the anchor, nor anywhere."""
    tokens = [(coming[0] + 1 + k % (VOCAB - 1)) % VOCAB for k in range(most)]
    return list(zip(tokens, random_parents(rng, most), strict=True))


def deepest_wrong(rng: np.random.Generator, nodes: Nodes, coming: list[int], most: int) -> Nodes:
    """The true path but for its last token, with wrong siblings before it."""
    found: Nodes = []
    parent = 0
    for depth, token in enumerate(coming[: most // 2]):
        is_last = depth == min(most // 2, len(coming)) - 1
        found += [((token + 1) % VOCAB, parent), ((token + 2 * is_last) % VOCAB, parent)]
        parent = len(found)
    return found


SPOILS: dict[str, Spoil] = {
    "shuffled": shuffled,
    "at random": at_random,
    "duplicates": duplicates,
    "all wrong": all_wrong,
    "deepest wrong": deepest_wrong,
}
