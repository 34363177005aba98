"""The prefill phase: prompt chunks go through the target and, where the request drafts, through the draft.

A chunk usually shares the call of the step's verification. Few requests want the logits of their prompt. Chunks of
those run alone, in calls of at most MAX_LOGIT_ROWS rows, which bounds the memory of the logits.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from faser_backend.core.batch import RowBatch
from faser_backend.core.decision import WHOLE
from faser_backend.core.errors import blaming
from faser_backend.core.plan import PrefillChunk, StepPlan
from faser_backend.core.ports import Clock, ModelRunner, Partition, PhaseTimes, Sampler
from faser_backend.core.request import NUM_CONTEXT_TOP
from faser_backend.core.sequence import Sequence
from faser_backend.pipeline.propose import Proposer
from faser_backend.pipeline.rows import piece_rows, run_model
from faser_backend.policy.block_manager import BlockManager

MAX_LOGIT_ROWS = 64  # of a call: 32 MB of logits at 128k tokens, and enough rows that weights are read for many at once


def joins_verification(plan: StepPlan, target: ModelRunner) -> bool:
    """Returns whether the verification's call also reads the step's prompts, so that weights are read once.

    Not in overlapped steps, whose target runs on a share of the device beside the draft; not if a prompt's logits are
    wanted, whose memory is bounded by calls of their own; and not if the runtime has no shape for so many rows.
    """
    chunks = plan.prefills
    if not plan.decodes or not chunks or plan.drafts or plan.decision.partition != WHOLE:
        return False
    if any(chunk.sequence.owes_context_logits for chunk in chunks):
        return False
    most = target.max_mixed_rows
    num_drafted = sum(plan.num_draft_tokens) + int(plan.in_flight.frontier.num_drafted.sum())
    return most is None or len(plan.decodes) + num_drafted + sum(chunk.num_tokens for chunk in chunks) <= most


class Prefiller:
    """Reads prompts, one plan at a time."""

    def __init__(
        self, blocks: BlockManager, sampler: Sampler, clock: Clock, times: PhaseTimes, proposer: Proposer | None
    ) -> None:
        self._blocks, self._sampler, self._proposer = blocks, sampler, proposer
        self._clock, self._times = clock, times

    def read(self, target: ModelRunner, plan: StepPlan) -> RowBatch | None:
        """Runs chunks through the target in calls of their own, or returns their rows for the verification's call."""
        if joins_verification(plan, target):
            return self._rows_of(plan.prefills, set(plan.decodes))
        if plain := [chunk for chunk in plan.prefills if not chunk.sequence.owes_context_logits]:
            run_model(target, self._rows_of(plain, set()))
            self._times.lap("prefill_model")
        for chunk in plan.prefills:
            if chunk.sequence.owes_context_logits:
                self._read_with_logits(target, chunk)
        return None

    def finish(self, partition: Partition, plan: StepPlan) -> float:
        """Commits chunks that the target has read; first the draft reads them, if wanted. Returns its microseconds."""
        is_wanted = plan.decision.prefills_draft and self._proposer is not None
        drafting = (chunk for chunk in plan.prefills if is_wanted and chunk.sequence.request.max_draft_tokens != 0)
        chunks = [chunk for chunk in drafting if chunk.sequence.draft_len >= chunk.start]  # else the draft lags
        draft_us = self.read_by_draft(partition, chunks)
        for sequence, start, num_tokens in plan.prefills:
            sequence.target_len = stop = start + num_tokens
            self._blocks.publish(sequence.slot, sequence.token_ids, stop, sequence.draft_len)
        self._times.lap("commit")
        return draft_us

    def _rows_of(self, chunks: list[PrefillChunk], ending: set[Sequence]) -> RowBatch:
        """Returns the target's rows of chunks, and behind those of sequences in `ending` their anchors, with logits."""
        ends = [sequence in ending for sequence, _, _ in chunks]
        pieces = [seq.token_ids[a : a + size + end] for (seq, a, size), end in zip(chunks, ends, strict=True)]
        tables = self._blocks.block_tables[[sequence.slot for sequence, _, _ in chunks]]
        rows = piece_rows(pieces, [start for _, start, _ in chunks], tables, with_logits=True)
        rows.adapters = [sequence.adapter for sequence, _, _ in chunks]
        self._times.lap("prefill_rows")
        return replace(rows, logit_rows=rows.logit_rows[ends])

    def read_by_draft(self, partition: Partition, chunks: list[PrefillChunk]) -> float:
        """Lets the draft read what it has missed of chunks. Returns the microseconds that the host saw."""
        if not chunks:
            return 0.0
        assert self._proposer is not None
        start_ns = self._clock.now_ns()
        self._proposer.prefill(partition, chunks)
        self._times.start()
        return (self._clock.now_ns() - start_ns) / 1e3

    def _read_with_logits(self, target: ModelRunner, chunk: PrefillChunk) -> None:
        """Stores every row's logits, or the requested part of them, in the sequence. If that fails, so does it."""
        sequence, first, num_tokens = chunk
        tables = self._blocks.block_tables[[sequence.slot]]
        most = MAX_LOGIT_ROWS if target.max_logit_rows is None else min(MAX_LOGIT_ROWS, target.max_logit_rows)
        for start in range(first, first + num_tokens, most):
            stop = min(start + most, first + num_tokens)
            rows = piece_rows([sequence.token_ids[start:stop]], [start], tables, with_logits=False)
            rows = replace(rows, logit_rows=np.arange(rows.num_rows), adapters=[sequence.adapter])
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
