"""Engines under forced decisions on every kind of lane, which check chains in flight and K/V."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from faser_backend.core.plan import StepRecord
from faser_backend.core.ports import Lanes
from faser_backend.core.request import Request
from faser_backend.core.sequence import Sequence
from faser_backend.pipeline.draft import ModelProposer
from faser_backend.policy.registry import USAGES, parse_policy
from faser_backend.policy.speculation import Knowledge
from tests.support.fakes import SequentialLanes, ThreadLanes
from tests.support.forcing import Change, Forced
from tests.support.harness import SPLIT, VOCAB, Driven, FakeEngine, drive, guessed, open_fake

LAYERS = (2, 2, 2)
POLICIES = [{"fixed": "fixed:4"}.get(name, name) for name in USAGES]
LANES: dict[str, Callable[[], Lanes]] = {
    "verify first": lambda: SequentialLanes(verifies_first=True),
    "propose first": lambda: SequentialLanes(verifies_first=False),
    "threads": ThreadLanes,
}


@dataclass
class Case:
    """Requests and the answers of plain decoding."""

    requests: list[Request]
    expected: dict[str, list[int]]


def both_partitions() -> Knowledge:
    """Returns the default times, for a share of the device too: policies may weigh every mode."""
    costs = guessed().costs
    shares = {(model, SPLIT): calls for (model, _), calls in costs.segments.items()}
    return Knowledge(replace(costs, segments={**costs.segments, **shares}))


def open_forced(policy: str, change: Change, lanes: Lanes | None = None, **options) -> FakeEngine:
    lanes = lanes or SequentialLanes(verifies_first=True)
    fake = open_fake(Forced(parse_policy(policy, both_partitions), change), lanes=lanes, num_layers=LAYERS, **options)
    check_what_is_in_flight(fake)
    return fake


def check_what_is_in_flight(fake: FakeEngine) -> None:
    """Checks every step: chains of running sequences alone, each once, within their blocks."""
    run, blocks = fake.step_runner.run, fake.step_runner.scheduler.blocks

    def checked(plan):
        in_flight = plan.in_flight
        running = set(fake.step_runner.scheduler.running)
        assert set(in_flight.sequences) <= running, "a chain outlived its sequence"
        assert len(set(in_flight.sequences)) == len(in_flight.sequences)
        frontier = in_flight.frontier
        assert frontier.num_drafted.size == len(in_flight.sequences)
        for sequence, num_drafted in zip(in_flight.sequences, frontier.num_drafted.tolist(), strict=True):
            held = blocks.num_blocks_of(sequence.slot) * blocks.block_size
            # N-grams may find nothing, and a model with them may lag too far behind.
            assert sequence.is_ready and num_drafted >= isinstance(fake.step_runner.proposer, ModelProposer)
            assert sequence.num_tokens + num_drafted <= held, "a chain past its blocks"
        result = run(plan)
        check_kv(fake)
        return result

    fake.step_runner.run = checked  # type: ignore[method-assign]


def check_kv(fake: FakeEngine) -> None:
    """Checks that the pools hold what each sequence records, in every segment of both models."""
    blocks = fake.step_runner.scheduler.blocks
    for sequence in fake.step_runner.scheduler.running:
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


# -- clients that guess ----------------------------------------------------------------------------------

GUESSES = ("right", "wrong", "partly right", "too long", "none", "one token", "by chance")


def _guess(kind: str, answer: list[int], vocab_size: int, rng: np.random.Generator) -> tuple[int, ...]:
    wrong = [(token + 1) % vocab_size for token in answer]
    half = len(answer) // 2
    return tuple(
        {
            "right": answer,
            "wrong": wrong,
            "partly right": answer[:half] + wrong[half : half + 1] + answer[half + 1 :],
            "too long": answer + wrong * 3,
            "none": [],
            "one token": answer[:1],
            "by chance": rng.integers(vocab_size, size=int(rng.integers(1, 30))).tolist(),
        }[kind]
    )


def guessing(requests: list[Request], expected: dict[str, list[int]], seed: int, vocab_size: int = VOCAB) -> Case:
    """Adds a client's guess to every request."""
    rng = np.random.default_rng(seed)
    drafted = [
        replace(r, draft_ids=_guess(GUESSES[int(rng.integers(len(GUESSES)))], expected[r.request_id], vocab_size, rng))
        for r in requests
    ]
    return Case(drafted, expected)


class GuessWatcher:
    """Checks that clients' chains are verified complete, once, and in their requests' first verification."""

    def __init__(self, fake: FakeEngine) -> None:
        self.num_chains = self.num_mixed = 0
        self._seen: set[Sequence] = set()
        fake.step_runner.observers.append(self.observe)

    def observe(self, record: StepRecord) -> None:
        frontier = record.frontier
        if not record.has_clients:
            self._seen.update(record.plan.decodes)
            return
        assert (frontier.num_rows == frontier.num_drafted + 1)[frontier.is_client].all(), "a client's token was trimmed"
        for row, sequence in enumerate(record.plan.decodes):
            if frontier.is_client[row]:
                assert sequence not in self._seen and sequence not in record.plan.drafts
                drafted = frontier.drafted[row, : frontier.num_drafted[row]].tolist()
                assert tuple(drafted) == sequence.request.draft_ids[: len(drafted)]
                self.num_chains += 1
            self._seen.add(sequence)
        self.num_mixed += bool((frontier.num_drafted[~frontier.is_client] > 0).any())
