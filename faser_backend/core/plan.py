"""A step's plan, which the scheduler makes, the drafts that it leaves for the next step, and its record.

Policies learn from the record; metrics and benchmarks count it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from faser_backend.core.decision import Decision
from faser_backend.core.frontier import Acceptance, Frontier, Verification
from faser_backend.core.sequence import Sequence


class PrefillChunk(NamedTuple):
    """Tokens [start, start + num_tokens) of a sequence, whose logits are returned if the request asks for them."""

    sequence: Sequence
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """Drafts that are not verified yet. Row b of the frontier follows the last token of sequences[b]."""

    sequences: list[Sequence]
    frontier: Frontier

    @classmethod
    def empty(cls) -> InFlight:
        return cls([], Frontier.empty(0))

    def take(self, rows: list[int]) -> InFlight:
        if len(rows) == len(self.sequences):
            return self
        frontier = self.frontier.take(np.array(rows, np.int64))
        return InFlight([self.sequences[row] for row in rows], frontier)

    def present(self) -> InFlight:
        """Returns the drafts of the sequences that still hold a request slot: not finished, cancelled or preempted."""
        return self.take([row for row, sequence in enumerate(self.sequences) if sequence.slot >= 0])


@dataclass(slots=True)
class StepPlan:
    """The work of one step. Blocks for every position that it touches are already allocated.

    A serial step drafts for its decodes and then verifies them. An overlapped step verifies its decodes,
    whose drafts are in flight, while the draft model works on `drafts`: sequences that are verified later and, in
    run-ahead mode, sequences of `decodes`, whose new tokens follow their drafts in flight.
    """

    decision: Decision
    in_flight: InFlight
    decodes: list[Sequence] = field(default_factory=list)  # verified in this step
    num_draft_tokens: list[int] = field(default_factory=list)  # per decode, drafted before the verification
    drafts: list[Sequence] = field(default_factory=list)  # drafted beside the verification
    num_ahead_tokens: list[int] = field(default_factory=list)  # per entry of drafts, >= 1
    prefills: list[PrefillChunk] = field(default_factory=list)
    draft_prefills: list[PrefillChunk] = field(default_factory=list)  # through the draft model alone, which lags behind
    admitted: list[Sequence] = field(default_factory=list)  # got a slot in this step
    num_reused_blocks: int = 0  # by the admissions of this step
    preempted: list[tuple[Sequence, int]] = field(default_factory=list)  # and the slot they gave up

    def sort_decodes(self) -> None:
        """Puts the sequences of one adapter side by side: a call then reads its matrices once."""
        if any(each.adapter for each in self.decodes):
            order = sorted(range(len(self.decodes)), key=lambda row: self.decodes[row].request.lora_name)
            self.decodes = [self.decodes[row] for row in order]
            self.num_draft_tokens = [self.num_draft_tokens[row] for row in order]

    @property
    def is_empty(self) -> bool:
        return not (self.decodes or self.drafts or self.prefills)


@dataclass(frozen=True, slots=True, eq=False)
class StepRecord:
    """A step that verified something, after the commit. Its arrays are shared with the step: read only.

    Row b of frontier, verification and acceptance belongs to plan.decodes[b].
    """

    plan: StepPlan
    frontier: Frontier
    verification: Verification
    acceptance: Acceptance
    num_tokens: np.ndarray  # [B] tokens of each sequence before the step
    start_ns: int
    end_ns: int
    propose_us: float  # duration of the draft phase, which an overlapped step runs beside the verification
    verify_us: float
    overlap_us: float  # while both phases ran
    num_mixed_rows: int = 0  # of prompts, in the verification's call; verify_us includes them
    draft_prefill_us: float = 0.0  # while the host saw the draft read prompts; a GPU may work on them afterwards
    # Chains that an overlapped step drafted for later ones, one per entry of plan.drafts.
    ahead: InFlight = field(default_factory=InFlight.empty)

    @property
    def step_us(self) -> float:
        return (self.end_ns - self.start_ns) / 1e3

    @property
    def has_clients(self) -> bool:
        """Whether any chain came from a client, so that no decision chose its rows."""
        return bool(self.frontier.is_client.any())

    @property
    def num_testable(self) -> np.ndarray:
        """[B] draft tokens whose testing row was fully computed."""
        return np.minimum(self.frontier.num_drafted, self.verification.num_kept)
