"""What passes between the phases of a step: the plan, a frontier, its verification, the acceptance.

Plain values: in-flight work is an argument and a result, never hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from faser_backend.core.sequence import Sequence


class PrefillChunk(NamedTuple):
    """Tokens [start, start + num_tokens) of a sequence, to be run without logits."""

    sequence: Sequence
    start: int
    num_tokens: int


@dataclass(slots=True)
class StepPlan:
    """What one step does. Blocks for every position that it touches are already allocated."""

    decodes: list[Sequence] = field(default_factory=list)
    num_draft_tokens: list[int] = field(default_factory=list)  # per decode, 0 = plain decoding
    prefills: list[PrefillChunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)  # got a slot in this step
    num_reused_blocks: int = 0  # by the admissions of this step
    preempted: list[tuple[Sequence, int]] = field(default_factory=list)  # and the slot they gave up

    @property
    def is_empty(self) -> bool:
        return not (self.decodes or self.prefills)


@dataclass(slots=True, eq=False)
class Frontier:
    """Draft tokens that are ready to be verified."""

    drafted: np.ndarray  # [B, K] int64, K = max(num_drafted); entries past num_drafted are 0
    num_drafted: np.ndarray  # [B] int64
    draft_probs: np.ndarray | None = None  # [B, K, V] float32, rejection sampling only

    @classmethod
    def empty(cls, num_sequences: int) -> Frontier:
        """Nothing drafted: verification is plain decoding."""
        return cls(np.zeros((num_sequences, 0), np.int64), np.zeros(num_sequences, np.int64))


@dataclass(slots=True, eq=False)
class Verification:
    """The target's view of a frontier: row j of sequence b follows drafted[b, :j]."""

    logits: np.ndarray  # [R, V] float32, R = sum(num_drafted + 1)
    cu_rows: np.ndarray  # [B + 1] int64


@dataclass(slots=True, eq=False)
class Acceptance:
    """Tokens that leave the step. Row b emits tokens[b, :num_emitted[b]]; what follows has no meaning.

    The last emitted token is the recovered token, or the bonus token where all were accepted.
    """

    tokens: np.ndarray  # [B, K + 1] int64
    num_accepted: np.ndarray  # [B] int64, drafted tokens kept, without bonus
    num_emitted: np.ndarray  # [B] int64
