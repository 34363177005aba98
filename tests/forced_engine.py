"""Engines under forced decisions, on lanes of every kind, that watch their chains in flight and their K/V."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from faser_backend.core.ports import Lanes
from faser_backend.core.request import Request
from faser_backend.pipeline.draft import ModelProposer
from faser_backend.policy.registry import parse_policy
from faser_backend.policy.speculation import Knowledge
from tests.fakes import SequentialLanes, ThreadLanes
from tests.forcing import Change, Forced
from tests.harness import SPLIT, Driven, FakeEngine, drive, guessed, open_fake

LAYERS = (2, 2, 2)
LANES: dict[str, Callable[[], Lanes]] = {
    "verify first": lambda: SequentialLanes(verifies_first=True),
    "propose first": lambda: SequentialLanes(verifies_first=False),
    "threads": ThreadLanes,
}


@dataclass
class Case:
    """Requests and what plain decoding answers."""

    requests: list[Request]
    expected: dict[str, list[int]]


def both_partitions() -> Knowledge:
    """The guess for the whole device, taken to hold on a share of it: policies may weigh every mode."""
    costs = guessed().costs
    shares = {(model, SPLIT): calls for (model, _), calls in costs.segments.items()}
    return Knowledge(replace(costs, segments={**costs.segments, **shares}))


def open_forced(policy: str, change: Change, lanes: Lanes | None = None, **options) -> FakeEngine:
    lanes = lanes or SequentialLanes(verifies_first=True)
    fake = open_fake(Forced(parse_policy(policy, both_partitions), change), lanes=lanes, num_layers=LAYERS, **options)
    check_what_is_in_flight(fake)
    return fake


def check_what_is_in_flight(fake: FakeEngine) -> None:
    """Every step is given chains of running sequences alone, each once, within the blocks that they hold."""
    run, blocks = fake.stepper.run, fake.stepper.scheduler.blocks

    def checked(plan):
        in_flight = plan.in_flight
        running = set(fake.stepper.scheduler.running)
        assert set(in_flight.sequences) <= running, "a chain outlived its sequence"
        assert len(set(in_flight.sequences)) == len(in_flight.sequences)
        frontier = in_flight.frontier
        assert frontier.num_drafted.size == len(in_flight.sequences)
        for sequence, num_drafted in zip(in_flight.sequences, frontier.num_drafted.tolist(), strict=True):
            held = blocks.num_blocks_of(sequence.slot) * blocks.block_size
            # N-grams may have no idea, and a model beside them too much to catch up with.
            assert sequence.is_ready and num_drafted >= isinstance(fake.stepper.proposer, ModelProposer)
            assert sequence.num_tokens + num_drafted <= held, "a chain past its blocks"
        result = run(plan)
        check_kv(fake)
        return result

    fake.stepper.run = checked  # type: ignore[method-assign]


def check_kv(fake: FakeEngine) -> None:
    """What a sequence says is in the pools is there, in every segment of both models."""
    blocks = fake.stepper.scheduler.blocks
    for sequence in fake.stepper.scheduler.running:
        table = blocks.block_tables[sequence.slot]
        for runners, num_known in ((fake.targets, sequence.target_len), (fake.drafts, sequence.draft_len)):
            at = np.arange(num_known)
            for pool in runners[0].pools if runners else []:
                held = pool[table[at // blocks.block_size], at % blocks.block_size]
                assert (held == sequence.token_ids[:num_known]).all(), "stale K/V counts as known"


def agrees(fake: FakeEngine, case: Case, seed: int | None) -> Driven:
    result = drive(fake.engine, case.requests, seed=seed)
    assert result.tokens == case.expected
    return result
