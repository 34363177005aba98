"""The oracle: drafts exactly the tokens that will be accepted, and so verifies only rows that emit one.

It reads the planted outcomes, which no policy that serves can know. Of what will be accepted it drafts as much as earns
most tokens per time in the step, by the costs of the world, in turns on the whole device; its chains are no longer than
those of policies that adapt. It looks no further than a step: where draft calls are dear and requests come one by one,
a policy whose steps are shorter may answer sooner.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from faser_backend.core.decision import WHOLE, Decision
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.cost_model import DRAFT, TARGET, CostModel
from faser_backend.policy.speculation import MAX_ADAPTIVE_TOKENS
from lab.simulation.acceptance import Outcomes


class OraclePolicy:
    """A SpeculationPolicy that is told what will be accepted."""

    is_drafting = True
    partitions = (WHOLE,)

    def __init__(self, outcomes: Outcomes, costs: CostModel) -> None:
        self._outcomes = outcomes
        self._costs = costs

    def decide(self, sequences: Sequence[RunningSequence], num_coming: int = 0) -> Decision:
        accepted = np.array([min(self._num_accepted(sequence), MAX_ADAPTIVE_TOKENS) for sequence in sequences])
        lengths = np.arange(int(accepted.max()) + 1)
        rows = np.minimum(accepted[:, None], lengths).sum(axis=0) + len(sequences)  # [L]: all emit a token
        context = self._costs.batch_context([float(sequence.num_tokens) for sequence in sequences])
        best = int(np.argmax(rows / self._step_us(rows, accepted, lengths, context)))
        return Decision(np.minimum(accepted, best).tolist())

    def observe(self, record: StepRecord) -> None:
        """Nothing to learn."""

    def _num_accepted(self, sequence: RunningSequence) -> int:
        """The last token of a request is the one behind its draft."""
        found = self._outcomes.num_accepted(sequence.slot, sequence.num_tokens)
        return min(found, sequence.num_remaining_tokens - 1)

    def _step_us(self, rows: np.ndarray, accepted: np.ndarray, lengths: np.ndarray, context: int) -> np.ndarray:
        """[L] time of a step that drafts up to each length."""
        size, overhead = accepted.size, self._costs.overhead
        drafting = np.count_nonzero(accepted[:, None] > lengths[:-1], axis=0)  # [L - 1] chains in each draft call
        draft_us = np.zeros(0)
        if drafting.size:
            calls = self._costs.call_us(DRAFT, WHOLE, drafting, drafting, context, num_logit_rows=drafting)
            draft_us = calls + overhead.draft_call(drafting)
        verify_us = self._costs.call_us(TARGET, WHOLE, rows, size, context)
        around = overhead.step(size, rows) + (lengths > 0) * overhead.draft_round(size)
        return verify_us + around + np.concatenate([[0.0], np.cumsum(draft_us)])
