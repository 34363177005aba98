"""What requests' acceptance histories say of their next draft tokens, for a policy that must never stop learning.

Counts fade with every test and with every step, a request's own towards the traffic's, the traffic's towards a
prior: who was not tested for long is worth a new try. Bounded by the requests of one decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TypeVar

import numpy as np

from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence

PRIOR_RATE = 0.6  # of acceptance, before any test
PRIOR_TESTS = 4.0  # what the prior weighs
OWN_PRIOR_TESTS = 8.0  # what the traffic's rate weighs for a request
MEMORY_TESTS = 500.0  # of the traffic
OWN_MEMORY_TESTS = 100.0
MEMORY_STEPS = 100.0  # evidence fades over so many steps, tested or not
BOUND_STDS = 0.5  # rates are taken at upper bounds, so many standard deviations above their means
MAX_RATE = 0.98

Rates = TypeVar("Rates", float, np.ndarray)


class AcceptanceHistory:
    """Faded counts of tests and acceptances, of the traffic and of each request of the last decision."""

    def __init__(self) -> None:
        self._accepted = 0.0
        self._tested = 0.0
        self._own: dict[RunningSequence, tuple[float, float]] = {}  # accepted, tested

    def rates(self, sequences: Sequence[RunningSequence]) -> np.ndarray:
        """[B] chance that a tested draft token of each request is accepted, seen with optimism."""
        known = self._own
        self._own = {sequence: known.get(sequence) or _lifetime(sequence) for sequence in sequences}
        counts = np.fromiter(chain.from_iterable(self._own.values()), np.float64).reshape(-1, 2)  # [B, 2]
        tests = self._tested + PRIOR_TESTS
        shared = min(_upper_bound((self._accepted + PRIOR_RATE * PRIOR_TESTS) / tests, tests), MAX_RATE)
        own_tests = counts[:, 1] + OWN_PRIOR_TESTS
        own = _upper_bound((counts[:, 0] + shared * OWN_PRIOR_TESTS) / own_tests, own_tests)
        return np.minimum(own, MAX_RATE)

    def observe(self, record: StepRecord) -> None:
        is_server = np.zeros(record.num_tokens.size, np.bool_)
        is_server[record.server_rows] = True
        accepted = record.acceptance.num_accepted * is_server
        tested = np.minimum(record.acceptance.num_accepted + 1, record.num_testable) * is_server
        num_tested = int(tested.sum())
        fade = _fade(num_tested, MEMORY_TESTS)
        self._accepted = self._accepted * fade + int(accepted.sum())
        self._tested = self._tested * fade + num_tested
        own = self._own
        for sequence, passed, tests in zip(record.plan.decodes, accepted.tolist(), tested.tolist(), strict=True):
            if (counts := own.get(sequence)) is not None:
                fade = _fade(tests, OWN_MEMORY_TESTS)
                own[sequence] = (counts[0] * fade + passed, counts[1] * fade + tests)


def _upper_bound(mean: Rates, num_tests: Rates) -> Rates:
    """Of a rate whose posterior is a Beta with this mean and weight; the mean lies below 1 by the prior."""
    return mean + BOUND_STDS * (mean * (1.0 - mean) / (num_tests + 1.0)) ** 0.5


def _fade(num_tests: int, memory_tests: float) -> float:
    return max(0.0, 1.0 - num_tests / memory_tests) * (1.0 - 1.0 / MEMORY_STEPS)


def _lifetime(sequence: RunningSequence) -> tuple[float, float]:
    """A request's counts on first sight, as heavy as memory allows."""
    accepted, tested = sequence.server_acceptance
    weight = min(1.0, OWN_MEMORY_TESTS / max(tested, 1))
    return accepted * weight, tested * weight
