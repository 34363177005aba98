"""The port between a GPU runner and its programs.

A program is one segment of a model, compiled by TensorRT or written in torch. A runner owns the tensors and the order
of calls; a program owns weights and kernels.
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
        """Tells whether block tables are packed to the width in the input table_width [1] int32.

        The program then reads the width on the device, and its calls differ only in their number of rows.
        """
        ...

    def prepare(self, tensors: Mapping[str, torch.Tensor], bounds: CallBounds, *, is_kept: bool = True) -> Launch:
        """Returns a function that queues the call on the current stream.

        The function never waits, keeps no allocation and reads no tensor on the host. tensors: every
        input and output of the manifest's segment by name (pools too), and always slot_mapping [T] int32. They outlive
        the result and have the shapes of `bounds`. is_kept: it may be captured and launched again; otherwise it is
        launched before the next call is prepared. Raises ConfigError if the program cannot take the bounds.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PreparedCall:
    """A call whose inputs the device itself may write.

    `launch` queues all segments of the model in order. For a draft head it queues the layer, which overwrites its input
    with the next launch's input.
    """

    tensors: Mapping[str, torch.Tensor]
    launch: Launch
    fill_tables: Callable[[np.ndarray], None]  # uploads block tables [any, any] int64 of the first sequences


class ProgramSource(Protocol):
    """Programs of the models of one engine."""

    def open(self, model: ModelEngine, split: str, num_sms: int) -> Sequence[SegmentProgram]:
        """Opens one program per segment for a share of num_sms SMs of `split` ("": no split). Raises ConfigError."""
        ...

    def limits(self, model: ModelEngine, split: str) -> CallBounds | None:
        """Returns the bounds of the largest calls that programs take; None = any."""
        ...

    def activation_bytes(self, models: Sequence[ModelEngine]) -> int | None:
        """Returns the memory that compiled engines of the models compute in, opening them; None: not compiled."""
        ...

    def num_unloaded_bytes(self, models: Sequence[ModelEngine]) -> int:
        """Returns the device memory that unloaded weights of the models will take."""
        ...

    def close(self) -> None: ...
