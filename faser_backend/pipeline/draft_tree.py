"""Drafting of trees: level by level, all nodes of a level in one call of the draft.

Nodes lie in the draft's cells behind the committed tokens in the order in which they are run, and see their ancestors
alone. What the draft makes of a node are its children: of all nodes that are known the likeliest ones stay.
"""

from __future__ import annotations

import numpy as np

from faser_backend.core.batch import RowBatch, SamplingRows, TreeRows
from faser_backend.core.frontier import Frontier
from faser_backend.core.ports import ModelRunner, TreeSampler
from faser_backend.core.tree import Tree
from faser_backend.pipeline.model_call import run_model
from faser_backend.pipeline.rows import DecodeBatch, token_range_rows
from faser_backend.pipeline.timing import PhaseTimes
from faser_backend.policy.tree_choice import MOST_CHILDREN, child_log_chances, worth_running


def propose_trees(
    runner: ModelRunner, sampler: TreeSampler, times: PhaseTimes, batch: DecodeBatch, num_draft_tokens: np.ndarray
) -> Frontier:
    """Trees of at most num_draft_tokens [B] nodes. The draft runs no more nodes of a sequence than that."""
    active = np.flatnonzero(num_draft_tokens)
    grove = Grove(batch, active, num_draft_tokens, min(MOST_CHILDREN, runner.vocab_size))
    trees, nodes = np.arange(active.size), np.zeros(active.size, np.int64)
    rows = grove.unseen_rows()
    while trees.size:
        times.lap("draft_rows")
        logits = run_model(runner, rows)
        times.lap("draft_model")
        children = sampler.sample_children(logits, grove.sampling_rows(trees, nodes), grove.num_children)
        grove.add(trees, nodes, children.tokens, child_log_chances(children.scores))
        trees, nodes = grove.next_nodes()
        times.lap("draft_sample")
        rows = grove.rows(trees, nodes)
    return grove.frontier()


class Grove:
    """The growing trees of A sequences of a batch. Node 0 of each is the anchor; then come its draft tokens, likeliest
    first, so that parents come before their children."""

    def __init__(self, batch: DecodeBatch, active: np.ndarray, num_draft_tokens: np.ndarray, most_children: int) -> None:
        """active [A] sequences of the batch; num_draft_tokens [B] nodes that each may have."""
        self._batch, self._active = batch, active
        self._num_wanted = num_draft_tokens[active]  # [A]
        self._most_nodes = int(self._num_wanted.max(initial=0))
        self.num_children = min(self._most_nodes, most_children)  # of a node
        kinds = [(name, np.int64) for name in ("token", "parent", "depth", "cell", "ancestors")]
        kind = np.dtype([("log_chance", np.float64), *kinds, ("path", np.int64, (self._most_nodes,))])
        self._nodes = np.zeros((active.size, 1), kind)  # [A, 1 + N]; log_chance = -inf: none; cell = -1: not run
        self._num_run = np.zeros(active.size, np.int64)  # [A] draft tokens that the draft has run: its next cell

    def unseen_rows(self) -> RowBatch:
        """What the draft has not seen of each sequence; behind the last of it come the anchor's children."""
        sequences = [self._batch.sequences[index] for index in self._active]
        starts, stops = [seq.draft_len for seq in sequences], [seq.num_tokens for seq in sequences]
        return token_range_rows(sequences, starts, stops, self._batch.block_tables[self._active], with_logits=True)

    def rows(self, trees: np.ndarray, nodes: np.ndarray) -> RowBatch:
        """Of nodes [n] of trees [n], rising, as next_nodes gives them."""
        trees, counts = np.unique(trees, return_counts=True)
        chosen, slots = self._nodes[np.repeat(trees, counts), nodes], self._active[trees]
        cu_rows = np.concatenate([[0], np.cumsum(counts)])
        trunk_lens = self._batch.num_tokens[slots]
        context_lens = trunk_lens + chosen["cell"][cu_rows[:-1]]
        tree = TreeRows(trunk_lens, np.ascontiguousarray(chosen["ancestors"]))
        tokens, tables = np.ascontiguousarray(chosen["token"]), self._batch.block_tables[slots]
        return RowBatch(tokens, cu_rows, context_lens, tables, np.arange(nodes.size), tree)

    def sampling_rows(self, trees: np.ndarray, nodes: np.ndarray) -> SamplingRows:
        """Of the tokens that follow nodes [n] of trees [n]."""
        chosen, sequences = self._nodes[trees, nodes], self._active[trees]
        depths = chosen["depth"]
        positions = self._batch.num_tokens[sequences] + depths
        return SamplingRows(self._batch.slots[sequences], positions, np.arange(depths.size), depths, chosen["path"])

    def add(self, trees: np.ndarray, nodes: np.ndarray, tokens: np.ndarray, log_chances: np.ndarray) -> None:
        """Nodes [n] of trees [n], rising, have the children tokens [n, C] with log_chances [n, C]; the best ones of all
        stay."""
        size, width = self._nodes.shape
        place = np.arange(trees.size) - np.searchsorted(trees, trees)  # among the nodes of its tree
        grown = np.zeros((size, width + tokens.shape[1] * (int(place.max()) + 1)), self._nodes.dtype)
        grown["log_chance"] = -np.inf
        grown[:, :width] = self._nodes
        parents = self._nodes[trees, nodes][:, None]  # [n, 1]
        children = np.zeros(tokens.shape, grown.dtype)
        children["log_chance"] = parents["log_chance"] + log_chances
        children["token"], children["parent"], children["cell"] = tokens, nodes[:, None], -1
        children["depth"] = parents["depth"] + 1
        children["path"] = parents["path"]
        can_lead = np.flatnonzero(parents["depth"][:, 0] < self._most_nodes)
        children["path"][can_lead, :, parents["depth"][can_lead, 0]] = tokens[can_lead]
        grown[trees[:, None], width + place[:, None] * tokens.shape[1] + np.arange(tokens.shape[1])] = children
        order = np.argsort(-grown["log_chance"], axis=1, kind="stable")
        rank = np.argsort(order, axis=1)
        self._nodes = np.take_along_axis(grown, order[:, : self._most_nodes + 1], axis=1)
        self._nodes["parent"] = np.take_along_axis(rank, self._nodes["parent"], axis=1)

    def next_nodes(self) -> tuple[np.ndarray, np.ndarray]:
        """([n] trees, [n] nodes), rising, that the draft runs next; none where no child of theirs could be among the
        best. They get cells in this order."""
        nodes = self._nodes[:, 1:]
        chosen = worth_running(nodes["log_chance"], nodes["cell"] >= 0, self._num_wanted)
        number = np.cumsum(chosen, axis=1)
        chosen &= number <= (self._num_wanted - self._num_run)[:, None]
        trees, columns = np.nonzero(chosen)
        cells = self._num_run[trees] + number[trees, columns] - 1
        nodes["cell"][trees, columns] = cells
        above = self._nodes["ancestors"][trees, nodes["parent"][trees, columns]]
        nodes["ancestors"][trees, columns] = above | np.int64(1) << cells
        self._num_run += np.count_nonzero(chosen, axis=1)
        return trees, columns + 1

    def frontier(self) -> Frontier:
        """Of all sequences of the batch; every node has its row."""
        nodes = self._nodes[:, 1:]
        num_drafted = np.zeros(len(self._batch), np.int64)
        num_known = np.count_nonzero(nodes["log_chance"] > -np.inf, axis=1)
        num_drafted[self._active] = np.minimum(num_known, self._num_wanted)
        drafted, parents, cells = (np.zeros((len(self._batch), nodes.shape[1]), np.int64) for _ in range(3))
        for array, name in ((drafted, "token"), (parents, "parent"), (cells, "cell")):
            array[self._active] = nodes[name]
        return Frontier(drafted, num_drafted, num_drafted + 1, tree=Tree(parents, cells))
