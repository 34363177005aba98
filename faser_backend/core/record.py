"""The record of a step, for policies, which learn from it, and for metrics and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from faser_backend.core.frontier import Acceptance, Frontier, Verification
from faser_backend.core.plan import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class StepRecord:
    """One step that verified something, its tokens already committed. Arrays are the step's own: read only.

    Row b of frontier, verification and acceptance belongs to plan.decodes[b].
    """

    plan: StepPlan
    frontier: Frontier
    verification: Verification
    acceptance: Acceptance
    num_tokens: np.ndarray  # [B] tokens of each sequence before the step
    start_ns: int
    end_ns: int
    propose_us: float  # of the draft phase, which an overlapped step runs beside the verification
    verify_us: float
    overlap_us: float  # time in which both phases ran
    # In which the host saw the models read prompts, and the draft catch up; a GPU may go on with it later.
    prefill_us: float = 0.0
    draft_prefill_us: float = 0.0

    @property
    def step_us(self) -> float:
        return (self.end_ns - self.start_ns) / 1e3

    @property
    def server_rows(self) -> np.ndarray | slice:
        """Index of the sequences without a client's chain: what became of such a chain says nothing of the draft."""
        return np.flatnonzero(~self.frontier.is_client) if self.has_clients else slice(None)

    @property
    def has_clients(self) -> bool:
        """Whether a chain was a client's, whose rows no decision chose."""
        return bool(self.frontier.is_client.any())

    @property
    def num_testable(self) -> np.ndarray:
        """[B] draft tokens that a fully computed row tests."""
        return np.minimum(self.frontier.num_drafted, self.verification.num_kept)
