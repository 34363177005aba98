"""What `faser profile` would have learned of a simulated pair: margins, and how to read its exits.

The process is known, so nothing is fitted: with exit margins of N(+-d/2, 1) the logit of a chance grows by d times
the margin. Thresholds are chosen for a retention, as the profiler chooses them.
"""

from __future__ import annotations

import numpy as np

from faser_backend.policy.calibration import KINDS, MarginCounts, MatchCalibration
from faser_backend.policy.cost_model import CostModel
from faser_backend.policy.early_exit import ExitCalibration
from faser_backend.policy.speculation import MAX_ADAPTIVE_TOKENS, Knowledge
from lab.simulation.acceptance import AcceptanceProcess, separation

RETENTION = 0.95  # of tokens that would be accepted, at an exit
_NUM_TEXTS, _CHAINS_PER_TEXT = 200, 20


def knowledge_of(process: AcceptanceProcess, costs: CostModel, exits: tuple[tuple[int, int], ...]) -> Knowledge:
    """exits: (segment, layer) of each exit, in order of the process's exit_aucs."""
    assert len(exits) == len(process.exit_aucs)
    drawn = process.sample(_NUM_TEXTS, _CHAINS_PER_TEXT * MAX_ADAPTIVE_TOKENS)
    margins, is_match = (values.reshape(-1, MAX_ADAPTIVE_TOKENS) for values in drawn[:2])  # chains [C, K]
    is_accepted = np.cumprod(is_match, axis=1) > 0
    is_tested = np.concatenate([np.ones((len(margins), 1), np.bool_), is_accepted[:, :-1]], axis=1)
    counts = MarginCounts.of(margins[is_tested], is_accepted[is_tested])
    chances = MatchCalibration(counts).curve.chances(margins)
    calibrations = []
    for place, (segment, layer) in enumerate(exits):
        weight = separation(process.exit_aucs[place])
        exit_margins = drawn[2][place].reshape(margins.shape)
        calibrations.append(_calibrate((segment, layer), weight, chances, exit_margins, is_accepted))
    return Knowledge(costs, dict.fromkeys(KINDS, counts), tuple(calibrations))


def _calibrate(
    exit_: tuple[int, int], weight: float, chances: np.ndarray, exit_margins: np.ndarray, is_accepted: np.ndarray
) -> ExitCalibration:
    """Threshold and shares over chains; arrays are [C, K]."""

    def calibration(*shares: float, pruned: tuple[float, ...]) -> ExitCalibration:
        threshold, retention, trimmed_retention, trimmed_share = shares
        return ExitCalibration(*exit_, 0.0, 1.0, weight, threshold, retention, pruned, trimmed_retention, trimmed_share)

    at_exit = calibration(0.0, 1.0, 1.0, 0.0, pruned=(0.0,)).survival(chances, exit_margins)
    by_draft = np.cumprod(chances, axis=1)
    threshold, trim = (float(np.quantile(values[is_accepted], 1.0 - RETENTION)) for values in (at_exit, by_draft))
    stays, enters = at_exit >= threshold, by_draft >= trim
    return calibration(
        threshold,
        float(stays[is_accepted].mean()),
        float(stays[is_accepted & enters].mean()),
        float((~stays)[enters].mean()),
        pruned=tuple((~stays).mean(axis=0).tolist()),
    )
