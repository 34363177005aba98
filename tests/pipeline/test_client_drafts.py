"""Drafts that clients bring along: tokens are those of plain decoding whatever they guess; right guesses save steps."""

from dataclasses import replace

import numpy as np
import pytest

from faser_backend.core.frontier import CLIENT, MAIN, Frontier
from faser_backend.core.plan import StepRecord
from faser_backend.core.request import Request, Sampling
from faser_backend.pipeline import in_flight
from faser_backend.pipeline.acceptance import accept_by_rejection
from faser_backend.policy import scheduler
from faser_backend.policy.gp_lcb import GpLcb
from faser_backend.policy.registry import parse_policy
from faser_backend.policy.throughput_policy import ThroughputPolicy
from tests.pipeline.test_engine import alone
from tests.support.forced_engine import Case, agrees, both_partitions, open_forced
from tests.support.forcing import Change, Forced, forced
from tests.support.harness import VOCAB, FakeEngine, drive, fake_engine, open_fake, request


def test_reused_prefixes_hold_what_the_draft_has_read():
    """Blocks full of guessed tokens are reused with the draft's K/V, which check_kv reads."""
    prompt = list(range(20)) * 2
    first = request("first", prompt, 30)
    answer = alone([first])["first"]
    again = [replace(request(f"again {i}", prompt + answer[: 9 * i], 12), draft_ids=(3, 4)) for i in range(3)]
    case = Case([replace(first, draft_ids=tuple(answer))], {"first": answer})
    for policy in ("none", "fixed:4"):
        fake = open_forced(policy, forced())
        agrees(fake, case, None)
        agrees(fake, Case(again, alone(again)), None)
        assert fake.engine.metrics().num_reused_blocks > 20


# -- what is counted -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["none", "fixed:4", "faser"])
def test_a_right_guess_is_one_step(policy: str):
    requests = [request(f"r{i}", [1, 2, 3 + i], 20) for i in range(3)]
    expected = alone(requests)
    engine, _ = fake_engine(policy)
    result = drive(engine, [replace(r, draft_ids=tuple(expected[r.request_id]) * 2) for r in requests])
    assert result.tokens == expected
    for output in result.final.values():
        stats = output.stats
        assert stats is not None
        assert (stats.num_steps, stats.num_drafted, stats.num_tested, stats.num_accepted) == (1, 19, 19, 19)
    metrics = engine.metrics()
    assert metrics.num_drafted == metrics.num_accepted == 3 * 19


def test_a_guess_is_tested_up_to_its_first_mistake():
    r = request("r", [1, 2, 3], 20)
    answer = alone([r])["r"]
    engine, _ = fake_engine("none")
    draft = (*answer[:5], (answer[5] + 1) % VOCAB, *answer[6:9])
    stats = drive(engine, [replace(r, draft_ids=draft)]).final["r"].stats
    assert stats is not None and (stats.num_drafted, stats.num_tested, stats.num_accepted) == (9, 6, 5)
    assert stats.num_steps == 20 - 5


@pytest.mark.parametrize("options", [{"max_draft_tokens": 0}, {"max_tokens": 1}])
def test_where_there_is_no_room_guesses_are_ignored(options: dict[str, int]):
    r = request("r", [1, 2, 3], options.pop("max_tokens", 8), draft_ids=(1, 2, 3, 4), **options)
    engine, _ = fake_engine("fixed:4")
    result = drive(engine, [r])
    assert result.tokens == alone([r])
    stats = result.final["r"].stats
    assert stats is not None and stats.num_drafted == 0


@pytest.mark.parametrize("policy", ["none", "fixed:20"])
@pytest.mark.parametrize(("most", "count", "bound"), [(16, 1, 16), (None, 4, 48)])
def test_no_device_gets_more_rows_than_it_takes(policy: str, most: int | None, count: int, bound: int, monkeypatch):
    for module in (scheduler, in_flight):
        monkeypatch.setattr(module, "MAX_VERIFIED_ROWS", 48)
    requests = [request(f"r{index}", [1, 2, 3 + index], 60) for index in range(count)]
    answers = alone(requests)
    drafted = [replace(r, draft_ids=tuple(answers[r.request_id]) if policy == "none" else ()) for r in requests]
    fake, rows = open_fake(policy), []
    fake.targets[0].max_logit_rows = most
    fake.step_runner.observers.append(lambda record: rows.append(sum(record.frontier.num_drafted + 1)))
    assert drive(fake.engine, drafted).tokens == answers
    assert bound // 2 < max(rows) <= bound


def test_long_guesses_share_what_a_step_may_read():
    requests = [request(f"r{i}", [1, 2, 3 + i], 90) for i in range(3)]
    expected = alone(requests)
    drafted = [replace(r, draft_ids=tuple(expected[r.request_id])) for r in requests]
    for budget, longest in ((16, 32), (150, 50), (1000, 89)):  # never less than a draft of the server's own may have
        engine, _ = fake_engine("none", max_prefill_tokens=budget)
        result = drive(engine, drafted)
        assert result.tokens == expected
        assert {output.stats.num_drafted for output in result.final.values() if output.stats} == {longest}


def test_a_guess_makes_nobody_go():
    requests = [request(f"r{i}", [i] * 9, 20) for i in range(4)]  # 3 blocks each, and one to spare
    expected = alone(requests)
    drafted = [replace(r, draft_ids=tuple(expected[r.request_id])) for r in requests]
    fake = open_fake("none", num_blocks=26, max_prefill_tokens=200)
    preempted = []

    def note(record: StepRecord) -> None:
        if record.has_clients:
            preempted.extend(record.plan.preempted)

    fake.step_runner.observers.append(note)
    result = drive(fake.engine, drafted)
    assert result.tokens == expected and not preempted
    counts = [output.stats.num_drafted for output in result.final.values() if output.stats]
    assert 0 in counts and 19 in counts, "some guesses find room and some do not"


# -- under rejection sampling -----------------------------------------------------------------------------


def test_rejection_sampling_of_a_mixed_frontier_by_hand():
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


# -- what policies learn ---------------------------------------------------------------------------------


def misled_requests(count: int = 12) -> list[Request]:
    """Guesses that are wrong from the first token on, but for the odd one."""
    rng = np.random.default_rng(2)
    return [
        request(
            f"r{i}",
            rng.integers(24, size=int(rng.integers(2, 20))).tolist(),
            30,
            sampling=Sampling(temperature=0.0 if i % 2 else 1.0, seed=i),
            draft_ids=tuple(rng.integers(24, size=20).tolist()),
        )
        for i in range(count)
    ]


def learn(policy: str, change: Change | None = None) -> FakeEngine:
    """A run in which the server's draft is always right and clients' are always wrong."""
    options = {"draft_noise": 0.0, "draft_memory": 10**6, "max_prefill_tokens": 40}
    fake = open_forced(policy, change or forced(), **options)
    num_given = 0

    def note(record: StepRecord) -> None:
        nonlocal num_given
        num_given += record.has_clients
        rows = ~record.frontier.is_client
        assert (record.acceptance.num_accepted[rows] == record.num_testable[rows]).all()

    fake.step_runner.observers.append(note)
    metrics = fake.engine.metrics()
    drive(fake.engine, misled_requests(), seed=4)
    assert num_given > 4 and metrics.num_failed_steps == 0 and metrics.num_drafted > metrics.num_accepted + 100
    return fake


@pytest.mark.parametrize("name", ["faser", "gp-lcb"])
def test_offsets_are_of_the_servers_draft_alone(name: str):
    """Its tokens are all accepted, so no request is harder than the traffic; `faser` learns from some steps alone."""
    offsets = offsets_of(learn(name))
    assert min(offsets) >= 0.0 and max(offsets) > 0.0


def test_a_record_that_tells_nobody_apart_fails_the_same_checks(monkeypatch: pytest.MonkeyPatch):
    """The control."""
    monkeypatch.setattr(Frontier, "is_client", property(lambda self: np.zeros(self.sources.shape, np.bool_)))
    with pytest.raises(AssertionError):
        learn("gp-lcb")


def offsets_of(fake: FakeEngine) -> list[float]:
    """Offsets that the policy learned, one of each request."""
    policy = fake.step_runner.scheduler.policy
    assert isinstance(policy, Forced) and isinstance(policy.inner, ThroughputPolicy | GpLcb)
    return [offset for offset, _ in policy.inner._acceptance._requests.values()]


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

    monkeypatch.setattr(policy, "observe", watched)
    if isinstance(policy, ThroughputPolicy):
        monkeypatch.setattr(policy._errors, "observe", lesson)
        monkeypatch.setattr(policy._yield, "observe", lesson)
    else:
        assert isinstance(policy, GpLcb)
        monkeypatch.setattr(policy._process, "observe", lesson)
    drive(fake.engine, misled_requests(24), seed=4)
    assert len(steps) > 10 and not any(steps)
