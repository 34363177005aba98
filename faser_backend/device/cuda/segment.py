"""What a GPU runner and the programs that it runs agree on: bounds of a call, its tensors, how it is queued.

A program is one segment of a model, compiled or written in torch. A runner owns the tensors and the order of
calls; a program owns weights and kernels. Neither knows which kind the other is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from faser_backend.core.batch import RowBatch
from faser_backend.device.cuda.row_counts import MAX_GRAPH_ROWS
from faser_backend.manifest import SegmentSpec

ROW_STEP = 8
MIN_BLOCKS = 8

Launch = Callable[[], None]


class CallBounds(NamedTuple):
    """What the host knows of a call; fixed under a captured graph. Counts that are rounded up are bounds."""

    num_rows: int  # T, rounded up to a bucket
    num_sequences: int  # B, rounded up
    max_rows: int  # Q, most rows of one sequence, rounded up
    num_blocks: int  # MB, columns of the block table, rounded up
    num_logit_rows: int  # R, rounded up; 0 = none wanted
    num_candidates: int  # C; 0 = no exit scores


class SegmentProgram(Protocol):
    """One segment on one share of the device."""

    @property
    def spec(self) -> SegmentSpec: ...

    @property
    def packs_tables(self) -> bool:
        """Whether block tables lie without gaps, as wide as the input table_width [1] int32 says: the program reads it
        on the device, and its calls differ in their rows alone."""
        ...

    def prepare(self, tensors: Mapping[str, torch.Tensor], bounds: CallBounds) -> Launch:
        """tensors: every input and output of the manifest's segment, by its name (pools too), and slot_mapping
        [T] int32 in any case. They outlive the result and have the shapes that `bounds` say.

        Returns what queues the call on the current stream. That never waits, allocates nothing lasting, reads
        no tensor on the host, and may be captured. Raises ConfigError where the program cannot take the bounds.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PreparedCall:
    """A call whose inputs the device itself may write. `launch` queues all segments of the model in order; of a draft
    head the layer, which leaves what its next launch goes on from in its own input."""

    bounds: CallBounds
    tensors: Mapping[str, torch.Tensor]
    launch: Launch
    fill_tables: Callable[[np.ndarray], None]  # uploads block tables [any, any] int64 of the first sequences


def bucketed_rows(num_rows: int) -> int:
    """The rows of a call: powers of two up to 8, multiples of 8 up to 64, of 32 up to MAX_GRAPH_ROWS.

    Up to some dozens of rows a GPU reads weights for as long as it computes, so that padding costs nothing.
    """
    if num_rows <= ROW_STEP:
        return power_of_two(num_rows)
    return _multiple(num_rows, ROW_STEP if num_rows <= 64 or num_rows > MAX_GRAPH_ROWS else 32)


def power_of_two(count: int) -> int:
    """The least power of two that is not below count; 0 for 0."""
    return 1 << (count - 1).bit_length() if count > 0 else 0


def call_bounds(
    rows: RowBatch, kv_block_size: int, num_candidates: int, limits: CallBounds | None = None
) -> CallBounds:
    """The bucket of a call. limits: the largest bounds that its programs take; rounding up ends there."""
    counts = rows.cu_rows[1:] - rows.cu_rows[:-1]
    num_tokens = int((rows.context_lens + counts).max())
    needed = CallBounds(
        rows.num_rows,
        rows.num_sequences,
        int(counts.max()),
        -(-num_tokens // kv_block_size),
        rows.logit_rows.shape[0],
        num_candidates,
    )
    rounded = CallBounds(
        bucketed_rows(needed.num_rows),
        power_of_two(needed.num_sequences),
        power_of_two(needed.max_rows),
        max(power_of_two(needed.num_blocks), MIN_BLOCKS),
        bucketed_rows(needed.num_logit_rows),
        num_candidates,
    )
    return rounded if limits is None else clipped(needed, rounded, limits)


def clipped(needed: CallBounds, rounded: CallBounds, limits: CallBounds) -> CallBounds:
    """`rounded`, but not past `limits` where `needed` is not; a program refuses what needs more."""
    sizes = zip(needed, rounded, limits, strict=True)
    return CallBounds._make(max(need, min(up, limit)) for need, up, limit in sizes)


def _multiple(count: int, step: int) -> int:
    return -(-count // step) * step
