"""Clients' drafts under rejection sampling keep the target's law, and no policy takes them for its own draft's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faser_backend.core.decision import PipelineMode
from faser_backend.core.frontier import CLIENT, MAIN, Frontier
from faser_backend.core.plan import InFlight
from faser_backend.core.record import StepRecord
from faser_backend.core.request import Request, SamplingParams
from faser_backend.core.sequence import Sequence
from faser_backend.pipeline.in_flight import merge, split, stack
from faser_backend.policy import acceptance
from faser_backend.policy.acceptance import accept_by_rejection
from faser_backend.policy.gp_lcb import GpLcb
from faser_backend.policy.price_rule import PriceRule
from faser_backend.policy.registry import parse_policy
from tests.fakes import SequentialLanes
from tests.forced_engine import both_partitions, open_forced
from tests.forcing import Change, Forced, always, forced, random_everything
from tests.harness import FakeEngine, drive, guessed, open_fake, request
from tests.law import exact_law, observed, p_value

SERIAL, RUN_AHEAD, PING_PONG = PipelineMode
VOCAB, LENGTH, COUNT, BATCH = 4, 3, 2500, 24
PASSES, FAILS = 1e-3, 1e-6


# -- the law ---------------------------------------------------------------------------------------------


def guess(seed: int) -> tuple[int, ...]:
    """Two requests of three have a draft of their client's, which knows nothing of the model."""
    return () if seed % 3 == 0 else (seed % VOCAB, seed // VOCAB % VOCAB)[: seed % 3]


def law_p_value(change: Change, policy: str = "fixed:2", *, uses_rejection: bool = True) -> float:
    """Of the first tokens of many requests, in steps that verify chains of both kinds."""
    fake = open_fake(
        Forced(parse_policy(policy, guessed), change),
        lanes=SequentialLanes(verifies_first=True),
        num_layers=(1, 1, 1),
        uses_rejection=uses_rejection,
        vocab_size=VOCAB,
        draft_noise=4.0,
        max_num_seqs=BATCH,
        num_blocks=8 * BATCH,
        max_prefill_tokens=20,
    )
    num_mixed = 0

    def note(record: StepRecord) -> None:
        nonlocal num_mixed
        num_mixed += record.has_clients and bool(record.frontier.num_drafted[record.server_rows].any())

    fake.stepper.observers.append(note)
    counts = observed(fake.engine, VOCAB, LENGTH, COUNT, num_at_once=BATCH, draft_of=guess)
    assert num_mixed > 20 or policy == "none"
    assert fake.engine.metrics().num_accepted > COUNT // 10
    return p_value(counts, exact_law(VOCAB, LENGTH))


@pytest.mark.parametrize("policy", ["none", "fixed:2"])
@pytest.mark.parametrize("mode", PipelineMode)
@pytest.mark.parametrize("uses_rejection", [False, True])
def test_joint_law_is_the_targets(policy: str, mode: PipelineMode, uses_rejection: bool):
    assert law_p_value(forced(mode), policy, uses_rejection=uses_rejection) > PASSES


def test_joint_law_is_the_targets_whatever_is_decided():
    assert law_p_value(random_everything(1, longest=3, most_candidates=3)) > PASSES


def test_a_client_law_that_is_not_certain_fails_the_same_test(monkeypatch: pytest.MonkeyPatch):
    """The control: recovered tokens drawn as if the client had drawn from a law of its own."""

    def spread(frontier: Frontier, draft_probs: np.ndarray, sequences: np.ndarray, columns: np.ndarray) -> np.ndarray:
        laws = real(frontier, draft_probs, sequences, columns)
        laws[frontier.is_client[sequences]] = 1 / VOCAB
        return laws

    real = acceptance._drawn_from
    monkeypatch.setattr(acceptance, "_drawn_from", spread)
    assert law_p_value(forced(SERIAL)) < FAILS


def test_laws_of_a_mixed_frontier_by_hand():
    """Chain 0 was drawn, chain 1 is a client's and longer: its second token is one that the target never draws."""
    probs = np.array([[[0.5, 0.5, 0.0]], [[0.0, 0.0, 0.0]]], np.float32)  # [2, 1, 3]
    sources = np.array([MAIN, CLIENT])
    frontier = Frontier(
        np.array([[1, 0], [2, 0]]), np.array([1, 2]), np.array([2, 3]), draft_probs=probs, sources=sources
    )
    target = np.array([[0, 0, 1], [0, 0, 1], [0, 0, 1], [0, 0.25, 0.75], [1, 0, 0]], np.float32)
    uniforms = np.full(5, 0.5)
    result = accept_by_rejection(frontier, target, np.array([0, 2, 5]), uniforms, uniforms)
    assert result.num_accepted.tolist() == [0, 1] and result.num_emitted.tolist() == [1, 2]
    assert result.tokens[0, :1].tolist() == [2] and result.tokens[1, :2].tolist() == [2, 2]


# -- chains in flight ------------------------------------------------------------------------------------


def sequences(count: int) -> list[Sequence]:
    made = [Sequence.from_request(request(str(i), [1, 2], 9), 0) for i in range(count)]
    for sequence in made:
        sequence.slot = 0
    return made


def drawn(rng: np.random.Generator, counts: list[int]) -> Frontier:
    width = max(counts)
    shape = (len(counts), width)
    return Frontier(
        rng.integers(9, size=shape),
        np.array(counts),
        np.array(counts) + 1,
        rng.random(shape).astype(np.float32),
        rng.integers(9, size=(*shape, 3)),
        rng.random((*shape, 5)).astype(np.float32),
    )


def clients(rng: np.random.Generator, counts: list[int]) -> Frontier:
    drafted = rng.integers(9, size=(len(counts), max(counts)))
    return replace(Frontier.whole(drafted, np.array(counts)), sources=np.full(len(counts), CLIENT))


@pytest.mark.parametrize("is_first", [False, True])
def test_laws_of_drawn_chains_survive_beside_those_of_clients(is_first: bool):
    rng = np.random.default_rng(0)
    own, given = drawn(rng, [2, 3]), clients(rng, [7, 1, 4])
    both = stack(given, own) if is_first else stack(own, given)
    rows = np.arange(2) + (3 if is_first else 0)
    assert own.draft_probs is not None and both.draft_probs is not None
    assert both.draft_probs.shape == (5, 3, 5), "no column for tokens that nobody drew"
    assert (both.draft_probs[rows] == own.draft_probs).all()
    assert both.margins is None and both.candidates is None, "nothing is known of a client's chain"
    assert np.flatnonzero(~both.is_client).tolist() == rows.tolist()
    alone = both.take(rows)
    assert not alone.is_client.any() and (alone.drafted[:, :3] == own.drafted).all()


def test_split_and_merge_keep_whose_chain_it_is():
    rng = np.random.default_rng(1)
    first, second, third = sequences(3)
    in_flight = InFlight([second], clients(rng, [4]))
    ready, waiting = split(in_flight, [first, second, third])
    assert not waiting.sequences
    assert ready.is_client.tolist() == [False, True, False]
    own = drawn(rng, [2, 0, 3])
    frontier = merge(ready, own)
    assert frontier.num_drafted.tolist() == [2, 4, 3] and frontier.num_rows.tolist() == [3, 5, 4]
    assert frontier.is_client.tolist() == [False, True, False]
    assert frontier.draft_probs is not None and own.draft_probs is not None
    assert (frontier.draft_probs[[0, 2]] == own.draft_probs[[0, 2]]).all()


# -- what policies learn ---------------------------------------------------------------------------------


def misled_requests(count: int = 12) -> list[Request]:
    """Guesses that are wrong from the first token on, but for the odd one."""
    rng = np.random.default_rng(2)
    return [
        request(
            f"r{i}",
            rng.integers(24, size=int(rng.integers(2, 20))).tolist(),
            30,
            sampling=SamplingParams(temperature=0.0 if i % 2 else 1.0, seed=i),
            draft_ids=tuple(rng.integers(24, size=20).tolist()),
        )
        for i in range(count)
    ]


def learn(policy: str, change: Change | None = None) -> FakeEngine:
    """A run in which the server's draft is always right and clients' are always wrong."""
    options = {"draft_noise": 0.0, "draft_memory": 10**6, "max_prefill_tokens": 40}
    fake = open_forced(policy, change or forced(SERIAL), **options)
    num_given = 0

    def note(record: StepRecord) -> None:
        nonlocal num_given
        num_given += record.has_clients
        rows = record.server_rows
        assert (record.acceptance.num_accepted[rows] == record.num_testable[rows]).all()
        for sequence in record.plan.decodes:
            accepted, tested = sequence.server_acceptance
            assert accepted == tested

    fake.stepper.observers.append(note)
    metrics = fake.engine.metrics()
    drive(fake.engine, misled_requests(), seed=4)
    assert num_given > 4 and metrics.num_failed_steps == 0 and metrics.num_drafted > metrics.num_accepted + 100
    return fake


def inner_policy(fake: FakeEngine):
    policy = fake.stepper.scheduler.policy
    assert isinstance(policy, Forced)
    return policy._inner


@pytest.mark.parametrize("name", ["faser", "gp-lcb"])
def test_offsets_are_of_the_servers_draft_alone(name: str):
    """Its tokens are all accepted, so every request is easier than the traffic."""
    assert min(offsets_of(learn(name))) > 0.0


@pytest.mark.parametrize("policy", ["goodput", "fixed:4"])
def test_acceptance_rates_are_the_servers(policy: str):
    learn(policy, forced(SERIAL, pruner=always(exits=())))


def test_a_record_that_tells_nobody_apart_fails_the_same_checks(monkeypatch: pytest.MonkeyPatch):
    """The control."""
    monkeypatch.setattr(StepRecord, "server_rows", slice(None))
    with pytest.raises(AssertionError):
        learn("gp-lcb")


def offsets_of(fake: FakeEngine) -> list[float]:
    """What the policy learned of each request."""
    policy = inner_policy(fake)
    assert isinstance(policy, PriceRule | GpLcb)
    return [offset for offset, _ in policy._acceptance._requests.values()]


@pytest.mark.parametrize("name", ["faser", "gp-lcb"])
def test_times_of_steps_with_guesses_are_nobodys(name: str, monkeypatch: pytest.MonkeyPatch):
    """Their rows were chosen by no decision: what they took corrects no prediction."""
    policy = parse_policy(name, both_partitions)
    fake = open_fake(policy, draft_noise=0.0, draft_memory=10**6, max_prefill_tokens=40)
    steps: list[bool] = []  # of each lesson: whether its step had guesses
    current: list[StepRecord] = []
    observe = policy.observe

    def watched(record: StepRecord) -> None:
        current[:] = [record]
        observe(record)

    def lesson(*args: object, **options: object) -> None:
        steps.append(current[0].has_clients)

    fake.stepper.observers[0] = watched
    if isinstance(policy, PriceRule):
        monkeypatch.setattr(policy._errors, "observe", lesson)
        monkeypatch.setattr(policy._yield, "observe", lesson)
    else:
        assert isinstance(policy, GpLcb)
        monkeypatch.setattr(policy._process, "observe", lesson)
    drive(fake.engine, misled_requests(24), seed=4)
    assert len(steps) > 10 and not any(steps)
