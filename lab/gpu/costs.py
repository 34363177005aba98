"""What policies are told of a synthetic pair: costs fitted to measured calls, overhead to measured steps.

The serving profile does the same for an engine directory, in minutes; here a small grid has to do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from faser_backend.core.decision import WHOLE
from faser_backend.policy.cost_fit import CallShapes, fit_call_cost, fit_non_negative
from faser_backend.policy.cost_model import DRAFT, TARGET, CostModel, OverheadCost
from lab.gpu.calls import PairCalls

Point = dict[str, Any]  # model, partition, sequences, rows, context, segment_us
DRAFT_TOKENS = 4  # per draft sample, as the mean of so many tokens of a chain
NO_OVERHEAD = OverheadCost(0.0, 0.0, 0.0, 0.0, 0.0, exit_us=60.0, exit_row_us=0.1, lanes_us=60.0)


def grid(max_num_seqs: int, max_context: int) -> Iterator[tuple[int, int, int]]:
    """(sequences, rows, context) of the verifications to measure."""
    sizes = sorted({1, max(1, max_num_seqs // 8), max(1, max_num_seqs // 2), max_num_seqs})
    return itertools.product(sizes, (1, 3, 5, 9), (max_context // 8, max_context * 3 // 4))


def measure_points(calls: PairCalls, partition: str, repeats: int, max_num_seqs: int) -> list[Point]:
    """Both models on a partition; on a split, while the other model works beside them."""
    max_context = calls.models.max_context
    cases = list(grid(max_num_seqs, max_context))
    drafts = [(size, 1, context) for size, rows, context in cases if rows == 1]
    middle = (max(1, max_num_seqs // 4), max_context // 2)
    points = []
    num_segments = len(calls.models.target.segments)
    works = [work for case in cases for work in calls.verify_segments(partition, *case)]
    chains = [calls.draft(partition, size, DRAFT_TOKENS, context) for size, _, context in drafts]
    if partition == WHOLE:
        target, draft = calls.times(works, repeats), calls.times(chains, repeats)
    else:
        target = calls.company(
            partition, works, calls.draft(partition, middle[0], DRAFT_TOKENS, middle[1]), repeats, model=TARGET
        )
        draft = calls.company(partition, chains, calls.verify(partition, middle[0], 5, middle[1]), repeats, model=DRAFT)
    target_us = np.median(target, axis=0).reshape(len(cases), num_segments)
    draft_us = np.median(draft, axis=0) / DRAFT_TOKENS
    points += [_point(TARGET, partition, case, times.tolist()) for case, times in zip(cases, target_us, strict=True)]
    points += [_point(DRAFT, partition, case, [float(us)]) for case, us in zip(drafts, draft_us, strict=True)]
    return points


def fit_costs(points: Sequence[Point], kv_block_size: int, max_context: int) -> CostModel:
    """A cost model of what was measured; its overhead is still to be measured."""
    segments = {}
    for model, partition in dict.fromkeys((point["model"], point["partition"]) for point in points):
        own = [point for point in points if (point["model"], point["partition"]) == (model, partition)]
        shapes = np.array([(p["sequences"], p["rows"], p["context"]) for p in own], np.float64)
        sequences, rows, context = shapes.T
        columns = np.ceil((context + rows) / kv_block_size) * kv_block_size
        last = len(own[0]["segment_us"]) - 1
        costs = []
        for segment in range(last + 1):
            logit_rows = sequences * rows if segment == last else np.zeros_like(rows)
            measured = np.array([point["segment_us"][segment] for point in own])
            costs.append(fit_call_cost(CallShapes(sequences * rows, sequences, rows, columns, logit_rows), measured))
        segments[model, partition] = tuple(costs)
    tokens = np.arange(max_context + 1)
    key_columns = np.ceil(tokens / kv_block_size) * kv_block_size
    return CostModel(segments, NO_OVERHEAD, key_columns, is_measured=True, is_padded=False)


def fit_error(costs: CostModel, points: Sequence[Point]) -> dict[str, float]:
    """Mean absolute error of the fit by model and partition, in percent."""
    errors: dict[str, list[float]] = {}
    for point in points:
        predicted = costs.call_us(
            point["model"],
            point["partition"],
            point["sequences"] * point["rows"],
            point["sequences"],
            point["context"],
        )
        name = f"{point['model']} on {point['partition']}"
        errors.setdefault(name, []).append(100.0 * abs(float(predicted) / sum(point["segment_us"]) - 1.0))
    return {name: float(np.mean(values)) for name, values in errors.items()}


def with_overhead(costs: CostModel, steps: np.ndarray, exit_us: tuple[float, float], lanes_us: float) -> CostModel:
    """steps [n, 3]: sequences, rows and microseconds beyond the calls of measured steps; exit_us: of an exit, and
    of each of its rows."""
    features = np.concatenate([np.ones((len(steps), 1)), steps[:, :2]], axis=1)
    weights = fit_non_negative(features, np.maximum(steps[:, 2], 1.0))
    overhead = replace(
        costs.overhead,
        step_us=float(weights[0]),
        step_sequence_us=float(weights[1]),
        step_row_us=float(weights[2]),
        exit_us=exit_us[0],
        exit_row_us=exit_us[1],
        lanes_us=lanes_us,
    )
    return replace(costs, overhead=overhead)


def measure_exit(calls: PairCalls, sizes: Sequence[int], repeats: int) -> tuple[float, float]:
    """What asking an exit costs beyond its segment: microseconds, and microseconds per row."""
    rows, extra = [], []
    for size in sizes:
        plain, pruned = calls.times(calls.exit(size, 5, calls.models.max_context // 4, 8), repeats).T
        rows.append(size * 5)
        extra.append(max(float(np.median(pruned) - np.median(plain)), 1.0))
    fixed, per_row = fit_non_negative(np.stack([np.ones(len(rows)), np.array(rows)], axis=1), np.array(extra))
    return float(fixed), float(per_row)


def _point(model: str, partition: str, case: tuple[int, int, int], segment_us: list[float]) -> Point:
    sequences, rows, context = case
    return {
        "model": model,
        "partition": partition,
        "sequences": sequences,
        "rows": rows,
        "context": context,
        "segment_us": [round(us, 2) for us in segment_us],
    }
