"""Times of a step's phases. A lap costs two dictionary operations and one clock reading."""

from __future__ import annotations

from typing import NamedTuple

from faser_backend.core.ports import Clock

# An overlapped step waits for its lanes, which have their own laps.
MODEL_PHASES = frozenset({"draft_model", "target_model", "prefill_model", "wait"})


class PhaseEvent(NamedTuple):
    """One lap, in nanoseconds of the engine's clock."""

    phase: str
    start_ns: int
    end_ns: int


class PhaseTimes:
    """Nanoseconds per phase since the engine started. `lap` charges the time since the last lap.

    Each lane has its own object. `events`: if set to a list, it collects every lap, for a timeline.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_ns = 0
        self.total_ns: dict[str, int] = {}
        self.events: list[PhaseEvent] | None = None

    def start(self) -> None:
        self._last_ns = self._clock.now_ns()

    def lap(self, phase: str) -> None:
        now = self._clock.now_ns()
        self.total_ns[phase] = self.total_ns.get(phase, 0) + now - self._last_ns
        if self.events is not None:
            self.events.append(PhaseEvent(phase, self._last_ns, now))
        self._last_ns = now
