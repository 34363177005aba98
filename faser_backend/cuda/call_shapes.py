"""Shapes of the calls that a runner captures: a menu of row counts, or buckets of every dimension.

The project's kernels read sequence lengths, rows per sequence and table widths on the device, so their calls differ
only in the number of rows. For compiled engines the host sets every dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from faser_backend.core.batch import RowBatch

# Larger calls take longer to compute than to queue, and their lengths hardly repeat. Their rows are rounded up to a
# multiple of 8, and no graph is captured.
MAX_GRAPH_ROWS = 512
# Powers of two and one or two steps between them. Up to some hundred rows a GPU is bound by reading weights, so padding
# costs little.
ROW_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, MAX_GRAPH_ROWS)
PROMPT_ROWS = 128  # from here on a call without logits, such as a prompt's chunk, has a separate shape
FILTER_ROWS = 64  # rows sorted at once for top-k and top-p
ROW_STEP = 8
MIN_BLOCKS = 8


class CallBounds(NamedTuple):
    """Sizes of a call that the host sets, rounded up; a captured graph fixes them."""

    num_rows: int  # T, rounded up to a bucket
    num_sequences: int  # B, rounded up
    max_rows: int  # Q, most rows of one sequence, rounded up
    num_blocks: int  # MB, columns of the block table, rounded up
    num_logit_rows: int  # R, rounded up; 0 = none wanted
    num_candidates: int  # C; 0 = no exit scores


UNLIMITED = CallBounds(*[1 << 30] * 6)


@dataclass(frozen=True)
class RowMenu:
    """Shapes that differ in the number of rows only. num_blocks: columns of a table that holds any context."""

    num_blocks: int

    def of(self, rows: RowBatch, num_candidates: int) -> CallBounds:
        """Returns the shape of a batch's call."""
        num_rows, num_logit_rows = rows.num_rows, rows.logit_rows.shape[0]
        if num_rows <= MAX_GRAPH_ROWS:
            return self._shape(num_rows, num_candidates, has_logits=num_logit_rows > 0)
        padded, longest = ceil_to(num_rows, ROW_STEP), int(rows.rows_per_sequence.max())
        return CallBounds(
            padded, rows.num_sequences, longest, self.num_blocks, bucketed_rows(num_logit_rows), num_candidates
        )

    def of_decode(self, num_sequences: int, num_tokens: int) -> CallBounds:
        """Returns the shape of a call with one row and one logit row per sequence, of up to num_tokens tokens."""
        return self._shape(num_sequences, 0, has_logits=True)

    def menu(self, num_candidates: int) -> list[CallBounds]:
        """Returns every shape that may be captured."""
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
    """Shapes whose every dimension is rounded up, within `limits`, the largest that programs take.

    A call that exceeds the limits keeps its size, and its program refuses it.
    """

    kv_block_size: int
    limits: CallBounds

    def of(self, rows: RowBatch, num_candidates: int) -> CallBounds:
        """See RowMenu."""
        counts = rows.rows_per_sequence
        num_blocks = -(-int((rows.context_lens + counts).max()) // self.kv_block_size)
        longest, num_logit_rows = int(counts.max()), rows.logit_rows.shape[0]
        needed = CallBounds(rows.num_rows, rows.num_sequences, longest, num_blocks, num_logit_rows, num_candidates)
        return self._rounded(needed, power_of_two(rows.num_sequences))

    def of_decode(self, num_sequences: int, num_tokens: int) -> CallBounds:
        """See RowMenu."""
        num_blocks = -(-num_tokens // self.kv_block_size)
        needed = CallBounds(num_sequences, num_sequences, 1, num_blocks, num_sequences, 0)
        rounded = self._rounded(needed, bucketed_rows(num_sequences))
        size = min(rounded.num_rows, rounded.num_sequences, rounded.num_logit_rows)
        return CallBounds(size, size, 1, rounded.num_blocks, size, 0)

    def menu(self, num_candidates: int) -> list[CallBounds]:
        """Returns []: the shapes depend on the traffic."""
        return []

    def _rounded(self, needed: CallBounds, num_sequences: int) -> CallBounds:
        rounded = CallBounds(
            bucketed_rows(needed.num_rows),
            num_sequences,
            power_of_two(needed.max_rows),
            max(power_of_two(needed.num_blocks), MIN_BLOCKS),
            bucketed_rows(needed.num_logit_rows),
            needed.num_candidates,
        )
        sizes = zip(needed, rounded, self.limits, strict=True)
        return CallBounds._make(max(need, min(up, limit)) for need, up, limit in sizes)


CallShapes = RowMenu | Buckets


def bucketed_rows(num_rows: int) -> int:
    """Rounds up the rows of a call: powers of two up to 8, multiples of 8 up to 64, of 32 up to MAX_GRAPH_ROWS."""
    if num_rows <= ROW_STEP:
        return power_of_two(num_rows)
    return ceil_to(num_rows, ROW_STEP if num_rows <= 64 or num_rows > MAX_GRAPH_ROWS else 32)


def power_of_two(count: int) -> int:
    """Returns the least power of two >= count, or 0 for 0."""
    return 1 << (count - 1).bit_length() if count > 0 else 0


def ceil_to(count: int, step: int) -> int:
    """Returns the least multiple of step >= count."""
    return -(-count // step) * step
