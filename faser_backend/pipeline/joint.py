"""Drafting by look-ups and by a draft model: each request's chain comes from the one that promises more.

The look-up is made first, for all. The draft model is asked for those sequences alone that it promises more for
(policy/calibration.py), and reads then what it has missed of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from faser_backend.core.frontier import Frontier
from faser_backend.core.plan import PrefillChunk
from faser_backend.core.ports import Partition
from faser_backend.core.sequence import Sequence
from faser_backend.pipeline.draft import ModelProposer
from faser_backend.pipeline.in_flight import choose
from faser_backend.pipeline.ngram import NgramProposer
from faser_backend.pipeline.propose import Proposal
from faser_backend.pipeline.rows import DecodeBatch
from faser_backend.policy.calibration import DrafterChoice

MAX_LAG = 64  # tokens of a sequence that the draft may have missed while look-ups replaced it


@dataclass(frozen=True, slots=True)
class Guess:
    """Draft tokens that were proposed behind the first num_tokens tokens of a sequence."""

    source: int
    num_tokens: int
    tokens: list[int]
    margins: np.ndarray  # [K]


class JointProposer:
    """max_prefill_tokens: that the draft model may read in a step before it drafts; sequences for which that does not
    suffice go without its draft for once."""

    main_source = "model"
    max_lag = MAX_LAG

    def __init__(self, model: ModelProposer, look_ups: NgramProposer, max_prefill_tokens: int) -> None:
        self.model, self.look_ups = model, look_ups
        self.times = model.times
        self.choice = DrafterChoice()
        self._max_prefill_tokens = max_prefill_tokens
        self._guesses: dict[Sequence, list[Guess]] = {}  # whose continuation is not known yet

    def propose(self, partition: Partition, batch: DecodeBatch, proposal: Proposal) -> Frontier:
        """Chains of either source; some may be empty where the draft model would have had too much to read."""
        self.times.start()
        wanted = proposal.num_draft_tokens
        for sequence in batch.sequences:
            self._learn(sequence)
        found = self.look_ups.look_up(batch, proposal)
        is_sampled = np.array([not each.request.sampling.is_greedy for each in batch.sequences], np.bool_)
        takes = self.choice.takes_look_up(found, wanted, is_sampled, proposal.trim)
        self.times.lap("draft_lookup")
        asked = self._caught_up(partition, batch, (wanted > 0) & ~takes)
        takes |= ~asked & (found.num_drafted > 0)
        drafted = Frontier.empty(len(batch))
        if asked.any():
            mine = replace(proposal, num_draft_tokens=np.where(asked, wanted, 0))
            drafted = self.model.propose(partition, batch, mine)
        self._remember(batch, proposal, found, drafted)
        return choose(found, drafted, takes)

    def prefill(self, partition: Partition, chunks: list[PrefillChunk]) -> None:
        self.model.prefill(partition, chunks)  # look-ups read what they miss when they are asked

    def forget(self, sequence: Sequence) -> None:
        self._guesses.pop(sequence, None)
        self.model.forget(sequence)
        self.look_ups.forget(sequence)

    def _caught_up(self, partition: Partition, batch: DecodeBatch, asked: np.ndarray) -> np.ndarray:
        """Returns bool [B]: which of the sequences `asked` [B] the draft has read, up to its max_lag tokens."""
        budget, chunks = self._max_prefill_tokens, []
        ready = asked.copy()
        for row in np.flatnonzero(asked):
            sequence = batch.sequences[row]
            lag = sequence.num_tokens - sequence.draft_len
            if lag <= self.model.max_lag:
                continue
            num_tokens = lag - 1  # the last one is fed when it drafts
            if num_tokens > budget:
                ready[row] = False
                continue
            budget -= num_tokens
            chunks.append(PrefillChunk(sequence, sequence.draft_len, num_tokens))
        if chunks:
            self.model.prefill(partition, chunks)
        return ready

    def _remember(self, batch: DecodeBatch, proposal: Proposal, found: Frontier, drafted: Frontier) -> None:
        """Stores both sources' chains, verified or not, except those behind uncommitted tokens."""
        for chains in (found, drafted):
            for row in np.flatnonzero((chains.num_drafted > 0) & (proposal.behind.num_drafted == 0)):
                count = int(chains.num_drafted[row])
                source = int(chains.sources[row])
                tokens = chains.drafted[row, :count].tolist()
                assert chains.margins is not None
                guess = Guess(source, int(batch.num_tokens[row]), tokens, chains.margins[row, :count])
                self._guesses.setdefault(batch.sequences[row], []).append(guess)

    def _learn(self, sequence: Sequence) -> None:
        """Compares the proposals for a sequence with the tokens that were emitted."""
        guesses = self._guesses.get(sequence)
        if not guesses or sequence.num_tokens == guesses[-1].num_tokens:
            return
        is_sampled = not sequence.request.sampling.is_greedy
        for guess in guesses:
            came = sequence.token_ids[guess.num_tokens : sequence.num_tokens].tolist()
            matches = [token == drafted for token, drafted in zip(came, guess.tokens, strict=False)]
            num_accepted = [*matches, False].index(False)
            num_tested = min(num_accepted + 1, len(matches))
            self.choice.observe(guess.source, is_sampled, guess.margins, num_accepted, num_tested)
        guesses.clear()
