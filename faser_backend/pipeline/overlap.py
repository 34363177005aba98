"""Drafting and verifying at once: the frontier pipeline's overlapped step.

The draft works on its share of the device while the target verifies on its own. Both read tokens that are
committed and write KV of positions that nobody else touches; what the draft yields is a value of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

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


def run_overlapped(
    lanes: Lanes, clock: Clock, frontier: Frontier, verify: Callable[[], Verified], propose: Callable[[], InFlight]
) -> Phases:
    """Runs both phases at once and measures by how much they overlap.

    Each phase ends with tokens on the host, so that its time is the device's too, where calls are merely queued.
    """

    def timed_verify() -> tuple[Verified, int, int]:
        start = clock.now_ns()
        return verify(), start, clock.now_ns()

    def timed_propose() -> tuple[InFlight, int, int]:
        start = clock.now_ns()
        return propose(), start, clock.now_ns()

    (verified, *verifying), (ahead, *proposing) = lanes.run_both(timed_verify, timed_propose)
    overlap_ns = max(0, min(verifying[1], proposing[1]) - max(verifying[0], proposing[0]))
    return Phases(
        frontier,
        verified,
        ahead,
        propose_us=(proposing[1] - proposing[0]) / 1e3,
        verify_us=(verifying[1] - verifying[0]) / 1e3,
        overlap_us=overlap_ns / 1e3,
    )
