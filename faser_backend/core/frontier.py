"""Values that the phases of a step exchange: a frontier, its verification, the acceptance.

Plain values: in-flight work is an argument and a result, never hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from faser_backend.core.ports import DeviceArray
from faser_backend.core.tree import Tree

# Sources of chains: the engine's drafter, which is its draft model or, where it has none, n-grams of the request's own
# text; such n-grams beside a model; the client, who guessed it. Sources before CLIENT are the server's.
MAIN, NGRAM, CLIENT = range(3)


@dataclass(slots=True, eq=False)
class Frontier:
    """Draft tokens of B sequences, ready to be verified. Entries past num_drafted have no meaning.

    Row 0 of a sequence runs its anchor, row j its j-th draft token, which follows the one before it, or where there is
    a tree any row before it. Fewer than num_drafted + 1 rows
    means that the last ones are not worth running: what is tested then follows policy/acceptance.py.
    """

    drafted: np.ndarray  # [B, K] int64, K = max(num_drafted)
    num_drafted: np.ndarray  # [B] int64
    num_rows: np.ndarray  # [B] int64, in [1, num_drafted + 1]
    margins: np.ndarray | None = None  # [B, K] float32, how far ahead each draft token was, in logits
    candidates: np.ndarray | None = None  # [B, K, C] int64, the draft's C best tokens, drafted[b, k] first
    # [B, K', V] float32, the distributions that tokens were drawn from; rejection sampling only. Columns past K' <= K
    # are those of clients' chains alone: nobody drew such a token, and its distribution puts everything on it.
    draft_probs: np.ndarray | None = None
    tree: Tree | None = None  # None: all are chains
    sources: np.ndarray = None  # type: ignore[assignment]  # [B] int64; all MAIN where none are given

    def __post_init__(self) -> None:
        if self.sources is None:
            self.sources = np.zeros(self.num_drafted.shape, np.int64)

    @classmethod
    def empty(cls, num_sequences: int) -> Frontier:
        """Nothing drafted: verification is plain decoding."""
        zeros = np.zeros(num_sequences, np.int64)
        return cls(np.zeros((num_sequences, 0), np.int64), zeros, zeros + 1)

    @classmethod
    def whole(cls, drafted: np.ndarray, num_drafted: np.ndarray, draft_probs: np.ndarray | None = None) -> Frontier:
        """Every draft token has its row, and there is a bonus row where num_drafted ends."""
        return cls(drafted, num_drafted, num_drafted + 1, draft_probs=draft_probs)

    def take(self, index: np.ndarray) -> Frontier:
        """The chains or trees of sequences `index` [n], in that order."""
        optional = (self.margins, self.candidates, self.draft_probs)
        arrays = (None if array is None else array[index] for array in optional)
        tree = None if self.tree is None else self.tree.take(index)
        counts = self.num_drafted[index], self.num_rows[index]
        return Frontier(self.drafted[index], *counts, *arrays, tree=tree, sources=self.sources[index])

    @property
    def is_main(self) -> np.ndarray:
        """[B] bool, chains that the engine's drafter has made, and run."""
        return self.sources == MAIN

    @property
    def is_client(self) -> np.ndarray:
        """[B] bool, chains that clients brought along."""
        return self.sources == CLIENT


@dataclass(slots=True, eq=False)
class Verification:
    """The target's view of a frontier: row j of sequence b follows drafted[b, :j], or what leads to it in a tree."""

    logits: DeviceArray  # [R, V] float32, R = sum(num_kept)
    cu_rows: np.ndarray  # [B + 1] int64, prefix sums of num_kept
    num_kept: np.ndarray  # [B] int64 rows that went through the whole target, in [1, frontier.num_rows]
    num_row_layers: int  # rows times layers that were computed, pruned rows up to their exit included


@dataclass(slots=True, eq=False)
class AcceptedPath:
    """The way from the anchor through trees. Entries past num_emitted have no meaning."""

    rows: np.ndarray  # [B, D] int64, the row that each emitted token was drawn from; rows[:, 0] are the anchors'
    num_tested: np.ndarray  # [B] int64, rows of the path that draft tokens follow: draws that were compared with some


@dataclass(slots=True, eq=False)
class Acceptance:
    """Tokens that leave the step. Row b emits tokens[b, :num_emitted[b]]; what follows has no meaning.

    The last emitted token is the recovered token, or the bonus token where all were accepted; where
    rows were trimmed or pruned and every tested token was accepted, it is the last accepted one.
    """

    tokens: np.ndarray  # [B, K + 1] int64
    num_accepted: np.ndarray  # [B] int64, drafted tokens kept, without bonus
    num_emitted: np.ndarray  # [B] int64
    path: AcceptedPath | None = None  # through trees; in chains row j is what token j was drawn from
