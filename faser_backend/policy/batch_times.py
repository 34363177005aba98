"""Predicted times of all the steps that a batch could make next: asked of the cost model once, then looked up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import numpy as np

from faser_backend.policy.cost_model import DRAFT, TARGET, CostModel

_GRID = 48  # row counts at which the cost model is asked; between them times are interpolated
_CONTEXT_STEP = 32
_MAX_TIMES = 512  # batches whose predicted times are kept, some kB each: working one out takes 0.1 to 0.2 ms


class BatchTimes:
    """Predicted microseconds of a batch on one partition."""

    def __init__(self, costs: CostModel, size: int, context: int, partition: str, max_draft_tokens: int) -> None:
        most = size * max_draft_tokens
        extra = np.unique(np.linspace(0, most, min(most + 1, _GRID)).astype(np.int64))
        rows = size + extra
        times = costs.call_us(TARGET, partition, rows, size, context, max_rows=1)
        grid = np.arange(most + 1)
        self.target_us = np.interp(grid, extra, times)  # [N + 1] with 0..N rows beside the anchors, unpadded
        self.overhead_us = np.interp(grid, extra, costs.overhead.step(size, rows))  # [N + 1] around the calls
        two, one = costs.call_us(TARGET, partition, size, size, context, max_rows=np.array([2, 1]))
        self.column_us = float(two - one)  # for every row of the longest chain
        active = np.unique(np.linspace(1, size, min(size, _GRID)).astype(np.int64))
        times = costs.call_us(DRAFT, partition, active, active, context, num_logit_rows=active)
        times = times + costs.overhead.draft_call(active)
        self.draft_us = np.interp(np.arange(size + 1), active, times)  # [B + 1] of a call for 0..B sequences
        self.trim_us = np.asarray(costs.overhead.trim_call(np.arange(size + 1)))  # [B + 1] that confidence adds to it
        self.trimmed_draft_us = self.draft_us + self.trim_us  # [B + 1]

        self.lengths = np.arange(1, max_draft_tokens + 1)  # [K] of uniform rounds, in which all draft alike
        num_extra = size * self.lengths
        self.uniform_target_us = self.target_us[num_extra] + self.lengths * self.column_us  # [K]
        self.uniform_overhead_us = self.overhead_us[num_extra]  # [K]
        self.draft_round_us = float(costs.overhead.draft_round(size))
        self.uniform_draft_us = self.draft_round_us + self.lengths * self.draft_us[size]  # [K]
        self.uniform_trim_us = self.lengths * self.trim_us[size]  # [K] where confidence decides after every call
        self.step_us = self.target_us + self.overhead_us  # [N + 1] without drafting and padding
        # By is_trimmed: for which version of what is believed, tokens per microsecond, length.
        self.best_uniform: dict[bool, tuple[Hashable, float, int]] = {}

    @property
    def size(self) -> int:
        return self.draft_us.size - 1

    def chains_us(self, lengths: np.ndarray, *, is_trimmed: bool) -> float:
        """Drafting chains of these lengths [B]: each call is for those that are not done yet.

        is_trimmed: confidence decided after every call which chains go on.
        """
        longest = int(lengths.max(initial=0))
        active = np.count_nonzero(np.arange(longest)[:, None] < lengths, axis=1)
        call_us = self.trimmed_draft_us if is_trimmed else self.draft_us
        return float(call_us[active].sum()) + (self.draft_round_us if longest else 0.0)

    def verify_us(self, num_extra: int, num_columns: int) -> float:
        """A step with so many rows beside the anchors, num_columns of them in the longest chain, without drafting."""
        num_extra = min(num_extra, self.target_us.size - 1)
        return float(self.target_us[num_extra] + self.overhead_us[num_extra]) + num_columns * self.column_us


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
