"""The agreement between a GPU runner and the programs that it runs: a call's tensors, how it is queued, who opens them.

A program is one segment of a model, compiled or written in torch. A runner owns the tensors and the order of
calls; a program owns weights and kernels. Neither knows which kind the other is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from faser_backend.cuda.call_shapes import CallBounds
from faser_backend.manifest import ModelEngine, SegmentSpec

Launch = Callable[[], None]


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

    tensors: Mapping[str, torch.Tensor]
    launch: Launch
    fill_tables: Callable[[np.ndarray], None]  # uploads block tables [any, any] int64 of the first sequences


class ProgramSource(Protocol):
    """Programs of the models of one engine."""

    def open(self, model: ModelEngine, split: str, num_sms: int) -> Sequence[SegmentProgram]:
        """One per segment, in order, for a share of num_sms SMs; split: of which it is one, "" for the whole
        device. Raises ConfigError where they cannot be loaded."""
        ...

    def limits(self, model: ModelEngine, split: str) -> CallBounds | None:
        """The largest calls that they take; None = any."""
        ...

    def num_unloaded_bytes(self, models: Sequence[ModelEngine]) -> int:
        """Device memory that the models' weights are still going to take."""
        ...

    def close(self) -> None: ...
