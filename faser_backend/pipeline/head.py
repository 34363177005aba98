"""The propose phase with a draft that reads what the target made of each token: an EAGLE-3 head or a block drafter.

Row i of a head holds token i + 1, so that n tokens make n - 1 rows, all of positions that the target has run. The
chain goes on from the head's own hidden states; the rows of accepted tokens are read again in the next round, then
beside the target's.

A block drafter (DFlash, arXiv 2602.06036) guesses all tokens of a chain in one call. A block's rows are the anchor and
a mask for each token; masks see each other, not the tokens drawn for them. Each draws with its own position's noise, as
a chain does, so sample-and-match stays exact; rejection sampling tests against each position's distribution.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from faser_backend.core.batch import RowBatch, SamplingRows
from faser_backend.core.plan import PrefillChunk
from faser_backend.core.ports import (
    BlockRunner,
    DeviceArray,
    DraftLoop,
    DraftTokens,
    HeadRunner,
    ModelRunner,
    Partition,
    Sampler,
)
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
            self._read(partition.draft, rows)
            self.times.lap("prefill_model")
        for sequence, stop in behind:
            self._num_read[sequence] = stop
        for sequence, stop in ends:
            sequence.draft_len = max(sequence.draft_len, min(stop, sequence.num_tokens - 1))

    def unread_rows(self, batch: DecodeBatch, active: np.ndarray, *, with_logits: bool = True) -> RowBatch:
        """Returns all rows of sequences active [A] that are not read yet; with_logits: of the last of each."""
        sequences = [batch.sequences[i] for i in active]
        stops = [sequence.num_tokens - 1 for sequence in sequences]
        rows = self._unread(sequences, stops, batch.block_tables[active], with_logits=with_logits)
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

    def _read(self, runner: ModelRunner, rows: RowBatch) -> None:
        """Reads rows without logits."""
        run_model(runner, rows)

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


class BlockProposer(HeadProposer):
    """Drafts with the block drafter of a partition, in turn with its target. A block holds at most block_size - 1
    draft tokens; a sequence of one token gets none, for the target has run no position yet."""

    def _draft_in_steps(self, runner: ModelRunner, chain: Chain, active: np.ndarray, num_candidates: int) -> None:
        drafter, batch = cast(BlockRunner, runner), chain.batch
        active = active[batch.num_tokens[active] >= self.fewest_tokens]
        if not active.size:
            return
        context = self.unread_rows(batch, active, with_logits=False)
        lengths = chain.num_wanted[active].clip(max=drafter.block_size - 1)
        rows = _block_rows(chain, active, lengths, drafter.mask_id)
        self.times.lap("draft_rows")
        drafter.run_segment(0, context, None)
        logits = drafter.run_segment(1, rows, None)
        self.times.lap("draft_model")
        firsts = np.cumsum(lengths) - lengths  # of each sequence's logits
        drawn = None
        if not (self._keeps_probs or self._sampler.has_rules(batch.slots[active])):
            drawn = self._sampler.sample_draft(logits, _sampling_rows(chain, active, lengths), num_candidates)
        for step in range(int(lengths.max())):
            goes_on = np.flatnonzero(lengths > step)
            index = firsts[goes_on] + step
            if drawn is None:  # a draw depends on those before it
                these = runner.take_rows(logits, index)
                chain.add(active[goes_on], step, *self._draw(chain, active[goes_on], step, these, num_candidates))
            else:
                named = None if drawn.candidates is None else drawn.candidates[index]
                chain.add(active[goes_on], step, DraftTokens(drawn.tokens[index], drawn.margins[index], named), None)
        self.times.lap("draft_sample")

    def _read(self, runner: ModelRunner, rows: RowBatch) -> None:
        runner.run_segment(0, rows, None)


def _block_rows(chain: Chain, active: np.ndarray, lengths: np.ndarray, mask_id: int) -> RowBatch:
    """Returns the rows of blocks of sequences active [A]: an anchor and lengths [A] masks each, which have logits."""
    batch, counts = chain.batch, lengths + 1
    cu_rows = np.concatenate([[0], np.cumsum(counts)])
    token_ids = np.full(int(cu_rows[-1]), mask_id)
    token_ids[cu_rows[:-1]] = [batch.sequences[i].token_ids[batch.num_tokens[i] - 1] for i in active]
    is_mask = np.ones(token_ids.size, np.bool_)
    is_mask[cu_rows[:-1]] = False
    tables = batch.block_tables[active]
    return RowBatch(token_ids, cu_rows, batch.num_tokens[active] - 1, tables, np.flatnonzero(is_mask))


def _sampling_rows(chain: Chain, active: np.ndarray, lengths: np.ndarray) -> SamplingRows:
    """Returns the draws of all masks, whose slots have no rules: what was drafted before is not read."""
    sequence = np.repeat(active, lengths)
    offsets = np.arange(sequence.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    positions = chain.positions[sequence] + offsets
    drafted = np.zeros((len(chain.batch), int(lengths.max())), np.int64)
    return SamplingRows(chain.batch.slots[sequence], positions, sequence, offsets, drafted)
