"""Measures what confidence trimming adds to drafting: deciding after every call which chains go on, and in the end
which rows to verify.

In the real engine every second step trims, by a rule that stops no chain and leaves out no row: both kinds of steps
make the same calls, in the same company. An EAGLE head decides as a draft model does. A device that drafts whole chains
by itself knows no rule; there it is what cutting them afterwards takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from faser_backend.config import EngineConfig
from faser_backend.core.decision import WHOLE, Decision, TrimRule
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.pipeline.engine import Engine
from faser_backend.policy.calibration import MarginCurve
from faser_backend.policy.cost_fit import fit_trim
from lab.profiling.overhead import LOADS, MakeEngine, phases_of_steps

LENGTHS = (3, 6)  # draft tokens of each sequence
_KNOTS = MarginCurve.margin_knots  # as many as served rules have
# All is certain and time is worth nothing.
STOPS_NOTHING = TrimRule(
    margin_knots=_KNOTS,
    match_logits=np.full(_KNOTS.size, 40.0),
    offsets=np.zeros(1),
    margin_shares=np.full(_KNOTS.size, 1.0 / _KNOTS.size),
    verify_us=np.ones(2),
    column_us=0.0,
    draft_us=np.zeros(2),
    tokens_per_us=0.0,
    row_price=0.0,
)


class TrimSample(NamedTuple):
    """Of one load, microseconds of a round of drafting, its calls included: the median of untrimmed steps, and that
    plus the median of what each trimmed one takes more than its neighbour."""

    num_sequences: int
    num_draft_tokens: int  # of each sequence
    untrimmed_us: float
    trimmed_us: float


class InTurns:
    """A fixed length for everyone; every second step is trimmed, which changes no chain. For engines that are measured,
    not served."""

    is_drafting = True
    partitions = (WHOLE,)

    def __init__(self, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._is_trimmed = False

    def decide(self, sequences: Sequence[RunningSequence], num_coming: int = 0) -> Decision:
        self._is_trimmed = not self._is_trimmed
        return Decision([self._num_draft_tokens] * len(sequences), trim=STOPS_NOTHING if self._is_trimmed else None)

    def observe(self, record: StepRecord) -> None:
        """Nothing to learn."""


def measure_trim(make_engine: MakeEngine, *, is_quick: bool, seed: int) -> tuple[float, float, list[TrimSample]]:
    """trim_us and trim_sequence_us of OverheadCost, and the samples behind them. For engines with a draft model:
    n-grams heed no rule."""
    rng = np.random.default_rng(seed)
    engine = make_engine(EngineConfig.from_options(policy=f"fixed:{max(LENGTHS)}"))
    samples = []
    try:
        for num_draft_tokens in LENGTHS:
            for num_sequences in LOADS:
                records = records_of_steps(engine, num_sequences, num_draft_tokens, 24 if is_quick else 48, rng)
                untrimmed, trimmed = (
                    np.array([r.propose_us for r in records if (r.plan.decision.trim is not None) == is_trimmed])
                    for is_trimmed in (False, True)
                )
                num_pairs = min(untrimmed.size, trimmed.size)
                if num_pairs:  # a short context may not hold one
                    untrimmed_us = float(np.median(untrimmed))
                    added_us = float(np.median(trimmed[:num_pairs] - untrimmed[:num_pairs]))  # of neighbours
                    samples.append(TrimSample(num_sequences, num_draft_tokens, untrimmed_us, untrimmed_us + added_us))
    finally:
        engine.close()
    if not samples:
        return 0.0, 0.0, samples
    return *fit_trim(*np.array(samples, np.float64).T), samples


def records_of_steps(
    engine: Engine, num_sequences: int, num_draft_tokens: int, num_steps: int, rng: np.random.Generator
) -> list[StepRecord]:
    """Of the steps, trimmed and untrimmed in turn, in which all sequences decode and draft the full length."""
    records: list[StepRecord] = []
    engine.stepper.scheduler.policy = InTurns(num_draft_tokens)
    engine.stepper.observers.append(records.append)
    try:
        phases_of_steps(engine, num_sequences, num_draft_tokens, num_steps, rng)
    finally:
        engine.stepper.observers.remove(records.append)
    return [
        record
        for record in records
        if record.num_tokens.size == num_sequences
        and not record.plan.prefills
        and record.frontier.num_drafted.min() == num_draft_tokens
    ]
