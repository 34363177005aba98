"""`Tree`: how the draft tokens of a frontier hang together where some follow the same token.

Rows of a sequence are numbered as in a chain: row 0 runs the anchor, row k + 1 draft token k. A row sees the context,
and of its own sequence's rows those that lead to it. Index arithmetic alone; knows nothing of models or caches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_TREE_ROWS = 64  # of a sequence, the anchor's included: one bit each
MAX_TREE_TOKENS = MAX_TREE_ROWS - 1


@dataclass(slots=True, eq=False)
class Tree:
    """Of B sequences with at most K draft tokens each. Entries past a sequence's draft tokens have no meaning.

    Draft token k of sequence b follows row parents[b, k] <= k, so that parents come before their children and the
    first rows of a tree are a tree. A chain is parents[b, k] = k; it alone may be longer than MAX_TREE_TOKENS.
    """

    parents: np.ndarray  # [B, K] int64
    draft_cells: np.ndarray  # [B, K] int64: where the draft holds the token, behind the last committed one; -1: nowhere

    @classmethod
    def of_chains(cls, num_drafted: np.ndarray, width: int, *, is_run: np.ndarray) -> Tree:
        """Chains of num_drafted [B] tokens in `width` columns; of those that is_run [B] the draft has run all tokens
        but the last one."""
        columns = np.arange(width)
        parents = np.broadcast_to(columns, (num_drafted.size, width)).copy()
        has_run = is_run[:, None] & (columns < num_drafted[:, None] - 1)
        return cls(parents, np.where(has_run, columns, -1))

    def take(self, index: np.ndarray) -> Tree:
        return Tree(self.parents[index], self.draft_cells[index])

    def is_chain(self, num_drafted: np.ndarray) -> np.ndarray:
        """[B] bool."""
        columns = np.arange(self.parents.shape[1])
        return ((self.parents == columns) | (columns >= num_drafted[:, None])).all(axis=1)

    def depths(self) -> np.ndarray:
        """[B, K + 1] rows between a row and the anchor, itself counted: its position behind the anchor's."""
        size, width = self.parents.shape
        every = np.arange(size)
        depths = np.zeros((size, width + 1), np.int64)
        for column in range(width):
            depths[:, column + 1] = depths[every, self.parents[:, column]] + 1
        return depths

    def ancestors(self, num_drafted: np.ndarray) -> np.ndarray:
        """[B, K + 1] int64: bit i of a row's says that it sees row i, itself included; 0 in chains, whose rows see all
        rows before them."""
        size, width = self.parents.shape
        every = np.arange(size)
        bits = np.zeros((size, width + 1), np.int64)
        bits[:, 0] = 1
        for column in range(min(width, MAX_TREE_TOKENS)):
            bits[:, column + 1] = bits[every, self.parents[:, column]] | np.int64(1) << np.int64(column + 1)
        bits[self.is_chain(num_drafted)] = 0
        return bits

    def paths(self, depths: np.ndarray) -> np.ndarray:
        """[B, K + 1, D] columns of the draft tokens that lead to each row of depths [B, K + 1], the first of them
        first; entries past a row's depth have no meaning."""
        size, width = self.parents.shape
        every = np.arange(size)
        paths = np.zeros((size, width + 1, int(depths.max(initial=0))), np.int64)
        for column in range(width):
            paths[:, column + 1] = paths[every, self.parents[:, column]]
            paths[every, column + 1, depths[:, column + 1] - 1] = column
        return paths
