"""Packs sequences into the row batches of model calls, and runs a batch through a whole model."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np

from faser_backend.core.batch import RowBatch, SamplingRows
from faser_backend.core.frontier import Frontier
from faser_backend.core.ports import DeviceArray, ModelRunner
from faser_backend.core.sequence import Sequence

_NO_ROWS = np.zeros(0, np.int64)


class DecodeBatch:
    """Slots, lengths and blocks of the B sequences that decode in a step; fixed while it runs.

    prompts: rows that the verification's call reads too.
    """

    __slots__ = ("block_tables", "num_tokens", "prompts", "sequences", "slots")

    def __init__(self, sequences: list[Sequence], block_tables: np.ndarray, prompts: RowBatch | None = None) -> None:
        self.sequences, self.prompts = sequences, prompts
        self.slots = np.array([sequence.slot for sequence in sequences], np.int64)  # [B]
        self.num_tokens = np.array([sequence.num_tokens for sequence in sequences], np.int64)  # [B]
        self.block_tables = block_tables[self.slots]  # [B, max_blocks]

    @property
    def rounds(self) -> np.ndarray:
        """[B] verifications of each sequence so far: keys the noise of acceptance."""
        return np.array([sequence.stats.num_steps for sequence in self.sequences], np.int64)

    @property
    def draft_rounds(self) -> np.ndarray:
        """[B] proposals for each sequence so far: keys the draft's own noise."""
        return np.array([sequence.num_proposals for sequence in self.sequences], np.int64)

    def __len__(self) -> int:
        return len(self.sequences)


def piece_rows(pieces: list[np.ndarray], starts: list[int], block_tables: np.ndarray, *, with_logits: bool) -> RowBatch:
    """Returns rows for the tokens of each of B pieces, whose first token is at position start; with_logits: of each
    last row. block_tables: [B, max_blocks]."""
    cu_rows = np.array([*accumulate((piece.size for piece in pieces), initial=0)])
    return RowBatch(
        token_ids=pieces[0] if len(pieces) == 1 else np.concatenate(pieces),
        cu_rows=cu_rows,
        context_lens=np.array(starts, np.int64),
        block_tables=block_tables,
        logit_rows=cu_rows[1:] - 1 if with_logits else _NO_ROWS,
    )


def single_rows(tokens: np.ndarray, positions: np.ndarray, block_tables: np.ndarray) -> RowBatch:
    """Returns one row per sequence, with logits: tokens [A] at positions [A]."""
    cu_rows = np.arange(tokens.shape[0] + 1)
    return RowBatch(tokens, cu_rows, positions, block_tables, cu_rows[:-1])


def verify_rows(batch: DecodeBatch, frontier: Frontier) -> RowBatch:
    """Returns rows for the anchor and the verified draft tokens of each sequence, with logits on every row."""
    counts = frontier.num_rows
    cu_rows = np.zeros(len(batch) + 1, np.int64)
    counts.cumsum(out=cu_rows[1:])
    chains = np.empty((len(batch), frontier.drafted.shape[1] + 1), np.int64)  # [B, 1 + K]
    chains[:, 0] = [seq.token_ids[seq.num_tokens - 1] for seq in batch.sequences]
    chains[:, 1:] = frontier.drafted
    token_ids = chains[np.arange(chains.shape[1]) < counts[:, None]]
    contexts, adapters = batch.num_tokens - 1, [each.adapter for each in batch.sequences]
    return RowBatch(token_ids, cu_rows, contexts, batch.block_tables, np.arange(token_ids.size), adapters)


def mixed_rows(rows: RowBatch, prompts: RowBatch) -> RowBatch:
    """Returns the rows of a verification and behind them those of prompts.

    The last sequences of the verification, an anchor each, are those of prompts with logits, in that order: their
    prompts hold the anchors.
    """
    num_ends = prompts.logit_rows.size
    num_sequences, num_rows = rows.num_sequences - num_ends, rows.num_rows - num_ends
    return RowBatch(
        np.concatenate([rows.token_ids[:num_rows], prompts.token_ids]),
        np.concatenate([rows.cu_rows[: num_sequences + 1], num_rows + prompts.cu_rows[1:]]),
        np.concatenate([rows.context_lens[:num_sequences], prompts.context_lens]),
        np.concatenate([rows.block_tables[:num_sequences], prompts.block_tables]),
        np.concatenate([rows.logit_rows[:num_rows], num_rows + prompts.logit_rows]),
        [*rows.adapters[:num_sequences], *prompts.adapters],
    )


def verify_sampling_rows(batch: DecodeBatch, frontier: Frontier, cu_rows: np.ndarray) -> SamplingRows:
    """Returns sampling rows: row j of sequence b draws position num_tokens[b] + j, after drafted[b, :j]."""
    sequence = np.arange(len(batch)).repeat(cu_rows[1:] - cu_rows[:-1])
    offsets = np.arange(sequence.shape[0]) - cu_rows[sequence]
    return SamplingRows(
        batch.slots[sequence], batch.num_tokens[sequence] + offsets, sequence, offsets, frontier.drafted
    )


def keep_rows(rows: RowBatch, num_kept: np.ndarray) -> tuple[RowBatch, np.ndarray]:
    """Returns the first num_kept [B] rows of each sequence, for the next segment, and their indices."""
    counts = rows.rows_per_sequence
    offsets = np.arange(rows.num_rows) - np.repeat(rows.cu_rows[:-1], counts)
    kept = np.flatnonzero(offsets < np.repeat(num_kept, counts))
    cu_rows = np.zeros_like(rows.cu_rows)
    np.cumsum(num_kept, out=cu_rows[1:])
    shorter = replace(rows, token_ids=rows.token_ids[kept], cu_rows=cu_rows, logit_rows=np.arange(kept.size))
    return shorter, kept


def run_model(runner: ModelRunner, rows: RowBatch) -> DeviceArray:
    """Runs all segments. Returns logits [R, V] of rows.logit_rows; the pool then holds the rows' K/V."""
    output = runner.run_segment(0, rows, None)
    for segment in range(1, runner.num_segments):
        output = runner.run_segment(segment, rows, output)
    return output
