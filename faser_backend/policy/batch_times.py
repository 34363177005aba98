"""Predicted times of all the steps that a batch could make next: asked of the cost model once, then looked up."""

from __future__ import annotations

from collections import OrderedDict
from copy import copy

import numpy as np

from faser_backend.policy.cost_model import DRAFT, TARGET, CostModel
from faser_backend.policy.time_errors import TimeErrors

_GRID = 48  # row counts at which the cost model is asked; between them times are interpolated
_CONTEXT_STEP = 32
_MAX_TIMES = 512  # batches whose predicted times are kept, some kB each: working one out takes 0.1 to 0.2 ms


class BatchTimes:
    """Predicted microseconds of a batch of B sequences on one partition."""

    def __init__(self, costs: CostModel, size: int, context: int, partition: str, max_draft_tokens: int) -> None:
        most = size * max_draft_tokens
        extra = np.unique(np.linspace(0, most, min(most + 1, _GRID)).astype(np.int64))
        rows = size + extra
        target_us = costs.call_us(TARGET, partition, rows, size, context, max_rows=1)
        grid = np.arange(most + 1)
        self.size, self.partition = size, partition
        # [N + 1] of a step with 0..N rows beside the anchors, unpadded, without drafting.
        self.verify_us = np.interp(grid, extra, target_us + costs.overhead.step(size, rows))
        two, one = costs.call_us(TARGET, partition, size, size, context, max_rows=np.array([2, 1]))
        self.column_us = float(two - one)  # more for every row of the longest chain, where a runtime pads to it
        active = np.unique(np.linspace(1, size, min(size, _GRID)).astype(np.int64))
        times = costs.call_us(DRAFT, partition, active, active, context, num_logit_rows=active)
        times = times + costs.overhead.draft_call(active)
        self.draft_us = np.interp(np.arange(size + 1), active, times)  # [B + 1] of a call for 0..B sequences
        self.trim_us = np.asarray(costs.overhead.trim_call(np.arange(size + 1)))  # [B + 1] that confidence adds to it
        self.draft_round_us = float(costs.overhead.draft_round(size))
        self.lanes_us = costs.overhead.lanes_us
        self._log2_rows = np.log2(size + grid)
        self._log2_active = np.log2(np.maximum(np.arange(size + 1), 1))

    def corrected(self, errors: TimeErrors) -> BatchTimes:
        """Returns the same times as they turned out to be."""
        times = copy(self)
        target = errors.ratios(TARGET, self.partition, self._log2_rows)
        draft = errors.ratios(DRAFT, self.partition, self._log2_active)
        times.verify_us, times.column_us = self.verify_us * target, self.column_us * float(target[0])
        times.draft_us, times.trim_us = self.draft_us * draft, self.trim_us * draft
        times.draft_round_us = self.draft_round_us * float(draft[-1])
        return times

    def chains_us(self, lengths: np.ndarray, *, is_trimmed: bool) -> float:
        """Returns the time of drafting chains of these lengths [B]: each call is for those that are not done yet.

        is_trimmed: confidence decided after every call which chains go on.
        """
        longest = int(lengths.max(initial=0))
        active = np.count_nonzero(np.arange(longest)[:, None] < lengths, axis=1)
        call_us = self.draft_us + self.trim_us if is_trimmed else self.draft_us
        return float(call_us[active].sum()) + (self.draft_round_us if longest else 0.0)

    def step_us(self, num_extra: int, num_columns: int) -> float:
        """Returns the time of a step with so many rows beside the anchors, num_columns of them in the longest chain,
        without drafting."""
        return float(self.verify_us[min(num_extra, self.verify_us.size - 1)]) + num_columns * self.column_us


class BatchTimesCache:
    """Times of the batches that were asked about last."""

    def __init__(self, costs: CostModel, max_draft_tokens: int) -> None:
        self._costs = costs
        self._max_draft_tokens = max_draft_tokens
        self._known: OrderedDict[tuple[int, int, str], BatchTimes] = OrderedDict()

    def of(self, size: int, context: int, partition: str) -> BatchTimes:
        """Kept for the contexts of a few steps: rounded up to _CONTEXT_STEP tokens, they change slowly."""
        key = (size, -(-context // _CONTEXT_STEP), partition)
        times = self._known.get(key)
        if times is None:
            while len(self._known) >= _MAX_TIMES:
                self._known.popitem(last=False)
            times = BatchTimes(self._costs, size, key[1] * _CONTEXT_STEP, partition, self._max_draft_tokens)
            self._known[key] = times
        return times
