"""The propose phase with a draft that reads what the target made of each token: an EAGLE-3 head or a block drafter.

Row i of a head holds token i + 1, so that n tokens make n - 1 rows, all of positions that the target has run. The
chain goes on from the head's own hidden states; the rows of accepted tokens are read again in the next round, then
beside the target's.

A block drafter guesses all tokens of a chain in one call. A block's rows are the anchor and a mask for each token, one
less if the anchor predicts too; they see each other, not the tokens drawn for them, which DSpark's bias alone follows.
Each draws with its own position's noise, as a chain does, so sample-and-match stays exact; rejection sampling tests
against each position's distribution, behind the tokens drawn before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from faser_backend.core.batch import RowBatch
from faser_backend.core.frontier import Frontier
from faser_backend.core.ports import BlockRunner, DeviceArray, DraftTokens, HeadRunner, ModelRunner
from faser_backend.core.sequence import Sequence
from faser_backend.pipeline.draft import Chain, ModelProposer
from faser_backend.pipeline.rows import DecodeBatch, piece_rows, single_rows, verify_sampling_rows
from faser_backend.policy.speculation import MAX_ADAPTIVE_TOKENS, MAX_DRAFT_LAG


@dataclass(eq=False)
class HeadProposer(ModelProposer):
    """Drafts with the head of a partition, in turn with its target: it cannot go on behind tokens that the target
    has not seen. A sequence of one token gets no draft, for there is no row yet."""

    max_lag = MAX_ADAPTIVE_TOKENS + MAX_DRAFT_LAG  # rows of accepted tokens are read again in any case
    num_ahead = 1
    fewest_tokens = 2  # of a sequence: the first token has no row yet

    _num_read: dict[Sequence, int] = field(default_factory=dict, init=False)  # rows beside the target's hidden states

    def unread_rows(self, batch: DecodeBatch, active: np.ndarray, *, with_logits: bool = True) -> RowBatch:
        """Returns all rows of sequences active [A] that are not read yet; with_logits: of the last of each."""
        ends = [(sequence, sequence.num_tokens - 1) for sequence in (batch.sequences[i] for i in active)]
        return self._unread(ends, batch.block_tables[active], with_logits=with_logits)

    def forget(self, sequence: Sequence) -> None:
        self._num_read.pop(sequence, None)

    def _draft_in_steps(self, runner: ModelRunner, chain: Chain, active: np.ndarray, num_candidates: int) -> None:
        assert not chain.num_behind.any(), "a head cannot draft behind tokens that its target has not seen"
        head, batch, step = cast(HeadRunner, runner), chain.batch, 0
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
            chain.add(active, step, *self._draw(chain, active, logits, num_candidates))
            step += 1
            goes_on = chain.wants_more(active, step)
            active, hidden = active[goes_on], head.take_rows(hidden, np.flatnonzero(goes_on))
            self.times.lap("draft_sample")

    def _first_rows(self, chain: Chain, active: np.ndarray, tables: np.ndarray) -> RowBatch:
        assert not chain.num_behind.any(), "a head cannot draft behind tokens that its target has not seen"
        return self.unread_rows(chain.batch, active)

    def _num_rows_read(self, sequence: Sequence) -> int:
        # A reused prefix brings its own, the last of them beside another's next token.
        return max(0, min(self._num_read.get(sequence, sequence.draft_len), sequence.num_tokens - 2))

    def _unread(self, ends: list[tuple[Sequence, int]], tables: np.ndarray, *, with_logits: bool) -> RowBatch:
        rows = super()._unread(ends, tables, with_logits=with_logits)
        self._num_read.update(ends)
        return rows


class BlockProposer(HeadProposer):
    """Drafts with the block drafter of a partition, in turn with its target. A block has at most block_size rows; a
    sequence of one token gets none, for the target has run no position yet. A confidence c, the log odds of
    acceptance, counts as a margin: -log(1 - sigmoid(c)), which rises with it from 0."""

    def _draft_in_steps(self, runner: ModelRunner, chain: Chain, active: np.ndarray, num_candidates: int) -> None:
        drafter, batch = cast(BlockRunner, runner), chain.batch
        if not active.size:
            return
        context = self.unread_rows(batch, active, with_logits=False)
        lengths = chain.num_wanted[active].clip(max=drafter.block_size - drafter.num_idle)
        rows = _block_rows(chain, active, lengths + drafter.num_idle, drafter)
        self.times.lap("draft_rows")
        drafter.run_segment(0, context, None)
        logits, sure = drafter.run_block(rows)
        self.times.lap("draft_model")
        firsts = np.cumsum(lengths) - lengths  # of each sequence's logits
        drawn, last = None, rows.token_ids[rows.cu_rows[:-1]]
        if not (self.keeps_probs or drafter.has_bias or self.sampler.has_rules(batch.slots[active])):
            counts = np.bincount(active + 1, lengths, len(batch) + 1).astype(np.int64)
            draws = verify_sampling_rows(batch, Frontier.empty(len(batch)), np.cumsum(counts))
            drawn = self.sampler.sample_draft(logits, draws, num_candidates)
        for step in range(int(lengths.max())):
            goes_on = np.flatnonzero(lengths > step)
            index, probs = firsts[goes_on] + step, None
            if drawn is None:  # a draw depends on those before it
                these = drafter.biased(logits, index, last[goes_on])
                found, probs = self._draw(chain, active[goes_on], these, num_candidates)
            else:
                named = None if drawn.candidates is None else drawn.candidates[index]
                found = DraftTokens(drawn.tokens[index], drawn.margins[index], named)
            if sure is not None and drafter.token_confidences is not None:
                confidences = sure[index] + drafter.token_confidences[last[goes_on]]
                found = found._replace(margins=np.nan_to_num(np.logaddexp(0.0, confidences)))
            chain.add(active[goes_on], step, found, probs)
            last[goes_on] = found.tokens
        self.times.lap("draft_sample")

    def _read(self, runner: ModelRunner, rows: RowBatch) -> None:
        runner.run_segment(0, rows, None)


def _block_rows(chain: Chain, active: np.ndarray, counts: np.ndarray, drafter: BlockRunner) -> RowBatch:
    """Returns the rows of blocks of sequences active [A], counts [A] each: an anchor, then masks. Those that predict
    have logits."""
    batch, starts = chain.batch, chain.batch.num_tokens[active] - 1
    pieces = [np.full(count, drafter.mask_id) for count in counts]
    for piece, index, start in zip(pieces, active, starts, strict=True):
        piece[0] = batch.sequences[index].token_ids[start]
    rows = piece_rows(pieces, starts.tolist(), batch.block_tables[active], with_logits=False)
    idle = rows.cu_rows if drafter.num_idle else rows.cu_rows[:0]
    return replace(rows, logit_rows=np.setdiff1d(np.arange(rows.num_rows), idle))
