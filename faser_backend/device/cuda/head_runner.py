"""`CudaHeadRunner`: an EAGLE-3 head on a GPU; implements core.ports.HeadRunner.

The target's calls leave the hidden states that the head reads in its own pool, by slot like keys and values; segment 0
joins those of a call's rows, segment 1 is the layer. What one call gives the next one goes on from stays on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from faser_backend.core.batch import RowBatch
from faser_backend.device.cuda.buffers import InputBlock
from faser_backend.device.cuda.runner import CudaRunner
from faser_backend.device.cuda.segment import CallBounds

JOIN, LAYER = 0, 1


class CudaHeadRunner(CudaRunner):
    """As CudaRunner, for a pool whose `features` are those of the target's pool."""

    num_ahead = 1

    def run_layer(self, rows: RowBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See core.ports.HeadRunner; both results as run_segment's."""
        call, num_made = self._run(LAYER, rows, hidden, None), rows.logit_rows.shape[0]
        return call.tensors["logits"][:num_made], call.tensors["hidden_out"][:num_made]

    def run_unseen(self, rows: RowBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """See CudaRunner."""
        return self.run_layer(rows, self.run_segment(JOIN, rows, None))

    def take_rows(self, hidden: torch.Tensor, kept: np.ndarray) -> torch.Tensor:
        """See core.ports.ModelRunner. Rows that lie side by side, as those of chains that all go on, need no index on
        the device."""
        first = int(kept[0]) if kept.size else 0
        if kept.size and int(kept[-1]) - first + 1 == kept.size:
            return hidden[first : first + kept.size].clone()
        return super().take_rows(hidden, kept)

    def bounds_of(self, segment: int, bounds: CallBounds) -> CallBounds:
        """Rows are joined alike whoever wants logits of them."""
        return bounds._replace(num_logit_rows=0) if segment == JOIN else bounds

    @property
    def _decode_segments(self) -> Sequence[int]:
        """Rows that follow drafted tokens read nothing of the target's."""
        return (LAYER,)

    def _decode_tensors(self, index: int, bounds: CallBounds, inputs: InputBlock) -> dict[str, torch.Tensor]:
        """What the layer makes of each row lies where its next launch reads it."""
        tensors = super()._decode_tensors(index, bounds, inputs)
        return {**tensors, "hidden_out": tensors["hidden"]}
