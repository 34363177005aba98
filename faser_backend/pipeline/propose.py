"""The interface of a proposer: a step asks it for draft tokens and gets a `Frontier`.

pipeline/draft.py drafts with a model, pipeline/head.py with an EAGLE-3 head or a block drafter, pipeline/ngram.py with
n-grams of the text, and pipeline/joint.py with a model and n-grams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from faser_backend.core.decision import TrimRule
from faser_backend.core.frontier import Frontier
from faser_backend.core.plan import PrefillChunk
from faser_backend.core.ports import Partition, PhaseTimes
from faser_backend.core.sequence import Sequence
from faser_backend.pipeline.rows import DecodeBatch


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A request for draft tokens of the B sequences of a batch.

    behind: uncommitted chains that the new tokens follow; empty ones if they follow the last token.
    """

    num_draft_tokens: np.ndarray  # [B] int64 >= 0
    behind: Frontier
    trim: TrimRule | None = None  # ends chains that are no longer worth extending
    num_candidates: int = 0  # per token, for the exit head


class Proposer(Protocol):
    """Drafts for one batch at a time, on any thread."""

    times: PhaseTimes  # of the draft's lane
    main_source: str  # name of its chains in metrics
    max_lag: int  # tokens of a sequence that it may have to read when it proposes

    def propose(self, partition: Partition, batch: DecodeBatch, proposal: Proposal) -> Frontier:
        """Returns up to num_draft_tokens tokens per sequence, each with its row; maybe none. For rejection sampling the
        frontier carries the distributions that the tokens were drawn from."""
        ...

    def prefill(self, partition: Partition, chunks: list[PrefillChunk]) -> None:
        """Reads the unread tokens of each chunk."""

    def forget(self, sequence: Sequence) -> None:
        """Drops all state of a sequence that has left its slot."""
