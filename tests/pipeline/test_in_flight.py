"""Chains in flight as values: taken out, joined, merged and discarded without touching each other."""

from dataclasses import replace

import numpy as np
import pytest

from faser_backend.core.decision import Decision
from faser_backend.core.frontier import CLIENT, MAIN, Acceptance, Frontier
from faser_backend.core.plan import InFlight, StepPlan
from faser_backend.core.sequence import Sequence
from faser_backend.pipeline.in_flight import merge, split, stack, surviving, without_bonus
from tests.support.harness import request

Chain = tuple[list[int], int, list, bool]  # tokens, rows; margins, candidates, probabilities where known; a client's


def sequences(count: int, slot: int = 0) -> list[Sequence]:
    made = [Sequence.from_request(request(str(i), [1, 2], 9), 0) for i in range(count)]
    for sequence in made:
        sequence.slot = slot
    return made


def random_frontier(rng: np.random.Generator, size: int, *, longest: int = 5, shortest: int = 0) -> Frontier:
    counts = rng.integers(shortest, longest + 1, size)
    width = int(counts.max(initial=0)) + int(rng.integers(2))  # columns that no chain uses are allowed
    return Frontier(
        rng.integers(50, size=(size, width)),
        counts,
        rng.integers(1, counts + 2),
        rng.random((size, width)).astype(np.float32),
        rng.integers(50, size=(size, width, 3)),
        rng.random((size, width, 4)).astype(np.float32),
        rng.choice([MAIN, CLIENT], size),
    )


def chains(frontier: Frontier) -> list[Chain]:
    """All that has meaning, as plain values."""
    result: list[Chain] = []
    for b, count in enumerate(frontier.num_drafted.tolist()):
        optional = (frontier.margins, frontier.candidates, frontier.draft_probs)
        known = [None if array is None else array[b, :count].tolist() for array in optional]
        is_client = bool(frontier.is_client[b])
        result.append((frontier.drafted[b, :count].tolist(), int(frontier.num_rows[b]), known, is_client))
    return result


EMPTY: Chain = ([], 1, [[], [], []], False)


@pytest.mark.parametrize("seed", range(8))
def test_split_finds_each_sequence_its_chain(seed: int):
    rng = np.random.default_rng(seed)
    everyone = sequences(7)
    flying = [everyone[i] for i in rng.permutation(7)[: rng.integers(1, 7)]]
    frontier = random_frontier(rng, len(flying), shortest=1)
    chain_of = dict(zip(flying, chains(frontier), strict=True))
    wanted = [everyone[i] for i in rng.permutation(7)[: rng.integers(0, 8)]]
    ready, waiting = split(InFlight(flying, frontier), wanted)
    assert chains(ready) == [chain_of.get(sequence, EMPTY) for sequence in wanted]
    assert set(waiting.sequences) == set(flying) - set(wanted)
    assert chains(waiting.frontier) == [chain_of[sequence] for sequence in waiting.sequences]


@pytest.mark.parametrize("seed", range(8))
def test_merge_takes_the_chain_that_is_there(seed: int):
    rng = np.random.default_rng(seed)
    ready, drafted = random_frontier(rng, 6), random_frontier(rng, 6)
    has_ready = rng.random(6) < 0.5
    ready.num_drafted = np.where(has_ready, ready.num_drafted, 0)
    drafted.num_drafted = np.where(ready.num_drafted > 0, 0, drafted.num_drafted)
    expected = [a if a[0] else b for a, b in zip(chains(ready), chains(drafted), strict=True)]
    assert chains(merge(ready, drafted)) == expected


def test_stack_drops_what_one_side_does_not_know():
    rng = np.random.default_rng(0)
    full, silent, other = (random_frontier(rng, 2, shortest=1) for _ in range(3))
    silent.candidates = None
    assert other.candidates is not None
    other.candidates = other.candidates[:, :, :2]  # of another width: cannot be told apart later
    for partner in (silent, other):
        for stacked in (stack(full, partner), stack(partner, full)):
            assert stacked.candidates is None
            assert stacked.margins is not None and stacked.draft_probs is not None


def accepted(counts: list[int]) -> Acceptance:
    array = np.array(counts)
    return Acceptance(np.zeros((array.size, 6), np.int64), array, array + 1)


def test_chains_survive_only_behind_whole_acceptance():
    a, b, c, d = sequences(4)
    verified = Frontier(np.zeros((3, 2), np.int64), np.array([2, 2, 1]))
    ahead = InFlight([d, b, a, c], random_frontier(np.random.default_rng(2), 4, shortest=1))
    held = surviving(ahead, [a, b, c], verified, accepted([2, 1, 1]))
    assert held.sequences == [d, a, c]  # d was not verified: its chain follows committed tokens
    assert chains(held.frontier) == [chains(ahead.frontier)[row] for row in (0, 2, 3)]


def test_present_leaves_out_who_lost_its_slot():
    first, second = sequences(2)
    in_flight = InFlight([first, second], random_frontier(np.random.default_rng(3), 2, shortest=1))
    assert in_flight.present() is in_flight
    first.slot = -1
    assert in_flight.present().sequences == [second]
    assert chains(in_flight.present().frontier) == chains(in_flight.frontier)[1:]


def test_running_ahead_follows_the_last_test():
    """Whole chain: no bonus row. Trimmed chain: it ends with the token that its last row tests."""
    a, b, c = sequences(3)
    ready = Frontier(np.arange(12).reshape(3, 4), np.array([4, 4, 4]), np.array([5, 2, 2]))
    plan = StepPlan(Decision([]), InFlight.empty(), decodes=[a, b, c], drafts=[a, b], num_ahead_tokens=[2, 2])
    frontier = without_bonus(ready, plan)
    assert frontier.num_rows.tolist() == [4, 2, 2]
    assert frontier.num_drafted.tolist() == [4, 2, 4]
    assert frontier.drafted is ready.drafted
    plan.drafts = []
    assert without_bonus(ready, plan) is ready


# -- beside clients' chains ------------------------------------------------------------------------------


def clients(rng: np.random.Generator, counts: list[int]) -> Frontier:
    drafted = rng.integers(9, size=(len(counts), max(counts)))
    return replace(Frontier(drafted, np.array(counts)), sources=np.full(len(counts), CLIENT))


@pytest.mark.parametrize("is_first", [False, True])
def test_distributions_of_drawn_chains_survive_beside_clients_chains(is_first: bool):
    rng = np.random.default_rng(0)
    own, given = replace(random_frontier(rng, 2, shortest=1), sources=None), clients(rng, [7, 1, 4])
    both = stack(given, own) if is_first else stack(own, given)
    rows = np.arange(2) + (3 if is_first else 0)
    assert own.draft_probs is not None and both.draft_probs is not None
    assert both.draft_probs.shape == (5, *own.draft_probs.shape[1:]), "no column for tokens that nobody drew"
    assert (both.draft_probs[rows] == own.draft_probs).all()
    assert both.margins is None and both.candidates is None, "nothing is known of a client's chain"
    assert np.flatnonzero(~both.is_client).tolist() == rows.tolist()
    alone = both.take(rows)
    assert not alone.is_client.any() and (alone.drafted[:, : own.drafted.shape[1]] == own.drafted).all()
