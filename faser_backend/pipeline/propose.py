"""Who proposes: the seam between a step and what drafts for it.

A step asks for draft tokens and gets a `Frontier`; whether a model made them or the text so far is not its
business. Implemented by pipeline/draft.py, pipeline/head.py, pipeline/ngram.py and, of these, pipeline/joint.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from faser_backend.core.decision import TrimRule
from faser_backend.core.frontier import Frontier
from faser_backend.core.plan import PrefillChunk
from faser_backend.core.ports import Partition
from faser_backend.core.sequence import Sequence
from faser_backend.pipeline.rows import DecodeBatch
from faser_backend.pipeline.timing import PhaseTimes


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """The draft tokens that are wanted for the B sequences of a batch.

    behind: uncommitted chains that the new tokens follow (empty ones where they follow the last token).
    """

    num_draft_tokens: np.ndarray  # [B] int64 >= 0
    behind: Frontier
    trim: TrimRule | None = None  # chains that are no longer worth it end early
    num_candidates: int = 0  # that are asked for per token, for the exit head
    trees: bool = False  # the tokens of a sequence may form a tree, whose best ones are wanted


class Proposer(Protocol):
    """Drafts for one batch at a time, on whichever thread the step gives it."""

    times: PhaseTimes  # of the draft's lane
    main_source: str  # what its own chains are called
    max_lag: int  # tokens of a sequence that it may have to read when it proposes

    def propose(self, partition: Partition, batch: DecodeBatch, proposal: Proposal) -> Frontier:
        """Up to num_draft_tokens tokens per sequence, each with its row; maybe none. Where tokens are tested
        against the distribution they were drawn from, the frontier carries it."""
        ...

    def prefill(self, partition: Partition, chunks: list[PrefillChunk]) -> None:
        """Reads what it has not seen of each chunk."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has left its slot. Nothing may be known of it."""
        ...
