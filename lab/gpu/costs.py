"""What policies are told of a synthetic pair: costs fitted to measured calls, overhead to measured steps.

The fit is that of `faser profile`, which takes minutes to measure; here a small grid has to do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from faser_backend.core.decision import WHOLE
from faser_backend.device.partition import split_name
from faser_backend.policy.cost_model import DRAFT, TARGET, CostModel, OverheadCost
from lab.gpu.calls import PairCalls
from lab.gpu.worker import Context
from lab.profiling.cases import Case
from lab.profiling.cost_fit import fit_non_negative
from lab.profiling.measure import Sampled, fit_segments

Point = dict[str, Any]  # model, partition, sequences, rows, context, segment_us
DRAFT_TOKENS = 4  # per draft sample, as the mean of so many tokens of a chain
NO_OVERHEAD = OverheadCost(0.0, 0.0, 0.0, 0.0, 0.0, exit_us=60.0, exit_row_us=0.1, lanes_us=60.0)
LANE_REPEATS = 30


def grid(max_num_seqs: int, max_context: int) -> Iterator[tuple[int, int, int]]:
    """(sequences, rows, context) of the verifications to measure."""
    sizes = sorted({1, max(1, max_num_seqs // 8), max(1, max_num_seqs // 2), max_num_seqs})
    return itertools.product(sizes, (1, 3, 5, 9), (max_context // 8, max_context * 3 // 4))


def measure_points(calls: PairCalls, partition: str, repeats: int, max_num_seqs: int) -> list[Point]:
    """Both models on a partition; on a split, while the other model works beside them."""
    max_context = calls.models.max_context
    cases = list(grid(max_num_seqs, max_context))
    drafts = [(size, 1, context) for size, rows, context in cases if rows == 1]
    size, context = max(1, max_num_seqs // 4), max_context // 2
    works = [work for case in cases for work in calls.verify_segments(partition, *case)]
    chains = [calls.draft(partition, size, DRAFT_TOKENS, context) for size, _, context in drafts]
    if partition == WHOLE:
        target, draft = calls.times(works, repeats), calls.times(chains, repeats)
    else:
        drafting = calls.draft(partition, size, DRAFT_TOKENS, context)
        target = calls.company(partition, works, drafting, repeats, model=TARGET)
        draft = calls.company(partition, chains, calls.verify(partition, size, 5, context), repeats, model=DRAFT)
    target_us = np.median(target, axis=0).reshape(len(cases), -1)
    draft_us = np.median(draft, axis=0)[:, None] / DRAFT_TOKENS
    names = ("sequences", "rows", "context")
    return [
        {
            "model": model,
            "partition": partition,
            **dict(zip(names, case, strict=True)),
            "segment_us": us.round(2).tolist(),
        }
        for model, own, times in ((TARGET, cases, target_us), (DRAFT, drafts, draft_us))
        for case, us in zip(own, times, strict=True)
    ]


def fit_costs(points: Sequence[Point], kv_block_size: int, max_context: int) -> CostModel:
    """A cost model of what was measured; its overhead is still to be measured."""
    columns = np.ceil(np.arange(max_context + 1) / kv_block_size) * kv_block_size
    measured: dict[tuple[str, str], list[Sampled]] = {}
    for point in points:
        size, rows = point["sequences"], point["rows"]
        case = Case((rows,) * size, point["context"], size * rows)
        sampled = Sampled(case, tuple(point["segment_us"]), 0.0, 0.0)
        measured.setdefault((point["model"], point["partition"]), []).append(sampled)
    segments = {key: fit_segments(own, columns, pads=False) for key, own in measured.items()}
    return CostModel(segments, NO_OVERHEAD, columns, is_measured=True, is_padded=False)


def fit_error(costs: CostModel, points: Sequence[Point]) -> dict[str, float]:
    """Mean absolute error of the fit by model and partition, in percent."""
    errors: dict[str, list[float]] = {}
    for p in points:
        size = p["sequences"]
        predicted = float(costs.call_us(p["model"], p["partition"], size * p["rows"], size, p["context"]))
        error = 100.0 * abs(predicted / sum(p["segment_us"]) - 1.0)
        errors.setdefault(f"{p['model']} on {p['partition']}", []).append(error)
    return {name: float(np.mean(values)) for name, values in errors.items()}


def with_overhead(costs: CostModel, steps: np.ndarray, exit_us: tuple[float, float], lanes_us: float) -> CostModel:
    """steps [n, 3]: sequences, rows and microseconds beyond the calls of measured steps; exit_us: of an exit, and
    of each of its rows."""
    features = np.concatenate([np.ones((len(steps), 1)), steps[:, :2]], axis=1)
    step, sequence, row = map(float, fit_non_negative(features, np.maximum(steps[:, 2], 1.0)))
    more = {"exit_us": exit_us[0], "exit_row_us": exit_us[1], "lanes_us": lanes_us}
    overhead = replace(costs.overhead, step_us=step, step_sequence_us=sequence, step_row_us=row, **more)
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


class CallCosts:
    """Costs of calls of a pair, of an exit and of lanes: all that is measured before engines take the slots."""

    def __init__(self, context: Context, calls: PairCalls, pair: str) -> None:
        latency = context.result_of("latency")
        points = latency.get("points") if latency.get("pair") == pair else None
        if not points:  # a few calls of the whole device and of the split that the runtime holds to be the best
            chosen = [WHOLE, *(split_name(*split) for split in calls.runtime.splits[:1])]
            points = [point for name in chosen for point in measure_points(calls, name, 2, calls.max_num_seqs)]
        self.model = fit_costs(points, calls.runtime.kv_block_size, calls.models.max_context)
        segments = calls.models.target.segments
        self.exits = tuple((i, each.last_layer) for i, each in enumerate(segments) if each.has_exit_scores)
        sizes = (1, max(1, calls.max_num_seqs // 2))
        self.exit_us = measure_exit(calls, sizes, 3) if self.exits else (0.0, 0.0)
        lanes = next((place.lanes for place in calls.partitions.values() if place.lanes is not None), None)
        self.lanes_us = 0.0 if lanes is None else calls.lanes_us(lanes, LANE_REPEATS)
