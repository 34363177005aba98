"""When to try an arm that was not chosen, and with which sequences: what the controller cannot know otherwise.

Within a small share of the time: a few steps of plain decoding while it speculates, some drafting while it decodes
plainly. Plain decoding leaves the draft's cache behind, and the price of a probe holds what catching up takes. Where
speculation is nearly as good, a probe runs it as it would be run, seldom, for nothing else tells a few percent; where
it is far behind, a probe drafts for few sequences, those that lag least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from faser_backend.core.decision import WHOLE
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.arms import PLAIN, SERIAL, UNIFORM, Arm, Place
from faser_backend.policy.corrections import Corrections
from faser_backend.policy.cost_model import DRAFT
from faser_backend.policy.pricing import BatchTimes, Pricer

NEW_SHARE, PROBE_SHARE = 0.01, 0.005  # of the time, where a level's choice is new, and once a probe has not changed it
COLD_STEPS = 2  # after a change find caches cold, and are not counted
PROBE_STEPS, FIRST_LOOK_STEPS = COLD_STEPS + 8, COLD_STEPS + 1  # in a row: a single step may be off by a fifth
FAR_BEHIND = 0.4  # as a share of the speed
PROBE_TOKENS = 2  # drafted to see whether speculation would pay again
# Share of plain decoding's expected speed with which speculation begins on a level that it never saw. What it is worth
# there a few steps beside plain ones show; from plain decoding it takes long to tell, for the draft falls behind.
WORTH_A_LOOK = 0.85
LEAST_PAID = 0.1  # of a plain step: an arm that is as good as the chosen one is not probed all the time
PROBED_PART = 8  # one sequence in so many drafts then, but one at least


class Prober:
    """Saves up time and spends it on the arm that was not seen for longest."""

    def __init__(self, corrections: Corrections) -> None:
        self._corrections = corrections
        self._saved_us = self._plain_us = 0.0
        self._arm = PLAIN
        self._num_left = 0  # steps of the current probe
        self._chosen_at_probe: dict[Place, Arm] = {}  # when it was probed last
        self._chosen: dict[Place, Arm] = {}
        self._deposed: dict[Place, Arm] = {}  # chosen before, and not looked at since

    def arm(self, chosen: Arm) -> Arm:
        """The arm of the next step: the chosen one, or the one that is probed."""
        if self._num_left == 0 or self._arm == chosen:
            self._num_left = 0
            return chosen
        self._num_left -= 1
        return self._arm

    def consider(
        self, chosen: Arm, num_steps: int, plain_us: float, prices_us: Mapping[Arm, float], *, is_growing: bool = False
    ) -> None:
        """Whether to probe from the next step on. Asked wherever arms were weighed, not in every step.

        num_steps: since it was asked last. plain_us: of a plain step, as which time is saved up. prices_us: of the arms
        that were not chosen, what a probe will take beyond what the chosen arm would; what it did take is paid.
        A first look at plain decoding comes at once, a short one: it is cheap, and tells whether slow steps are the
        arm's or the machine's. So do a first look on a level, unless plain decoding is far behind, and a look back at
        the arm that was chosen before, once the new one is known: the machine may have been another when that was seen.
        Both wait while the batch is still growing, for steps of fewer sequences tell little of it.
        """
        place = self._corrections.place
        if self._chosen.get(place) in prices_us:
            self._deposed[place] = self._chosen[place]
        self._chosen[place] = chosen
        self._plain_us = plain_us
        share = PROBE_SHARE if self._chosen_at_probe.get(place) == chosen else NEW_SHARE
        self._saved_us += share * num_steps * plain_us
        if self._num_left:
            return
        is_first = chosen != PLAIN and not self._corrections.knows(PLAIN)
        urgent = PLAIN if is_first else None if is_growing else self._urgent(chosen, PROBE_STEPS * plain_us, prices_us)
        probed = urgent or max(prices_us, key=self._corrections.age)
        if urgent or self._saved_us >= prices_us[probed]:
            self._arm = probed
            self._num_left = FIRST_LOOK_STEPS if is_first else PROBE_STEPS
            self._chosen_at_probe[place] = chosen

    def _urgent(self, chosen: Arm, probe_us: float, prices_us: Mapping[Arm, float]) -> Arm | None:
        """What to look at before enough time is saved up. probe_us: of as many plain steps."""
        if chosen != PLAIN and not self._corrections.knows_here(PLAIN) and prices_us[PLAIN] < FAR_BEHIND * probe_us:
            return PLAIN
        # However far behind it is believed to be, for that is what is looked at; but no draft catches up for it.
        place = self._corrections.place
        deposed = self._deposed.get(place)
        if deposed is None or not self._corrections.is_settled(chosen) or prices_us.get(deposed, probe_us) >= probe_us:
            return None
        return self._deposed.pop(place)

    def prolong(self) -> None:
        """By a step, for one that told nothing."""
        self._num_left += 1

    def pay(self, excess_us: float) -> None:
        """What a step of a probe took beyond the time in which the chosen arm emits as much. May leave a debt."""
        self._saved_us -= max(excess_us, LEAST_PAID * self._plain_us)


def probe_prices(
    pricer: Pricer, sequences: Sequence[RunningSequence], chosen: Arm, speeds: Mapping[Arm, float], times: BatchTimes
) -> dict[Arm, float]:
    """Microseconds that a look at each arm takes which was not chosen; overlapped ones are not probed.

    speeds: tokens per microsecond that are expected. times: of the batch that is weighed.
    """
    others = [arm for arm in (PLAIN, UNIFORM, SERIAL) if arm != chosen]
    if chosen == PLAIN and not is_worth_a_look(speeds):
        return dict.fromkeys(others, small_probe_us(pricer, times, sequences, probed_lengths(sequences)))
    price_us = catch_up_us(pricer, sequences) if chosen == PLAIN else 0.0
    probe_us = PROBE_STEPS * times.verify_us(0, 0)
    return {arm: price_us + probe_us * max(1.0 - speeds[arm] / speeds[chosen], LEAST_PAID) for arm in others}


def is_worth_a_look(speeds: Mapping[Arm, float]) -> bool:
    """Whether uniform rounds are expected to come near plain decoding."""
    return speeds[UNIFORM] >= WORTH_A_LOOK * speeds[PLAIN]


def probed_lengths(sequences: Sequence[RunningSequence]) -> list[int]:
    """[B] draft tokens of a small probe among plain rounds: of those that may draft the ones that lag least."""
    lags = [(lag(seq), i) for i, seq in enumerate(sequences) if seq.request.max_draft_tokens != 0]
    lengths = [0] * len(sequences)
    for _, index in sorted(lags)[: max(len(sequences) // PROBED_PART, 1)]:
        lengths[index] = PROBE_TOKENS
    return lengths


def lag(sequence: RunningSequence) -> int:
    """Tokens that the draft has not read."""
    return sequence.num_tokens - sequence.draft_len


def catch_up_us(pricer: Pricer, sequences: Sequence[RunningSequence]) -> float:
    """What it takes the draft to read what it has missed of those that may draft; infinity where none may."""
    lags = [lag(sequence) for sequence in sequences if sequence.request.max_draft_tokens != 0]
    if not lags:
        return float("inf")
    return float(pricer.costs.call_us(DRAFT, WHOLE, sum(lags), len(lags), pricer.context(sequences)))


def small_probe_us(
    pricer: Pricer, times: BatchTimes, sequences: Sequence[RunningSequence], lengths: list[int]
) -> float:
    """What PROBE_STEPS steps that draft `lengths` take beyond plain ones, catching up included."""
    probed = [seq for seq, length in zip(sequences, lengths, strict=True) if length]
    num_drafts = len(probed)
    rows_us = times.verify_us(PROBE_TOKENS * num_drafts, PROBE_TOKENS) - times.verify_us(0, 0)
    draft_us = float(pricer.costs.overhead.draft_round(num_drafts)) + PROBE_TOKENS * float(times.draft_us[num_drafts])
    return catch_up_us(pricer, probed) + PROBE_STEPS * (rows_us + draft_us)
