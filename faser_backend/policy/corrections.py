"""What predictions turn out to be worth: by how much each arm is slower, and yields more, than promised.

Two running ratios per arm. Time: measured over predicted, of the step that was really made, apart for each level,
a power of two of sequences: what is wrong about a prediction for two is seldom what is wrong about one for sixty, and
load comes and goes too fast to learn it again each time. Yield: tokens over
those that the arm's promise implies for that step, at the cost model's own time; it holds what a promise leaves
out, such as what trimming gains over uniform rounds, and is known only of an arm that ran as promised.
"""

from __future__ import annotations

import math

import numpy as np

from faser_backend.policy.arms import Arm

_FADE = 0.97  # of an arm's correction of time, per step that it ran
_AGE_FADE = 0.995  # and per step that it did not
_YIELD_FADE = 0.997  # of the token counts, per sequence and step: acceptance is noisy where few run
_YIELD_PRIOR = 64.0  # tokens' weight of the promise itself
_LENGTH_FADE = 0.995  # of what is known of lengths, per step that is learned from
_LENGTH_PRIOR = 10.0  # steps' weight of what is usual
ALIKE = 0.02  # lengths whose speeds are this near are tried in turn


def _kin(arm: Arm) -> Arm:
    return arm._replace(is_trimmed=not arm.is_trimmed)


class Corrections:
    """Running ratios of each arm; a probe teaches of time alone."""

    def __init__(self) -> None:
        self.level = 0  # of the steps that are asked and told about; set by whoever asks
        self._log_ratio: dict[tuple[Arm, int], float] = {}
        self._last_step: dict[tuple[Arm, int], int] = {}
        self._tokens: dict[Arm, tuple[float, float]] = {}  # faded sums: emitted, promised
        self._num_steps = 0

    def knows(self, arm: Arm) -> bool:
        return any(each == arm for each, _ in self._log_ratio)

    def knows_here(self, arm: Arm) -> bool:
        """On this level."""
        return (arm, self.level) in self._log_ratio

    def age(self, arm: Arm) -> int:
        """Steps since the arm was seen at work on this level."""
        return self._num_steps - self._last_step.get((arm, self.level), -(10**6))

    def slowdown(self, arm: Arm) -> float:
        """Measured over predicted time. Where the arm never ran on this level: on the nearest level; of one that never
        ran: that of its kin, which makes the same calls, else the mean of those that ran, for a slow machine is slow
        with every arm."""
        known = self._log_ratio
        for each in (arm, _kin(arm)):
            if (each, self.level) in known:
                return math.exp(known[each, self.level])
        for each in (arm, _kin(arm)):
            levels = [level for other, level in known if other == each]
            if levels:
                return math.exp(known[each, min(levels, key=lambda level: abs(level - self.level))])
        return math.exp(sum(known.values()) / len(known)) if known else 1.0

    def yield_ratio(self, arm: Arm) -> float:
        """Emitted over promised tokens in the same predicted time. Of an arm that never ran as promised: that of its
        kin, whose promise rests on the same chances, else 1."""
        emitted, promised = self._tokens.get(arm) or self._tokens.get(_kin(arm), (0.0, 0.0))
        return (emitted + _YIELD_PRIOR) / (promised + _YIELD_PRIOR)

    def observe(self, arm: Arm, predicted_us: float, measured_us: float) -> None:
        """Of a step's time; predicted_us for what the step really did."""
        expected = math.log(self.slowdown(arm))
        ratio = math.log(max(measured_us, 1.0) / predicted_us)
        if self._log_ratio:  # a step that the machine lost to something else says little: cut at a factor of 2
            ratio = min(max(ratio, expected - math.log(2.0)), expected + math.log(2.0))
        # The machine's speed changes with time: the older what is known of an arm, the more a new step counts.
        key = (arm, self.level)
        if key in self._log_ratio:
            old, weight = self._log_ratio[key], _FADE * _AGE_FADE ** self.age(arm)
        else:
            old, weight = (expected if self.knows(arm) else ratio), 0.5
        self._log_ratio[key] = ratio + weight * (old - ratio)
        self._last_step[key] = self._num_steps
        self._num_steps += 1

    def observe_yield(self, arm: Arm, num_sequences: int, emitted: float, promised: float) -> None:
        """Of a step's tokens, all sequences together."""
        fade = _YIELD_FADE**num_sequences
        old_emitted, old_promised = self._tokens.get(arm, (0.0, 0.0))
        self._tokens[arm] = (fade * old_emitted + emitted, fade * old_promised + promised)


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
            ratio = min(max(ratio, usual - math.log(2.0)), usual + math.log(2.0))
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
