"""The effort of a profile: full, quick, or as much of either as fits a budget. Knows nothing of engines or time."""

from __future__ import annotations

from dataclasses import dataclass, replace

MIN_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Effort:
    """Numbers of what is run, and seconds of timed calls over all partitions."""

    calls_s: float
    max_sweeps: int  # of timed calls; 3 are made in any case
    case_share: float  # of the shapes of calls
    num_requests: int  # of a calibration
    num_steps: int  # of a kind, in each visit of plain steps
    num_trim_steps: int
    num_exit_repeats: int

    def scaled(self, share: float) -> Effort:
        """As much of everything, but not less than fits mean something with."""
        return replace(
            self,
            calls_s=share * self.calls_s,
            case_share=share * self.case_share,
            num_requests=max(round(share * self.num_requests), min(8, self.num_requests)),
            num_steps=max(round(share * self.num_steps), 2),
            num_trim_steps=max(round(share * self.num_trim_steps), 6),
            num_exit_repeats=max(round(share * self.num_exit_repeats), 3),
        )


def share_within(seconds: float, budget_s: float | None) -> float:
    """In [MIN_SHARE, 1]: what of work that takes so many seconds is done in a budget; None: all of it."""
    return 1.0 if budget_s is None else min(max(budget_s / max(seconds, 1e-9), MIN_SHARE), 1.0)


FULL = Effort(120.0, 25, case_share=1.0, num_requests=128, num_steps=8, num_trim_steps=48, num_exit_repeats=25)
QUICK = Effort(15.0, 7, case_share=0.5, num_requests=32, num_steps=4, num_trim_steps=24, num_exit_repeats=9)
