"""Speculation policies: what to draft in the next step, for which request, and how to verify it.

A policy sees sequences and answers with a `Decision`; it learns from `StepRecord`s. It knows nothing of
models, clocks or threads. To add one: write a class with `decide` and `observe` in a file of its own, and
name it in policy/registry.py; benchmarks and commands take it by that name (docs/tutorial-policy.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from faser_backend.core.decision import Decision
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.calibration import MarginCounts
from faser_backend.policy.cost_model import CostModel
from faser_backend.policy.early_exit import ExitCalibration

MAX_DRAFT_TOKENS = 32
MAX_ADAPTIVE_TOKENS = 8  # longest length that an adaptive policy weighs
# A sequence whose draft lags by more tokens is caught up before it drafts: its rows would pad everyone's first call.
MAX_DRAFT_LAG = 4


class SpeculationPolicy(Protocol):
    """is_drafting: False means that no draft model is needed at all."""

    is_drafting: bool

    @property
    def partitions(self) -> tuple[str, ...]:
        """All that it may ask for."""
        ...

    def decide(self, sequences: Sequence[RunningSequence], num_prefilling: int = 0) -> Decision:
        """Decides for the sequences that are ready to decode, at least one.

        num_prefilling: further ones whose prompts will soon have been read. The batch is about to grow by them, and
        what is begun now should suit it then.
        """
        ...

    def observe(self, record: StepRecord) -> None:
        """Learns from a step that verified something."""
        ...


def drafts_trees(policy: SpeculationPolicy) -> bool:
    """Whether the policy may ask for trees. One that does has an attribute of this name, which is True."""
    return getattr(policy, "drafts_trees", False)


@dataclass(frozen=True, slots=True, eq=False)
class Knowledge:
    """Results of `faser profile` for an engine on this machine, as policies see them.

    costs are guesses, and the rest is missing, where nothing was measured. margins: by kind of request
    (policy/calibration.KINDS); a kind that is not there is guessed.
    """

    costs: CostModel
    margins: Mapping[str, MarginCounts] = field(default_factory=dict)
    exits: tuple[ExitCalibration, ...] = ()

    def on(self, partitions: tuple[str, ...]) -> Knowledge:
        """Returns the same without the partitions that are not among these."""
        segments = {key: segments for key, segments in self.costs.segments.items() if key[1] in partitions}
        return replace(self, costs=replace(self.costs, segments=segments))
