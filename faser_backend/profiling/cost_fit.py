"""Fits `CallCost` and `OverheadCost`: non-negative least squares on relative errors, robust to outliers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from faser_backend.policy.cost_model import CallCost, Curve, OverheadCost

# Kernels take rows in tiles of 8 or 16: one row more than a tile costs as much as a tile more.
ROW_KNOTS = (1, 2, 4, 8, 9, 16, 17, 32, 64, 128)
KEY_KNOTS = (0, 1024, 4096, 8192)
NUM_REWEIGHTINGS = 8
SMALLEST_ERROR = 0.01  # relative; smaller errors do not increase a point's weight


@dataclass(frozen=True, slots=True, eq=False)
class CallShapes:
    """Shapes of N calls, arrays [N] float64; letters as in CallCost."""

    num_rows: np.ndarray  # T
    num_sequences: np.ndarray  # B
    max_rows: np.ndarray  # Q
    columns: np.ndarray  # L
    num_logit_rows: np.ndarray  # R


def fit_call_cost(shapes: CallShapes, measured_us: np.ndarray) -> CallCost:
    """Returns the CallCost nearest to measured_us [N] > 0 in relative error, N >= 1."""
    row_knots = _knots_below(ROW_KNOTS, shapes.num_rows.max())
    keys = shapes.num_sequences * shapes.columns
    key_knots = _knots_below(KEY_KNOTS, keys.max())
    cells = shapes.num_sequences * shapes.max_rows
    columns = [
        np.ones_like(cells),
        *_spans(shapes.num_rows, row_knots),
        *_spans(keys, key_knots),
        shapes.num_sequences,
        cells,
        cells * shapes.columns,
        shapes.num_logit_rows,
    ]
    weights = fit_non_negative(np.stack(columns, axis=1), measured_us)
    num_rows, num_keys = row_knots.size, key_knots.size
    fixed, row_slopes, key_slopes, rest = np.split(weights, np.cumsum([1, num_rows, num_keys]))
    return CallCost(
        Curve.from_slopes(row_knots, float(fixed[0]), row_slopes),
        Curve.from_slopes(key_knots, 0.0, key_slopes),
        *(float(value) for value in rest),
    )


def fit_overhead(
    num_sequences: np.ndarray,
    num_draft_tokens: np.ndarray,
    step_us: np.ndarray,
    draft_us: np.ndarray,
    predicted_calls_us: np.ndarray,
) -> OverheadCost:
    """Fits overhead to N steps, arrays [N] float64, in which each sequence drafts num_draft_tokens > 0.

    step_us: outside model calls and drafting. draft_us: drafting with its calls, predicted as predicted_calls_us.
    """
    ones = np.ones_like(num_sequences)
    num_rows = num_sequences * (num_draft_tokens + 1)
    step = fit_non_negative(np.stack([ones, num_sequences, num_rows], axis=1), step_us)
    per_call = np.stack([ones, num_sequences], axis=1)
    features = np.concatenate([num_draft_tokens[:, None] * per_call, per_call], axis=1)
    *draft, round_us, sequence_us = map(float, fit_non_negative(features, draft_us, known=predicted_calls_us))
    return OverheadCost(*map(float, step), *draft, draft_round_us=round_us, draft_round_sequence_us=sequence_us)


def fit_non_negative(features: np.ndarray, measured: np.ndarray, *, known: np.ndarray | None = None) -> np.ndarray:
    """Fits weights [F] >= 0 so that known [N] + features [N, F] @ weights is near measured [N] > 0 in relative error.

    Reweighted least squares approach the least sum of absolute errors, so outliers pull no more than other points.
    """
    goal = np.ones(measured.size) if known is None else 1.0 - known / measured
    relative = features / measured[:, None]
    scale = relative.max(axis=0)
    scale[scale == 0.0] = 1.0
    relative = relative / scale
    point_weights = np.ones(measured.shape[0])
    weights = np.zeros(features.shape[1])
    for _ in range(NUM_REWEIGHTINGS):
        root = np.sqrt(point_weights)
        weights = non_negative_least_squares(relative * root[:, None], goal * root)
        point_weights = 1.0 / np.maximum(np.abs(relative @ weights - goal), SMALLEST_ERROR)
        point_weights /= point_weights.mean()
    return weights / scale


def non_negative_least_squares(matrix: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """Returns x [F] >= 0 that minimises |matrix [N, F] x - goal [N]|, by Lawson and Hanson's active sets (1974)."""
    num_features = matrix.shape[1]
    x = np.zeros(num_features)
    is_free = np.zeros(num_features, np.bool_)
    tolerance = 1e-9 * max(float(np.abs(matrix.T @ goal).max()), 1e-300)
    for _ in range(3 * num_features):
        gradient = matrix.T @ (goal - matrix @ x)
        gradient[is_free] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= tolerance:
            break
        is_free[best] = True
        while is_free.any():
            trial = np.zeros(num_features)
            trial[is_free] = np.linalg.lstsq(matrix[:, is_free], goal, rcond=None)[0]
            is_bad = is_free & (trial <= 0.0)
            if not is_bad.any():
                x = trial
                break
            # Step towards the trial until the first weight is zero, and fix that one there.
            steps = x[is_bad] / (x[is_bad] - trial[is_bad])
            x = np.maximum(x + float(steps.min()) * (trial - x), 0.0)
            is_free &= x > 1e-15
            x[~is_free] = 0.0
    return x


def _knots_below(knots: tuple[int, ...], largest: float) -> np.ndarray:
    """Returns the knots below the largest value: no data supports a slope beyond it."""
    return np.array([knot for index, knot in enumerate(knots) if index == 0 or knot < largest], np.float64)


def _spans(x: np.ndarray, knots: np.ndarray) -> list[np.ndarray]:
    """Returns, for each knot, the part of x [N] between it and the next one."""
    ends = np.append(knots[1:], np.inf)
    return [np.clip(x, low, high) - low for low, high in zip(knots, ends, strict=True)]
