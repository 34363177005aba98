"""Which drafter proposes for a request where there are two: the one whose chain is worth more tokens.

A look-up costs next to nothing, so it comes first, and its chain says how many of its tokens agree: its chances are
known. What the draft model would make of the same step is not known before it is asked: it counts as its mean chance,
less what its calls cost where the step has a price of time. Each source has a curve of its own, of greedy and of
sampled requests apart (policy/calibration.py), learned from every proposal whose continuation became known, whether
it was verified or not.
"""

from __future__ import annotations

import numpy as np

from faser_backend.core.decision import TrimRule
from faser_backend.core.frontier import MAIN, NUM_SOURCES, Frontier
from faser_backend.policy.calibration import KINDS, MatchCalibration


class DrafterChoice:
    """Begins with the same guess of every source."""

    def __init__(self) -> None:
        self.calibrations = {
            (source, kind): MatchCalibration(None) for source in range(NUM_SOURCES) for kind in range(len(KINDS))
        }

    def takes_look_up(
        self, found: Frontier, num_wanted: np.ndarray, is_sampled: np.ndarray, trim: TrimRule | None
    ) -> np.ndarray:
        """[B] bool: for which sequences the chains of `found`, that look-ups made, stand in for the draft model's.

        num_wanted [B] tokens asked for, is_sampled [B]: not greedy.
        """
        kinds = is_sampled.astype(np.int64)
        row_price = call_price = 0.0
        if trim is not None:
            size = int(np.count_nonzero(num_wanted))
            row_price, call_price = trim.row_price, trim.draft_price(size) / max(size, 1)
        columns = np.arange(found.drafted.shape[1])
        survival = np.cumprod(self._chances(found, kinds), axis=1)
        worth = np.where(columns < found.num_drafted[:, None], np.maximum(survival - row_price, 0.0), 0.0).sum(axis=1)
        curves = [self.calibrations[MAIN, kind].curve for kind in range(len(KINDS))]
        means = np.array([curve.mean_chance for curve in curves])
        columns = np.arange(int(num_wanted.max(initial=0)))
        gains = np.maximum(means[:, None] ** (columns + 1) - row_price - call_price, 0.0)  # [kinds, K]
        models = np.where(columns < num_wanted[:, None], gains[kinds], 0.0).sum(axis=1)
        return (worth > 0.0) & (worth >= models)

    def _chances(self, found: Frontier, kinds: np.ndarray) -> np.ndarray:
        """[B, K] of the draft tokens of look-ups; entries past a chain have no meaning."""
        assert found.margins is not None and found.sources is not None
        chances = np.zeros(found.margins.shape)
        for (source, kind), calibration in self.calibrations.items():
            rows = np.flatnonzero((found.sources == source) & (kinds == kind))
            if rows.size:
                chances[rows] = calibration.curve.chances(found.margins[rows])
        return chances

    def observe(self, source: int, is_sampled: bool, margins: np.ndarray, num_accepted: int, num_tested: int) -> None:
        """Learns what became of one chain with margins [K]."""
        counts = np.array([num_accepted]), np.array([num_tested])
        self.calibrations[source, int(is_sampled)].observe(margins[None], *counts)
