"""What drafting by n-grams costs: next to nothing, which policies that weigh time have to be told.

The draft's entries of a cost model are replaced by those of a look-up on the host; the target's stay as they are.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from faser_backend.core.decision import WHOLE
from faser_backend.policy.cost_model import DRAFT, TARGET, CallCost, CostModel, Curve

# Microseconds on one core per token of a chain, with 2 to 4 tokens looked up at once, and more than a token takes to be
# read (docs/drafts.md).
CALL_US, TOKEN_US = 5.0, 5.0
_NOTHING = Curve(np.array([0.0, 1.0]), np.zeros(2))
_LOOK_UP = CallCost(rows=Curve.from_slopes(np.zeros(1), CALL_US, np.array([TOKEN_US])), keys=_NOTHING)


def with_ngrams(costs: CostModel) -> CostModel:
    """The costs of an engine in which n-grams draft. Its partition is the whole device: there is nothing to overlap."""
    segments = {(TARGET, WHOLE): costs.segments[TARGET, WHOLE], (DRAFT, WHOLE): (_LOOK_UP,)}
    drafting = ("draft_us", "draft_sequence_us", "draft_round_us", "draft_round_sequence_us")
    overhead = replace(costs.overhead, **dict.fromkeys((*drafting, "trim_us", "trim_sequence_us"), 0.0))
    return replace(costs, segments=segments, overhead=overhead)
