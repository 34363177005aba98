"""`RowBatch`: packed ragged rows for one model call. One row = one token of one sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(slots=True, eq=False)
class TreeRows:
    """The KV positions that the rows of trees see; rows of a chain see all positions before them.

    Row r of sequence b sees the first trunk_lens[b] KV positions of its sequence, and position trunk_lens[b] + i where
    bit i of ancestors[r] is set; its own is the last of them. A row without a bit is one of a chain.
    """

    trunk_lens: np.ndarray  # [B] int64, at most context_lens
    ancestors: np.ndarray  # [T] int64
    positions: np.ndarray  # [T] int64 of each row's token in its sequence


@dataclass(slots=True, eq=False)
class RowBatch:
    """T rows of B sequences, sequence-major; rows of a sequence are consecutive positions.

    Row r of sequence b sits at position context_lens[b] + (r - cu_rows[b]) and sees the
    context_lens[b] tokens in the pool plus the rows of its own sequence up to itself. Every block
    that holds those positions is already in block_tables.
    With `tree` these are the KV positions, where keys and values go; a row's position in the text is the number of KV
    positions that it sees before its own.
    """

    token_ids: np.ndarray  # [T] int64
    cu_rows: np.ndarray  # [B + 1] int64, prefix sums of rows per sequence
    context_lens: np.ndarray  # [B] int64, tokens already in the KV pool
    block_tables: np.ndarray  # [B, max_blocks] int64, entries past a sequence's blocks are 0
    logit_rows: np.ndarray  # [R] int64, rows whose logits are wanted; may be empty
    tree: TreeRows | None = None  # None: every sequence is a chain

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.context_lens.shape[0]

    @property
    def rows_per_sequence(self) -> np.ndarray:  # [B]
        return np.diff(self.cu_rows)

    @property
    def kv_positions(self) -> np.ndarray:  # [T] in its sequence, of each row's keys and values
        return np.repeat(self.context_lens - self.cu_rows[:-1], self.rows_per_sequence) + np.arange(self.num_rows)

    @property
    def positions(self) -> np.ndarray:  # [T] of each row's token in its sequence
        return self.kv_positions if self.tree is None else self.tree.positions


@dataclass(slots=True, eq=False)
class SamplingRows:
    """The position and prefix from which each of R rows of logits draws.

    Row r draws the token at absolute position `positions[r]` of the sequence in `slots[r]`, whose
    uncommitted prefix is drafted[sequence[r], :num_drafted[r]]: penalties act on that prefix too.
    """

    slots: np.ndarray  # [R] int64
    positions: np.ndarray  # [R] int64
    sequence: np.ndarray  # [R] int64, row of `drafted`
    num_drafted: np.ndarray  # [R] int64, drafted tokens before the one drawn here
    drafted: np.ndarray  # [B, K] int64
    has_siblings: bool = False  # rows of a slot may draw the same position
