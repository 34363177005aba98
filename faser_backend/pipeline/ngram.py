"""Drafting without a draft model: the text so far, continued as it was continued before (prompt lookup).

The longest n-gram that ends the sequence is looked up at its most recent earlier occurrence, and what followed there is
proposed again. Tokens that are drafted but not committed count as text. A chain depends on the tokens before it alone,
so it has no distributions: rejection sampling would accept each token with the target's probability of it, as
sample-and-match does.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np

from faser_backend.core.frontier import NGRAM, Frontier
from faser_backend.core.plan import PrefillChunk
from faser_backend.core.ports import Partition, PhaseTimes
from faser_backend.core.sequence import Sequence
from faser_backend.pipeline.propose import Proposal
from faser_backend.pipeline.rows import DecodeBatch
from faser_backend.policy.calibration import MarginCurve

MIN_MATCH, MAX_MATCH = 1, 3  # tokens that are looked up: the longest n-gram that occurred before
# In place of a margin: how many tokens before a draft token agree with those before its original. Each number up to the
# largest has a bin of the calibration to itself, and draws its chance from there.
_MARGINS = MarginCurve.margin_knots.astype(np.float32)  # [14] of 1, 2, ... agreeing tokens


class NgramIndex:
    """Where each n-gram of one growing sequence occurred last, but for the one at its end. min_match >= 1."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self._tokens: list[int] = []
        # By n, longest first: n-gram -> position behind its last occurrence that a token follows.
        self._followed: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in range(max_match, min_match - 1, -1)}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: list[int]) -> None:
        """Appends tokens, at constant time and memory per token."""
        tokens, old = self._tokens, len(self._tokens)
        tokens += token_ids
        for n, followed in self._followed.items():
            first = max(old, n)  # position behind the first n-gram that has a follower now
            if first >= len(tokens):
                continue
            columns = (tokens[first - n + i : len(tokens) - n + i] for i in range(n))
            followed.update(zip(zip(*columns, strict=True), range(first, len(tokens)), strict=True))

    def continuation(self, chain: list[int], num_tokens: int) -> tuple[list[int], int]:
        """Finds what followed the last occurrence of the longest n-gram that ends the sequence with `chain` behind it.

        Returns num_tokens tokens, none where nothing matches, and how many tokens before them agree, of as many as
        have a margin. A continuation that reaches the end goes on with itself, so a run is continued as a run.
        """
        size = len(self._tokens)
        self._tokens += chain  # for a moment
        start = self._find(size)
        found = ([], 0) if start is None else (self._copied(start, num_tokens), self._num_agreeing(start))
        del self._tokens[size:]
        return found

    def _copied(self, start: int, num_tokens: int) -> list[int]:
        copied = self._tokens[start : start + num_tokens]
        period = len(self._tokens) - start
        while len(copied) < num_tokens:
            copied.append(copied[len(copied) - period])
        return copied

    def _num_agreeing(self, start: int) -> int:
        """Counts the tokens before `start` that equal those at the end, up to the number of margins."""
        tokens, count = self._tokens, 1  # a match agrees in one at least
        most = min(start, _MARGINS.size)
        while count < most and tokens[start - 1 - count] == tokens[-1 - count]:
            count += 1
        return count

    def _find(self, num_indexed: int) -> int | None:
        """Returns where the continuation begins. Tokens from num_indexed on are not indexed: they are searched here."""
        tokens, end = self._tokens, len(self._tokens)
        for n, followed in self._followed.items():
            if n >= end:
                continue
            ngram = tokens[end - n :]
            for start in range(end - 1, max(num_indexed, n) - 1, -1):
                if tokens[start - n : start] == ngram:
                    return start
            start = followed.get(tuple(ngram))
            if start is not None:
                return start
        return None


class NgramProposer:
    """Drafts for sequences from their own tokens (pipeline/propose.py); `draft_len` counts what it has read of one.

    It names no candidates, so verification does not stop at exits, and it ignores trim rules: tokens cost next to
    nothing, and the step leaves out the rows that are not worth theirs.
    """

    main_source = "ngram"
    max_lag = sys.maxsize  # it reads what it has not seen in microseconds

    def __init__(self, times: PhaseTimes) -> None:
        self.times = times
        self._indexes: dict[Sequence, NgramIndex] = {}

    def propose(self, partition: Partition, batch: DecodeBatch, proposal: Proposal) -> Frontier:
        """Returns chains of full length where an n-gram matches, and empty ones elsewhere."""
        frontier = self.look_up(batch, proposal)
        for row in np.flatnonzero(proposal.num_draft_tokens):
            batch.sequences[row].draft_len = batch.sequences[row].num_tokens - 1
        return replace(frontier, sources=None)

    def look_up(self, batch: DecodeBatch, proposal: Proposal) -> Frontier:
        """Proposes beside a draft model: leaves draft_len unchanged."""
        self.times.start()
        wanted, behind = proposal.num_draft_tokens.tolist(), proposal.behind
        size, width = len(batch), max(wanted)
        drafted = np.zeros((size, width), np.int64)
        num_drafted = np.zeros(size, np.int64)
        num_agreeing = np.ones(size, np.int64)
        for row, sequence in enumerate(batch.sequences):
            if not wanted[row]:
                continue
            chain = behind.drafted[row, : behind.num_drafted[row]].tolist()
            index = self.read(sequence, sequence.num_tokens)
            tokens, agreeing = index.continuation(chain, wanted[row])
            if tokens:
                num_drafted[row], num_agreeing[row] = len(tokens), agreeing
                drafted[row, : len(tokens)] = tokens
        drafted = drafted[:, : int(num_drafted.max())]
        # With every draft token that is accepted one more agrees.
        agree_before = num_agreeing[:, None] + np.arange(drafted.shape[1])  # [B, K]
        margins = _MARGINS[np.minimum(agree_before, _MARGINS.size) - 1]
        self.times.lap("draft_lookup")
        return Frontier(drafted, num_drafted, margins=margins, sources=np.full(size, NGRAM))

    def prefill(self, partition: Partition, chunks: list[PrefillChunk]) -> None:
        self.times.start()
        for chunk in chunks:
            stop = chunk.start + chunk.num_tokens
            self.read(chunk.sequence, stop)
            chunk.sequence.draft_len = max(chunk.sequence.draft_len, stop)
        self.times.lap("draft_lookup")

    def forget(self, sequence: Sequence) -> None:
        self._indexes.pop(sequence, None)

    def read(self, sequence: Sequence, stop: int) -> NgramIndex:
        """The sequence's index, which has read `stop` tokens at least."""
        index = self._indexes.get(sequence)
        if index is None:
            index = self._indexes[sequence] = NgramIndex(MIN_MATCH, MAX_MATCH)
        if len(index) < stop:
            index.extend(sequence.token_ids[len(index) : stop].tolist())
        return index
