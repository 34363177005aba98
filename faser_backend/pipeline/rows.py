"""Packs sequences into the row batches of a step. Pure index arithmetic, no model calls."""

from __future__ import annotations

import numpy as np

from faser_backend.core.batch import RowBatch, SamplingRows
from faser_backend.core.plan import Frontier
from faser_backend.core.sequence import Sequence

_NO_ROWS = np.zeros(0, np.int64)


class DecodeBatch:
    """What stays the same through a step for the B sequences that decode in it."""

    __slots__ = ("block_tables", "num_tokens", "sequences", "slots")

    def __init__(self, sequences: list[Sequence], block_tables: np.ndarray) -> None:
        self.sequences = sequences
        self.slots = np.array([sequence.slot for sequence in sequences], np.int64)  # [B]
        self.num_tokens = np.array([sequence.num_tokens for sequence in sequences], np.int64)  # [B]
        self.block_tables = block_tables[self.slots]  # [B, max_blocks]

    @property
    def rounds(self) -> np.ndarray:
        """[B] verifications that each sequence has been through: keys fresh noise."""
        return np.array([sequence.stats.num_steps for sequence in self.sequences], np.int64)

    def __len__(self) -> int:
        return len(self.sequences)


def token_range_rows(
    sequences: list[Sequence], starts: list[int], stops: list[int], block_tables: np.ndarray, *, with_logits: bool
) -> RowBatch:
    """Rows for tokens [start, stop) of each sequence; logits of each last row if wanted.

    block_tables: [B, max_blocks], one row per sequence of the batch.
    """
    counts = np.array([stop - start for start, stop in zip(starts, stops, strict=True)], np.int64)
    cu_rows = np.zeros(len(sequences) + 1, np.int64)
    np.cumsum(counts, out=cu_rows[1:])
    pieces = [seq.token_ids[start:stop] for seq, start, stop in zip(sequences, starts, stops, strict=True)]
    return RowBatch(
        token_ids=pieces[0] if len(pieces) == 1 else np.concatenate(pieces),
        cu_rows=cu_rows,
        context_lens=np.array(starts, np.int64),
        block_tables=block_tables,
        logit_rows=cu_rows[1:] - 1 if with_logits else _NO_ROWS,
    )


def draft_step_rows(batch: DecodeBatch, active: np.ndarray | None, tokens: np.ndarray, step: int) -> RowBatch:
    """One row per active sequence: its newest draft token, at position num_tokens + step.

    active: [A] indices into the batch, None = all. tokens: [A].
    """
    num_tokens, tables = batch.num_tokens, batch.block_tables
    if active is not None:
        num_tokens, tables = num_tokens[active], tables[active]
    cu_rows = np.arange(tokens.shape[0] + 1)
    return RowBatch(tokens, cu_rows, num_tokens + step, tables, cu_rows[:-1])


def draft_sampling_rows(batch: DecodeBatch, active: np.ndarray | None, drafted: np.ndarray, step: int) -> SamplingRows:
    """Draws position num_tokens + step of each active sequence, after `step` drafted tokens."""
    if active is None:
        active, slots, num_tokens = np.arange(len(batch)), batch.slots, batch.num_tokens
    else:
        slots, num_tokens = batch.slots[active], batch.num_tokens[active]
    return SamplingRows(slots, num_tokens + step, active, np.full(active.shape[0], step), drafted)


def verify_rows(batch: DecodeBatch, frontier: Frontier) -> RowBatch:
    """The anchor and the draft tokens of each sequence, ragged, logits on every row."""
    counts = frontier.num_drafted + 1
    cu_rows = np.zeros(len(batch) + 1, np.int64)
    np.cumsum(counts, out=cu_rows[1:])
    chains = np.empty((len(batch), frontier.drafted.shape[1] + 1), np.int64)  # [B, 1 + K]
    chains[:, 0] = [seq.token_ids[seq.num_tokens - 1] for seq in batch.sequences]
    chains[:, 1:] = frontier.drafted
    num_rows = int(cu_rows[-1])
    is_uniform = num_rows == chains.size
    token_ids = chains.reshape(-1) if is_uniform else chains[np.arange(chains.shape[1]) < counts[:, None]]
    return RowBatch(token_ids, cu_rows, batch.num_tokens - 1, batch.block_tables, np.arange(num_rows))


def verify_sampling_rows(batch: DecodeBatch, frontier: Frontier, cu_rows: np.ndarray) -> SamplingRows:
    """Row j of sequence b draws position num_tokens[b] + j, after drafted[b, :j]."""
    sequence = np.repeat(np.arange(len(batch)), frontier.num_drafted + 1)
    offsets = np.arange(sequence.shape[0]) - cu_rows[sequence]
    return SamplingRows(
        batch.slots[sequence], batch.num_tokens[sequence] + offsets, sequence, offsets, frontier.drafted
    )
