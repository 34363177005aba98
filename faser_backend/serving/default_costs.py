"""Costs that nobody measured: of an engine without a profile, and of look-ups, which replace a draft model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from faser_backend.core.decision import WHOLE
from faser_backend.policy.cost_model import DRAFT, TARGET, CallCost, CostModel, Curve, OverheadCost

FIRST_CALL_EXTRA = 0.2  # of a draft call: a guess on the low side, on the demo pair 0.8
FLOPS_PER_US, BYTES_PER_US, LAYER_US = 20e3, 5e3, 20.0  # 20 GFLOP/s, 5 GB/s, dispatch of a layer's operators
# Microseconds on one core per token of a chain, with 2 to 4 tokens looked up at once, and more than a token takes to be
# read (docs/drafts.md).
CALL_US, TOKEN_US = 5.0, 5.0


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of an engine's model, for the default cost model."""

    num_layers: tuple[int, ...]  # of each segment
    layer_weights: int  # numbers in the matrices of one layer
    head_weights: int  # of the output head


def default_cost_model(target: ModelSize, draft: ModelSize | None = None, *, is_padded: bool = True) -> CostModel:
    """Returns the costs of an engine without a profile: one modest core, on which every row costs full price.

    Conservative: it has the whole machine as its only partition, so nothing is overlapped, and rows are never free.
    Rates are far below those of current cores. draft: the draft model, if one drafts.
    """
    segments = {(name, WHOLE): _segments(size) for name, size in ((TARGET, target), (DRAFT, draft)) if size}
    overhead = OverheadCost(200.0, 20.0, 10.0, 60.0, 10.0)
    costs = CostModel(segments, overhead, np.zeros(1), is_measured=False, is_padded=is_padded)
    if draft is None:
        return costs
    # The first call of a chain takes longer than further ones. Without this term the measured cost of short chains
    # would count against longer ones, and chains would get ever shorter.
    call_us = float(costs.call_us(DRAFT, WHOLE, 1, 1, 0)) + overhead.draft_us
    return replace(costs, overhead=replace(overhead, draft_round_us=FIRST_CALL_EXTRA * call_us))


def _segments(size: ModelSize) -> tuple[CallCost, ...]:
    costs = []
    for index, layers in enumerate(size.num_layers):
        head = size.head_weights if index == len(size.num_layers) - 1 else 0
        weights = layers * size.layer_weights
        fixed_us = layers * LAYER_US + 4 * (weights + head) / BYTES_PER_US
        costs.append(CallCost(_line(fixed_us, 2 * weights / FLOPS_PER_US), logit_row_us=2 * head / FLOPS_PER_US))
    return tuple(costs)


def with_ngrams(costs: CostModel) -> CostModel:
    """Returns the costs of an engine in which n-grams draft, with the whole device as its only partition."""
    segments = {(TARGET, WHOLE): costs.segments[TARGET, WHOLE], (DRAFT, WHOLE): (CallCost(_line(CALL_US, TOKEN_US)),)}
    step = costs.overhead
    overhead = OverheadCost(step.step_us, step.step_sequence_us, step.step_row_us, 0.0, 0.0)
    return replace(costs, segments=segments, overhead=overhead, drafts_at_once=False, num_idle=None)


def _line(first_us: float, row_us: float) -> Curve:
    return Curve.from_slopes(np.zeros(1), first_us, np.array([row_us]))
