"""What predictions turn out to be worth: by how much each arm is slower, and yields more, than promised.

Two running ratios per arm. Time: measured over predicted, of the step that was really made, apart for each level,
a power of two of sequences: what is wrong about a prediction for two is seldom what is wrong about one for sixty, and
load comes and goes too fast to learn it again each time. Yield: tokens over
those that the arm's promise implies for that step, at the cost model's own time, apart for greedy and for sampled
requests; it holds what a promise leaves out, such as what trimming gains over uniform rounds, and is known only of an
arm that ran as promised. Beside them,
for uniform rounds, how long each length takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from faser_backend.policy.arms import Arm, Place

MOST_STEPS = 32.0  # that an arm's correction of time is the mean of, older ones counting less
_KNOWN_STEPS = 4.0  # of its, that what an arm was on another level weighs: what one step lost would stay otherwise
_LOG_OUTLIER = math.log(2.0)  # a step that the machine lost to something else says little: it is cut there
_AGE_FADE = 0.998  # of what they weigh, per step that was observed since
_YIELD_FADE = 0.997  # of the token counts, per sequence and step: acceptance is noisy where few run
_YIELD_PRIOR = 256.0  # tokens' weight of the promise itself: the 25 or so of a probe of one request are luck
_LENGTH_FADE = 0.995  # of what is known of lengths, per step that is learned from
_LENGTH_PRIOR = 10.0  # steps' weight of what is usual
ALIKE = 0.01  # lengths whose speeds are this near are tried in turn


def _kin(arm: Arm) -> Arm:
    return arm._replace(is_trimmed=not arm.is_trimmed)


@dataclass(slots=True)
class _Time:
    """mean: of the logarithm of measured over predicted time; weight: of how many steps; last_step: seen at."""

    mean: float
    weight: float
    last_step: int = 0


class Corrections:
    """Running ratios of each arm. Steps are those that are told about: of an arm that goes on, not every one is."""

    def __init__(self) -> None:
        self.place = Place(0, is_sampled=False)  # that is asked about; set by whoever asks
        self._times: dict[tuple[Arm, int], _Time] = {}
        # By arm and kind of requests, faded sums: emitted, promised.
        self._tokens: dict[tuple[Arm, bool], tuple[float, float]] = {}
        self._num_steps = 0

    def knows(self, arm: Arm) -> bool:
        return any(each == arm for each, _ in self._times)

    def knows_here(self, arm: Arm) -> bool:
        """On this level."""
        return (arm, self.place.level) in self._times

    def is_settled(self, arm: Arm) -> bool:
        """Whether it ran for long enough on this level, lately, to tell its own slowness from the machine's."""
        time = self._times.get((arm, self.place.level))
        return time is not None and time.weight >= MOST_STEPS

    def age(self, arm: Arm) -> int:
        """Observed steps since the arm was seen at work on this level."""
        time = self._times.get((arm, self.place.level))
        return 10**6 if time is None else self._num_steps - time.last_step

    def slowdown(self, arm: Arm) -> float:
        """Measured over predicted time. Where the arm never ran on this level: that of its kin there, which makes the
        same calls; else its own, else its kin's, on the nearest level; else the mean of those that ran, for a slow
        machine is slow with every arm."""
        return math.exp(self._log_slowdown(arm, self.place.level))

    def _log_slowdown(self, arm: Arm, level: int) -> float:
        known = self._times
        for each in (arm, _kin(arm)):
            if (each, level) in known:
                return known[each, level].mean
        for each in (arm, _kin(arm)):
            levels = [other_level for other, other_level in known if other == each]
            if levels:
                return known[each, min(levels, key=lambda other: abs(other - level))].mean
        return sum(time.mean for time in known.values()) / len(known) if known else 0.0

    def yield_ratio(self, arm: Arm) -> float:
        """Emitted over promised tokens in the same predicted time, for this kind of requests. Of an arm that never ran
        as promised: that of its kin, whose promise rests on the same chances, else 1."""
        known, kind = self._tokens, self.place.is_sampled
        emitted, promised = known.get((arm, kind)) or known.get((_kin(arm), kind), (0.0, 0.0))
        return (emitted + _YIELD_PRIOR) / (promised + _YIELD_PRIOR)

    def observe(self, arm: Arm, level: int, predicted_us: float, measured_us: float, *, is_chosen: bool) -> None:
        """Of a step's time on a level; predicted_us for what the step really did.

        is_chosen: of the arm that runs most. What changes about one that is well known is taken for the machine's
        doing, and changes the others alike: they are compared as they were when they were last seen side by side.
        """
        expected = self._log_slowdown(arm, level)
        ratio = math.log(max(measured_us, 1.0) / predicted_us)
        if self._times:
            ratio = min(max(ratio, expected - _LOG_OUTLIER), expected + _LOG_OUTLIER)
        key = (arm, level)
        time = self._times.get(key)
        if time is None:
            time = self._times[key] = _Time(expected, _KNOWN_STEPS if self.knows(arm) else 0.0)
        weight = min(time.weight, MOST_STEPS) * _AGE_FADE ** (self._num_steps - time.last_step)
        change = (ratio - time.mean) / (weight + 1.0)
        if is_chosen:
            share = min(weight / MOST_STEPS, 1.0)
            for other in self._times.values():
                other.mean += share * change
            change *= 1.0 - share
        time.mean, time.weight, time.last_step = time.mean + change, weight + 1.0, self._num_steps
        self._num_steps += 1

    def observe_yield(self, arm: Arm, num_sequences: int, emitted: float, promised: float) -> None:
        """Of a step's tokens, all sequences together, in the place that is asked about."""
        fade, key = _YIELD_FADE**num_sequences, (arm, self.place.is_sampled)
        old_emitted, old_promised = self._tokens.get(key, (0.0, 0.0))
        self._tokens[key] = (fade * old_emitted + emitted, fade * old_promised + promised)


class LengthTimes:
    """How much longer than predicted uniform rounds of each length take, against one another, on each level.

    A few percent decide which length is best, and no cost model is that good. What several lengths promise alike is
    tried in turn: it costs nothing, and shows which of them keeps its promise.
    """

    def __init__(self, max_draft_tokens: int) -> None:
        self._size = max_draft_tokens
        self._levels: dict[int, np.ndarray] = {}  # [2, K] faded: number of steps, sum of log ratios

    def observe(self, level: int, length: int, predicted_us: float, measured_us: float) -> None:
        known = self._levels.setdefault(level, np.zeros((2, self._size)))
        ratio = math.log(max(measured_us, 1.0) / predicted_us)
        if known[0].any():  # as in Corrections.observe
            usual = known[1].sum() / known[0].sum()
            ratio = min(max(ratio, usual - _LOG_OUTLIER), usual + _LOG_OUTLIER)
        known *= _LENGTH_FADE
        known[:, length - 1] += (1.0, ratio)

    def slowdowns(self, level: int) -> np.ndarray:
        """[K] ratios about 1; seldom seen lengths are taken for usual ones."""
        known = self._levels.get(level)
        if known is None:
            return np.ones(self._size)
        steps, ratios = known
        usual = ratios.sum() / steps.sum()
        return np.exp((ratios - steps * usual) / (steps + _LENGTH_PRIOR))

    def choose(self, level: int, speeds: np.ndarray) -> int:
        """The length to run, of speeds [K] as promised: of those that are as good as the best the one least seen."""
        speeds = speeds / self.slowdowns(level)
        known = self._levels.get(level)
        if known is None:
            return int(speeds.argmax()) + 1
        is_good = speeds >= (1.0 - ALIKE) * speeds.max()
        return int(np.where(is_good, known[0], np.inf).argmin()) + 1
