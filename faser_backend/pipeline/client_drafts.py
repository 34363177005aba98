"""Drafts that clients bring along, verified like those of the server: guesses of what follows their prompts, and
tokens that their grammars force.

A client's chain enters what is in flight as soon as its prompt has been read, and so reaches the request's first
verification in every pipeline mode; a forced one the next verification of a sequence that has nothing in flight. The
draft model has not read it, and confidence knows nothing of it.
"""

from __future__ import annotations

import numpy as np

from faser_backend.core.frontier import Frontier
from faser_backend.core.plan import InFlight
from faser_backend.pipeline.in_flight import join
from faser_backend.policy.scheduler import Scheduler
from faser_backend.policy.speculation import MAX_DRAFT_TOKENS

_NO_CHAIN = np.zeros(0, np.int64)


def with_client_drafts(in_flight: InFlight, scheduler: Scheduler, max_logit_rows: int | None) -> InFlight:
    """What is in flight, and the chains of clients whose prompts have been read since.

    max_logit_rows: of a sequence, that the target takes. Who finds no free blocks for a chain goes on without it; whose
    chain cannot be read has failed.
    """
    fresh = [sequence for sequence in scheduler.running if sequence.client_draft and sequence.is_ready]
    if fresh:
        flying = set(in_flight.sequences)
        fresh = [sequence for sequence in fresh if sequence not in flying]
    if not fresh:
        return in_flight
    longest = _longest(len(fresh), scheduler.max_prefill_tokens, max_logit_rows)
    entering, chains = [], []
    for sequence in fresh:
        try:
            chain = np.array(sequence.client_draft[:longest], np.int64)
        except Exception as error:
            sequence.fail("draft_input_ids", error)
            chain = _NO_CHAIN
        if chain.size and scheduler.reserve(sequence, chain.size):
            entering.append(sequence)
            chains.append(chain)
        else:
            sequence.client_draft = ()
    return join(in_flight, InFlight(entering, _frontier(chains)))


def _longest(num_chains: int, max_prefill_tokens: int, max_logit_rows: int | None) -> int:
    """Tokens of each chain of those that enter together. As long as the server's own they may be in any case; longer
    ones share what a step may read of prompts, for everybody waits for their rows, and each has a row of logits."""
    longest = max(max_prefill_tokens // num_chains, MAX_DRAFT_TOKENS)
    return longest if max_logit_rows is None else min(longest, max_logit_rows - 1)


def _frontier(chains: list[np.ndarray]) -> Frontier:
    """A row for every token of each chain, and one for the bonus token."""
    counts = np.array([chain.size for chain in chains], np.int64)
    drafted = np.zeros((counts.size, counts.max(initial=0)), np.int64)
    for row, chain in enumerate(chains):
        drafted[row, : chain.size] = chain
    return Frontier(drafted, counts, counts + 1, is_client=np.ones(counts.size, np.bool_))
