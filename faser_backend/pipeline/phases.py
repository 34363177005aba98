"""How the phases of a step follow each other: in turn, or drafting and verifying at once on disjoint shares.

At once, the draft works on its share of the device while the target verifies on its own. Both read tokens that are
committed and write KV of positions that nobody else touches; what the draft yields is a value of its own. Every phase
returns when it began and ended; nobody else in a step holds a stopwatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from faser_backend.core.frontier import Acceptance, Frontier, Verification
from faser_backend.core.plan import InFlight, StepPlan
from faser_backend.core.ports import Clock, DraftLoop, Lanes, ModelRunner


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """A way to share the device: runners of both models, and lanes where the two can run at once."""

    target: ModelRunner
    draft: ModelRunner | None
    lanes: Lanes | None
    draft_loop: DraftLoop | None = None  # of the draft, where the device drafts whole chains by itself


class Verified(NamedTuple):
    """The target's view of a frontier, and what is emitted because of it."""

    verification: Verification
    acceptance: Acceptance


@dataclass(frozen=True, slots=True, eq=False)
class Phases:
    """What drafting and verification of one step came to."""

    frontier: Frontier  # that was verified
    verified: Verified | None  # None where nothing was in flight yet
    ahead: InFlight  # drafted for later steps
    propose_us: float = 0.0
    verify_us: float = 0.0
    overlap_us: float = 0.0  # time in which both ran


def without_bonus(ready: Frontier, plan: StepPlan) -> Frontier:
    """The frontier to verify while the draft runs ahead of it: with no row behind the last draft token, so that
    this token, once accepted, is the anchor that the chain ahead follows. A trimmed chain ends with its last
    test: row N - 1 tests draft token N, so the draft goes on behind that one."""
    ahead = set(plan.drafts)
    runs_ahead = np.array([sequence in ahead for sequence in plan.decodes], np.bool_)
    if not runs_ahead.any():
        return ready
    num_tested = np.minimum(ready.num_drafted, ready.num_rows)
    return replace(
        ready,
        num_drafted=np.where(runs_ahead, num_tested, ready.num_drafted),
        num_rows=np.where(runs_ahead, num_tested, ready.num_rows),
    )


class Span(NamedTuple):
    """When a phase ran, in nanoseconds of the engine's clock."""

    start_ns: int
    end_ns: int

    @property
    def us(self) -> float:
        return (self.end_ns - self.start_ns) / 1e3


Result = TypeVar("Result")


def timed(clock: Clock, phase: Callable[[], Result]) -> tuple[Result, Span]:
    """Runs a phase and notes when. It ends with tokens on the host, so that its time is the device's too, where calls
    are merely queued."""
    start_ns = clock.now_ns()
    result = phase()
    return result, Span(start_ns, clock.now_ns())


def run_in_turn(clock: Clock, propose: Callable[[], Frontier], verify: Callable[[Frontier], Verified]) -> Phases:
    """Drafts, then verifies what was drafted."""
    frontier, proposing = timed(clock, propose)
    verified, verifying = timed(clock, lambda: verify(frontier))
    return Phases(frontier, verified, InFlight.empty(), proposing.us, verifying.us)


def run_drafting(clock: Clock, frontier: Frontier, propose: Callable[[], InFlight]) -> Phases:
    """Drafts for later steps; there is nothing to verify yet."""
    ahead, proposing = timed(clock, propose)
    return Phases(frontier, None, ahead, proposing.us)


def run_overlapped(
    lanes: Lanes, clock: Clock, frontier: Frontier, verify: Callable[[], Verified], propose: Callable[[], InFlight]
) -> Phases:
    """Runs both phases at once and measures by how much they overlap."""
    (verified, verifying), (ahead, proposing) = lanes.run_both(
        lambda: timed(clock, verify), lambda: timed(clock, propose)
    )
    overlap_ns = min(verifying.end_ns, proposing.end_ns) - max(verifying.start_ns, proposing.start_ns)
    return Phases(frontier, verified, ahead, proposing.us, verifying.us, overlap_us=max(0, overlap_ns) / 1e3)
