"""The one fit of costs to measured calls, and how well it predicts those that it did not see."""

from __future__ import annotations

import numpy as np

from faser_backend.policy.cost_fit import CallShapes, fit_call_cost, mean_absolute_percentage_error
from faser_backend.policy.cost_model import CallCost, CostModel
from faser_backend.serving.profile_store import FitError
from lab.profiling.cases import Case
from lab.profiling.measure import Sampled, Share


def fit_segments(points: list[Sampled], widths: np.ndarray, *, pads: bool) -> tuple[CallCost, ...]:
    """A cost per segment from the points that are not held out. pads: see CostModel.is_padded."""
    fitted = [point for point in points if not point.case.is_held_out]
    shapes = shapes_of([point.case for point in fitted], widths, pads=pads)
    times = np.array([point.segment_us for point in fitted])
    return tuple(fit_call_cost(shapes, times[:, segment]) for segment in range(times.shape[1]))


def fit_error(model: CostModel, share: Share, points: list[Sampled]) -> FitError:
    """Errors of whole calls, all segments together, on the fitted and on the held-out points."""
    cases = [point.case for point in points]
    predicted = model.call_us(
        share.model,
        share.partition,
        np.array([case.num_rows for case in cases]),
        np.array([len(case.counts) for case in cases]),
        np.array([case.context for case in cases]),
        max_rows=np.array([max(case.counts) for case in cases]),
        num_logit_rows=np.array([case.num_logit_rows for case in cases]),
    )
    measured = np.array([sum(point.segment_us) for point in points])
    is_held_out = np.array([case.is_held_out for case in cases])
    fitted, held_out = (
        mean_absolute_percentage_error(predicted[of], measured[of]) for of in (~is_held_out, is_held_out)
    )
    num_held_out = int(is_held_out.sum())
    spread = float(np.median([point.spread for point in points]) * 100.0)
    new_shape_us = float(np.median([point.first_us - sum(point.segment_us) for point in points]))
    return FitError(
        share.model,
        share.partition,
        len(cases) - num_held_out,
        num_held_out,
        fitted,
        held_out,
        spread,
        new_shape_us,
    )


def shapes_of(cases: list[Case], widths: np.ndarray, *, pads: bool) -> CallShapes:
    rows = [(case.num_rows, len(case.counts), max(case.counts), case.num_logit_rows) for case in cases]
    num_rows, num_sequences, max_rows, num_logit_rows = np.array(rows, np.float64).T
    if not pads:  # as CostModel.call_us has it: on average, a sequence reads its context and its own rows
        max_rows = num_rows / num_sequences
    num_tokens = np.array([case.context for case in cases]) + max_rows
    return CallShapes(num_rows, num_sequences, max_rows, widths[num_tokens.astype(np.int64)], num_logit_rows)
