"""Chains that are drafted in one step and verified in a later one: taking them out, joining, discarding.

Pure array work on `InFlight` values; chains of different lengths are padded to the longest. Drafts that clients bring
along, and tokens that grammars force, enter here: a client's as soon as its prompt has been read, and so in the
request's first verification in every pipeline mode; a forced one when its sequence has nothing in flight. The draft
model has not read them, and confidence knows nothing of them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from faser_backend.core.frontier import CLIENT, Acceptance, Frontier
from faser_backend.core.plan import InFlight, StepPlan
from faser_backend.core.sequence import Sequence
from faser_backend.core.tree import Tree
from faser_backend.policy.scheduler import Scheduler
from faser_backend.policy.speculation import MAX_DRAFT_TOKENS


def with_client_drafts(in_flight: InFlight, scheduler: Scheduler, max_logit_rows: int | None) -> InFlight:
    """Returns what is in flight, joined by the chains of clients whose prompts have been read since.

    max_logit_rows: of a sequence, that the target takes. A sequence that finds no free blocks for a chain goes on
    without it; one whose chain cannot be read has failed.
    """
    fresh = [sequence for sequence in scheduler.running if sequence.client_draft and sequence.is_ready]
    if fresh:
        flying = set(in_flight.sequences)
        fresh = [sequence for sequence in fresh if sequence not in flying]
    if not fresh:
        return in_flight
    # As long as the server's own they may be in any case; longer ones share what a step may read of prompts, for
    # everybody waits for their rows, and each has a row of logits.
    longest = max(scheduler.max_prefill_tokens // len(fresh), MAX_DRAFT_TOKENS)
    if max_logit_rows is not None:
        longest = min(longest, max_logit_rows - 1)
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
    frontier = Frontier(drafted, counts, counts + 1, sources=np.full(counts.size, CLIENT))
    return join(in_flight, InFlight(entering, frontier))


def split(in_flight: InFlight, sequences: list[Sequence]) -> tuple[Frontier, InFlight]:
    """Returns what is in flight for each of B sequences (an empty chain where nothing is), and for all others."""
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
    """Two frontiers of the same B sequences, of which at most one has a chain for each: that chain."""
    if not ready.num_drafted.any():
        return drafted
    size = ready.num_drafted.size
    rows = np.arange(size)
    return stack(ready, drafted).take(np.where(ready.num_drafted > 0, rows, size + rows))


def surviving(ahead: InFlight, sequences: list[Sequence], verified: Frontier, acceptance: Acceptance) -> InFlight:
    """Returns those chains drafted beside a verification whose premise came true.

    A chain that ran ahead of sequences[b] follows verified.drafted[b] and holds if all of that was accepted; the
    frontier then had no bonus row, so its last token is the new anchor. Other chains hold in any case.
    """
    if not ahead.sequences:
        return ahead
    is_whole = acceptance.num_accepted == verified.num_drafted
    holds = dict(zip(sequences, is_whole.tolist(), strict=True))
    return ahead.take([row for row, sequence in enumerate(ahead.sequences) if holds.get(sequence, True)])


def without_bonus(ready: Frontier, plan: StepPlan) -> Frontier:
    """The frontier to verify while the draft runs ahead of it: with no row behind the last draft token, so that
    this token, once accepted, is the anchor that the chain ahead follows. A trimmed chain ends with its last
    test: row N - 1 tests draft token N, so the draft goes on behind that one."""
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
    """The chains of `first`, then those of `second`. What only one of them knows is dropped, but an empty
    frontier knows everything, and a client's chain has no distribution to know."""
    both = first, second
    width = max(each.drafted.shape[1] for each in both)
    num_probs = max(0 if each.draft_probs is None else each.draft_probs.shape[1] for each in both)
    counts = first.num_drafted, second.num_drafted
    drawn = counts[0] * ~first.is_client, counts[1] * ~second.is_client
    tree = None
    if first.tree is not None or second.tree is not None:  # the chains of one beside the trees of the other are trees
        trees = [each.tree or Tree.of_chains(each.num_drafted.size, width) for each in both]
        tree = Tree(np.concatenate([_padded(each.parents, width) for each in trees]))
    return Frontier(
        np.concatenate([_padded(each.drafted, width) for each in both]),
        np.concatenate(counts),
        np.concatenate([each.num_rows for each in both]),
        _stack_optional(first.margins, second.margins, counts, width),
        _stack_optional(first.candidates, second.candidates, counts, width),
        _stack_optional(first.draft_probs, second.draft_probs, drawn, num_probs),
        tree,
        np.concatenate([each.sources for each in both]),
    )


def _stack_optional(
    a: np.ndarray | None, b: np.ndarray | None, counts: tuple[np.ndarray, np.ndarray], width: int
) -> np.ndarray | None:
    """a [A, K, ...] and b [B, K', ...] with `width` columns. counts [A], [B]: the tokens that have a value each."""
    if a is None and b is not None and not counts[0].any():
        a = np.zeros((counts[0].size, 0, *b.shape[2:]), b.dtype)
    if b is None and a is not None and not counts[1].any():
        b = np.zeros((counts[1].size, 0, *a.shape[2:]), a.dtype)
    if a is None or b is None or a.shape[2:] != b.shape[2:]:
        return None
    return np.concatenate([_padded(a, width), _padded(b, width)])


def _padded(array: np.ndarray, width: int) -> np.ndarray:
    """array [B, K, ...] with zeros up to `width` columns."""
    missing = width - array.shape[1]
    return array if missing == 0 else np.pad(array, [(0, 0), (0, missing)] + [(0, 0)] * (array.ndim - 2))
