"""Runners and draft loops that compute on their share of the GPU whoever calls them.

A step that has nothing to overlap may still use a split's runner, from the stepping thread, whose stream is that
of the whole device. Its work, and above all the graphs that it captures, which keep the SMs of their stream, belong
on the share: such a call is queued there, between a fork from and a join to the caller's stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from faser_backend.core.batch import RowBatch
from faser_backend.core.ports import DeviceArray, DraftLoop, DraftTokens
from faser_backend.device.cuda.streams import SmPartition
from faser_backend.device.runtime import OpenRunner


class ShareRunner:
    """`runner` on `share`; implements core.ports.ModelRunner. Closes draft loops over it, too: see `loop`."""

    def __init__(self, runner: OpenRunner, share: SmPartition) -> None:
        self.runner: Any = runner
        self._loops: list[ShareDraftLoop] = []
        self.share = share
        self.num_segments = runner.num_segments
        self.num_layers = runner.num_layers
        self.exits = runner.exits
        self.vocab_size = runner.vocab_size
        self.max_logit_rows = runner.max_logit_rows

    def run_segment(self, segment: int, rows: RowBatch, hidden: DeviceArray | None) -> DeviceArray:
        """See core.ports.ModelRunner."""
        with self.share.current():
            return self.runner.run_segment(segment, rows, hidden)

    def run_segment_with_scores(
        self, segment: int, rows: RowBatch, hidden: DeviceArray | None, exit_candidates: np.ndarray
    ) -> tuple[DeviceArray, DeviceArray]:
        """See core.ports.ModelRunner."""
        with self.share.current():
            return self.runner.run_segment_with_scores(segment, rows, hidden, exit_candidates)

    def take_rows(self, hidden: DeviceArray, kept: np.ndarray) -> DeviceArray:
        """See core.ports.ModelRunner."""
        with self.share.current():
            return self.runner.take_rows(hidden, kept)

    def run_layer(self, rows: RowBatch, hidden: DeviceArray) -> tuple[DeviceArray, DeviceArray]:
        """See core.ports.HeadRunner: of heads alone."""
        with self.share.current():
            return self.runner.run_layer(rows, hidden)

    def capture_menu(self, num_candidates: int) -> None:
        """See CudaRunner."""
        with self.share.current():
            self.runner.capture_menu(num_candidates)

    def loop(self, make: Callable[[Any], DraftLoop]) -> ShareDraftLoop:
        """A draft loop over the runner, on the share; make: given the runner itself."""
        with self.share.current():
            self._loops.append(ShareDraftLoop(make(self.runner), self.share))
        return self._loops[-1]

    def check_integrity(self) -> None:
        self.runner.check_integrity()

    def close(self) -> None:
        """Waits for the device; then graphs go, the loops' as well, while the stream that they were captured on is
        there. May be called again."""
        self.runner.close()
        for loop in self._loops:
            loop.close()


class ShareDraftLoop:
    """`loop` on `share`; implements core.ports.DraftLoop."""

    def __init__(self, loop: Any, share: SmPartition) -> None:
        self._loop: Any = loop  # a TorchDraftLoop, until it is closed
        self._share = share

    def capture_menu(self, max_num_seqs: int, num_candidates: int) -> None:
        """See TorchDraftLoop."""
        assert self._loop is not None, "the draft loop was closed"
        with self._share.current():
            self._loop.capture_menu(max_num_seqs, num_candidates)

    def can_draft(self, slots: np.ndarray) -> bool:
        assert self._loop is not None, "the draft loop was closed"
        return self._loop.can_draft(slots)

    def draft(
        self, rows: RowBatch, slots: np.ndarray, num_draft_tokens: np.ndarray, num_candidates: int
    ) -> DraftTokens:
        """See core.ports.DraftLoop."""
        assert self._loop is not None, "the draft loop was closed"
        with self._share.current():
            return self._loop.draft(rows, slots, num_draft_tokens, num_candidates)

    def close(self) -> None:
        """Lets go of the loop and of its graphs. May be called again."""
        self._loop = None
