"""Token-wise early exit: predicts between target segments which draft tokens will be rejected.

Prune rows, never tests: row j is judged by draft tokens 1..j alone, so what is emitted stays exact
(pipeline/acceptance.py). `best_exit` decides whether an exit is worth its price.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from faser_backend.core.decision import ExitView, Score
from faser_backend.policy.calibration import MarginCurve, logits, sigmoid
from faser_backend.policy.cost_model import TARGET, CostModel

NUM_CANDIDATES = 8  # that the exit head scores per row: the draft's best tokens


@dataclass(frozen=True, slots=True)
class ExitCalibration:
    """The fit of one exit by `faser profile` (logistic regression) at a chosen retention.

    P(accepted) = sigmoid(bias + chance_weight logit(c) + margin_weight m), with c the calibrated chance by draft
    margin and m the exit margin. A chain's rows are kept while the product of these is at least `threshold`.
    Shares are of held-out chains: as they were drafted, and after confidence trimming at the same retention.
    """

    segment: int  # the exit is behind it
    layer: int
    bias: float
    chance_weight: float
    margin_weight: float
    threshold: float
    retention: float  # share of tokens that would be accepted and are kept
    pruned_shares: tuple[float, ...]  # of rows 1, 2, ... of a chain, how many of each are pruned
    trimmed_retention: float  # the same two of what trimming left
    trimmed_pruned_share: float

    def survival(self, chances: np.ndarray, exit_margins: np.ndarray) -> np.ndarray:
        """Returns [B, K]: entry j - 1 is the chance that draft tokens 1..j of a chain are all accepted. [B, K] each."""
        refined = sigmoid(self.bias + self.chance_weight * logits(chances) + self.margin_weight * exit_margins)
        return np.cumprod(refined, axis=1)

    def pruned_share(self, num_draft_rows: float) -> float:
        """Returns the share of rows pruned from untrimmed chains of this mean length."""
        known = np.array(self.pruned_shares)
        longest = max(math.ceil(num_draft_rows), 1)
        shares = known[np.minimum(np.arange(longest), known.size - 1)]
        weights = np.minimum(num_draft_rows - np.arange(longest), 1.0)
        return float(shares @ weights / num_draft_rows)


@dataclass(frozen=True, slots=True, eq=False)
class EarlyExit:
    """Ends a chain where its survival falls below an exit's threshold; implements core.decision.Pruner."""

    calibrations: tuple[ExitCalibration, ...]
    curve: MarginCurve  # chances of acceptance by the draft's margin
    offsets: np.ndarray | None = None  # [S] by slot, added to their log odds
    num_candidates: int = NUM_CANDIDATES

    @property
    def exits(self) -> frozenset[int]:
        """Segments after which it reads scores."""
        return frozenset(calibration.segment for calibration in self.calibrations)

    def keep(self, view: ExitView) -> np.ndarray:
        """Implements core.decision.Pruner. Survival falls along a chain, so the kept rows are a prefix. NaN ends the
        chain; entries past a row never affect it."""
        margins = view.frontier.margins
        assert margins is not None, "an exit needs the draft's margins: the frontier has none"
        scores = self.curve.logits(margins)
        if self.offsets is not None:
            scores = scores + self.offsets[view.slots, None]
        calibration = next(each for each in self.calibrations if each.segment == view.segment)
        survival = calibration.survival(sigmoid(scores), view.exit_margins)
        return np.minimum(1 + np.count_nonzero(survival >= calibration.threshold, axis=1), view.num_rows)


def predicted_saving_us(costs: CostModel, exit_: ExitCalibration, score: Score, size: int, context: int) -> float:
    """Returns the microseconds that an exit saves a verification of `size` sequences on average; negative if it costs
    time. score: the prediction without it.

    The sum: deeper segments, sampling and acceptance of the pruned rows; less the time that the lost tokens are worth;
    less the exit's own scoring. The longest chain is assumed to stay.
    """
    num_drafted = round(score.num_rows)
    if num_drafted <= 0:
        return 0.0
    share, retention = exit_.trimmed_pruned_share, exit_.trimmed_retention
    if not score.floor:  # confidence trimming has not taken the least likely rows already
        share, retention = exit_.pruned_share(num_drafted / size), exit_.retention
    num_rows, num_pruned = size + num_drafted, share * num_drafted
    counts, most_rows = np.array([num_rows, num_rows - num_pruned]), math.ceil(num_rows / size)
    where = {"max_rows": most_rows, "first_segment": exit_.segment + 1}
    before, after = costs.call_us(TARGET, score.partition, counts, size, context, **where)
    saved_us = float(before - after) + num_pruned * costs.overhead.step_row_us
    lost_us = (1.0 - retention) * max(score.num_tokens - size, 0.0) / score.tokens_per_us
    return saved_us - lost_us - float(costs.overhead.exit(num_rows))


def best_exit(
    costs: CostModel, exits: tuple[ExitCalibration, ...], score: Score, size: int, context: int
) -> ExitCalibration | None:
    """Returns the exit that saves most in such verifications; None if no exit pays."""
    savings = [predicted_saving_us(costs, each, score, size, context) for each in exits]
    best = max(range(len(exits)), key=savings.__getitem__, default=None)
    return None if best is None or savings[best] <= 0.0 else exits[best]
