"""`SimRunner`: a model whose calls take the time that a cost model predicts, and compute nothing.

Step overhead is charged here, all but that of trimming (simulation/proposer.py): what surrounds a verification with the
target's call that yields logits, and with it what a round of drafting costs where drafted rows are verified; what
surrounds a draft call with that call, an exit's with its scores. Prompt chunks pay for their calls alone.
"""

from __future__ import annotations

import numpy as np

from faser_backend.core.batch import RowBatch
from faser_backend.policy.cost_model import DRAFT, TARGET, CostModel
from lab.simulation.clock import SimClock


class SimRunner:
    """core.ports.ModelRunner on one partition, in virtual time."""

    def __init__(
        self,
        model: str,
        partition: str,
        costs: CostModel,
        clock: SimClock,
        *,
        num_layers: tuple[int, ...],  # of each segment
        exits: frozenset[int],
        vocab_size: int,
    ) -> None:
        assert len(num_layers) == costs.num_segments(model), "one cost per segment"
        self.model, self.partition = model, partition
        self.num_segments = len(num_layers)
        self.num_layers = num_layers
        self.exits = exits
        self.vocab_size = vocab_size
        self.max_logit_rows: int | None = None
        self._costs = costs
        self._clock = clock

    def run_segment(self, segment: int, rows: RowBatch, hidden: np.ndarray | None) -> np.ndarray:
        """Advances the clock. Returns [T, 1] in place of hidden states, [R, 1] in place of logits."""
        is_last = segment == self.num_segments - 1
        self._clock.advance_us(self._call_us(segment, rows))
        if not is_last:
            return np.zeros((rows.num_rows, 1), np.float32)
        if rows.logit_rows.size:
            self._clock.advance_us(self._overhead_us(rows))
        return np.zeros((rows.logit_rows.size, 1), np.float32)

    def run_segment_with_scores(
        self, segment: int, rows: RowBatch, hidden: np.ndarray | None, exit_candidates: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """As run_segment. Scores [T, C] carry the exit's place among the exits: the sampler knows its margins."""
        output = self.run_segment(segment, rows, hidden)
        self._clock.advance_us(float(self._costs.overhead.exit(rows.num_rows)))
        place = sorted(self.exits).index(segment)
        return output, np.full(exit_candidates.shape, place, np.float32)

    def take_rows(self, hidden: np.ndarray, kept: np.ndarray) -> np.ndarray:
        return hidden[kept]

    def _call_us(self, segment: int, rows: RowBatch) -> float:
        size = rows.num_sequences
        # Unpadded, the mean is exact: keys are charged by their sum over the sequences.
        contexts = rows.context_lens
        context = self._costs.batch_context(contexts.tolist())
        return float(
            self._costs.call_us(
                self.model,
                self.partition,
                rows.num_rows,
                size,
                context,
                max_rows=int(rows.rows_per_sequence.max()),
                num_logit_rows=rows.logit_rows.size,
                first_segment=segment,
                last_segment=segment + 1,
            )
        )

    def _overhead_us(self, rows: RowBatch) -> float:
        overhead = self._costs.overhead
        if self.model == DRAFT:
            return float(overhead.draft_call(rows.num_sequences))
        assert self.model == TARGET
        has_drafted = rows.num_rows > rows.num_sequences
        return float(
            overhead.step(rows.num_sequences, rows.num_rows) + has_drafted * overhead.draft_round(rows.num_sequences)
        )
