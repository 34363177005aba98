"""Which shapes of call a runner captures: a menu of row counts, or buckets of every dimension.

Kernels of ours read on the device how long sequences are, which rows are whose and how wide a block table is, so
their calls differ in the number of rows alone. Compiled engines are told every dimension by the host. Knows nothing
of programs or tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from faser_backend.core.batch import RowBatch
from faser_backend.device.cuda.row_counts import MAX_GRAPH_ROWS, PROMPT_ROWS, ROW_COUNTS
from faser_backend.device.cuda.segment import (
    MIN_BLOCKS,
    ROW_STEP,
    CallBounds,
    bucketed_rows,
    call_bounds,
    clipped,
    power_of_two,
)


class CallShapes(Protocol):
    """The shape that a call gets."""

    def of(self, rows: RowBatch, num_candidates: int) -> CallBounds: ...

    def of_decode(self, num_sequences: int, num_tokens: int) -> CallBounds:
        """Of a call of one row and one logit row per sequence, of up to num_tokens tokens."""
        ...

    def menu(self, num_candidates: int) -> list[CallBounds]:
        """Every shape that may be captured and is known beforehand; [] where that depends on the traffic."""
        ...


@dataclass(frozen=True)
class RowMenu:
    """Shapes by rows alone. num_blocks: columns of a table that holds any context."""

    num_blocks: int

    def of(self, rows: RowBatch, num_candidates: int) -> CallBounds:
        num_rows, num_logit_rows = rows.num_rows, rows.logit_rows.shape[0]
        if num_rows <= MAX_GRAPH_ROWS:
            return self._shape(num_rows, num_candidates, has_logits=num_logit_rows > 0)
        padded = -(-num_rows // ROW_STEP) * ROW_STEP
        longest = int(rows.rows_per_sequence.max())
        return CallBounds(
            padded, rows.num_sequences, longest, self.num_blocks, bucketed_rows(num_logit_rows), num_candidates
        )

    def of_decode(self, num_sequences: int, num_tokens: int) -> CallBounds:
        return self._shape(num_sequences, 0, has_logits=True)

    def menu(self, num_candidates: int) -> list[CallBounds]:
        kinds = [(count, True) for count in ROW_COUNTS]
        if not num_candidates:
            kinds += [(count, False) for count in ROW_COUNTS if count >= PROMPT_ROWS]
        return [self._shape(count, num_candidates, has_logits=has_logits) for count, has_logits in kinds]

    def _shape(self, num_rows: int, num_candidates: int, *, has_logits: bool) -> CallBounds:
        count = next(count for count in ROW_COUNTS if count >= num_rows)
        num_logit_rows = count if has_logits or count < PROMPT_ROWS else 0
        return CallBounds(count, count, count, self.num_blocks, num_logit_rows, num_candidates)


@dataclass(frozen=True)
class Buckets:
    """Shapes whose every dimension is rounded up, as far as `limits`, the largest that programs take, allow."""

    kv_block_size: int
    limits: CallBounds

    def of(self, rows: RowBatch, num_candidates: int) -> CallBounds:
        return call_bounds(rows, self.kv_block_size, num_candidates, self.limits)

    def of_decode(self, num_sequences: int, num_tokens: int) -> CallBounds:
        num_blocks = -(-num_tokens // self.kv_block_size)
        needed = CallBounds(num_sequences, num_sequences, 1, num_blocks, num_sequences, 0)
        size = bucketed_rows(num_sequences)
        rounded = CallBounds(size, size, 1, max(power_of_two(num_blocks), MIN_BLOCKS), size, 0)
        rounded = clipped(needed, rounded, self.limits)
        size = min(rounded.num_rows, rounded.num_sequences, rounded.num_logit_rows)
        return CallBounds(size, size, 1, rounded.num_blocks, size, 0)

    def menu(self, num_candidates: int) -> list[CallBounds]:
        return []
