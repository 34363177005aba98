"""`Tree`: the structure of a frontier's draft tokens if several may follow one token.

Rows of a sequence are numbered as in a chain: row 0 runs the anchor, row k + 1 draft token k. A row sees the context,
and of its own sequence's rows those that lead to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

MAX_TREE_ROWS = 64  # of a sequence, the anchor's included: one bit each
MAX_TREE_TOKENS = MAX_TREE_ROWS - 1
MOST_CHILDREN = 8  # of a node; the demo target draws one of so many 95 times in 100


class Lines(NamedTuple):
    """How rows descend from the anchor."""

    depths: np.ndarray  # [B, K + 1] int64 draft tokens that lead to a row, its own included
    ancestors: np.ndarray  # [B, K + 1] int64: bit i says that the row sees row i, itself included
    paths: np.ndarray  # [B, K + 1, D] int64 columns of these draft tokens, the first one first; then no meaning


@dataclass(slots=True, eq=False)
class Tree:
    """Trees of B sequences with at most K draft tokens each. Entries past a sequence's draft tokens have no meaning.

    Draft token k of sequence b follows row parents[b, k] <= k, so that parents come before their children and the
    first rows of a tree are a tree. A chain is parents[b, k] = k; it alone may be longer than MAX_TREE_TOKENS.
    """

    parents: np.ndarray  # [B, K] int64
    _lines: Lines | None = None

    @classmethod
    def of_chains(cls, size: int, width: int) -> Tree:
        """Returns chains of `size` sequences in `width` columns."""
        return cls(np.tile(np.arange(width), (size, 1)))

    def take(self, index: np.ndarray) -> Tree:
        return Tree(self.parents[index])

    def is_chain(self, num_drafted: np.ndarray) -> np.ndarray:
        """Returns bool [B]: whether each tree is a chain, whose rows see all rows before them."""
        columns = np.arange(self.parents.shape[1])
        return ((self.parents == columns) | (columns >= num_drafted[:, None])).all(axis=1)

    @property
    def lines(self) -> Lines:
        """The lines of the trees, computed once."""
        if self._lines is None:
            self._lines = self._ascend()
        return self._lines

    def _ascend(self) -> Lines:
        size, width = self.parents.shape
        depths, ancestors, steps = [], [], []  # trees are small: lists are faster here than arrays
        for parents in self.parents.tolist():
            own_depths, own_bits, own_steps = [0], [1], [[]]
            for column, parent in enumerate(parents):
                own_depths.append(own_depths[parent] + 1)
                own_bits.append(own_bits[parent] | 1 << min(column + 1, MAX_TREE_TOKENS))
                own_steps.append([*own_steps[parent], column])
            depths.append(own_depths)
            ancestors.append(own_bits)
            steps.append(own_steps)
        longest = max(map(max, depths), default=0)
        paths = np.array([[line + [0] * (longest - len(line)) for line in own] for own in steps], np.int64)
        bits = np.array(ancestors, np.uint64).view(np.int64)
        shape = (size, width + 1)
        return Lines(np.array(depths, np.int64).reshape(shape), bits.reshape(shape), paths.reshape(*shape, longest))
