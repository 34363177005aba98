"""Chains that are drafted in one step and verified in a later one: taking them out, joining, discarding.

Pure array work on `InFlight` values; chains of different lengths are padded to the longest.
"""

from __future__ import annotations

import numpy as np

from faser_backend.core.frontier import MAIN, Acceptance, Frontier
from faser_backend.core.plan import InFlight
from faser_backend.core.sequence import Sequence
from faser_backend.core.tree import Tree


def split(in_flight: InFlight, sequences: list[Sequence]) -> tuple[Frontier, InFlight]:
    """What is in flight for each of B sequences (an empty chain where nothing is), and for all others."""
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
    frontier = stack(first.frontier, second.frontier)
    return InFlight(first.sequences + second.sequences, frontier, first.drafting_us + second.drafting_us)


def merge(ready: Frontier, drafted: Frontier) -> Frontier:
    """Two frontiers of the same B sequences, of which at most one has a chain for each: that chain."""
    if not ready.num_drafted.any():
        return drafted
    size = ready.num_drafted.size
    rows = np.arange(size)
    return stack(ready, drafted).take(np.where(ready.num_drafted > 0, rows, size + rows))


def surviving(ahead: InFlight, sequences: list[Sequence], verified: Frontier, acceptance: Acceptance) -> InFlight:
    """Of what was drafted beside a verification, the chains whose premise came true.

    A chain that ran ahead of sequences[b] follows verified.drafted[b] and holds if all of that was accepted; the
    frontier then had no bonus row, so its last token is the new anchor. Other chains hold in any case.
    """
    if not ahead.sequences:
        return ahead
    is_whole = acceptance.num_accepted == verified.num_drafted
    holds = dict(zip(sequences, is_whole.tolist(), strict=True))
    return ahead.take([row for row, sequence in enumerate(ahead.sequences) if holds.get(sequence, True)])


def stack(first: Frontier, second: Frontier) -> Frontier:
    """The chains of `first`, then those of `second`. What only one of them knows is dropped, but an empty
    frontier knows everything, and a client's chain has no law to know."""
    width = max(first.drafted.shape[1], second.drafted.shape[1])
    num_laws = max(0 if probs is None else probs.shape[1] for probs in (first.draft_probs, second.draft_probs))
    counts = first.num_drafted, second.num_drafted
    is_client = [_is_client(first), _is_client(second)]
    drawn = first.num_drafted * ~is_client[0], second.num_drafted * ~is_client[1]
    has_clients = is_client[0].any() or is_client[1].any()
    return Frontier(
        np.concatenate([_padded(first.drafted, width), _padded(second.drafted, width)]),
        np.concatenate(counts),
        np.concatenate([first.num_rows, second.num_rows]),
        _stack_optional(first.margins, second.margins, counts, width),
        _stack_optional(first.candidates, second.candidates, counts, width),
        _stack_optional(first.draft_probs, second.draft_probs, drawn, num_laws),
        np.concatenate(is_client) if has_clients else None,
        _stack_trees(first, second, width),
        _stack_sources(first, second),
    )


def _stack_trees(first: Frontier, second: Frontier, width: int) -> Tree | None:
    """None where neither has trees; the chains of one beside the trees of the other become trees."""
    if first.tree is None and second.tree is None:
        return None
    trees = [
        frontier.tree
        or Tree.of_chains(frontier.num_drafted, width, is_run=~(_is_client(frontier) | frontier.is_look_up))
        for frontier in (first, second)
    ]
    parents = np.concatenate([_padded(tree.parents, width) for tree in trees])
    return Tree(parents, np.concatenate([_padded(tree.draft_cells, width) for tree in trees]))


def _stack_sources(first: Frontier, second: Frontier) -> np.ndarray | None:
    """None where the engine's drafter made them all."""
    if first.sources is None and second.sources is None:
        return None
    known = (each.sources for each in (first, second))
    sizes = first.num_drafted.size, second.num_drafted.size
    return np.concatenate(
        [np.full(size, MAIN) if sources is None else sources for sources, size in zip(known, sizes, strict=True)]
    )


def _is_client(frontier: Frontier) -> np.ndarray:
    """[B] bool."""
    return np.zeros(frontier.num_drafted.shape, np.bool_) if frontier.is_client is None else frontier.is_client


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
