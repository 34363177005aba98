"""The controller between greedy and sampled requests: what it learned of one kind does not decide for the other."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from faser_backend.policy.arms import PLAIN, SERIAL, UNIFORM, Arm, Place
from faser_backend.policy.corrections import MOST_STEPS, Corrections
from faser_backend.policy.faser import FEW_SEQUENCES, PATIENCE, WEIGH_EVERY, WEIGH_PLAIN_EVERY, Faser
from faser_backend.policy.probing import PROBE_STEPS, Prober

from faser_backend.config import EngineConfig
from faser_backend.core.record import StepRecord
from faser_backend.core.request import Request, SamplingParams
from lab.simulation.acceptance import VOCAB_SIZE, AcceptancePath, AcceptanceProcess, fitted_fits
from lab.simulation.engine import World, build_sim_engine
from tests.kinds import batch
from tests.test_faser import costs, knowing

GREEDY, SAMPLED = (Place(1, is_sampled=is_sampled) for is_sampled in (False, True))
NARROW = costs(300.0, 1000.0, 60.0)  # a draft that is accepted half as often as promised is not worth its time
FIRST = {1: SERIAL, 2: UNIFORM, 3: UNIFORM, 4: UNIFORM}  # what speculation begins with, by requests


class ByKind(AcceptanceProcess):
    """Of texts with odd seeds the target accepts no draft token."""

    def path(self, key: tuple[int, ...], num_positions: int) -> AcceptancePath:
        path = super().path(key, num_positions)
        return replace(path, drafted=(path.tokens + 1) % VOCAB_SIZE) if key[-1] % 2 else path


class Server:
    """A simulated engine: of greedy requests most draft tokens are accepted, of sampled ones none."""

    def __init__(self, policy: Faser) -> None:
        process = ByKind.from_dict(fitted_fits()["sampled"]["process"]).at_level(0.85)
        world = World("test", NARROW, process, (4,), (1,), (), 16384, 2048, ())
        config = EngineConfig.from_options(policy="faser", max_queue_size=0)
        self._engine = build_sim_engine(world, config, seed=0, max_output_tokens=1000, policy=policy)
        self._engine.observers.append(self._note)
        self._numbers = count()
        self._drafted: list[int] = []

    def _note(self, record: StepRecord) -> None:
        self._drafted.append(int(record.frontier.num_drafted.max()))

    def run(self, kinds: str, num_tokens: int) -> list[int]:
        """A request for each letter, all at once. Returns the longest chain of each step."""
        self._drafted = []
        for kind in kinds:
            number, is_sampled = next(self._numbers), kind == "s"
            sampling = SamplingParams(temperature=0.8 * is_sampled, seed=2 * number + is_sampled)
            request = Request(str(number), np.zeros(4, np.int64), num_tokens, sampling)
            self._engine.engine.submit(request)
        while self._engine.engine.has_work:
            self._engine.engine.step()
        return self._drafted


def taught(num_requests: int) -> tuple[Faser, Server]:
    """After sampled requests of 600 tokens each."""
    policy = knowing(NARROW)
    server = Server(policy)
    late = server.run("s" * num_requests, 600)[-100:]
    assert policy.arm == PLAIN and np.mean(late) < 0.1, "else nothing was learned"
    return policy, server


@pytest.mark.parametrize("num_requests", [1, 2, 3, 4])
def test_the_first_decision_for_other_requests_is_for_their_kind(num_requests: int) -> None:
    policy, _ = taught(num_requests)
    for kind, arm in (("g", FIRST[num_requests]), ("s", PLAIN), ("g", FIRST[num_requests]), ("s", PLAIN)):
        policy.decide(batch(kind * num_requests))
        assert policy.arm == arm


@pytest.mark.parametrize("num_requests", [1, 2, 4])
def test_greedy_requests_are_drafted_at_once_after_sampled_ones_that_were_rejected(num_requests: int) -> None:
    _, server = taught(num_requests)
    drafted = server.run("g" * num_requests, 300)
    assert min(drafted[:3]) > 0 and np.mean(drafted) > 1.5
    assert server.run("s" * num_requests, 100)[:PATIENCE] == [0] * PATIENCE, "and the others are known still"


def test_rules_follow_the_kind_at_once() -> None:
    """Not those of the batch that was weighed before, while the size is the same."""
    policy, _ = taught(1)
    policy.decide(batch("s"))
    sampled = policy._pricer.beliefs.curve
    for _ in range(2 * PROBE_STEPS):  # and one that is no probe
        trim = policy.decide(batch("g")).trim
    assert trim is not None
    greedy = policy._pricer.beliefs.curve
    assert np.array_equal(trim.match_probs, greedy.match_probs)
    assert (greedy.match_probs > sampled.match_probs + 0.1).any()


def test_each_place_keeps_its_own_arm() -> None:
    """The arm that won among greedy requests is not chosen for sampled ones."""
    policy, greedy, sampled = knowing(NARROW), batch("gggg"), batch("ssss")
    policy.decide(greedy)
    policy._corrections.observe_yield(UNIFORM, 1, 1000.0, 1000.0)
    policy._corrections.observe_yield(SERIAL, 1, 2000.0, 1000.0)
    assert policy.arm == UNIFORM
    for _ in range(WEIGH_EVERY + PATIENCE):
        policy.decide(greedy)
    assert policy.arm == SERIAL, "else the places keep the same"
    for _ in range(PATIENCE):
        policy.decide(sampled)
        assert policy.arm == UNIFORM
        policy.decide(greedy)
        assert policy.arm == SERIAL
    assert policy._arms_of_places[Place(3, is_sampled=True)] == UNIFORM
    assert policy._arms_of_places[Place(3, is_sampled=False)] == SERIAL


def test_a_batch_is_of_a_kind_from_three_quarters_on_and_of_the_last_one_in_between() -> None:
    policy = knowing(NARROW)
    seen = []
    for kinds in ("gs", "sssg", "gs", "sg", "ggs", "gggs", "ssg", "s", "gss"):
        policy.decide(batch(kinds))
        seen.append(policy._corrections.place.is_sampled)
    assert seen == [False, True, True, True, True, False, False, True, True]


def test_one_request_more_or_less_is_seen_at_once_among_few_and_soon_among_many() -> None:
    policy = knowing(NARROW)
    beliefs = policy._pricer.beliefs
    for kinds in ("gggg", "gggs", "ggss", "ggsg", "gs", "ss", "sg"):
        policy.decide(batch(kinds))
        assert beliefs.sampled_share == kinds.count("s") / len(kinds)
    many = "g" * (2 * FEW_SEQUENCES)
    policy.decide(batch(many))
    policy.decide(batch(many[1:] + "s"))
    assert beliefs.sampled_share == 0.0, "weighing takes time"
    for _ in range(WEIGH_PLAIN_EVERY):
        policy.decide(batch(many[1:] + "s"))
    assert beliefs.sampled_share == 1 / len(many)


def test_an_arm_that_another_place_has_was_not_deposed() -> None:
    """A look back is for the place whose arm was changed, and comes once, however often the places take turns."""
    corrections = Corrections()
    corrections.place = GREEDY
    prober = Prober(corrections)
    prober.pay(1e9)  # so that only what is urgent is probed
    prices = {PLAIN: 1e9, UNIFORM: 900.0, SERIAL: 900.0}  # of 1000 for as many plain steps
    for arm in (PLAIN, UNIFORM, SERIAL):
        for _ in range(2 * int(MOST_STEPS)):
            corrections.observe(arm, 1, 100.0, 100.0, is_chosen=False)

    def probed(chosen_of: dict[Place, Arm], num_turns: int) -> list[tuple[Place, Arm]]:
        """What is probed, and in which place that began."""
        found = []
        for _ in range(num_turns):
            for place, chosen in chosen_of.items():
                corrections.place = place
                prober.consider(chosen, 1, 100.0, {arm: us for arm, us in prices.items() if arm != chosen})
                arm = prober.arm(chosen)
                if arm != chosen:
                    found.append((place, arm))
                    for _ in range(PROBE_STEPS - 1):
                        assert prober.arm(chosen) == arm
                corrections.observe(arm, 1, 100.0, 100.0, is_chosen=arm == chosen)
        return found

    assert probed({GREEDY: UNIFORM, SAMPLED: SERIAL}, 200) == []
    assert probed({SAMPLED: SERIAL, GREEDY: SERIAL}, 200) == [(GREEDY, UNIFORM)]
