"""Predicted times of model calls and steps, in microseconds, and their correction by measured steps.

`CostModel` predicts a call from its shape with one formula for every device. Its coefficients are non-negative, so that
more rows, sequences or context never appear cheaper. `faser profile` fits it (profiling/cost_fit.py); without a profile
serving/profile_store.py guesses. `BatchTimes` predicts the steps of a batch.

`TimeErrors` splits the logarithm of measured over predicted time into two parts: how slow the machine is at present,
which is common to all calls, and how wrong the model is about calls of so many rows, which hardly changes. Only the
second part decides between plain and speculative decoding. A size that was not seen yet takes the error of its
neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from faser_backend.core.decision import WHOLE
from faser_backend.core.plan import PrefillChunk, StepRecord

DRAFT, TARGET = "draft", "target"
# Padded columns all read one block, which stays in the caches. On ONNX Runtime, 32 sequences of 20 to 480 tokens took
# 8.5 ms through padded attention where 250 tokens each took 6.2 and 480 each 13.4.
_PADDING_SHARE = 1 / 3
FAR = 1e9  # where the last slope of a curve is pinned: beyond every call
Numbers = np.ndarray | int | float


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """A nondecreasing piecewise-linear function: values_us at knots; the last slope continues."""

    knots: np.ndarray  # [n] float64, ascending
    values_us: np.ndarray  # [n] float64, >= 0, nondecreasing

    @classmethod
    def from_slopes(cls, knots: np.ndarray, first_us: float, slopes: np.ndarray) -> Curve:
        """Makes a curve of knots [n] and the slope [n] right of each; the last slope holds to FAR."""
        ends = np.append(knots, FAR)
        rises = np.concatenate([[first_us], slopes * np.diff(ends)])
        return cls(ends.astype(np.float64), np.cumsum(rises))

    def __call__(self, x: Numbers) -> np.ndarray:
        return np.interp(x, self.knots, self.values_us)


NO_TIME = Curve(np.array([0.0, FAR]), np.zeros(2))


@dataclass(frozen=True, slots=True, eq=False)
class CallCost:
    """Microseconds of one segment on one partition.

    rows(T) + keys(B L) + B sequence_us + B Q cell_us + B Q L cell_key_us + R logit_row_us, where T = rows,
    B = sequences, Q = most rows of one sequence, L = columns of keys that the runtime reads, R = rows of
    logits. B L stands for reading the paged keys, B Q L for attention, rows(T) for the matrix products.
    """

    rows: Curve
    keys: Curve = NO_TIME
    sequence_us: float = 0.0
    cell_us: float = 0.0
    cell_key_us: float = 0.0
    logit_row_us: float = 0.0

    def us(
        self, rows: Numbers, sequences: Numbers, max_rows: Numbers, columns: Numbers, logit_rows: Numbers
    ) -> Numbers:
        """Returns the microseconds [N] of N calls, numbers or [N]."""
        cells = sequences * max_rows
        total = self.rows(rows) + self.keys(sequences * columns) + self.sequence_us * sequences
        return total + cells * (self.cell_us + self.cell_key_us * columns) + self.logit_row_us * logit_rows


@dataclass(frozen=True, slots=True)
class OverheadCost:
    """Microseconds around the model calls of a step: scheduling, packing, sampling, acceptance, commit. The methods say
    what each is multiplied by. Exits and lanes default to guesses on the high side."""

    step_us: float
    step_sequence_us: float
    step_row_us: float
    draft_us: float
    draft_sequence_us: float
    exit_us: float = 150.0
    exit_row_us: float = 5.0
    lanes_us: float = 100.0  # hand-over to a second lane and back, in a step that overlaps its phases
    draft_round_us: float = 0.0  # that the first draft call takes longer, as the caches hold the target's data
    draft_round_sequence_us: float = 0.0
    trim_us: float = 0.0  # of a decision by confidence: after a draft call which chains go on, at last which rows
    trim_sequence_us: float = 0.0

    def step(self, num_sequences: Numbers, num_rows: Numbers) -> Numbers:
        return self.step_us + num_sequences * self.step_sequence_us + num_rows * self.step_row_us

    def draft_call(self, num_sequences: Numbers) -> Numbers:
        return self.draft_us + num_sequences * self.draft_sequence_us

    def draft_round(self, num_sequences: Numbers) -> Numbers:
        return self.draft_round_us + num_sequences * self.draft_round_sequence_us

    def trim_call(self, num_sequences: Numbers) -> Numbers:
        return self.trim_us + num_sequences * self.trim_sequence_us

    def exit(self, num_rows: Numbers) -> Numbers:
        return self.exit_us + num_rows * self.exit_row_us


@dataclass(frozen=True, slots=True, eq=False)
class CostModel:
    """Predictions for a draft and a target on the partitions that were measured.

    segments: (model, partition) -> cost of each segment in order. key_columns [n]: how many columns of keys the
    runtime reads for n tokens (it rounds up); longer contexts count as they are. is_padded: attention treats every
    sequence as having the call's longest context and most rows. drafts_at_once: by the device; no chain ends early.
    num_idle: rows of a block beside one for each token, see ModelSpec; None: each token takes a call.
    """

    segments: Mapping[tuple[str, str], tuple[CallCost, ...]]
    overhead: OverheadCost
    key_columns: np.ndarray
    is_measured: bool
    is_padded: bool = True
    drafts_at_once: bool = False
    num_idle: int | None = None

    @property
    def partitions(self) -> tuple[str, ...]:
        """Names of the partitions with costs of both models; "whole" is always one."""
        drafting = {partition for model, partition in self.segments if model == DRAFT}
        return tuple(partition for model, partition in self.segments if model == TARGET and partition in drafting)

    def batch_context(self, num_tokens: Sequence[float]) -> int:
        """Returns one context length for all sequences of a call: their mean, moved towards the longest if attention
        pads to it."""
        mean = sum(num_tokens) / len(num_tokens)
        return round(mean + (max(num_tokens) - mean) * _PADDING_SHARE) if self.is_padded else round(mean)

    def call_us(
        self,
        model: str,
        partition: str,
        num_rows: Numbers,
        num_sequences: Numbers,
        context_tokens: Numbers,
        *,
        max_rows: Numbers | None = None,
        num_logit_rows: Numbers | None = None,
        first_segment: int = 0,
        last_segment: int | None = None,
    ) -> np.ndarray:
        """Returns the microseconds [N] of segments [first_segment, last_segment) for N candidate calls, numbers or [N].

        context_tokens: tokens in the KV pool before the call, see batch_context. max_rows: most rows of one sequence,
        by default equal for all; used only if padded. num_logit_rows: default every row (a verification); 0 for a
        prefill, num_sequences for a draft call. Raises ValueError for an unknown model or partition.
        """
        costs = self.segments.get((model, partition), ())[first_segment:last_segment]
        if not costs:
            raise ValueError(f"segment {first_segment} of {model!r} on {partition!r}: unknown")
        rows, sequences = np.asarray(num_rows, np.float64), np.asarray(num_sequences, np.float64)
        mean_rows = rows / np.maximum(sequences, 1.0)
        if not self.is_padded:
            max_rows = mean_rows
        elif max_rows is None:
            max_rows = np.ceil(mean_rows)
        num_tokens = context_tokens + max_rows
        index = np.minimum(num_tokens, self.key_columns.size - 1).astype(np.int64)
        columns = np.maximum(self.key_columns[index], num_tokens)
        logit_rows = rows if num_logit_rows is None else num_logit_rows
        return np.asarray(sum(cost.us(rows, sequences, max_rows, columns, logit_rows) for cost in costs))

    def drafting_us(self, partition: str, length: int, num_sequences: Numbers, context_tokens: Numbers) -> np.ndarray:
        """Returns the microseconds [N] of the calls that draft `length` tokens of each sequence."""
        num_calls, tokens = (length, num_sequences) if self.num_idle is None else (1, num_sequences * length)
        rows = tokens + num_sequences * (self.num_idle or 0)
        return num_calls * self.call_us(DRAFT, partition, rows, num_sequences, context_tokens, num_logit_rows=tokens)


# -- times of a batch, corrected by what was measured ------------------------------------------------------------

_CONTEXT_STEP = 32  # tokens, more for long contexts: contexts are rounded up, so that predictions hold for some steps
_MAX_TIMES = 512  # batches whose predicted times are kept, some kB each: working one out takes 0.1 to 0.2 ms

_NUM_BUCKETS = 14  # powers of two of rows
_MOST_WEIGHT = 64.0  # steps that a bucket's error is the mean of
_FADE = 0.999  # of every weight, per step
_MACHINE_SHARE = 0.25  # of a surprise about a well-known bucket that the machine's present speed takes
_FEW_STEPS = 2.5  # until so many were seen, a surprise is the model's error and not the machine's
_LOG_OUTLIER = math.log(2.0)  # a step that the machine lost to something else says little: it is cut there
READ_ROWS = 256  # of a prompt that a draft reads at a time; their bucket stands for all of its reading
_BUCKETS = np.arange(_NUM_BUCKETS)
_NEARNESS = 16.0 ** -np.abs(np.subtract.outer(_BUCKETS, _BUCKETS))  # [n, n] what a step says about other buckets

Calls = tuple[str, str]  # (model, partition)


class BatchTimes:
    """Microseconds of a batch of B sequences on one partition."""

    def __init__(self, costs: CostModel, max_draft_tokens: int, size: int, context: int, partition: str) -> None:
        rows, active = np.arange(size, size * (max_draft_tokens + 1) + 1), np.arange(size + 1)
        draft_us = costs.drafting_us(partition, 1, active, context)
        self.draft_round_us = float(costs.overhead.draft_round(size))
        if costs.num_idle is not None:  # a token takes its row, the first one the rest of the call
            more_us = costs.drafting_us(partition, max_draft_tokens, active, context) - draft_us
            first_us, draft_us = float(draft_us[size]), np.maximum(more_us, 0.0) / max(max_draft_tokens - 1, 1)
            self.draft_round_us += max(first_us - float(draft_us[size]), 0.0)
        self.size, self.partition = size, partition
        # [N + 1] of a step with 0..N rows beside the anchors, without drafting.
        self.verify_us = costs.call_us(TARGET, partition, rows, size, context) + costs.overhead.step(size, rows)
        self.draft_us: np.ndarray = draft_us + costs.overhead.draft_call(active)  # [B + 1] of a call for 0..B sequences
        self.trim_us = np.asarray(costs.overhead.trim_call(active))  # [B + 1] of a decision by confidence
        self.drafts_at_once, self.is_measured = costs.drafts_at_once, costs.is_measured
        self.lanes_us = costs.overhead.lanes_us
        self._log2_rows, self._log2_active = np.log2(rows), np.log2(np.maximum(active, 1))

    def corrected(self, errors: TimeErrors) -> BatchTimes:
        """Returns the times corrected by what was measured."""
        times = copy(self)
        draft = errors.ratios(DRAFT, self.partition, self._log2_active)
        times.verify_us = self.verify_us * errors.ratios(TARGET, self.partition, self._log2_rows)
        if self.is_measured:  # fewer rows take no longer: a slow start must not make plain seem slow for ever
            times.verify_us = np.minimum.accumulate(times.verify_us[::-1])[::-1]
        times.draft_us, times.trim_us = self.draft_us * draft, self.trim_us * draft
        times.draft_round_us = self.draft_round_us * float(draft[-1])
        return times

    def chains_us(self, lengths: np.ndarray, *, is_trimmed: bool = False) -> float:
        """Returns the time of drafting chains of these lengths [B]: each call is for those that are not done yet.

        is_trimmed: confidence decided after every call which chains go on, and then which rows are verified.
        """
        longest = int(lengths.max(initial=0))
        active = np.count_nonzero(np.arange(longest)[:, None] < lengths, axis=1)
        call_us = self.draft_round_us + float(self.draft_us[active].sum()) if longest else 0.0
        last = np.count_nonzero(lengths)  # chains, whose rows are decided about
        return call_us + float(self.trim_us[active].sum() + self.trim_us[last]) if is_trimmed and last else call_us


class BatchTimesCache:
    """Predicted times of the latest batches."""

    def __init__(self, costs: CostModel, max_draft_tokens: int) -> None:
        self.costs = costs
        self._known = lru_cache(_MAX_TIMES)(partial(BatchTimes, costs, max_draft_tokens))

    def of(self, size: int, context: int, partition: str) -> BatchTimes:
        step = max(_CONTEXT_STEP, 1 << max(context.bit_length() - 3, 0))
        return self._known(size, -(-context // step) * step, partition)


class TimeErrors:
    """Running estimates of measured over predicted time, by model, partition and power of two of rows."""

    def __init__(self, optimism: float = 0.0) -> None:
        """optimism: subtracted from the log time of target calls at unseen sizes, so that they are tried."""
        self._optimism = optimism
        # [3, n] by bucket: error of the log, its weight in steps, and how near a measured bucket is.
        self.known: dict[Calls, np.ndarray] = {}
        self._log_machine = 0.0

    def ratios(self, model: str, partition: str, log2_rows: np.ndarray) -> np.ndarray:
        """Returns measured over predicted time of calls with these log2 of rows, less the machine's speed."""
        errors = self._errors(model, partition)
        if self._optimism and model == TARGET and (model, partition) in self.known:
            errors = errors - self._optimism * (1.0 - self.known[model, partition][2])
        return np.exp(np.interp(log2_rows, _BUCKETS, errors))

    def observe(self, model: str, partition: str, num_rows: float, predicted_us: float, measured_us: float) -> None:
        """Learns a mean of the log error from one step's calls: for their bucket, and for others by nearness."""
        if predicted_us <= 0.0:
            return
        bucket = min(round(math.log2(max(num_rows, 1.0))), _NUM_BUCKETS - 1)
        if (model, partition) not in self.known:
            self.known[model, partition] = np.stack([self._errors(model, partition), *np.zeros((2, _NUM_BUCKETS))])
        error, weight, nearest = self.known[model, partition]
        near = _NEARNESS[bucket]
        before = float(error[bucket])
        surprise = math.log(max(measured_us, 1.0) / predicted_us) - before - self._log_machine
        if weight[bucket] > _FEW_STEPS:
            surprise = min(max(surprise, -_LOG_OUTLIER), _LOG_OUTLIER)
        np.maximum(nearest, near, out=nearest)
        np.minimum(_FADE * weight + near, _MOST_WEIGHT * nearest, out=weight)
        share = near / weight
        error += share * (before + surprise - error)
        self._log_machine += (1.0 - float(share[bucket])) * _MACHINE_SHARE * surprise

    def _errors(self, model: str, partition: str) -> np.ndarray:
        """Returns the log errors [n]. An unseen partition takes those of the whole device, an unseen model the mean of
        all calls: a slow machine slows every call."""
        if (model, partition) in self.known:
            return self.known[model, partition][0]
        if partition != WHOLE:
            return self._errors(model, WHOLE)
        total = sum(float(weight.sum()) for _, weight, _ in self.known.values())
        mean = sum(float(error @ weight) for error, weight, _ in self.known.values()) / (total or 1.0)
        return np.full(_NUM_BUCKETS, mean)

    def observe_step(self, record: StepRecord, known: BatchTimesCache, *, learns_draft: bool) -> None:
        """Compares the times of a step's phases with their predictions; that of drafting if learns_draft."""
        plan, size = record.plan, record.num_tokens.size
        partition = plan.decision.partition
        context = known.costs.batch_context(record.num_tokens.tolist())
        times = known.of(size, context, partition)
        num_rows = int(record.verification.num_kept.sum())
        verify_us = float(times.verify_us[min(num_rows - size, times.verify_us.size - 1)])
        chains, drafting = record.frontier, times
        if plan.drafts:
            chains, drafting = record.ahead.frontier, known.of(len(plan.drafts), context, partition)
            verify_us += times.lanes_us
        lengths = chains.num_drafted * chains.is_main
        read_rows, read_us = _reading_of(TARGET, plan.prefills, known.costs) if plan.prefills else (0, 0.0)
        if record.num_mixed_rows:  # a call that also verifies reads the weights once
            read_us -= float(known.costs.call_us(TARGET, WHOLE, 0, 0, 0))
        measured_us = record.step_us - record.draft_prefill_us - record.propose_us + record.overlap_us
        self.observe(TARGET, partition, num_rows + read_rows, verify_us + read_us, measured_us)
        if learns_draft and lengths.any() and record.propose_us:
            draft_us = drafting.chains_us(lengths, is_trimmed=plan.decision.trim is not None)
            self.observe(DRAFT, partition, int(np.count_nonzero(lengths)), draft_us, record.propose_us)

    def observe_draft_reading(self, record: StepRecord, costs: CostModel) -> None:
        """Compares the time in which the draft read prompts with its prediction."""
        chunks = record.plan.draft_prefills + record.plan.prefills * record.plan.decision.prefills_draft
        self.observe(DRAFT, WHOLE, READ_ROWS, _reading_of(DRAFT, chunks, costs)[1], record.draft_prefill_us)


def _reading_of(model: str, chunks: Sequence[PrefillChunk], costs: CostModel) -> tuple[int, float]:
    """Returns the prompt rows that a model read in a step, and the time that is predicted for them."""
    num_rows = [chunk.num_tokens for chunk in chunks]
    context = costs.batch_context([chunk.start + 1 for chunk in chunks])
    us = costs.call_us(model, WHOLE, sum(num_rows), len(num_rows), context, max_rows=max(num_rows), num_logit_rows=0)
    return sum(num_rows), float(us)
