"""Looks at what was not chosen, so that the choice may be revised: a hundredth of the time is saved up for them."""

from __future__ import annotations

from typing import NamedTuple

from faser_backend.core.decision import Score
from faser_backend.core.record import StepRecord

LOOK_SHARE = 0.01  # of the time
LOOK_STEPS, COLD_STEPS = 6, 2  # of a look that count, after steps that find the caches cold
FAR_BEHIND = 0.5  # share of a step's time that a look loses, from which on it is not taken unless saved for


class Look(NamedTuple):
    """One that could be taken."""

    other: Score
    is_new: bool  # nothing is known of it: taken at once, shortly, where it is cheap
    extra_us: float  # that a step of it takes more than what is chosen, for the same tokens
    once_us: float  # before the first of its steps

    @property
    def price_us(self) -> float:
        return (LOOK_STEPS + COLD_STEPS) * max(self.extra_us, 0.02 * self.other.step_us) + self.once_us

    @property
    def is_free(self) -> bool:
        """Nothing has to be saved for it before."""
        return self.is_new and self.extra_us < FAR_BEHIND * self.other.step_us and self.once_us < float("inf")


class Looks:
    """At most one look is taken at a time."""

    def __init__(self) -> None:
        self.current: Score | None = None
        self._num_left = 0  # steps
        self._saved_us = 0.0
        self._turn = 0

    def observe(self, record: StepRecord) -> None:
        """Counts a step of a look, or saves for the next one. While the draft only catches up nothing is seen."""
        if self.current is None:
            self._saved_us += LOOK_SHARE * record.step_us
        elif record.frontier.num_drafted.any() or not record.plan.draft_prefills:
            self._num_left -= 1

    def end_if_done(self) -> bool:
        """Whether a look ended just now: what was seen is to be weighed at once."""
        if self.current is None or self._num_left > 0:
            return False
        self.current = None
        return True

    def consider(self, kinds: list[Look]) -> None:
        """Begins one if enough was saved for it: what is new and cheap at once, the others in turn."""
        look = next((each for each in kinds if each.is_free), kinds[self._turn % len(kinds)])
        if self._saved_us >= look.price_us or look.is_free:
            self._saved_us = min(self._saved_us - look.price_us, look.price_us)
            self.current, self._num_left = look.other, COLD_STEPS + (1 if look.is_new else LOOK_STEPS)
            self._turn += 1
