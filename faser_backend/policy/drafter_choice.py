"""The choice between two drafters of a request: the one whose chain is worth more tokens.

A look-up costs next to nothing, so it comes first, and its chain says how many of its tokens agree: its chances are
known. What the draft model would make of the same step is not known before it is asked: it counts as its mean chance,
less the price of its calls where the step has a trim rule. Each source has a curve of its own, of greedy and of
sampled requests apart (policy/calibration.py), learned from every proposal whose continuation became known, whether
it was verified or not.
"""

from __future__ import annotations

import numpy as np

from faser_backend.core.decision import TrimRule
from faser_backend.core.frontier import CLIENT, MAIN, Frontier
from faser_backend.policy.calibration import KINDS, MatchCalibration, margin_bins


class DrafterChoice:
    """Chooses by calibrated chances, which start from the same guess for every source."""

    def __init__(self) -> None:
        self.calibrations = {
            (source, kind): MatchCalibration(None) for source in range(CLIENT) for kind in range(len(KINDS))
        }

    def takes_look_up(
        self, found: Frontier, num_wanted: np.ndarray, is_sampled: np.ndarray, trim: TrimRule | None
    ) -> np.ndarray:
        """Returns bool [B]: for which sequences the look-ups' chains `found` replace the draft model's.

        num_wanted [B] tokens asked for, is_sampled [B]: not greedy.
        """
        if not found.num_drafted.any():
            return np.zeros(num_wanted.shape, np.bool_)
        assert found.margins is not None
        kinds = is_sampled.astype(np.int64)
        row_price = call_price = 0.0
        if trim is not None:
            size = int(np.count_nonzero(num_wanted))
            row_price, call_price = trim.row_price, trim.draft_price(size) / max(size, 1)
        curves = {key: calibration.curve for key, calibration in self.calibrations.items()}
        chances = np.array([curve.match_probs for curve in curves.values()])  # [sources x kinds, M]
        # A look-up's count has a bin of the margins to itself.
        groups = len(KINDS) * found.sources + kinds
        survival = chances[groups[:, None], margin_bins(found.margins)].cumprod(axis=1)
        columns = np.arange(found.drafted.shape[1])
        worth = ((columns < found.num_drafted[:, None]) * np.maximum(survival - row_price, 0.0)).sum(axis=1)
        columns = np.arange(int(num_wanted.max()))
        means = np.array([curves[MAIN, kind].mean_chance for kind in range(len(KINDS))])
        gains = np.maximum(means[:, None] ** (columns + 1) - (row_price + call_price), 0.0)  # [kinds, K]
        models = ((columns < num_wanted[:, None]) * gains[kinds]).sum(axis=1)
        return (worth > 0.0) & (worth >= models)

    def observe(self, source: int, is_sampled: bool, margins: np.ndarray, num_accepted: int, num_tested: int) -> None:
        """Learns from one chain with margins [K]."""
        counts = np.array([num_accepted]), np.array([num_tested])
        self.calibrations[source, int(is_sampled)].observe(margins[None], *counts)
