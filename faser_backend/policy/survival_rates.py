"""How far chains survive: the chance that a draft token is accepted, given that all before it were, by its place.

Counted of chains that no confidence has trimmed, and of the first token of the others, which every chain has. The
rate rises along a chain, for easy text stays easy: on the demo pair from 0.69 to 0.8 at temperature 0.8. One rate for
all places would call long chains worse than they are, and short ones better. A place that was seldom tested leans on
the one before it, the first one on the mean chance.
"""

from __future__ import annotations

import numpy as np

PRIOR_TESTS = 32.0  # what a place's prior weighs
MEMORY_TESTS = 1000.0  # of a place; older evidence fades beyond so many
REFRESH_TESTS = 64  # new tests of the first place that are worth working the rates out again


class SurvivalRates:
    """survival [K]: the chance that the first 1..K draft tokens are all accepted."""

    def __init__(self, max_draft_tokens: int, mean_chance: float) -> None:
        self._accepted = [0.0] * max_draft_tokens
        self._tested = [0.0] * max_draft_tokens
        self._num_fresh = 0.0
        self.version = 0  # rises with every refresh
        self._refresh(mean_chance)

    @property
    def num_tests(self) -> float:
        """Of the first place, older ones counting less."""
        return self._tested[0]

    def observe(
        self, num_accepted: list[int], num_testable: list[int], mean_chance: float, *, is_trimmed: bool = False
    ) -> None:
        """Of chains. mean_chance: of any draft token, where nothing is known of its place."""
        # Told one by one: most steps that are learned from have few sequences, and few places of each are tested.
        counted = 1 if is_trimmed else len(self._tested)
        tested, accepted = [0] * counted, [0] * counted
        for passed, testable in zip(num_accepted, num_testable, strict=True):
            for place in range(min(passed + 1, testable, counted)):
                tested[place] += 1
                accepted[place] += place < passed
        for place, count in enumerate(tested):
            fade = max(1.0 - count / MEMORY_TESTS, 0.0)
            self._tested[place] = self._tested[place] * fade + count
            self._accepted[place] = self._accepted[place] * fade + accepted[place]
        self._num_fresh += tested[0]
        if self._num_fresh >= REFRESH_TESTS:
            self._refresh(mean_chance)

    def _refresh(self, mean_chance: float) -> None:
        self._num_fresh = 0.0
        self.version += 1
        rates, rate = [], mean_chance
        for accepted, tested in zip(self._accepted, self._tested, strict=True):
            rate = (accepted + PRIOR_TESTS * rate) / (tested + PRIOR_TESTS)
            rates.append(rate)
        self.survival = np.cumprod(rates)
