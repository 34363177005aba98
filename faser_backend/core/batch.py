"""`RowBatch`: packed ragged rows for one model call. One row = one token of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(slots=True, eq=False)
class RowBatch:
    """T rows of B sequences, sequence-major; rows of a sequence are consecutive positions.

    Row r of sequence b sits at position context_lens[b] + (r - cu_rows[b]) and sees the
    context_lens[b] tokens in the pool plus the rows of its own sequence up to itself. Every block
    that holds those positions is already in block_tables.
    """

    token_ids: np.ndarray  # [T] int64
    cu_rows: np.ndarray  # [B + 1] int64, prefix sums of rows per sequence
    context_lens: np.ndarray  # [B] int64, tokens already in the KV pool
    block_tables: np.ndarray  # [B, max_blocks] int64, entries past a sequence's blocks are 0
    logit_rows: np.ndarray  # [R] int64, rows whose logits are wanted; may be empty
    adapters: Sequence[Any] = ()  # [B] from AdaptableRunner.store_adapter, or None; empty: nobody has one

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.context_lens.shape[0]

    @property
    def rows_per_sequence(self) -> np.ndarray:  # [B]; np.diff and np.repeat are slow for short arrays
        return self.cu_rows[1:] - self.cu_rows[:-1]

    @property
    def positions(self) -> np.ndarray:  # [T] of each row in its sequence
        return (self.context_lens - self.cu_rows[:-1]).repeat(self.rows_per_sequence) + np.arange(self.num_rows)


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
