"""Operations on `InFlight`, the chains that a later step verifies: split, join, merge, choose, discard.

Chains of different lengths are padded to the longest. Draft tokens of clients and tokens that grammars force enter
here. A client's chain enters as soon as its prompt has been read, so the request's first verification tests it in
every pipeline mode. A forced chain enters when its sequence has nothing in flight. The draft model has read neither,
and they have no margins.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from faser_backend.core.decision import MAX_VERIFIED_ROWS
from faser_backend.core.frontier import CLIENT, Acceptance, Frontier
from faser_backend.core.plan import InFlight, StepPlan
from faser_backend.core.sequence import Sequence
from faser_backend.policy.scheduler import Scheduler
from faser_backend.policy.speculation import MAX_DRAFT_TOKENS


def with_client_drafts(in_flight: InFlight, scheduler: Scheduler, max_logit_rows: int | None) -> InFlight:
    """Returns in_flight with the chains of clients whose prompts have been read since.

    max_logit_rows: the target's limit per sequence. A sequence without free blocks for its chain goes on without it;
    a sequence whose chain cannot be read fails.
    """
    fresh = [sequence for sequence in scheduler.running if sequence.client_draft and sequence.is_ready]
    if fresh:
        flying = set(in_flight.sequences)
        fresh = [sequence for sequence in fresh if sequence not in flying]
    if not fresh:
        return in_flight
    # Chains may always be as long as the server's own. Longer ones share the prefill budget of a step, because all
    # requests wait for their rows.
    longest = max(scheduler.max_prefill_tokens // len(fresh), MAX_DRAFT_TOKENS)
    bound = min(MAX_VERIFIED_ROWS // len(scheduler.running), max_logit_rows or MAX_VERIFIED_ROWS)
    longest = max(min(longest, bound - 1), 0)
    entering, chains = [], []
    for sequence in fresh:
        chain = None
        try:
            chain = np.array(sequence.client_draft[:longest], np.int64)
        except Exception as error:
            sequence.fail("draft_input_ids", error)
        if chain is not None and chain.size and scheduler.reserve(sequence, chain.size):
            entering.append(sequence)
            chains.append(chain)
        else:
            sequence.client_draft = ()
    counts = np.array([chain.size for chain in chains], np.int64)
    drafted = np.zeros((counts.size, counts.max(initial=0)), np.int64)
    for row, chain in enumerate(chains):
        drafted[row, : chain.size] = chain
    frontier = Frontier(drafted, counts, sources=np.full(counts.size, CLIENT))
    return join(in_flight, InFlight(entering, frontier))


def split(in_flight: InFlight, sequences: list[Sequence]) -> tuple[Frontier, InFlight]:
    """Returns the chains in flight of B sequences (empty ones if there is none), and those of all other sequences."""
    if not in_flight.sequences:
        return Frontier.empty(len(sequences)), in_flight
    row_of = {sequence: row for row, sequence in enumerate(in_flight.sequences)}
    none = len(in_flight.sequences)  # an empty chain behind all others
    chains = stack(in_flight.frontier, Frontier.empty(1))
    ready = chains.take(np.array([row_of.pop(sequence, none) for sequence in sequences], np.int64))
    return ready, in_flight.take(sorted(row_of.values()))


def join(first: InFlight, second: InFlight) -> InFlight:
    if not second.sequences:
        return first
    if not first.sequences:
        return second
    return InFlight(first.sequences + second.sequences, stack(first.frontier, second.frontier))


def merge(ready: Frontier, drafted: Frontier) -> Frontier:
    """Merges two frontiers of the same B sequences, at most one of which has a chain for each sequence."""
    return choose(ready, drafted, ready.num_drafted > 0)


def choose(first: Frontier, second: Frontier, takes_first: np.ndarray) -> Frontier:
    """Returns for each of B sequences its chain of `first` where takes_first [B], else that of `second`."""
    if not takes_first.any():
        return second
    rows = np.arange(takes_first.size)
    taken = replace(first, num_drafted=first.num_drafted * takes_first)  # others need no optional arrays
    return stack(taken, second).take(np.where(takes_first, rows, rows.size + rows))


def surviving(ahead: InFlight, sequences: list[Sequence], verified: Frontier, acceptance: Acceptance) -> InFlight:
    """Returns the chains drafted beside a verification that are still valid after it.

    A chain that ran ahead of sequences[b] follows verified.drafted[b] and is valid if all of that was accepted:
    the frontier had no bonus row, so its last token is the new anchor. Other chains stay valid.
    """
    if not ahead.sequences:
        return ahead
    is_whole = acceptance.num_accepted == verified.num_drafted
    holds = dict(zip(sequences, is_whole.tolist(), strict=True))
    return ahead.take([row for row, sequence in enumerate(ahead.sequences) if holds.get(sequence, True)])


def without_bonus(ready: Frontier, plan: StepPlan) -> Frontier:
    """Returns the frontier to verify while the draft runs ahead of it. It has no bonus row, so that its last draft
    token, once accepted, is the anchor that the chain ahead follows. A trimmed chain ends with its last test: row
    N - 1 tests draft token N, so the draft continues behind that token."""
    ahead = set(plan.drafts)
    runs_ahead = np.array([sequence in ahead for sequence in plan.decodes], np.bool_)
    if not runs_ahead.any():
        return ready
    num_tested = np.minimum(ready.num_drafted, ready.num_rows)
    return replace(
        ready,
        num_drafted=np.where(runs_ahead, num_tested, ready.num_drafted),
        num_rows=np.where(runs_ahead, num_tested, ready.num_rows),
    )


def stack(first: Frontier, second: Frontier) -> Frontier:
    """Returns the chains of `first`, then those of `second`. Optional arrays that one of them lacks are dropped,
    unless it is empty; chains of clients and n-grams need no distributions."""
    both = first, second
    width = max(each.drafted.shape[1] for each in both)
    num_probs = max(0 if each.draft_probs is None else each.draft_probs.shape[1] for each in both)
    counts = first.num_drafted, second.num_drafted
    drawn = counts[0] * first.is_main, counts[1] * second.is_main
    return Frontier(
        np.concatenate([_padded(each.drafted, width) for each in both]),
        np.concatenate(counts),
        np.concatenate([each.num_rows for each in both]),
        _stack_optional(first.margins, second.margins, counts, width),
        _stack_optional(first.candidates, second.candidates, counts, width),
        _stack_optional(first.draft_probs, second.draft_probs, drawn, num_probs),
        np.concatenate([each.sources for each in both]),
    )


def _stack_optional(
    a: np.ndarray | None, b: np.ndarray | None, counts: tuple[np.ndarray, np.ndarray], width: int
) -> np.ndarray | None:
    """Stacks a [A, K, ...] and b [B, K', ...] in `width` columns. counts [A], [B]: tokens that need a value."""
    if a is None and b is not None and not counts[0].any():
        a = np.zeros((counts[0].size, 0, *b.shape[2:]), b.dtype)
    if b is None and a is not None and not counts[1].any():
        b = np.zeros((counts[1].size, 0, *a.shape[2:]), a.dtype)
    if a is None or b is None or a.shape[2:] != b.shape[2:]:
        return None
    return np.concatenate([_padded(a, width), _padded(b, width)])


def _padded(array: np.ndarray, width: int) -> np.ndarray:
    """Returns array [B, K, ...] with zeros up to `width` columns."""
    missing = width - array.shape[1]
    return array if missing == 0 else np.pad(array, [(0, 0), (0, missing)] + [(0, 0)] * (array.ndim - 2))
