"""The prefill phase: prompt chunks go through the target and, where the request drafts, through the draft.

Few requests want the logits of their prompt. Chunks of those run alone, in calls of at most MAX_LOGIT_ROWS rows, which
bounds the memory of the logits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from faser_backend.core.errors import blaming
from faser_backend.core.plan import PrefillChunk, StepPlan
from faser_backend.core.ports import Clock, ModelRunner, Partition, Sampler
from faser_backend.core.request import NUM_CONTEXT_TOP
from faser_backend.core.sequence import Sequence
from faser_backend.pipeline.propose import Proposer
from faser_backend.pipeline.rows import run_model, token_range_rows
from faser_backend.pipeline.timing import PhaseTimes
from faser_backend.policy.block_manager import BlockManager

MAX_LOGIT_ROWS = 64  # of a call: 32 MB of logits at 128k tokens, and enough rows that weights are read for many at once


class PrefillTimes(NamedTuple):
    """Microseconds spent in each model."""

    target_us: float
    draft_us: float


class Prefiller:
    """Reads prompts, one plan at a time."""

    def __init__(
        self, blocks: BlockManager, sampler: Sampler, clock: Clock, times: PhaseTimes, proposer: Proposer | None
    ) -> None:
        self._blocks = blocks
        self._sampler = sampler
        self._clock = clock
        self._times = times
        self._proposer = proposer

    def prefill(self, partition: Partition, plan: StepPlan) -> PrefillTimes:
        """Runs prompt chunks through the target and, if wanted, the draft. First the draft reads missed tokens."""
        start_ns = self._clock.now_ns()
        if plan.draft_prefills:
            assert self._proposer is not None
            self._proposer.prefill(partition, plan.draft_prefills)
            self._times.start()
        caught_up_ns = self._clock.now_ns()
        if not plan.prefills:
            return PrefillTimes(0.0, (caught_up_ns - start_ns) / 1e3)
        wanting = [chunk for chunk in plan.prefills if _takes_logits(chunk.sequence, partition.target.vocab_size)]
        plain = [chunk for chunk in plan.prefills if chunk not in wanting] if wanting else plan.prefills
        if plain:
            self._read(partition.target, plain)
        for chunk in wanting:
            self._read_with_logits(partition.target, chunk)
        read_ns = self._clock.now_ns()
        if self._proposer is not None and plan.decision.prefills_draft:
            self._proposer.prefill(partition, [chunk for chunk in plan.prefills if _is_for_draft(chunk)])
            self._times.start()
        end_ns = self._clock.now_ns()
        for sequence, start, num_tokens in plan.prefills:
            sequence.target_len = stop = start + num_tokens
            self._blocks.publish(sequence.slot, sequence.token_ids, stop, sequence.draft_len)
        self._times.lap("commit")
        return PrefillTimes((read_ns - caught_up_ns) / 1e3, (caught_up_ns - start_ns + end_ns - read_ns) / 1e3)

    def _read(self, target: ModelRunner, chunks: list[PrefillChunk]) -> None:
        sequences = [chunk.sequence for chunk in chunks]
        starts = [chunk.start for chunk in chunks]
        stops = [chunk.start + chunk.num_tokens for chunk in chunks]
        tables = self._blocks.block_tables[[sequence.slot for sequence in sequences]]
        rows = token_range_rows(sequences, starts, stops, tables, with_logits=False)
        self._times.lap("prefill_rows")
        run_model(target, rows)
        self._times.lap("prefill_model")

    def _read_with_logits(self, target: ModelRunner, chunk: PrefillChunk) -> None:
        """Stores every row's logits, or the requested part of them, in the sequence."""
        sequence, first, num_tokens = chunk
        tables = self._blocks.block_tables[[sequence.slot]]
        most = MAX_LOGIT_ROWS if target.max_logit_rows is None else min(MAX_LOGIT_ROWS, target.max_logit_rows)
        for start in range(first, first + num_tokens, most):
            stop = min(start + most, first + num_tokens)
            rows = token_range_rows([sequence], [start], [stop], tables, with_logits=False)
            rows = replace(rows, logit_rows=np.arange(rows.num_rows))
            self._times.lap("prefill_rows")
            logits = self._sampler.to_host(run_model(target, rows))
            try:
                _keep(sequence, start, stop, logits)
            except Exception as error:
                sequence.fail("return_context_logits", error)
            self._times.lap("prefill_model")


def context_logits(sequence: Sequence, vocab_size: int) -> np.ndarray:
    """Returns the array [num_prompt_tokens, V] float32 that is filled while the prompt is read. After a preemption rows
    are read and written again."""
    if sequence.context_logits is None:
        sequence.context_logits = np.empty((sequence.num_prompt_tokens, vocab_size), np.float32)
    return sequence.context_logits


def _takes_logits(sequence: Sequence, vocab_size: int) -> bool:
    """Returns whether the prompt is read with logits. If their memory cannot be allocated, the sequence fails."""
    if sequence.owes_context_logits and sequence.failure is None:
        try:
            if sequence.request.wants_context_logits:
                context_logits(sequence, vocab_size)
            return True
        except Exception as error:
            sequence.fail("return_context_logits", error)
    return False


def _keep(sequence: Sequence, start: int, stop: int, logits: np.ndarray) -> None:
    """Stores the requested values of prompt positions [start, stop) in the sequence."""
    if sequence.request.wants_context_logits:
        context_logits(sequence, logits.shape[1])[start:stop] = logits
    if sequence.request.wants_context_log_probs:
        next_ids = sequence.token_ids[start + 1 : stop + 1]
        found = blaming("return_context_log_probs", _log_probs, logits, next_ids)
        context_log_probs(sequence)[start:stop] = found


def context_log_probs(sequence: Sequence) -> np.ndarray:
    """The same of EngineOutput.context_log_probs. The last row's logits are those of the first output token."""
    if sequence.context_log_probs is None:
        shape = sequence.num_prompt_tokens - 1, 1 + 2 * NUM_CONTEXT_TOP
        sequence.context_log_probs = np.zeros(shape, np.float32)
    return sequence.context_log_probs


def _log_probs(logits: np.ndarray, next_ids: np.ndarray) -> np.ndarray:
    """Returns rows of EngineOutput.context_log_probs from logits [n, V]. A small V repeats its last alternative."""
    values = logits - logits.max(axis=1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
    count = min(NUM_CONTEXT_TOP, logits.shape[1])
    best = np.argpartition(values, -count, axis=1)[:, -count:]
    order = np.argsort(-np.take_along_axis(values, best, axis=1), axis=1, kind="stable")
    best = np.pad(np.take_along_axis(best, order, axis=1), ((0, 0), (0, NUM_CONTEXT_TOP - count)), mode="edge")
    own = np.take_along_axis(values, next_ids[:, None], axis=1)
    return np.hstack([own, best, np.take_along_axis(values, best, axis=1)])


def _is_for_draft(chunk: PrefillChunk) -> bool:
    """Returns whether the draft may read this chunk too: the request drafts and the draft does not lag."""
    return chunk.sequence.request.max_draft_tokens != 0 and chunk.sequence.draft_len >= chunk.start
