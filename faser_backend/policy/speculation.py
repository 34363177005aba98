"""Speculation policies: what to draft in the next step, for which request, and how to verify it.

Before each step the scheduler calls `decide`, which returns a `Decision`; after it, the step calls `observe` with a
`StepRecord`. To add a policy, write a class with both methods and name it in policy/registry.py. Commands then take it
by that name (docs/tutorial-policy.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from faser_backend.core.decision import WHOLE, Decision
from faser_backend.core.plan import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.calibration import MarginCounts
from faser_backend.policy.cost_model import CostModel
from faser_backend.policy.early_exit import ExitCalibration

MAX_DRAFT_TOKENS = 32
MAX_ADAPTIVE_TOKENS = 8  # longest chain of an adaptive policy
# A sequence whose draft lags by more tokens is caught up before it drafts: its rows would pad everyone's first call.
MAX_DRAFT_LAG = 4


class SpeculationPolicy(Protocol):
    """Chooses what to draft. is_drafting: False means that no draft model is needed.

    A class that inherits from this one drafts on the whole device and learns nothing, unless it says otherwise.
    """

    is_drafting: bool = True

    @property
    def partitions(self) -> tuple[str, ...]:
        """The partitions that decisions may name."""
        return (WHOLE,)

    def decide(self, sequences: Sequence[RunningSequence], num_prefilling: int = 0) -> Decision:
        """Returns the decision for the sequences that are ready to decode, at least one.

        num_prefilling: sequences by which the batch will soon grow, because their prompts are nearly read.
        """
        ...

    def observe(self, record: StepRecord) -> None:
        """Learns from a step that verified something."""


@dataclass(frozen=True, slots=True, eq=False)
class Knowledge:
    """Results of `faser profile` for an engine on this machine. Without a profile costs are guesses, others empty."""

    costs: CostModel
    margins: Mapping[str, MarginCounts] = field(default_factory=dict)  # by kind of request, see calibration.KINDS
    exits: tuple[ExitCalibration, ...] = ()

    def on(self, partitions: tuple[str, ...]) -> Knowledge:
        """Returns the knowledge about these partitions only."""
        segments = {key: segments for key, segments in self.costs.segments.items() if key[1] in partitions}
        return replace(self, costs=replace(self.costs, segments=segments))
