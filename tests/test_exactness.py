"""Tokens do not depend on how they are decoded.

Combines policies, modes, rules, drafters, lanes and pools, and compares each with plain decoding alone. Every KV entry
of the fake models matters; after each step the records are compared with their pools.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from faser_backend.core.decision import PipelineMode
from faser_backend.core.plan import StepRecord
from faser_backend.core.request import FinishReason
from faser_backend.core.sequence import Sequence
from faser_backend.pipeline import step
from faser_backend.pipeline.commit import RoundCounts, commit_tokens
from faser_backend.policy.calibration import DrafterChoice
from tests.pipeline.test_engine import alone, random_requests
from tests.support.forced_engine import LANES, POLICIES, Case, GuessWatcher, agrees, guessing, open_forced
from tests.support.forcing import (
    ADMITS_ALL,
    ADMITS_NOTHING,
    Change,
    alternating,
    always,
    at_random,
    by_parity,
    calibrated,
    forced,
    outside_top,
    random_everything,
    random_lengths,
    random_rule,
)
from tests.support.harness import drive, request

SERIAL, RUN_AHEAD, PING_PONG = PipelineMode
MODES = list(PipelineMode)
DRAFTERS: dict[str, dict[str, Any]] = {"model": {}, "n-grams": {"has_ngrams": True}, "both": {"has_both": True}}


@dataclass(frozen=True)
class World:
    """A way to decode requests. change: of the policy's decisions, made from the requests' seed."""

    change: Callable[[int], Change]
    policy: str = "fixed:4"
    drafter: str = "model"
    has_clients: bool = False  # with guesses
    lanes: str = "verify first"
    options: dict[str, Any] = field(default_factory=dict)
    happens: tuple[str, ...] = ()  # counters that must rise in this world
    seeds: tuple[int, ...] = (0, 1)


def worlds() -> dict[str, World]:
    found: dict[str, World] = {}
    for index, (policy, mode) in enumerate(product(POLICIES, MODES)):
        drafter = list(DRAFTERS)[index % 3] if policy != "fixed:4" else "model"
        options = {"num_blocks": (26, 200)[index % 2]}
        found[f"{policy}, {mode.value}, {drafter}"] = World(
            lambda _, mode=mode: forced(mode), policy, drafter, index % 2 == 0, options=options, seeds=(index % 2,)
        )
    for drafter, mode in product(DRAFTERS, MODES):
        found[f"fixed:4, {mode.value}, {drafter}, small pool"] = World(
            lambda _, mode=mode: forced(mode), drafter=drafter, options={"num_blocks": 26}, happens=("num_preemptions",)
        )
    for lanes, mode in product(LANES, (RUN_AHEAD, PING_PONG)):
        found[f"lengths of their own, {mode.value}, {lanes}"] = World(
            lambda seed, mode=mode: random_lengths(seed, mode), lanes=lanes, options={"num_blocks": 40}
        )
    pruners = {
        "random exits": lambda seed: at_random(np.random.default_rng(seed), exits=(0, 1)),
        "anchors alone": lambda _: always(exits=(1,)),
        "exits by parity": lambda _: by_parity(),
        "exits as calibrated": lambda _: calibrated(0.6, segments=(0, 1)),
        "exits by margin": lambda _: outside_top(-2.0, exits=(0, 1), num_candidates=3),
    }
    for (name, pruner), mode in product(pruners.items(), MODES):
        found[f"{name}, {mode.value}"] = World(
            lambda seed, mode=mode, pruner=pruner: forced(mode, pruner=pruner(seed)),
            options={"num_blocks": 30},
            happens=("num_pruned",),
            has_clients=name == "exits by parity",
            seeds=(0,),
        )
    rules = {
        "all rows": lambda _: ADMITS_ALL,
        "no rows": lambda _: ADMITS_NOTHING,
        "any rows": lambda seed: random_rule(np.random.default_rng(seed)),
    }
    for (name, rule), mode, drafter in product(rules.items(), MODES, ("model", "n-grams")):
        found[f"{name}, {mode.value}, {drafter}"] = World(
            lambda seed, mode=mode, rule=rule: forced(mode, trim=rule(seed)),
            drafter=drafter,
            has_clients=name == "no rows",
            options={"num_blocks": 40},
            seeds=(0, 2) if name == "any rows" else (0,),
        )
    for index, (lanes, drafter, num_blocks) in enumerate(product(LANES, DRAFTERS, (200, 26))):
        found[f"everything changes, {lanes}, {drafter}, {num_blocks} blocks"] = World(
            random_everything,
            drafter=drafter,
            lanes=lanes,
            has_clients=index % 2 == 0,
            options={"num_blocks": num_blocks},
            happens=("num_preemptions",) if num_blocks == 26 else (),
        )
    found["nobody is preempted"] = World(
        lambda _: forced(), options={"num_blocks": 26, "never_evicts": True}, has_clients=True
    )
    return found


WORLDS = worlds()


@pytest.fixture(scope="module")
def cases() -> dict[tuple[int, bool], Case]:
    """Returns cases by seed, with and without clients' guesses."""
    found = {}
    for seed in range(3):
        requests = [*random_requests(seed, 10), request("copies", [7, 8, 9, 10] * 4, 30)]
        found[seed, False] = case = Case(requests, alone(requests))
        found[seed, True] = guessing(case.requests, case.expected, seed)
    return found


@pytest.mark.parametrize("name", WORLDS)
def test_tokens_are_those_of_plain_decoding(cases: dict[tuple[int, bool], Case], name: str):
    world = WORLDS[name]
    totals = dict.fromkeys(world.happens, 0)
    for seed in world.seeds:
        case, options = cases[seed, world.has_clients], DRAFTERS[world.drafter] | world.options
        fake = open_forced(world.policy, world.change(seed), LANES[world.lanes](), **options)
        watcher = GuessWatcher(fake)
        result = agrees(fake, case, seed)
        assert (watcher.num_chains > 0) == world.has_clients
        for r in case.requests:
            assert len(result.log_probs[r.request_id]) == len(result.tokens[r.request_id]) * r.wants_log_probs
        metrics = fake.engine.metrics()
        assert metrics.num_preemptions == 0 or "never_evicts" not in options
        totals = {counter: total + getattr(metrics, counter) for counter, total in totals.items()}
    assert all(totals.values()), totals


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_whichever_of_two_drafts_is_taken(
    cases: dict[tuple[int, bool], Case], mode: PipelineMode, drafter: str, monkeypatch: pytest.MonkeyPatch
):
    """Sources alternate at random; under rejection sampling greedy answers also equal plain decoding's."""
    rng = np.random.default_rng(5)
    takes = lambda self, found, *_: (found.num_drafted > 0) & (rng.random(found.num_drafted.size) < 0.5)  # noqa: E731
    monkeypatch.setattr(DrafterChoice, "takes_look_up", takes)
    requests = [r for r in cases[0, True].requests if r.sampling.is_greedy]
    options = {"uses_rejection": True, "num_blocks": 40} | DRAFTERS[drafter]
    fake = open_forced("fixed:4", forced(mode), **options)
    agrees(fake, Case(requests, {r.request_id: cases[0, True].expected[r.request_id] for r in requests}), 0)
    if drafter == "both":
        fake = open_forced("fixed:4", forced(mode), num_blocks=26, has_both=True)
        agrees(fake, cases[0, False], 0)
        assert all(fake.engine.metrics().num_accepted_by_source[source] > 0 for source in ("model", "ngram"))


@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_any_number_of_sequences(count: int):
    requests = random_requests(100 + count, count)
    case = Case(requests, alone(requests))
    for change in (*map(forced, PipelineMode), random_everything(0)):
        agrees(open_forced("fixed:3", change, max_num_seqs=32), case, None)


@pytest.mark.parametrize("mode", [RUN_AHEAD, PING_PONG])
def test_reused_prefixes(mode: PipelineMode):
    prompt = list(range(20)) * 2
    requests = [request(f"r{i}", [*prompt, i % 4], 12, max_draft_tokens=0 if i == 1 else None) for i in range(8)]
    fake = open_forced("fixed:4", alternating(forced(mode), forced(mode, pruner=by_parity())))
    agrees(fake, Case(requests, alone(requests)), 0)
    assert fake.engine.metrics().num_reused_blocks > 0


# -- what speculation is for -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [RUN_AHEAD, PING_PONG, "any"])
def test_a_perfect_draft_is_never_rejected(mode: PipelineMode | str):
    """The draft's KV is complete and its penalties see every token, whatever was drafted, discarded or pruned."""
    requests = random_requests(50, 12)
    change = random_lengths(0, mode) if isinstance(mode, PipelineMode) else random_everything(0)
    fake = open_forced("fixed:4", change, LANES["threads"](), num_blocks=40, draft_noise=0.0, draft_memory=10**6)

    def all_tested_are_accepted(record: StepRecord) -> None:
        assert (record.acceptance.num_accepted == record.num_testable).all()

    fake.step_runner.observers.append(all_tested_are_accepted)
    agrees(fake, Case(requests, alone(requests)), 0)
    assert fake.engine.metrics().num_accepted > 50


@pytest.mark.parametrize(("mode", "count"), [(RUN_AHEAD, 1), (PING_PONG, 2), (PING_PONG, 5)])
def test_overlapped_steps_draft_beside_verification(mode: PipelineMode, count: int):
    requests = [request(f"r{i}", [1, 2, 3 + i], 40) for i in range(count)]
    fake = open_forced("fixed:3", forced(mode), draft_noise=0.0, draft_memory=10**6)
    shares = []

    def note(record: StepRecord) -> None:
        shares.append(bool(record.plan.drafts))
        in_both = set(record.plan.drafts) & set(record.plan.decodes)
        assert not in_both if mode is PING_PONG else len(in_both) == len(record.plan.drafts)

    fake.step_runner.observers.append(note)
    agrees(fake, Case(requests, alone(requests)), None)
    assert np.mean(shares) > 0.6


def test_running_ahead_discards_after_a_rejection_alone():
    """With a perfect draft each token is drafted once; a useless one drafts repeatedly."""
    requests = [request("r", [1, 2, 3], 40)]
    perfect = open_forced("fixed:4", forced(RUN_AHEAD), draft_noise=0.0, draft_memory=10**6)
    agrees(perfect, Case(requests, alone(requests)), None)
    assert perfect.drafts[1].num_calls <= 40
    useless = open_forced("fixed:4", forced(RUN_AHEAD), draft_noise=100.0)
    agrees(useless, Case(requests, alone(requests)), None)
    assert useless.drafts[1].num_calls > 100


# -- requests that leave in the middle -------------------------------------------------------------------


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("mode", MODES)
def test_cancellation_takes_chains_along(cases: dict[tuple[int, bool], Case], mode: PipelineMode, lanes: str):
    case = cases[1, mode is SERIAL]
    fake = open_forced("fixed:4", forced(mode), LANES[lanes](), num_blocks=40)
    cancel = {r.request_id: index % 4 for index, r in enumerate(case.requests) if index % 3}
    result = drive(fake.engine, case.requests, seed=2, cancel=cancel)
    ended = [r for r in case.requests if result.final[r.request_id].finish_reason is FinishReason.CANCELLED]
    for r in case.requests:
        tokens = result.tokens[r.request_id]
        assert tokens == case.expected[r.request_id][: len(tokens) if r in ended else None]
    assert ended
    again = [replace(r, request_id=f"again {r.request_id}") for r in case.requests]
    agrees(fake, Case(again, {f"again {key}": tokens for key, tokens in case.expected.items()}), 3)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(
    ("mode", "fails_draft", "at_call"),
    [(RUN_AHEAD, True, 1), (RUN_AHEAD, False, 7), (PING_PONG, True, 7), (PING_PONG, False, 2)],
)
def test_a_failing_lane_fails_its_step_alone(
    cases: dict[tuple[int, bool], Case], mode: PipelineMode, lanes: str, fails_draft: bool, at_call: int
):
    fake = open_forced("fixed:3", forced(mode), LANES[lanes]())
    requests = [request(f"r{i}", [1, 2, 3 + i], 30) for i in range(3)]
    expected = alone(requests)
    (fake.drafts if fails_draft else fake.targets)[1].fails_at_call = at_call
    result = drive(fake.engine, requests)
    failed = {i for i, output in result.final.items() if output.finish_reason is FinishReason.ERROR}
    assert failed and all("told to fail" in str(result.final[i].error) for i in failed)
    for r in requests:
        tokens = result.tokens[r.request_id]
        assert tokens == expected[r.request_id][: len(tokens) if r.request_id in failed else None]
    assert fake.engine.metrics().num_failed_steps == 1
    agrees(fake, cases[1, False], 4)


def test_a_failing_step_spares_the_chains_that_wait():
    """In ping-pong, a sequence whose chain waits for the next step is in no lane of this one."""
    fake = open_forced("fixed:3", forced(PING_PONG))
    requests = [request(f"r{i}", [3 + i], 30) for i in range(3)]
    expected = alone(requests)
    for r in requests:
        fake.engine.submit(r)
    tokens: dict[str, list[int]] = {r.request_id: [] for r in requests}
    failed, spared = set(), set()
    while fake.engine.has_work:
        waiting = {s.request.request_id for s in fake.engine._in_flight.sequences}
        fake.targets[1].fails_at_call = fake.targets[1].num_calls + 1 if len(waiting) == 3 and not failed else None
        for output in fake.engine.step():
            tokens[output.request_id] += output.token_ids
            if output.finish_reason is FinishReason.ERROR:
                failed.add(output.request_id)
                spared = waiting
        fake.engine.check_integrity()
    spared -= failed
    assert failed and spared
    assert all(tokens[i] == expected[i] for i in spared)


# -- negative control ------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["model", "both"])
def test_a_draft_that_counts_others_chains_as_read_is_found(
    cases: dict[tuple[int, bool], Case], drafter: str, monkeypatch: pytest.MonkeyPatch
):
    """If draft_len advanced over guesses of clients and n-grams, the draft would read K/V that were never written."""

    def careless(sequence: Sequence, tokens: list[int], counts: RoundCounts) -> FinishReason | None:
        return commit_tokens(sequence, tokens, counts._replace(source=0))

    monkeypatch.setattr(step, "commit_tokens", careless)
    monkeypatch.setattr(DrafterChoice, "takes_look_up", lambda self, found, *_: found.num_drafted > 0)
    fake = open_forced("fixed:4", forced(SERIAL), **DRAFTERS[drafter])
    result = drive(fake.engine, cases[0, drafter == "model"].requests, seed=0, check=False)
    assert any("stale K/V counts as known" in str(output.error) for output in result.final.values())
