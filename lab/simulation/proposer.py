"""`SimProposer`: drafts as the engine does, and lets the clock know what deciding by confidence takes the host.

It is part of drafting, and so of the lane that drafts, but of no model call: the runner cannot charge it.
"""

from __future__ import annotations

import numpy as np

from faser_backend.core.frontier import Frontier
from faser_backend.core.ports import Sampler
from faser_backend.pipeline.draft import ModelProposer
from faser_backend.pipeline.phases import Partition
from faser_backend.pipeline.propose import Proposal
from faser_backend.pipeline.rows import DecodeBatch
from faser_backend.pipeline.timing import PhaseTimes
from faser_backend.policy.cost_model import OverheadCost
from lab.simulation.clock import SimClock


class SimProposer(ModelProposer):
    """ModelProposer in virtual time: sample-and-match, a draft model that is called token by token."""

    def __init__(
        self,
        sampler: Sampler,
        times: PhaseTimes,
        block_tables: np.ndarray,  # [max_num_seqs, max_blocks], by slot
        clock: SimClock,
        overhead: OverheadCost,
    ) -> None:
        super().__init__(sampler, times, block_tables, keeps_probs=False)
        self._clock = clock
        self._overhead = overhead

    def propose(self, partition: Partition, batch: DecodeBatch, proposal: Proposal) -> Frontier:
        """As ModelProposer. Under a trim rule every draft call costs a decision on the chains that it made longer."""
        frontier = super().propose(partition, batch, proposal)
        if proposal.trim is not None:
            num_calls = frontier.drafted.shape[1]
            num_active = np.count_nonzero(np.arange(num_calls)[:, None] < frontier.num_drafted, axis=1)
            self._clock.advance_us(float(np.sum(self._overhead.trim_call(num_active))))
            self.times.lap("draft_sample")
        return frontier
