"""Drafting of trees: level by level, all nodes of a level in one call of the draft.

Nodes lie in the draft's cells behind the committed tokens in the order in which they are run, and see their ancestors
alone. What the draft makes of a node are its children: of all nodes that are known the likeliest ones stay.

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
from faser_backend.pipeline.model_call import run_model
from faser_backend.pipeline.rows import DecodeBatch, token_range_rows
from faser_backend.pipeline.timing import PhaseTimes

# Of the models' logits: greatest likelihood of the demo target's draws at temperature 0.8; and a head's.
DIFFERENCE, HEAD_DIFFERENCE = 0.7, 1.5
LEAD = -math.log(0.8)  # chance of the best child of a node that is worth the draft's row
LEVEL_CHANCE = 0.5  # that the draw is behind one of a level's nodes, from which on it is worth a draft call


class TreeCalls(Protocol):
    """How the draft of a proposal runs what trees need: its logits give the children of what a row runs."""

    keeps_cells: bool  # what it has run of an accepted path stays of use
    vocab_size: int
    difference: float  # between the logits of draft and target
    times: PhaseTimes

    def run_unseen(self, batch: DecodeBatch, level: dict[int, list[Node]]) -> np.ndarray:
        """What the draft has not seen of a level's sequences, whose anchors are the nodes; logits of what follows."""
        ...

    def run_level(self, batch: DecodeBatch, level: dict[int, list[Node]]) -> np.ndarray:
        """The nodes of a level, by sequence of the batch, at the cells that they were given; logits of each."""
        ...


class ModelTreeCalls:
    """Of a draft that is a model of its own: a TreeCalls."""

    keeps_cells, difference = True, DIFFERENCE

    def __init__(self, runner: ModelRunner, times: PhaseTimes) -> None:
        self.vocab_size = runner.vocab_size
        self._runner, self.times = runner, times

    def run_unseen(self, batch: DecodeBatch, level: dict[int, list[Node]]) -> np.ndarray:
        active = list(level)
        sequences = [batch.sequences[index] for index in active]
        starts, stops = [seq.draft_len for seq in sequences], [seq.num_tokens for seq in sequences]
        return self._run(token_range_rows(sequences, starts, stops, batch.block_tables[active], with_logits=True))

    def run_level(self, batch: DecodeBatch, level: dict[int, list[Node]]) -> np.ndarray:
        return self._run(node_rows(batch, level, batch.num_tokens))

    def _run(self, rows: RowBatch) -> np.ndarray:
        self.times.lap("draft_rows")
        return run_model(self._runner, rows)


def propose_trees(calls: TreeCalls, sampler: TreeSampler, batch: DecodeBatch, num_draft_tokens: np.ndarray) -> Frontier:
    """Trees of at most num_draft_tokens [B] nodes. The draft runs no more nodes of a sequence than that."""
    wanted = num_draft_tokens.tolist()
    grown = {index: GrowingTree(num_nodes) for index, num_nodes in enumerate(wanted) if num_nodes}
    num_children = min(int(num_draft_tokens.max(initial=0)), MOST_CHILDREN, calls.vocab_size)
    level = {index: [tree.root] for index, tree in grown.items()}
    run = calls.run_unseen
    while level:
        logits = run(batch, level)
        run = calls.run_level
        calls.times.lap("draft_model")
        children = sampler.sample_children(logits, _sampling_rows(batch, level), num_children)
        offered = zip(
            children.tokens.tolist(), child_log_chances(children.scores, calls.difference).tolist(), strict=True
        )
        level = {index: grown[index].grow(nodes, [next(offered) for _ in nodes]) for index, nodes in level.items()}
        level = {index: nodes for index, nodes in level.items() if nodes}
        calls.times.lap("draft_sample")
    return _frontier(grown, len(batch), keeps_cells=calls.keeps_cells)


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


class Node:
    """A draft token, or the anchor. Its cell, once the draft has run it, is counted behind the committed tokens."""

    __slots__ = ("ancestors", "cell", "depth", "log_chance", "made", "parent", "path", "row")

    def __init__(self, parent: Node | None, path: list[int], log_chance: float) -> None:
        self.parent = parent
        self.path = path  # tokens behind the anchor, its own at the end
        self.depth = len(path)
        self.log_chance = log_chance
        self.cell = -1  # not run
        self.ancestors = 0  # bits of cells, its own included
        self.row = 0  # in the frontier
        self.made: DeviceArray = None  # by a draft that goes on from what it made of the parent


class GrowingTree:
    """Of one sequence: the likeliest draft tokens that are known, at most `num_nodes`."""

    def __init__(self, num_nodes: int) -> None:
        self.root = Node(None, [], 0.0)
        self.nodes: list[Node] = []  # likeliest first; at equal chances parents come before children
        self._num_nodes = num_nodes
        self._num_run = 0

    def grow(self, parents: list[Node], offered: list[tuple[list[int], list[float]]]) -> list[Node]:
        """Takes (tokens, log chances), each falling, as the children of nodes of the tree, keeps the best of all, and
        returns those that the draft runs next, with their cells."""
        nodes, most = self.nodes, self._num_nodes
        for parent, (tokens, log_chances) in zip(parents, offered, strict=True):
            bar = nodes[most - 1].log_chance if len(nodes) >= most else -math.inf
            for token, log_chance in zip(tokens, log_chances, strict=True):
                if parent.log_chance + log_chance <= bar and nodes:
                    break
                nodes.append(Node(parent, [*parent.path, token], parent.log_chance + log_chance))
            nodes.sort(key=attrgetter("log_chance"), reverse=True)  # stable
            del nodes[most:]
        chosen = next_level([node.log_chance for node in nodes], [node.cell >= 0 for node in nodes], most)
        level = [nodes[index] for index in chosen[: most - self._num_run]]
        for node in level:
            assert node.parent is not None
            node.cell = self._num_run
            node.ancestors = node.parent.ancestors | 1 << node.cell
            self._num_run += 1
        return level


def node_rows(batch: DecodeBatch, level: dict[int, list[Node]], num_cells: np.ndarray) -> RowBatch:
    """A row for each node of a level, by sequence of the batch. The draft holds num_cells [B] cells before trees."""
    active = list(level)
    nodes = [node for nodes in level.values() for node in nodes]
    tokens, depths, cells, ancestors = np.array(
        [(node.path[-1], node.depth, node.cell, _signed(node.ancestors)) for node in nodes], np.int64
    ).reshape(-1, 4).T  # fmt: skip
    cu_rows = np.cumsum([0, *map(len, level.values())])
    trunk_lens = num_cells[active]
    positions = np.repeat(trunk_lens, np.diff(cu_rows)) + depths - 1
    return RowBatch(
        tokens,
        cu_rows,
        trunk_lens + cells[cu_rows[:-1]],
        batch.block_tables[active],
        np.arange(len(nodes)),
        TreeRows(trunk_lens, ancestors, positions),
    )


def _signed(bits: int) -> int:
    """64 bits as an int64."""
    return bits - (1 << 64) if bits >> 63 else bits


def _sampling_rows(batch: DecodeBatch, level: dict[int, list[Node]]) -> SamplingRows:
    """Of the tokens that follow each node of a level."""
    nodes = [node for nodes in level.values() for node in nodes]
    sequences = np.repeat(list(level), [len(nodes) for nodes in level.values()])
    depths = np.array([node.depth for node in nodes], np.int64)
    longest = int(depths.max())
    drafted = np.array([node.path + [0] * (longest - node.depth) for node in nodes], np.int64)
    positions = batch.num_tokens[sequences] + depths
    return SamplingRows(batch.slots[sequences], positions, np.arange(depths.size), depths, drafted, has_siblings=True)


def _frontier(grown: dict[int, GrowingTree], size: int, *, keeps_cells: bool) -> Frontier:
    """Every node has its row. Sequences of a batch of `size` without a tree have no draft tokens."""
    width = max((len(tree.nodes) for tree in grown.values()), default=0)
    drafted, parents, cells = (np.zeros((size, width), np.int64) for _ in range(3))
    num_drafted = np.zeros(size, np.int64)
    for index, tree in grown.items():
        for row, node in enumerate(tree.nodes, 1):
            node.row = row
        count = num_drafted[index] = len(tree.nodes)
        if count:
            named = [
                (node.path[-1], node.parent.row if node.parent else 0, node.cell if keeps_cells else -1)
                for node in tree.nodes
            ]
            drafted[index, :count], parents[index, :count], cells[index, :count] = np.array(named, np.int64).T
    return Frontier(drafted, num_drafted, num_drafted + 1, tree=Tree(parents, cells))
