"""Menus of the shapes of calls, all of which a runner prepares and captures before the first request.

The project's kernels read sequence lengths, rows per sequence and table widths on the device, so their calls differ
only in the number of rows. TensorRT-RTX runs no kernels of the project: it pads attention to the shape of the call.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import isqrt
from operator import le
from typing import NamedTuple

from faser_backend.core.batch import RowBatch
from faser_backend.core.decision import MAX_VERIFIED_ROWS

MAX_GRAPH_ROWS = MAX_VERIFIED_ROWS  # of calls with logits of all rows
# Queueing a call takes longer than 1,000 rows of an 8B model take to compute. Larger calls are rounded up to a multiple
# of 8 rows, and no graph is captured.
MAX_PROMPT_ROWS = 1024
# Powers of two and one or two steps between them. Up to some hundred rows a GPU is bound by reading weights, so padding
# costs little.
ROW_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, MAX_GRAPH_ROWS)
LARGE_COUNTS = (640, 768, 896, MAX_PROMPT_ROWS)  # with prompts; products compute 128 rows at a time
PROMPT_ROWS = 128  # from here on a call without logits, such as a prompt's chunk, has a separate shape
MIXED_LOGIT_ROWS = 256  # of a chunk in a call with others' decodes, which has a shape of its own
VERIFY_ROWS = 8  # rows per sequence that attention's tiles are chosen for, unless the call is a prompt's chunk
FILTER_ROWS = 64  # rows sorted at once for top-k and top-p
ROW_STEP = 8
PADDED_ROWS = (1, 8)  # of each sequence in padded calls: decode, verification
MOST_PADDED_ROWS = 16  # the same for the longest verification


class CallBounds(NamedTuple):
    """Sizes of a call that the host sets, rounded up; a captured graph fixes them."""

    num_rows: int  # T, rounded up to a bucket
    num_sequences: int  # B, rounded up
    max_rows: int  # Q, most rows of one sequence, rounded up
    num_blocks: int  # MB, columns of the block table, rounded up
    num_logit_rows: int  # R, rounded up; 0 = none wanted
    num_candidates: int  # C; 0 = no exit scores
    has_adapters: bool = False  # rows may have adapters


DIMENSIONS = ("T", "B", "Q", "MB", "R", "K")  # the names of these sizes in manifests, in order
UNLIMITED = CallBounds._make([*[1 << 30] * 6, False])


@dataclass(frozen=True)
class CallMenu:
    """The shapes of a runner's calls, within `limits`: compiled engines', or UNLIMITED but for the blocks of a context.

    is_padded: the engines compute every padded row and column.
    """

    kv_block_size: int
    limits: CallBounds
    is_padded: bool

    def of(self, rows: RowBatch, num_candidates: int) -> CallBounds:
        """Returns the shape of a batch's call: the menu's smallest that holds it, or its own size."""
        return self._shape(exact_bounds(rows, self.kv_block_size, num_candidates))

    def of_decode(self, num_sequences: int, num_tokens: int) -> CallBounds:
        """Returns the shape of a call with one row and one logit row per sequence, of up to num_tokens tokens."""
        num_blocks = -(-num_tokens // self.kv_block_size)
        return self._shape(CallBounds(num_sequences, num_sequences, 1, num_blocks, num_sequences, 0))

    def holds(self, shape: CallBounds) -> bool:
        """Tells whether a shape is captured."""
        return shape in self.menu(shape.num_candidates)

    def menu(self, num_candidates: int) -> list[CallBounds]:
        """Returns every shape without adapters that is captured, in ascending order."""
        return menu_shapes(self.limits, num_candidates, self.is_padded)

    def _shape(self, needed: CallBounds) -> CallBounds:
        shapes = self.menu(needed.num_candidates)
        for shape in shapes[bisect_left(shapes, needed[:1]) :]:
            if all(map(le, needed, shape)):
                return shape
        num_rows, num_logit_rows = (
            -(-size // ROW_STEP) * ROW_STEP for size in (needed.num_rows, needed.num_logit_rows)
        )
        larger = needed._replace(num_rows=num_rows, num_logit_rows=num_logit_rows)
        # A call that exceeds the limits keeps its size, and its program refuses it.
        return CallBounds._make(map(max, needed, map(min, larger, self.limits)))


@cache
def menu_shapes(limits: CallBounds, num_candidates: int, is_padded: bool) -> list[CallBounds]:
    """Returns the shapes of a CallMenu with exit scores of num_candidates, or, for 0, without."""
    wanted = (_padded_shapes if is_padded else _row_shapes)(limits, num_candidates)
    return sorted({CallBounds._make(map(min, each, limits)) for each in wanted})


def _row_shapes(limits: CallBounds, num_candidates: int) -> list[CallBounds]:
    """Returns shapes for kernels that read lengths: they differ in rows. Compiled engines have at most 20 in all."""
    is_compiled, most = limits.num_rows < UNLIMITED.num_rows, min(limits.num_rows, MAX_GRAPH_ROWS)
    counts = [*(count for count in ROW_COUNTS if count < most), most]
    if num_candidates and is_compiled:
        counts = counts[::-3]
    sizes = [(count, count) for count in counts]  # rows, and those with logits
    if not num_candidates:
        prompts = [count for count in (*counts, *(() if is_compiled else LARGE_COUNTS)) if count >= PROMPT_ROWS]
        sizes += [(count, 0) for count in prompts]
        sizes += [(count, MIXED_LOGIT_ROWS) for count in prompts if count > MIXED_LOGIT_ROWS and not is_compiled]
    return [CallBounds(rows, rows, rows, limits.num_blocks, logits, num_candidates) for rows, logits in sizes]


def _padded_shapes(limits: CallBounds, num_candidates: int) -> list[CallBounds]:
    """Returns at most 20 shapes for engines that compute all padding.

    One, some or all sequences decode or are verified, in contexts of up to a quarter of the longest or any; one
    sequence reads a prompt. Exit scores are of the longest verifications in any context.
    """
    widths = -(-limits.num_blocks // 4), limits.num_blocks
    kinds = [] if num_candidates else [*product(PADDED_ROWS, widths)]
    some = min(1 << isqrt(limits.num_sequences).bit_length(), limits.num_sequences)
    wanted = [
        CallBounds(count * rows, count, rows, width, count * rows, num_candidates)
        for count in (1, some, limits.num_sequences)
        for rows, width in [*kinds, (MOST_PADDED_ROWS, limits.num_blocks)]
    ]
    longest = min(limits.max_rows, MAX_GRAPH_ROWS)
    prompts = [] if num_candidates else [CallBounds(longest, 1, longest, width, 1, 0) for width in widths]
    return [each for each in wanted if each.num_rows <= MAX_GRAPH_ROWS] + prompts


def exact_bounds(rows: RowBatch, kv_block_size: int, num_candidates: int) -> CallBounds:
    """Returns the bounds of a batch's call without padding."""
    counts = rows.rows_per_sequence
    num_blocks = -(-int((rows.context_lens + counts).max()) // kv_block_size)
    num_logit_rows = rows.logit_rows.shape[0]
    return CallBounds(rows.num_rows, rows.num_sequences, int(counts.max()), num_blocks, num_logit_rows, num_candidates)
