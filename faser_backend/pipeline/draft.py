"""The propose phase: the draft model extends each sequence by its num_draft_tokens.

The draft's KV may lag behind the tokens (after full acceptance, a round of length 0, a reused
prefix): the first call of a round feeds every token that the draft has not seen.
"""

from __future__ import annotations

import numpy as np

from faser_backend.core.batch import SamplingRows
from faser_backend.core.plan import Frontier
from faser_backend.core.ports import ModelRunner, Sampler
from faser_backend.core.sequence import Sequence
from faser_backend.pipeline.model_call import run_model
from faser_backend.pipeline.rows import DecodeBatch, draft_sampling_rows, draft_step_rows, token_range_rows
from faser_backend.pipeline.timing import PhaseTimes
from faser_backend.policy.randomness import PURPOSE_DRAFT, sample_from

# A sequence that lags by more rows than this is caught up alone, not padding everyone's first call.
MAX_FIRST_ROWS = 4


def propose(
    runner: ModelRunner,
    sampler: Sampler,
    times: PhaseTimes,
    batch: DecodeBatch,
    num_draft_tokens: list[int],
    block_tables: np.ndarray,
    *,
    with_probs: bool,
) -> Frontier:
    """Drafts num_draft_tokens [B] tokens per sequence.

    block_tables: [max_num_seqs, max_blocks], indexed by slot. with_probs: keep the processed draft
    probabilities for rejection sampling, and draw with noise of their own.
    """
    num_drafted = np.array(num_draft_tokens, np.int64)
    longest = int(num_drafted.max())
    drafted = np.zeros((len(batch), longest), np.int64)  # [B, K]
    probs = np.zeros((len(batch), longest, runner.vocab_size), np.float32) if with_probs and longest else None
    for step in range(longest):
        is_all = longest == int(num_drafted.min()) or bool((num_drafted > step).all())
        active = None if is_all else np.flatnonzero(num_drafted > step)
        if step == 0:
            logits = _run_first(runner, times, batch, active, block_tables)
        else:
            tokens = drafted[:, step - 1] if active is None else drafted[active, step - 1]
            rows = draft_step_rows(batch, active, tokens, step - 1)
            times.lap("draft_rows")
            logits = run_model(runner, rows)
            times.lap("draft_model")
        sampling_rows = draft_sampling_rows(batch, active, drafted, step)
        if probs is None:
            tokens = sampler.sample(logits, sampling_rows)
        else:
            tokens, step_probs = _sample_fresh(sampler, logits, sampling_rows, batch)
            probs[sampling_rows.sequence, step] = step_probs
        drafted[sampling_rows.sequence, step] = tokens
        times.lap("draft_sample")
    return Frontier(drafted, num_drafted, probs)


def prefill_draft(
    runner: ModelRunner, times: PhaseTimes, sequences: list[Sequence], stops: list[int], block_tables: np.ndarray
) -> None:
    """Runs tokens [draft_len, stop) of each sequence through the draft, without logits.

    block_tables: [max_num_seqs, max_blocks], indexed by slot.
    """
    behind = [(sequence, stop) for sequence, stop in zip(sequences, stops, strict=True) if sequence.draft_len < stop]
    if not behind:
        return
    lagging = [sequence for sequence, _ in behind]
    tables = block_tables[[sequence.slot for sequence in lagging]]
    starts = [sequence.draft_len for sequence in lagging]
    rows = token_range_rows(lagging, starts, [stop for _, stop in behind], tables, with_logits=False)
    times.lap("prefill_rows")
    run_model(runner, rows)
    times.lap("prefill_model")
    for sequence, stop in behind:
        sequence.draft_len = stop


def _run_first(
    runner: ModelRunner, times: PhaseTimes, batch: DecodeBatch, active: np.ndarray | None, block_tables: np.ndarray
) -> np.ndarray:
    """Feeds what the draft has not seen, the anchor last. Returns logits [A, V]."""
    sequences = batch.sequences if active is None else [batch.sequences[i] for i in active]
    far_behind = [seq for seq in sequences if seq.num_tokens - seq.draft_len > MAX_FIRST_ROWS]
    if far_behind:
        prefill_draft(runner, times, far_behind, [seq.num_tokens - 1 for seq in far_behind], block_tables)
    starts = [seq.draft_len for seq in sequences]
    stops = [seq.num_tokens for seq in sequences]
    tables = batch.block_tables if active is None else batch.block_tables[active]
    rows = token_range_rows(sequences, starts, stops, tables, with_logits=True)
    times.lap("draft_rows")
    logits = run_model(runner, rows)
    times.lap("draft_model")
    return logits


def _sample_fresh(
    sampler: Sampler, logits: np.ndarray, rows: SamplingRows, batch: DecodeBatch
) -> tuple[np.ndarray, np.ndarray]:
    """Draws from the draft's own distribution with noise that no other draw uses.

    Returns token ids [A] and the processed probabilities [A, V] that rejection sampling tests.
    """
    probs = sampler.probabilities(logits, rows)
    rounds = batch.rounds[rows.sequence]
    uniforms = sampler.uniforms(rows, PURPOSE_DRAFT, rounds)
    return sample_from(probs, uniforms), probs
