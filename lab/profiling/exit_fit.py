"""Fits an exit to recorded chains, and replays chains under other rules: pure arithmetic on arrays.

Logistic regression by iteratively reweighted least squares; the area under the ROC curve by ranks; thresholds as
quantiles of the survival of rows that turned out useful. Row j of a chain is useful where draft tokens 1..j are
all accepted: it emits the next token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from faser_backend.policy.calibration import sigmoid
from faser_backend.serving.profile_calibration import Replay
from lab.profiling.chains import Chains

_RIDGE = 1.0  # in rows of data: holds weights finite where outcomes can be told apart without error
_MAX_ITERATIONS = 50


def fit_logistic(features: np.ndarray, outcomes: np.ndarray) -> np.ndarray:
    """[1 + F] bias and weights of P(outcome) = sigmoid(bias + features [n, F] @ weights), outcomes bool [n]."""
    design = np.column_stack([np.ones(len(features)), features])
    penalty = np.diag([0.0] + [_RIDGE] * features.shape[1])
    weights = np.zeros(design.shape[1])
    for _ in range(_MAX_ITERATIONS):
        probs = sigmoid(design @ weights)
        gradient = design.T @ (outcomes - probs) - penalty @ weights
        curvature = (design * (probs * (1.0 - probs))[:, None]).T @ design + penalty
        step = np.linalg.solve(curvature + 1e-9 * np.eye(weights.size), gradient)
        weights = weights + step
        if np.abs(step).max() < 1e-8:
            break
    return weights


def area_under_curve(scores: np.ndarray, outcomes: np.ndarray) -> float:
    """Chance that a random positive of scores [n] outranks a random negative, ties for half; outcomes bool [n]."""
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]  # mean rank among equals, from 1
    num_positive = int(outcomes.sum())
    num_negative = outcomes.size - num_positive
    return float((ranks[outcomes].sum() - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))


def threshold_for(survival: np.ndarray, is_useful: np.ndarray, num_kept: int) -> float:
    """The largest threshold on survival [N, K] that keeps at least num_kept of the useful rows, bool [N, K]."""
    useful = np.sort(survival[is_useful])[::-1]
    return float(useful[min(num_kept, useful.size) - 1]) if num_kept and useful.size else 1.0


class Survivals(NamedTuple):
    """Predicted survival [N, K] of chains: by the draft alone, and at an exit."""

    chains: Chains
    by_draft: np.ndarray
    at_exit: np.ndarray


def replay(fitted: Survivals, held_out: Survivals, retention: float, depth: tuple[int, int]) -> Replay:
    """Chooses thresholds on `fitted` so that they keep `retention` of the useful rows; tells of `held_out`.

    depth: layers before the exit and of the whole target. The cascade trims by the draft's confidence first and
    spends what it may lose on both in the proportion that saved most.
    """
    useful = fitted.chains.is_accepted
    num_useful = int(useful.sum())
    num_kept = int(np.ceil(retention * num_useful))
    trim = threshold_for(fitted.by_draft, useful, num_kept)
    exit_ = threshold_for(fitted.at_exit, useful, num_kept)
    pairs = []
    for share in np.linspace(retention, 1.0, 11):
        first = threshold_for(fitted.by_draft, useful, int(np.ceil(share * num_useful)))
        pairs.append((first, threshold_for(fitted.at_exit, useful & (fitted.by_draft >= first), num_kept)))
    best = max(pairs, key=lambda pair: outcome(fitted, pair, depth)[0])
    rules = ((trim, 0.0), (0.0, exit_), best)
    (trim_saved, trim_kept), (exit_saved, exit_kept), (cascade_saved, cascade_kept) = (
        outcome(held_out, rule, depth) for rule in rules
    )
    return Replay(trim_saved, trim_kept, exit_saved, exit_kept, cascade_saved, cascade_kept)


def outcome(of: Survivals, rule: tuple[float, float], depth: tuple[int, int]) -> tuple[float, float]:
    """Saved and kept shares (see Replay). rule: a threshold before verification, and one at the exit."""
    chains, (trim, exit_) = of.chains, rule
    entering = chains.is_drafted & (of.by_draft >= trim)
    staying = entering & (of.at_exit >= exit_)
    shallow, whole = depth
    num_anchors = chains.num_drafted.size
    full = (num_anchors + chains.is_drafted.sum()) * whole
    run = num_anchors * whole + entering.sum() * shallow + staying.sum() * (whole - shallow)
    useful = chains.is_accepted
    return 1.0 - float(run) / float(full), float((staying & useful).sum()) / float(useful.sum())
