"""Where a step's time goes. A lap costs two dictionary operations and one clock reading."""

from __future__ import annotations

from faser_backend.core.ports import Clock

MODEL_PHASES = frozenset({"draft_model", "target_model", "prefill_model"})


class PhaseTimes:
    """Nanoseconds per phase since the engine started. `lap` charges the time since the last lap."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_ns = 0
        self.total_ns: dict[str, int] = {}

    def start(self) -> None:
        self._last_ns = self._clock.now_ns()

    def lap(self, phase: str) -> None:
        now = self._clock.now_ns()
        self.total_ns[phase] = self.total_ns.get(phase, 0) + now - self._last_ns
        self._last_ns = now

    @property
    def overhead_share(self) -> float:
        """Share of the step that is not a model call, in [0, 1]."""
        total = sum(self.total_ns.values())
        model = sum(ns for phase, ns in self.total_ns.items() if phase in MODEL_PHASES)
        return 1.0 - model / total if total else 0.0
