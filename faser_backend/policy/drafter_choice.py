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
        self._version = 0  # of the curves that were read
        self._chances = np.zeros((0, 0))  # [CLIENT x kinds, M] by bin of margins
        self._means = np.zeros(0)  # [kinds] of the draft model's tokens

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
        survival = self._survival(found, kinds)
        columns = np.arange(found.drafted.shape[1])
        worth = ((columns < found.num_drafted[:, None]) * np.maximum(survival - row_price, 0.0)).sum(axis=1)
        columns = np.arange(int(num_wanted.max()))
        gains = np.maximum(self._means[:, None] ** (columns + 1) - (row_price + call_price), 0.0)  # [kinds, K]
        models = ((columns < num_wanted[:, None]) * gains[kinds]).sum(axis=1)
        return (worth > 0.0) & (worth >= models)

    def _survival(self, found: Frontier, kinds: np.ndarray) -> np.ndarray:
        """Returns the chances [B, K] that look-ups' tokens 1..k are all accepted, for requests of kinds [B]."""
        assert found.margins is not None
        self._refresh()
        groups = len(KINDS) * found.sources + kinds
        return self._chances[groups[:, None], margin_bins(found.margins)].cumprod(axis=1)

    def _refresh(self) -> None:
        """Reads the curves where one has changed. A look-up's count has a bin of the margins to itself."""
        curves = self.calibrations.values()
        version = sum(calibration.version for calibration in curves)
        if version != self._version:
            self._version = version
            self._chances = np.array([calibration.curve.match_probs for calibration in curves])
            self._means = np.array([self.calibrations[MAIN, kind].curve.mean_chance for kind in range(len(KINDS))])

    def observe(self, source: int, is_sampled: bool, margins: np.ndarray, num_accepted: int, num_tested: int) -> None:
        """Learns from one chain with margins [K]."""
        counts = np.array([num_accepted]), np.array([num_tested])
        self.calibrations[source, int(is_sampled)].observe(margins[None], *counts)
