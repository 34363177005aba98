"""Values that the phases of a step exchange: a frontier, its verification, the acceptance.

A *chain* is the draft tokens of one sequence, each following the one before. The *anchor* is the last emitted token of
a sequence; neither KV cache holds it yet. A *row* is one token of one sequence in a model call. Proposing makes a
`Frontier`, the target makes a `Verification` of it, and acceptance turns that into emitted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from faser_backend.core.ports import DeviceArray

# Sources of chains. MAIN: the engine's drafter, a draft model or, without one, n-grams of the request's own text.
# NGRAM: n-grams beside a draft model. CLIENT: draft tokens in the request. The server makes all but CLIENT.
MAIN, NGRAM, CLIENT = range(3)


@dataclass(slots=True, eq=False)
class Frontier:
    """Draft tokens of B sequences, at most K each, ready to be verified. Entries past num_drafted have no meaning.

    Row 0 of a sequence runs its anchor, row j its j-th draft token. Row j - 1 tests draft token j; the last row of a
    chain yields the bonus token. With fewer than num_drafted + 1 rows, tokens without a testing row are not emitted.
    V is the vocabulary's size, C the number of candidates.
    """

    drafted: np.ndarray  # [B, K] int64, K = max(num_drafted)
    num_drafted: np.ndarray  # [B] int64
    num_rows: np.ndarray = None  # type: ignore[assignment]  # [B] int64, in [1, num_drafted + 1], the default
    margins: np.ndarray | None = None  # [B, K] float32, the lead over the draft's second choice, in logits
    candidates: np.ndarray | None = None  # [B, K, C] int64, the draft's C best tokens, drafted[b, k] first
    # [B, K', V] float32, the distributions that tokens were drawn from; rejection sampling only. Chains of clients and
    # n-grams, whose tokens have probability 1, need none: K' <= K.
    draft_probs: np.ndarray | None = None
    sources: np.ndarray = None  # type: ignore[assignment]  # [B] int64; default: all MAIN

    def __post_init__(self) -> None:
        if self.num_rows is None:
            self.num_rows = self.num_drafted + 1
        if self.sources is None:
            self.sources = np.zeros(self.num_drafted.shape, np.int64)

    @classmethod
    def empty(cls, num_sequences: int) -> Frontier:
        """Returns a frontier without draft tokens, whose verification is plain decoding."""
        return cls(np.zeros((num_sequences, 0), np.int64), np.zeros(num_sequences, np.int64))

    def take(self, index: np.ndarray) -> Frontier:
        """Returns the chains of sequences `index` [n], in that order."""
        optional = (self.margins, self.candidates, self.draft_probs)
        arrays = (None if array is None else array[index] for array in optional)
        counts = self.num_drafted[index], self.num_rows[index]
        return Frontier(self.drafted[index], *counts, *arrays, sources=self.sources[index])

    @property
    def is_main(self) -> np.ndarray:
        """[B] bool: chains of the engine's drafter."""
        return self.sources == MAIN

    @property
    def is_client(self) -> np.ndarray:
        """[B] bool: chains that clients sent."""
        return self.sources == CLIENT


@dataclass(slots=True, eq=False)
class Verification:
    """The target's logits for a frontier: row j of sequence b follows drafted[b, :j]."""

    logits: DeviceArray  # [R, V] float32, R = sum(num_kept)
    cu_rows: np.ndarray  # [B + 1] int64, prefix sums of num_kept
    num_kept: np.ndarray  # [B] int64 rows that went through the whole target, in [1, frontier.num_rows]
    num_row_layers: int  # rows times layers that were computed, pruned rows up to their exit included


@dataclass(slots=True, eq=False)
class Acceptance:
    """Emitted tokens. Sequence b emits tokens[b, :num_emitted[b]], token j from row j; later entries have no meaning.

    The last one is the recovered token after a rejection, else the bonus token. If rows were trimmed (left out before
    verification) or pruned (at an early exit) and all tested tokens were accepted, it is the last accepted one.
    """

    tokens: np.ndarray  # [B, K + 1] int64
    num_accepted: np.ndarray  # [B] int64, draft tokens kept, bonus excluded
    num_emitted: np.ndarray  # [B] int64
