"""Token-wise early exit: predicts between target segments which draft tokens will be rejected.

Pure; the pipeline calls it with the leads that the exit head gives to draft tokens (core/decision.py ExitView).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExitCalibration:
    """How to read one exit, fitted by `faser profile` (logistic regression) at a chosen retention.

    P(accepted) = sigmoid(bias + chance_weight logit(c) + margin_weight m), with c the calibrated chance by draft
    margin and m the exit margin. A chain's rows are kept while the product of these exceeds `threshold`.
    """

    segment: int  # the exit is behind it
    layer: int
    bias: float
    chance_weight: float
    margin_weight: float
    threshold: float
    retention: float  # share of tokens that would be accepted and are kept, on the calibration data
    pruned_share: float  # share of draft rows pruned there
