"""The propose phase: the draft model extends each sequence by its num_draft_tokens.

The draft's KV may lag behind the tokens (after full acceptance, a round of length 0, a reused
prefix): the first call of a round feeds every token that the draft has not seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from faser_backend.core.batch import RowBatch, SamplingRows
from faser_backend.core.frontier import Frontier
from faser_backend.core.plan import PrefillChunk
from faser_backend.core.ports import DraftLoop, DraftTokens, ModelRunner, Partition, PhaseTimes, Sampler
from faser_backend.core.sequence import Sequence
from faser_backend.pipeline.acceptance import PURPOSE_DRAFT, draw, rank_drawn
from faser_backend.pipeline.propose import Proposal, Proposer
from faser_backend.pipeline.rows import DecodeBatch, piece_rows, run_model, single_rows
from faser_backend.pipeline.trim import chances, continues
from faser_backend.policy.speculation import MAX_DRAFT_LAG


@dataclass(eq=False)
class ModelProposer(Proposer):
    """Drafts with the draft model of a partition (pipeline/propose.py).

    keeps_probs: rejection sampling, which tests against the draft's processed probabilities and draws with noise of
    its own; else the target's noise is shared.
    """

    main_source = "model"
    max_lag = MAX_DRAFT_LAG
    num_ahead = 0  # the position of a row's token, minus the row's
    fewest_tokens = 1  # of a sequence that drafts

    sampler: Sampler
    times: PhaseTimes
    block_tables: np.ndarray  # [max_num_seqs, max_blocks], by slot
    keeps_probs: bool

    def propose(self, partition: Partition, batch: DecodeBatch, proposal: Proposal) -> Frontier:
        """Drafts with one model call per position, or with the partition's draft loop if it can pick the tokens.
        A sequence that asks for tokens gets at least one."""
        runner, loop = partition.draft, partition.draft_loop
        assert runner is not None, "drafting needs a draft model"
        self.times.start()
        chain = Chain(batch, proposal, runner.vocab_size if self.keeps_probs else 0)
        active = np.flatnonzero((proposal.num_draft_tokens > 0) & (batch.num_tokens >= self.fewest_tokens))
        if loop is None or self.keeps_probs or not active.size or not loop.can_draft(batch.slots[active]):
            self._draft_in_steps(runner, chain, active, proposal.num_candidates)
        else:
            self._draft_at_once(loop, chain, active, proposal)
        for sequence in batch.sequences:
            sequence.num_proposals += 1
        return chain.frontier()

    def _draft_in_steps(self, runner: ModelRunner, chain: Chain, active: np.ndarray, num_candidates: int) -> None:
        batch, step = chain.batch, 0
        while active.size:
            whole = active.size == len(batch)  # the common case needs no gathering
            tables = batch.block_tables if whole else batch.block_tables[active]
            rows = self._first_rows(chain, active, tables) if step == 0 else chain.next_rows(active, tables)
            self.times.lap("draft_rows")
            logits = run_model(runner, rows)
            self.times.lap("draft_model")
            chain.add(active, step, *self._draw(chain, active, logits, num_candidates))
            step += 1
            active = active[chain.wants_more(active, step)]
            self.times.lap("draft_sample")

    def _draft_at_once(self, loop: DraftLoop, chain: Chain, active: np.ndarray, proposal: Proposal) -> None:
        """Drafts like _draft_in_steps, but no chain ends early: the device asks nobody between its calls. A trim rule
        decides about the rows alone."""
        rows = self._first_rows(chain, active, chain.batch.block_tables[active])
        self.times.lap("draft_rows")
        lengths = proposal.num_draft_tokens[active]
        tokens, margins, candidates = loop.draft(rows, chain.batch.slots[active], lengths, proposal.num_candidates)
        self.times.lap("draft_model")
        for step in range(tokens.shape[1]):
            going = np.flatnonzero(lengths > step)  # rows of what was drafted
            named = None if candidates is None else candidates[going, step]
            chain.add(active[going], step, DraftTokens(tokens[going, step], margins[going, step], named), None)
        self.times.lap("draft_sample")

    def prefill(self, partition: Partition, chunks: list[PrefillChunk]) -> None:
        """Feeds the draft the unread tokens of each chunk before the anchor, without logits."""
        assert partition.draft is not None, "drafting needs a draft model"
        self.times.start()
        ends = [(each.sequence, min(each.start + each.num_tokens, each.sequence.num_tokens - 1)) for each in chunks]
        behind = [(sequence, stop) for sequence, stop in ends if self._num_rows_read(sequence) < stop]
        if behind:
            tables = self.block_tables[[sequence.slot for sequence, _ in behind]]
            rows = self._unread(behind, tables, with_logits=False)
            self.times.lap("prefill_rows")
            self._read(partition.draft, rows)
            self.times.lap("prefill_model")
        for sequence, stop in ends:
            sequence.draft_len = max(sequence.draft_len, stop)

    def _num_rows_read(self, sequence: Sequence) -> int:
        return sequence.draft_len

    def _unread(self, ends: list[tuple[Sequence, int]], tables: np.ndarray, *, with_logits: bool) -> RowBatch:
        """Returns the unread rows of sequences, each up to its end; with_logits: of the last of each."""
        starts, ahead = [self._num_rows_read(sequence) for sequence, _ in ends], self.num_ahead
        pieces = [seq.token_ids[a + ahead : b + ahead] for a, (seq, b) in zip(starts, ends, strict=True)]
        return piece_rows(pieces, starts, tables, with_logits=with_logits)

    def _read(self, runner: ModelRunner, rows: RowBatch) -> None:
        """Reads rows without logits."""
        run_model(runner, rows)

    def _first_rows(self, chain: Chain, active: np.ndarray, tables: np.ndarray) -> RowBatch:
        """Returns rows of the unread tokens, up to the anchor or the last uncommitted token. Chains of n-grams are
        unread."""
        sequences = [chain.batch.sequences[i] for i in active]
        is_behind = chain.num_behind[active] > 0
        fresh = [seq for seq, waits in zip(sequences, is_behind, strict=True) if not waits]
        if len(fresh) == len(sequences):
            return self._unread([(seq, seq.num_tokens) for seq in sequences], tables, with_logits=True)
        last = chain.last_tokens(active)
        pieces = [
            last[row : row + 1]
            if is_behind[row] and chain.is_main[active[row]]
            else np.append(seq.token_ids[seq.draft_len : seq.num_tokens], chain.behind_tokens(active[row]))
            for row, seq in enumerate(sequences)
        ]
        ends = chain.positions[active]
        starts = [int(end) - piece.size for end, piece in zip(ends, pieces, strict=True)]
        return piece_rows(pieces, starts, tables, with_logits=True)

    def _draw(
        self, chain: Chain, active: np.ndarray, logits: np.ndarray, num_candidates: int
    ) -> tuple[DraftTokens, np.ndarray | None]:
        """Draws a token for each active sequence; under rejection sampling also returns its distribution [A, V]."""
        rows = chain.sampling_rows(active)
        if not self.keeps_probs:
            return self.sampler.sample_draft(logits, rows, num_candidates), None
        probs = self.sampler.probabilities(logits, rows)
        probs[~probs.any(axis=1)] = 1 / probs.shape[1]  # unusable logits: any distribution keeps the target's
        uniforms = self.sampler.uniforms(rows, PURPOSE_DRAFT, chain.batch.draft_rounds[active])
        return rank_drawn(probs, draw(probs, uniforms), num_candidates), probs


class Chain:
    """The growing chains of one proposal: uncommitted tokens, then new ones."""

    def __init__(self, batch: DecodeBatch, proposal: Proposal, num_probs: int) -> None:
        behind, num_wanted = proposal.behind, proposal.num_draft_tokens
        self.batch = batch
        self.num_behind = behind.num_drafted  # [B]
        self.is_main = behind.is_main  # [B]
        self._trim = proposal.trim
        self.num_wanted = num_wanted
        size, width, old = len(batch), int(num_wanted.max(initial=0)), behind.drafted.shape[1]
        self.positions = batch.num_tokens + self.num_behind  # [B] of the next token
        self._tokens = np.zeros((size, old + width), np.int64)
        self._tokens[:, :old] = behind.drafted
        self._num_tokens = self.num_behind.copy()  # [B] filled entries of a row
        self._margins = np.zeros((size, width), np.float32)
        self._candidates: np.ndarray | None = None
        if proposal.num_candidates:
            self._candidates = np.zeros((size, width, proposal.num_candidates), np.int64)
        self._probs = np.zeros((size, width, num_probs), np.float32) if num_probs else None
        self._survival = np.ones(size)
        if self._trim is not None and old and behind.margins is not None:
            is_token = np.arange(old) < self.num_behind[:, None]
            self._survival = np.where(is_token, chances(self._trim, behind.margins, batch.slots), 1.0).prod(axis=1)

    def behind_tokens(self, row: int) -> np.ndarray:
        """Returns the uncommitted tokens [n] from before this proposal."""
        return self._tokens[row, : self.num_behind[row]]

    def last_tokens(self, active: np.ndarray) -> np.ndarray:
        return self._tokens[active, self._num_tokens[active] - 1]

    def next_rows(self, active: np.ndarray, tables: np.ndarray) -> RowBatch:
        """Returns one row per active sequence: its newest draft token."""
        return single_rows(self.last_tokens(active), self.positions[active] - 1, tables)

    def sampling_rows(self, active: np.ndarray) -> SamplingRows:
        return SamplingRows(
            self.batch.slots[active], self.positions[active], active, self._num_tokens[active], self._tokens
        )

    def add(self, active: np.ndarray, step: int, drawn: DraftTokens, probs: np.ndarray | None) -> None:
        self._tokens[active, self._num_tokens[active]] = drawn.tokens
        self._num_tokens[active] += 1
        self.positions[active] += 1
        self._margins[active, step] = drawn.margins
        if self._candidates is not None:
            self._candidates[active, step] = drawn.candidates
        if self._probs is not None:
            self._probs[active, step] = probs
        if self._trim is not None:
            self._survival[active] *= chances(self._trim, drawn.margins, self.batch.slots[active])

    def wants_more(self, active: np.ndarray, step: int) -> np.ndarray:
        """Returns bool [A]: whether to draft a further token, after `step` new ones."""
        is_open = self.num_wanted[active] > step
        if self._trim is not None and is_open.any():
            is_open &= continues(self._trim, self._survival[active], self.batch.slots[active])
        return is_open

    def frontier(self) -> Frontier:
        """Returns the new tokens alone, each with a row."""
        counts = self._num_tokens - self.num_behind
        width = int(counts.max(initial=0))
        if self._tokens.shape[1] == self._margins.shape[1]:
            drafted = self._tokens[:, :width]
        else:
            columns = self.num_behind[:, None] + np.arange(width)
            drafted = np.take_along_axis(self._tokens, np.minimum(columns, self._tokens.shape[1] - 1), axis=1)
        candidates = None if self._candidates is None else self._candidates[:, :width]
        probs = None if self._probs is None else self._probs[:, :width]
        return Frontier(drafted, counts, margins=self._margins[:, :width], candidates=candidates, draft_probs=probs)
