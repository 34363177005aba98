"""Virtual time: a clock that only model calls advance, and lanes in which two phases start at the same instant."""

from __future__ import annotations

from collections.abc import Callable

from faser_backend.core.ports import Proposed, Verified

START_NS = 1_000_000_000  # not 0: a time of 0 means "never" in RequestStats


class SimClock:
    """core.ports.Clock in virtual nanoseconds."""

    def __init__(self) -> None:
        self._now_ns = START_NS

    def now_ns(self) -> int:
        return self._now_ns

    def advance_us(self, duration_us: float) -> None:
        self._now_ns += round(duration_us * 1e3)

    def move_to(self, time_ns: int) -> None:
        """Forward to an arrival, or back to where a lane begins."""
        self._now_ns = time_ns


class SimLanes:
    """core.ports.Lanes: both phases start at once, after the hand-over, and have ended at the later of their ends."""

    def __init__(self, clock: SimClock, hand_over_us: float) -> None:
        self._clock = clock
        self._hand_over_us = hand_over_us

    def run_both(self, verify: Callable[[], Verified], propose: Callable[[], Proposed]) -> tuple[Verified, Proposed]:
        self._clock.advance_us(self._hand_over_us)
        start_ns = self._clock.now_ns()
        verified = verify()
        verified_ns = self._clock.now_ns()
        self._clock.move_to(start_ns)
        proposed = propose()
        self._clock.move_to(max(verified_ns, self._clock.now_ns()))
        return verified, proposed
