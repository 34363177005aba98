"""The propose phase with an EAGLE-3 head, which reads what the target made of each token.

Row i of the head holds token i + 1, so that n tokens make n - 1 rows, all of positions that the target has run. The
chain goes on from the head's own hidden states; the rows of accepted tokens are read again in the next round, then
beside the target's.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from faser_backend.core.batch import RowBatch
from faser_backend.core.plan import PrefillChunk
from faser_backend.core.ports import DeviceArray, DraftLoop, HeadRunner, ModelRunner, Partition, Sampler
from faser_backend.core.sequence import Sequence
from faser_backend.pipeline.draft import Chain, ModelProposer
from faser_backend.pipeline.propose import Proposal
from faser_backend.pipeline.rows import DecodeBatch, piece_rows, run_model, single_rows
from faser_backend.pipeline.timing import PhaseTimes
from faser_backend.policy.speculation import MAX_ADAPTIVE_TOKENS, MAX_DRAFT_LAG


class HeadProposer(ModelProposer):
    """Drafts with the head of a partition, in turn with its target: it cannot go on behind tokens that the target
    has not seen. A sequence of one token gets no draft, for there is no row yet."""

    max_lag = MAX_ADAPTIVE_TOKENS + MAX_DRAFT_LAG  # rows of accepted tokens are read again in any case
    fewest_tokens = 2  # of a sequence: the first token has no row yet

    def __init__(self, sampler: Sampler, times: PhaseTimes, block_tables: np.ndarray, *, keeps_probs: bool) -> None:
        super().__init__(sampler, times, block_tables, keeps_probs=keeps_probs)
        self._num_read: dict[Sequence, int] = {}  # rows beside the target's hidden states

    def prefill(self, partition: Partition, chunks: list[PrefillChunk]) -> None:
        """Reads the rows of each chunk whose next token is known, without logits."""
        self.times.start()
        ends = [(chunk.sequence, chunk.start + chunk.num_tokens) for chunk in chunks]
        behind = [(seq, min(stop, seq.num_tokens - 1)) for seq, stop in ends]
        behind = [(sequence, stop) for sequence, stop in behind if self._rows_of(sequence) < stop]
        if behind:
            sequences = [sequence for sequence, _ in behind]
            tables = self._block_tables[[sequence.slot for sequence in sequences]]
            rows = self._unread(sequences, [stop for _, stop in behind], tables, with_logits=False)
            self.times.lap("prefill_rows")
            assert partition.draft is not None, "drafting needs a draft head"
            run_model(partition.draft, rows)
            self.times.lap("prefill_model")
        for sequence, stop in behind:
            self._num_read[sequence] = stop
        for sequence, stop in ends:
            sequence.draft_len = max(sequence.draft_len, min(stop, sequence.num_tokens - 1))

    def unread_rows(self, batch: DecodeBatch, active: np.ndarray) -> RowBatch:
        """All rows of sequences active [A] that are not read yet, logits behind the last of each."""
        sequences = [batch.sequences[i] for i in active]
        stops = [sequence.num_tokens - 1 for sequence in sequences]
        rows = self._unread(sequences, stops, batch.block_tables[active], with_logits=True)
        self._num_read.update(zip(sequences, stops, strict=True))
        return rows

    def forget(self, sequence: Sequence) -> None:
        self._num_read.pop(sequence, None)

    def _draft_in_steps(self, runner: ModelRunner, chain: Chain, active: np.ndarray, num_candidates: int) -> None:
        assert not chain.num_behind.any(), "a head cannot draft behind tokens that its target has not seen"
        head, batch, step = cast(HeadRunner, runner), chain.batch, 0
        active = active[batch.num_tokens[active] >= self.fewest_tokens]
        hidden: DeviceArray = None
        while active.size:
            if hidden is None:
                rows = self.unread_rows(batch, active)
            else:  # the newest token of each chain
                rows = single_rows(chain.last_tokens(active), chain.positions[active] - 2, batch.block_tables[active])
            self.times.lap("draft_rows")
            if hidden is None:
                hidden = head.run_segment(0, rows, None)
            logits, hidden = head.run_layer(rows, hidden)
            self.times.lap("draft_model")
            chain.add(active, step, *self._draw(chain, active, step, logits, num_candidates))
            step += 1
            goes_on = chain.wants_more(active, step)
            active, hidden = active[goes_on], head.take_rows(hidden, np.flatnonzero(goes_on))
            self.times.lap("draft_sample")

    def _draft_at_once(self, loop: DraftLoop, chain: Chain, active: np.ndarray, proposal: Proposal) -> None:
        active = active[chain.batch.num_tokens[active] >= self.fewest_tokens]
        if active.size:
            super()._draft_at_once(loop, chain, active, proposal)

    def _first_rows(self, chain: Chain, active: np.ndarray, tables: np.ndarray) -> RowBatch:
        assert not chain.num_behind.any(), "a head cannot draft behind tokens that its target has not seen"
        return self.unread_rows(chain.batch, active)

    def _rows_of(self, sequence: Sequence) -> int:
        """Rows that are read. A reused prefix brings its own, the last of them beside another's next token."""
        return max(0, min(self._num_read.get(sequence, sequence.draft_len), sequence.num_tokens - 2))

    def _unread(
        self, sequences: list[Sequence], stops: list[int], tables: np.ndarray, *, with_logits: bool
    ) -> RowBatch:
        """Rows up to stop of each sequence that are not read yet."""
        starts = [self._rows_of(sequence) for sequence in sequences]
        pieces = [seq.token_ids[a + 1 : b + 1] for seq, a, b in zip(sequences, starts, stops, strict=True)]
        return piece_rows(pieces, starts, tables, with_logits=with_logits)
