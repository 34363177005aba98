"""Draft and target on the whole device and on every split: alone, at once, and what policies may be told of it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np

from faser_backend.core.decision import WHOLE
from lab import shapes
from lab.gpu.calls import PairCalls
from lab.gpu.costs import fit_costs, fit_error, measure_exit, measure_points
from lab.gpu.economics import overlap_share
from lab.gpu.lent_runtime import LentRuntime, overlap_figures
from lab.gpu.pairs import DTYPE, opened_pair
from lab.gpu.timing import Timing
from lab.gpu.worker import Context, Result
from lab.shapes import PAIRS, TINY_PAIR, Pair

DRAFT_TOKENS = 4
REPEATS = 9


def run(context: Context) -> Result:
    """The 8B pair: latencies, then the points of its cost model."""
    shape = TINY_PAIR if context.is_tiny else PAIRS["qwen3-8b/0.6b"]
    with ExitStack() as stack:
        runtime = opened_pair(context, shape, stack)
        calls = PairCalls.open(runtime, runtime.models, shape.max_num_seqs, stack, context.seed)
        found: Result = {
            "pair": shape.name,
            "menu": runtime.menu.note,
            "splits_note": runtime.splits_note,
            "draft_tokens": DRAFT_TOKENS,
            "verified_rows": DRAFT_TOKENS + 1,
        }
        context.save(found)
        sizes = (1, 4) if context.is_tiny else (1, 8, 32)
        found["latency"] = latencies(context, calls, runtime, sizes, found)
        found["floors"] = _floors(context, shape, sizes)
        found |= cost_points(context, calls, shape, found)
    return found


def latencies(
    context: Context, calls: PairCalls, runtime: LentRuntime, sizes: tuple[int, ...], found: Result
) -> list[dict[str, Any]]:
    """A row per partition and batch: a chain of the draft, a verification, and on splits both at once."""
    rows: list[dict[str, Any]] = []
    found["latency"] = rows
    length = calls.models.max_context // 2
    repeats = 3 if context.is_tiny else REPEATS
    for size in sizes:
        whole = _alone(calls, WHOLE, size, length, repeats)
        rows.append({"partition": WHOLE, "batch": size, "context": length, **whole})
        for partition in calls.partitions:
            if partition == WHOLE or not context.has_time(5.0):
                continue
            alone = _alone(calls, partition, size, length, repeats)
            rows.append(
                {
                    "partition": partition,
                    "batch": size,
                    "context": length,
                    **alone,
                    **_together(calls, runtime, partition, size=size, context=length, repeats=repeats, alone=alone),
                }
            )
            context.save(found)
    return rows


def _alone(calls: PairCalls, partition: str, size: int, context: int, repeats: int) -> dict[str, float]:
    draft = calls.draft(partition, size, DRAFT_TOKENS, context)
    verify = calls.verify(partition, size, DRAFT_TOKENS + 1, context)
    plain = calls.verify(partition, size, 1, context)
    drafted = Timing.of(calls.on_draft(partition, lambda: calls.times([draft], repeats))[:, 0])
    verified, decoded = (
        Timing.of(column) for column in calls.on_target(partition, lambda: calls.times([verify, plain], repeats)).T
    )
    return {
        "draft_us": drafted.median_us,
        "draft_spread": drafted.spread,
        "verify_us": verified.median_us,
        "verify_spread": verified.spread,
        "decode_us": decoded.median_us,
    }


def _together(
    calls: PairCalls,
    runtime: LentRuntime,
    partition: str,
    *,
    size: int,
    context: int,
    repeats: int,
    alone: dict[str, float],
) -> dict[str, float]:
    """Both phases of an overlapped step, again and again; times by the host, spans by the device's events."""
    lanes = calls.partitions[partition].lanes
    assert lanes is not None, f"partition {partition} has no lanes"
    draft = calls.draft(partition, size, DRAFT_TOKENS, context)
    verify = calls.verify(partition, size, DRAFT_TOKENS + 1, context)

    def both() -> None:
        lanes.run_both(verify, draft)

    calls.times([both], 1)
    watched = next(each for each in runtime.lanes if each is lanes)
    watched.forget()
    together = float(np.median([calls.timed(both) for _ in range(repeats)]))
    spans = watched.spans_us()
    lengths = np.median(spans[:, :, 1] - spans[:, :, 0], axis=0)
    return {
        "together_us": together,
        "hidden_share": overlap_share(alone["draft_us"], alone["verify_us"], together),
        **overlap_figures(spans),
        "verify_company_us": float(lengths[0]),
        "draft_company_us": float(lengths[1]),
        "lanes_us": calls.lanes_us(lanes, 5 * repeats),
    }


def cost_points(context: Context, calls: PairCalls, shape: Pair, found: Result) -> Result:
    """Measured calls of the whole device and of the splits, as far as time allows, and how well a model fits them."""
    points: list[dict[str, Any]] = []
    repeats = 2 if context.is_tiny else 3
    for partition in calls.partitions:
        if partition == WHOLE or context.has_time(6.0):
            points += measure_points(calls, partition, repeats, shape.max_num_seqs)
            context.save(found | {"points": points})
    costs = fit_costs(points, calls.runtime.kv_block_size, calls.models.max_context)
    fixed, per_row = measure_exit(calls, (1, shape.max_num_seqs // 2), 5) if shape.exit_layers else (0.0, 0.0)
    return {"points": points, "fit_error_percent": fit_error(costs, points), "exit_us": [fixed, per_row]}


def _floors(context: Context, shape: Pair, sizes: tuple[int, ...]) -> list[dict[str, float]]:
    """The least time of a verification and of a draft call by bytes and arithmetic, over the measured peaks."""
    peaks = context.result_of("peaks")
    if "copy_gb_per_s" not in peaks:
        return []
    speed = {"bytes_per_s": peaks["copy_gb_per_s"] * 1e9, "flops_per_s": peaks["gemm_tflops"] * 1e12}
    itemsize = 4 if DTYPE[context.device] == "fp32" else 2
    length = shape.target.max_context // 2
    return [
        {
            "batch": size,
            "verify_us": shapes.call_floor_us(shape.target, size * (DRAFT_TOKENS + 1), size, length, itemsize, **speed),
            "draft_us": DRAFT_TOKENS * shapes.call_floor_us(shape.draft, size, size, length, itemsize, **speed),
        }
        for size in sizes
    ]
