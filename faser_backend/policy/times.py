"""How long the steps take that a batch could make next: predicted by the cost model, corrected by what was measured.

The logarithm of measured over predicted time is taken for the sum of two things: how slow the machine is at the moment,
which changes fast and changes every call alike, and how wrong the model is about calls of so many rows, which hardly
changes. Only the second one decides between plain and speculative decoding. What was learned of calls of one size
stands for the sizes about it until those are seen.
"""

from __future__ import annotations

import math
from copy import copy
from functools import lru_cache, partial

import numpy as np

from faser_backend.core.decision import WHOLE
from faser_backend.core.record import StepRecord
from faser_backend.policy.cost_model import DRAFT, TARGET, CostModel

_GRID = 48  # row counts at which the cost model is asked; between them times are interpolated
_CONTEXT_STEP = 32  # tokens to which contexts are rounded up, so that predictions hold for some steps
_MAX_TIMES = 512  # batches whose predicted times are kept, some kB each: working one out takes 0.1 to 0.2 ms

_NUM_BUCKETS = 14  # powers of two of rows
_MOST_WEIGHT = 64.0  # steps that a bucket's error is the mean of
_PRIOR_WEIGHT = 0.05  # of what is known of other calls, in steps
_FADE = 0.999  # of every weight, per step
_MACHINE_SHARE = 0.25  # of a surprise about a well-known bucket that the machine's present speed takes
_FEW_STEPS = 2.5  # until so many were seen, a surprise is the model's error and not the machine's
_LOG_OUTLIER = math.log(2.0)  # a step that the machine lost to something else says little: it is cut there
_SMOOTH_EVERY = 8  # observations of well-known calls
_BUCKETS = np.arange(_NUM_BUCKETS)
_NEARNESS = 16.0 ** -np.abs(np.subtract.outer(_BUCKETS, _BUCKETS))  # [n, n]

Calls = tuple[str, str]  # (model, partition)


class BatchTimes:
    """Microseconds of a batch of B sequences on one partition."""

    def __init__(self, costs: CostModel, max_draft_tokens: int, size: int, context: int, partition: str) -> None:
        most = size * max_draft_tokens
        extra = np.unique(np.linspace(0, most, min(most + 1, _GRID)).astype(np.int64))
        rows = size + extra
        target_us = costs.call_us(TARGET, partition, rows, size, context)
        grid = np.arange(most + 1)
        self.size, self.partition = size, partition
        # [N + 1] of a step with 0..N rows beside the anchors, without drafting.
        self.verify_us = np.interp(grid, extra, target_us + costs.overhead.step(size, rows))
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
        draft = errors.ratios(DRAFT, self.partition, self._log2_active)
        times.verify_us = self.verify_us * errors.ratios(TARGET, self.partition, self._log2_rows)
        times.draft_us, times.trim_us = self.draft_us * draft, self.trim_us * draft
        times.draft_round_us = self.draft_round_us * float(draft[-1])
        return times

    def chains_us(self, lengths: np.ndarray, *, is_trimmed: bool = False) -> float:
        """Returns the time of drafting chains of these lengths [B]: each call is for those that are not done yet.

        is_trimmed: confidence decided after every call which chains go on.
        """
        longest = int(lengths.max(initial=0))
        active = np.count_nonzero(np.arange(longest)[:, None] < lengths, axis=1)
        call_us = self.draft_us + self.trim_us if is_trimmed else self.draft_us
        return float(call_us[active].sum()) + (self.draft_round_us if longest else 0.0)

    def step_us(self, num_extra: int) -> float:
        """Returns the time of a step with so many rows beside the anchors, without drafting."""
        return float(self.verify_us[min(num_extra, self.verify_us.size - 1)])


class BatchTimesCache:
    """Predicted times of the batches that were asked about last."""

    def __init__(self, costs: CostModel, max_draft_tokens: int) -> None:
        self.costs = costs
        self._known = lru_cache(_MAX_TIMES)(partial(BatchTimes, costs, max_draft_tokens))

    def of(self, size: int, context: int, partition: str) -> BatchTimes:
        return self._known(size, -(-context // _CONTEXT_STEP) * _CONTEXT_STEP, partition)


class TimeErrors:
    """Measured over predicted time of target calls and draft calls: running estimates by model, partition and power of
    two of rows."""

    def __init__(self, optimism: float = 0.0) -> None:
        """optimism: what the log of the time of target calls is taken for less at sizes that were not seen: where costs
        are guesses, what is never tried is never known."""
        self._optimism = optimism
        self._known: dict[Calls, np.ndarray] = {}  # [2, n] error of the log and its weight
        self._log_machine = 0.0
        self._num_observed = 0
        self._logs: dict[Calls, np.ndarray] = {}  # [n] smoothed, for a few observations

    def ratios(self, model: str, partition: str, log2_rows: np.ndarray) -> np.ndarray:
        """Returns measured over predicted time of calls with these log2 of rows, the machine's present speed aside."""
        return np.exp(np.interp(log2_rows, _BUCKETS, self._smoothed_logs(model, partition)))

    def knows(self, model: str, partition: str) -> bool:
        """Whether calls of the model were seen there at all."""
        return (model, partition) in self._known

    def observe(self, model: str, partition: str, num_rows: float, predicted_us: float, measured_us: float) -> None:
        """Learns from one step's calls of a model."""
        if predicted_us <= 0.0:
            return
        logs = self._smoothed_logs(model, partition)
        bucket = min(round(math.log2(max(num_rows, 1.0))), _NUM_BUCKETS - 1)
        surprise = math.log(max(measured_us, 1.0) / predicted_us) - float(logs[bucket]) - self._log_machine
        error, weight = self._known.setdefault((model, partition), np.zeros((2, _NUM_BUCKETS)))
        if weight[bucket] > _FEW_STEPS:
            surprise = min(max(surprise, -_LOG_OUTLIER), _LOG_OUTLIER)
        if weight[bucket] < 0.5:
            error[bucket] = logs[bucket]
        share = 1.0 / (weight[bucket] + 1.0)
        error[bucket] += share * surprise
        self._log_machine += (1.0 - share) * _MACHINE_SHARE * surprise
        weight *= _FADE
        weight[bucket] = min(weight[bucket] + 1.0, _MOST_WEIGHT)
        self._num_observed += 1
        if weight[bucket] < _FEW_STEPS + 2.0 or self._num_observed % _SMOOTH_EVERY == 0:
            self._logs.clear()

    def observe_step(self, record: StepRecord, known: BatchTimesCache, *, knows_who: bool) -> None:
        """Learns how long a step's phases took beside what was predicted of them. knows_who: whether the draft made
        the chains is known."""
        plan, size, costs = record.plan, record.num_tokens.size, known.costs
        partition = plan.decision.partition
        context = costs.batch_context(record.num_tokens.tolist())
        times = known.of(size, context, partition)
        num_rows = int(record.verification.num_kept.sum())
        verify_us = times.step_us(num_rows - size)
        if plan.drafts:
            lengths = np.array(plan.num_ahead_tokens)
            drafting = known.of(lengths.size, context, partition)
            verify_us += times.lanes_us
        else:
            lengths, drafting = record.frontier.num_drafted * record.frontier.is_main, times
        reading_us = _target_reading_us(record, costs) + record.draft_prefill_us
        measured_us = record.step_us - reading_us - record.propose_us + record.overlap_us
        self.observe(TARGET, partition, num_rows, verify_us, measured_us)
        if knows_who and lengths.any() and record.propose_us:
            draft_us = drafting.chains_us(lengths, is_trimmed=plan.decision.trim is not None)
            self.observe(DRAFT, partition, int(np.count_nonzero(lengths)), draft_us, record.propose_us)

    def _smoothed_logs(self, model: str, partition: str) -> np.ndarray:
        """[n] as `_smoothed`, of a few observations ago."""
        if (model, partition) not in self._logs:
            self._logs[model, partition] = self._smoothed(model, partition)
        return self._logs[model, partition]

    def _smoothed(self, model: str, partition: str) -> np.ndarray:
        """[n] errors of the logs. Where nothing is known of a partition, calls on the whole device stand for them, and
        where nothing is known of a model, all calls do: a slow machine is slow with everything."""
        prior: np.ndarray | float
        if partition != WHOLE:
            prior = self._smoothed(model, WHOLE)
        else:
            every = list(self._known.values())
            total = sum(float(weight.sum()) for _, weight in every)
            prior = sum(float(error @ weight) for error, weight in every) / total if total else 0.0
        if (model, partition) not in self._known:
            return np.full(_NUM_BUCKETS, prior)
        error, weight = self._known[model, partition]
        # 1 at the buckets that were seen, less far away from them, as much as their own evidence is.
        near = _NEARNESS.max(axis=1, where=weight > 0.0, initial=1e-9)
        hope = self._optimism * (1.0 - near) if model == TARGET else 0.0
        return -hope + (_NEARNESS @ (error * weight) + _PRIOR_WEIGHT * prior * near) / (
            _NEARNESS @ weight + _PRIOR_WEIGHT * near
        )


def _target_reading_us(record: StepRecord, costs: CostModel) -> float:
    """Time of the step in which the target read prompts. A device that computes while the host goes on shows the host
    next to nothing of it: then the predicted time."""
    chunks = record.plan.prefills
    if not chunks:
        return 0.0
    num_rows = [chunk.num_tokens for chunk in chunks]
    context = costs.batch_context([chunk.start + 1 for chunk in chunks])
    us = costs.call_us(TARGET, WHOLE, sum(num_rows), len(num_rows), context, max_rows=max(num_rows), num_logit_rows=0)
    return record.prefill_us if record.prefill_us > 0.5 * float(us) else float(us)
