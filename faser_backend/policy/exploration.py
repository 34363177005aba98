"""Explorations: a few steps of a candidate that was not chosen, so that the predictions about it stay true.

They take EXPLORED_SHARE of the time. While decoding plainly, some requests draft; while speculating, none does for some
steps. A way that never ran is explored at once, unless it is expensive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from faser_backend.core.decision import Score
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.cost_model import BatchTimes

EXPLORED_SHARE = 0.005  # of the time
EXPLORED_STEPS, COLD_STEPS = 6, 2  # steps of an exploration that count, after steps that find the caches cold
OWN_US, LEAST_SHARE = 1500.0, 0.1  # what weighing and learning cost an exploration; a step loses this share at least
EXPENSIVE = 0.5  # share of a step's time; an exploration that loses more has to be saved for
DRAFTING_PART = 8  # one request in so many drafts in an exploration among plain rounds


class Exploration(NamedTuple):
    """Some steps of a candidate that was not chosen."""

    other: Score
    is_new: bool  # never run: explored at once, for fewer steps, if it is cheap
    extra_us: float  # time that a step of it loses against the chosen candidate, at equal tokens
    once_us: float = 0.0  # time before the first of its steps

    @property
    def cost_us(self) -> float:
        lost_us = max(self.extra_us, LEAST_SHARE * self.other.step_us)
        return (EXPLORED_STEPS + COLD_STEPS) * lost_us + self.once_us + OWN_US

    @property
    def is_free(self) -> bool:
        return self.is_new and self.extra_us < EXPENSIVE * self.other.step_us and self.once_us < float("inf")


class Explorer:
    """Saves time for explorations. At most one runs at a time."""

    def __init__(self) -> None:
        self.current: Score | None = None
        self._num_left = 0  # steps
        self._saved_us = 0.0

    def observe(self, record: StepRecord, *, has_drafted: bool) -> None:
        """Counts a step of the exploration, or saves for the next one. A step in which the draft only catches up does
        not count."""
        if self.current is None:
            self._saved_us += EXPLORED_SHARE * record.step_us
        elif has_drafted or not record.plan.draft_prefills:
            self._num_left -= 1

    def end_if_done(self) -> bool:
        """Returns True if an exploration has just ended, whose result is to be weighed at once."""
        if self.current is None or self._num_left > 0:
            return False
        self.current = None
        return True

    def end_if_chosen(self, chosen: Score) -> None:
        """Ends an exploration whose mode has just been chosen."""
        if self.current is not None and (chosen.mode, chosen.partition) == (self.current.mode, self.current.partition):
            self.current = None

    def consider(self, exploration: Exploration) -> None:
        """Begins it if enough was saved, or at once if it is free."""
        if self._saved_us >= exploration.cost_us or exploration.is_free:
            self._saved_us = min(max(self._saved_us - exploration.cost_us, 0.0), exploration.cost_us)
            self.current = exploration.other
            self._num_left = COLD_STEPS + (1 if exploration.is_new else EXPLORED_STEPS)


def extra_us(times: BatchTimes, length: int, num_drafting: int) -> float:
    """Returns the time that chains of one length add to a plain step."""
    num_rows = min(length * num_drafting, times.verify_us.size - 1)
    draft_us = length * times.draft_us[num_drafting] + times.draft_round_us
    return float(times.verify_us[num_rows] - times.verify_us[0] + draft_us)


def some_drafting(sequences: Sequence[RunningSequence]) -> list[int]:
    """Returns the indices of the requests that draft in an exploration among plain rounds: the few whose draft lags
    least, because all requests could cost more than the exploration reveals."""
    able = [index for index, each in enumerate(sequences) if each.request.max_draft_tokens != 0]
    able.sort(key=lambda index: sequences[index].num_tokens - sequences[index].draft_len)
    return able[: max(len(sequences) // DRAFTING_PART, 1)]
