"""How long a profile will take, from a few steps of the engine, and what share of the work fits a budget.

Knows what the parts of a profile run; the parts know how to do less.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from faser_backend.config import EngineConfig
from lab.profiling.calibration import TOKENS_EACH, num_requests_of
from lab.profiling.cases import MAX_SEQUENCES, Case
from lab.profiling.chains import MakeEngine
from lab.profiling.step_costs import (
    LENGTHS,
    LOADS,
    TRIM_LENGTHS,
    WALL,
    num_steps_of,
    num_trim_steps_of,
    phases_of_steps,
)

PROBE_LENGTH = max(LENGTHS)
PROBE_STEPS = 2
TOKENS_PER_STEP = 1.5  # that a calibration emits for a request, about
SHORTER = 0.7  # of a step whose chains are half as long as the probe's, beside the probe's
CALLS_PER_CASE = 4  # that find out what a case takes, and one sweep at least
MIN_SHARE = 0.1
MIN_CASES = 24  # of a model, the held-out ones included, or a fit means little


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of a step of the engine with PROBE_LENGTH draft tokens for each request, by requests."""

    step_s: dict[int, float]

    @classmethod
    def probe(cls, make_engine: MakeEngine, seed: int) -> Speed:
        engine = make_engine(EngineConfig.from_options(policy=f"fixed:{PROBE_LENGTH}"))
        rng = np.random.default_rng(seed)
        found: dict[int, float] = {}
        try:
            for num_sequences in LOADS:
                steps = phases_of_steps(engine, num_sequences, PROBE_LENGTH, PROBE_STEPS, rng)
                if steps:  # a short context may not hold one
                    found[num_sequences] = min(step[WALL] for step in steps) / 1e9
        finally:
            engine.close()
        return cls(found or {1: 0.0})

    def estimate_s(self, *, num_calls: int, calls_s: float, is_quick: bool, has_draft: bool, has_exits: bool) -> float:
        """Seconds of a whole profile, about. num_calls: cases over all partitions; calls_s: meant for timing them."""
        each, busiest = sum(self.step_s.values()), max(self.step_s.values())
        waves = -(-num_requests_of(is_quick=is_quick) // MAX_SEQUENCES)
        calibration_s = waves * TOKENS_EACH / TOKENS_PER_STEP * busiest
        visits_s = 3 * len(LENGTHS) * (num_steps_of(is_quick=is_quick) + 2) * SHORTER * each
        trim_s = len(TRIM_LENGTHS) * (num_trim_steps_of(is_quick=is_quick) + 2) * SHORTER * each if has_draft else 0.0
        exits_s = 4 * num_steps_of(is_quick=is_quick) * each if has_exits else 0.0
        least_s = CALLS_PER_CASE * num_calls * SHORTER * each / len(self.step_s)
        return calibration_s + visits_s + trim_s + exits_s + max(calls_s, least_s)


def share_of(estimate_s: float, budget_s: float | None) -> float:
    """In [MIN_SHARE, 1]: how much of the work is done."""
    return 1.0 if budget_s is None else float(np.clip(budget_s / max(estimate_s, 1e-9), MIN_SHARE, 1.0))


def thinned(cases: list[Case], share: float, rng: np.random.Generator) -> list[Case]:
    """As many of the cases, held out and not in proportion, but MIN_CASES of them where there are."""
    if share >= 1.0:
        return cases
    share = max(share, min(MIN_CASES / len(cases), 1.0))
    kept = []
    for is_held_out in (False, True):
        those = [case for case in cases if case.is_held_out == is_held_out]
        kept += [those[i] for i in sorted(rng.permutation(len(those))[: max(round(share * len(those)), 1)])]
    return kept
