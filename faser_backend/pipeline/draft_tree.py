"""Drafting of trees: level by level, all nodes of a level in one call of the draft.

Nodes lie at the draft's KV positions behind the committed tokens in the order in which they are run, and see their
ancestors alone. What the draft makes of a node are its children: of all nodes that are known the likeliest ones stay.

The target's draw is the best of its own scores, which carry the same noise as the draft's. By how much the two models
differ decides how far down the draft's order it lies: a token's chance is a softmax of the draft's scores, noise
included, at a temperature that stands for that difference. A node's chance is the product along its path.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Protocol

import numpy as np

from faser_backend.core.batch import RowBatch, SamplingRows, TreeRows
from faser_backend.core.frontier import Frontier
from faser_backend.core.ports import DeviceArray, ModelRunner, TreeSampler
from faser_backend.core.tree import MOST_CHILDREN, Tree
from faser_backend.pipeline.rows import DecodeBatch
from faser_backend.pipeline.timing import PhaseTimes

# Of the models' logits: greatest likelihood of the demo target's draws at temperature 0.8; and a head's.
DIFFERENCE, HEAD_DIFFERENCE = 0.7, 1.5
LEAD = -math.log(0.8)  # chance of the best child of a node that is worth the draft's row
LEVEL_CHANCE = 0.5  # that the draw is behind one of a level's nodes, from which on it is worth a draft call


class Node:
    """A draft token, or the anchor. Its place, once the draft has run it, is counted behind the committed tokens."""

    __slots__ = ("ancestors", "log_chance", "made", "parent", "path", "place", "row")

    def __init__(self, parent: Node | None, path: list[int], log_chance: float) -> None:
        self.parent = parent
        self.path = path  # tokens behind the anchor, its own at the end
        self.log_chance = log_chance
        self.place = -1  # not run
        self.ancestors = 0  # bit i: the node run as number i; its own bit included
        self.row = 0  # in the frontier
        self.made: DeviceArray = None  # by a draft that goes on from what it made of the parent


Level = dict[int, list[Node]]  # nodes that the draft runs in one call, by sequence of the batch


class TreeDrafter(Protocol):
    """Runs what trees need: the logits of a row give the children of what it runs."""

    difference: float  # between the logits of draft and target
    times: PhaseTimes

    def run_unseen(self, runner: ModelRunner, batch: DecodeBatch, level: Level) -> np.ndarray:
        """Runs what the draft has not read of a level's sequences, whose anchors are the nodes; logits of these."""
        ...

    def run_level(self, runner: ModelRunner, batch: DecodeBatch, level: Level) -> np.ndarray:
        """The nodes of a level, where they were placed; logits of each."""
        ...


def propose_trees(
    drafter: TreeDrafter, runner: ModelRunner, sampler: TreeSampler, batch: DecodeBatch, num_draft_tokens: np.ndarray
) -> Frontier:
    """The likeliest trees of at most num_draft_tokens [B] nodes; the draft runs no more nodes of a sequence than
    that."""
    grown = {index: GrowingTree(num_nodes) for index, num_nodes in enumerate(num_draft_tokens.tolist()) if num_nodes}
    num_children = min(int(num_draft_tokens.max(initial=0)), MOST_CHILDREN, runner.vocab_size)
    level = {index: [tree.root] for index, tree in grown.items()}
    run = drafter.run_unseen
    while level:
        logits = run(runner, batch, level)
        run = drafter.run_level
        drafter.times.lap("draft_model")
        children = sampler.sample_children(logits, _sampling_rows(batch, level), num_children)
        log_chances = child_log_chances(children.scores, drafter.difference)
        offered = zip(children.tokens.tolist(), log_chances.tolist(), strict=True)
        level = {index: grown[index].grow(nodes, [next(offered) for _ in nodes]) for index, nodes in level.items()}
        level = {index: nodes for index, nodes in level.items() if nodes}
        drafter.times.lap("draft_sample")
    return _frontier(grown, len(batch))


def child_log_chances(scores: np.ndarray, difference: float) -> np.ndarray:
    """[n, C] of the C best tokens, of scores [n, C] in logits; -inf: forbidden. At least one of a row is not."""
    scores = scores / difference
    scores = scores - scores.max(axis=1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


def next_level(log_chances: list[float], is_run: list[bool], num_wanted: int) -> list[int]:
    """The nodes that make the next level: whose children could be among the best num_wanted nodes of the tree.

    log_chances of the known nodes, falling; is_run: the draft has run it. A tree of n nodes has few of a chance below
    1/2n: that much a node needs while few are known.
    """
    bar = math.log(0.5 / num_wanted)
    if len(log_chances) >= num_wanted:
        bar = max(bar, log_chances[num_wanted - 1])
    bar += LEAD
    level = [i for i, log_chance in enumerate(log_chances) if log_chance >= bar and not is_run[i]]
    return level if sum(math.exp(log_chances[i]) for i in level) >= LEVEL_CHANCE else []


class GrowingTree:
    """The tree of one sequence while it grows: the likeliest draft tokens that are known, at most `num_nodes`."""

    def __init__(self, num_nodes: int) -> None:
        self.root = Node(None, [], 0.0)
        self.nodes: list[Node] = []  # likeliest first; at equal chances parents come before children
        self._num_nodes = num_nodes
        self._num_run = 0

    def grow(self, parents: list[Node], offered: list[tuple[list[int], list[float]]]) -> list[Node]:
        """Takes (tokens, log chances), each falling, as the children of nodes of the tree, keeps the best of all, and
        returns those that the draft runs next, numbered in `place`."""
        nodes, most = self.nodes, self._num_nodes
        for parent, (tokens, log_chances) in zip(parents, offered, strict=True):
            bar = nodes[most - 1].log_chance if len(nodes) >= most else -math.inf
            for token, log_chance in zip(tokens, log_chances, strict=True):
                if parent.log_chance + log_chance <= bar and nodes:
                    break
                nodes.append(Node(parent, [*parent.path, token], parent.log_chance + log_chance))
            nodes.sort(key=attrgetter("log_chance"), reverse=True)  # stable
            del nodes[most:]
        chosen = next_level([node.log_chance for node in nodes], [node.place >= 0 for node in nodes], most)
        level = [nodes[index] for index in chosen[: most - self._num_run]]
        for node in level:
            assert node.parent is not None
            node.place = self._num_run
            node.ancestors = node.parent.ancestors | 1 << node.place
            self._num_run += 1
        return level


def node_rows(batch: DecodeBatch, level: Level, num_held: np.ndarray) -> RowBatch:
    """A row for each node of a level. The draft holds num_held [B] tokens before trees."""
    active = list(level)
    nodes = [node for nodes in level.values() for node in nodes]
    cu_rows = np.cumsum([0, *map(len, level.values())])
    trunk_lens = num_held[active]
    depths = np.array([len(node.path) for node in nodes])
    ancestors = np.array([node.ancestors for node in nodes], np.uint64).view(np.int64)
    return RowBatch(
        np.array([node.path[-1] for node in nodes], np.int64),
        cu_rows,
        trunk_lens + [nodes[0].place for nodes in level.values()],
        batch.block_tables[active],
        np.arange(len(nodes)),
        TreeRows(trunk_lens, ancestors, np.repeat(trunk_lens, np.diff(cu_rows)) + depths - 1),
    )


def _sampling_rows(batch: DecodeBatch, level: Level) -> SamplingRows:
    """Sampling rows of the tokens that follow each node of a level."""
    paths = [node.path for nodes in level.values() for node in nodes]
    sequences = np.repeat(list(level), [len(nodes) for nodes in level.values()])
    depths = np.array(list(map(len, paths)), np.int64)
    longest = int(depths.max())
    drafted = np.array([path + [0] * (longest - len(path)) for path in paths], np.int64)
    positions = batch.num_tokens[sequences] + depths
    return SamplingRows(batch.slots[sequences], positions, np.arange(depths.size), depths, drafted, has_siblings=True)


def _frontier(grown: dict[int, GrowingTree], size: int) -> Frontier:
    """Every node has its row. Sequences of a batch of `size` without a tree have no draft tokens."""
    width = max((len(tree.nodes) for tree in grown.values()), default=0)
    drafted, parents = (np.zeros((size, width), np.int64) for _ in range(2))
    num_drafted = np.zeros(size, np.int64)
    for index, tree in grown.items():
        for row, node in enumerate(tree.nodes, 1):
            assert node.parent is not None
            node.row = row
            drafted[index, row - 1], parents[index, row - 1] = node.path[-1], node.parent.row
        num_drafted[index] = len(tree.nodes)
    return Frontier(drafted, num_drafted, num_drafted + 1, tree=Tree(parents))
