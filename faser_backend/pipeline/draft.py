"""The propose phase: the draft model extends each sequence by its num_draft_tokens.

The draft's KV may lag behind the tokens (after full acceptance, a round of length 0, a reused
prefix): the first call of a round feeds every token that the draft has not seen.
"""

from __future__ import annotations

import numpy as np

from faser_backend.core.batch import RowBatch, SamplingRows
from faser_backend.core.plan import Frontier
from faser_backend.core.ports import ModelRunner, Sampler
from faser_backend.core.sequence import Sequence
from faser_backend.pipeline.model_call import run_model
from faser_backend.pipeline.rows import DecodeBatch, draft_sampling_rows, draft_step_rows, token_range_rows
from faser_backend.pipeline.timing import PhaseTimes
from faser_backend.policy.acceptance import draw
from faser_backend.policy.randomness import PURPOSE_DRAFT

# A sequence that lags by more rows than this is caught up alone, not padding everyone's first call.
MAX_FIRST_ROWS = 4


class Proposer:
    """Drafts with one runner. `keeps_probs`: rejection sampling, which tests against the draft's
    processed probabilities and draws with noise of its own; else the target's noise is shared.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        times: PhaseTimes,
        block_tables: np.ndarray,  # [max_num_seqs, max_blocks], by slot
        *,
        keeps_probs: bool,
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._times = times
        self._block_tables = block_tables
        self._keeps_probs = keeps_probs

    def propose(self, batch: DecodeBatch, num_draft_tokens: list[int]) -> Frontier:
        """Drafts num_draft_tokens [B] >= 0 tokens per sequence, one model call per position."""
        num_drafted = np.array(num_draft_tokens, np.int64)
        longest, shortest = int(num_drafted.max()), int(num_drafted.min())
        drafted = np.zeros((len(batch), longest), np.int64)  # [B, K]
        probs = np.zeros((*drafted.shape, self._runner.vocab_size), np.float32) if self._keeps_probs else None
        for step in range(longest):
            active = None if step < shortest else np.flatnonzero(num_drafted > step)
            logits = self._first_logits(batch, active) if step == 0 else self._next_logits(batch, active, drafted, step)
            rows = draft_sampling_rows(batch, active, drafted, step)
            if probs is None:
                tokens = self._sampler.sample(logits, rows)
            else:
                tokens, probs[rows.sequence, step] = self._sample_fresh(batch, logits, rows)
            drafted[rows.sequence, step] = tokens
            self._times.lap("draft_sample")
        return Frontier(drafted, num_drafted, probs)

    def prefill(self, sequences: list[Sequence], stops: list[int]) -> None:
        """Feeds tokens [draft_len, stop) of each sequence, without logits."""
        behind = [(seq, stop) for seq, stop in zip(sequences, stops, strict=True) if seq.draft_len < stop]
        if not behind:
            return
        lagging = [sequence for sequence, _ in behind]
        tables = self._block_tables[[sequence.slot for sequence in lagging]]
        starts = [sequence.draft_len for sequence in lagging]
        rows = token_range_rows(lagging, starts, [stop for _, stop in behind], tables, with_logits=False)
        self._times.lap("prefill_rows")
        run_model(self._runner, rows)
        self._times.lap("prefill_model")
        for sequence, stop in behind:
            sequence.draft_len = stop

    def _first_logits(self, batch: DecodeBatch, active: np.ndarray | None) -> np.ndarray:
        """Feeds what the draft has not seen, the anchor last. Returns logits [A, V]."""
        sequences = batch.sequences if active is None else [batch.sequences[i] for i in active]
        far_behind = [seq for seq in sequences if seq.num_tokens - seq.draft_len > MAX_FIRST_ROWS]
        self.prefill(far_behind, [seq.num_tokens - 1 for seq in far_behind])
        starts = [seq.draft_len for seq in sequences]
        stops = [seq.num_tokens for seq in sequences]
        tables = batch.block_tables if active is None else batch.block_tables[active]
        return self._timed_run(token_range_rows(sequences, starts, stops, tables, with_logits=True))

    def _next_logits(self, batch: DecodeBatch, active: np.ndarray | None, drafted: np.ndarray, step: int) -> np.ndarray:
        """Feeds the draft token of the step before. Returns logits [A, V]."""
        tokens = drafted[:, step - 1] if active is None else drafted[active, step - 1]
        return self._timed_run(draft_step_rows(batch, active, tokens, step - 1))

    def _timed_run(self, rows: RowBatch) -> np.ndarray:
        self._times.lap("draft_rows")
        logits = run_model(self._runner, rows)
        self._times.lap("draft_model")
        return logits

    def _sample_fresh(
        self, batch: DecodeBatch, logits: np.ndarray, rows: SamplingRows
    ) -> tuple[np.ndarray, np.ndarray]:
        """Token ids [A] from the draft's own distribution, and its probabilities [A, V]."""
        probs = self._sampler.probabilities(logits, rows)
        uniforms = self._sampler.uniforms(rows, PURPOSE_DRAFT, batch.rounds[rows.sequence])
        return draw(probs, uniforms), probs
