"""`survival`: draft on while a chain is likely to survive, then verify the rows that promise most tokens per time.

A chain's survival is the product of its draft tokens' calibrated chances (policy/calibration.py); which tokens to
draft and which rows to verify is decided by policy/trim.py while drafting, at prices that are set here. After
TETRIS, DSpark (arXiv 2607.05147) and the adaptive verification of vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from faser_backend.core.decision import WHOLE, Decision
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.knowledge import Knowledge
from faser_backend.policy.pricing import Pricer
from faser_backend.policy.trim import continues

PROBE_EVERY = 128  # plain rounds, after which one token is drafted to see whether it would pay again


class Survival:
    """Serial rounds with confidence trimming. Plain rounds where not even a first draft token pays."""

    is_drafting = True
    partitions = (WHOLE,)

    def __init__(self, knowledge: Knowledge, max_draft_tokens: int) -> None:
        self._pricer = Pricer(knowledge, max_draft_tokens)
        self._num_plain = 0

    def decide(self, sequences: Sequence[RunningSequence], num_coming: int = 0) -> Decision:
        pricer, size = self._pricer, len(sequences)
        pricer.beliefs.look_at(sequences)
        times = pricer.times(size, pricer.context(sequences), WHOLE)
        best_speed, _ = pricer.best_uniform(times, is_trimmed=True)
        rule = pricer.rule(times, max(pricer.plain_speed(times), best_speed))
        if continues(rule, np.ones(size)).any():
            self._num_plain = 0
            return Decision([pricer.max_draft_tokens] * size, trim=rule)
        self._num_plain += 1
        return Decision([int(self._num_plain % PROBE_EVERY == 0)] * size)

    def observe(self, record: StepRecord) -> None:
        self._pricer.observe(record)
