"""What `faser profile` learned about an engine on this machine, as policies see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from faser_backend.policy.calibration import MarginCounts
from faser_backend.policy.cost_model import CostModel
from faser_backend.policy.early_exit import ExitCalibration


@dataclass(frozen=True, slots=True, eq=False)
class Knowledge:
    """costs are guesses, and the rest is missing, where nothing was measured.

    margins: by kind of request (policy/beliefs.KINDS); a kind that is not there is guessed.
    """

    costs: CostModel
    margins: Mapping[str, MarginCounts] = field(default_factory=dict)
    exits: tuple[ExitCalibration, ...] = ()

    def on(self, partitions: tuple[str, ...]) -> Knowledge:
        """Without the partitions that are not among these."""
        segments = {key: segments for key, segments in self.costs.segments.items() if key[1] in partitions}
        return replace(self, costs=replace(self.costs, segments=segments))
