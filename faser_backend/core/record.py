"""The record of a step. Policies learn from it; metrics and benchmarks count it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from faser_backend.core.frontier import Acceptance, Frontier, Verification
from faser_backend.core.plan import InFlight, StepPlan


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
