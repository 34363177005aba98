"""By how much an arm has to be ahead before the controller changes over to it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faser_backend.core.decision import WHOLE
from faser_backend.policy.arms import PLAIN, SERIAL, UNIFORM, Arm, Place, promise
from faser_backend.policy.corrections import Corrections
from faser_backend.policy.cost_model import TARGET, CallCost, CostModel, Curve
from faser_backend.policy.faser import HORIZON, LEFT_SHARE, WEIGH_PLAIN_EVERY, Faser
from faser_backend.policy.probing import Prober
from faser_backend.policy.speculation import MAX_ADAPTIVE_TOKENS
from tests.kinds import batch
from tests.test_faser import costs, knowledge_of

MODEL = costs(300.0, 1000.0, 60.0)
PLACE = {1: Place(1, is_sampled=False), 8: Place(4, is_sampled=False)}  # by requests
FIRST = {1: SERIAL, 8: UNIFORM}  # what a level begins with
SECOND = {1: UNIFORM, 8: SERIAL}


def arm_after(chosen: Arm | None, lead: dict[Arm, float], num_requests: int, model: CostModel = MODEL) -> Arm | None:
    """The arm after many decisions, of expected speeds that stand in these proportions. chosen: before, if any was."""

    class Expecting(Faser):
        def _expected_speed(self, arm: Arm) -> float:
            return 1e-3 * lead.get(arm, 0.1)

    policy = Expecting(knowledge_of(model), MAX_ADAPTIVE_TOKENS)
    if chosen is not None:
        policy._arms_of_places[PLACE[num_requests]] = chosen
    for _ in range(4 * WEIGH_PLAIN_EVERY):
        policy.decide(batch("g" * num_requests))
    return policy.arm


@pytest.mark.parametrize("num_requests", [1, 8])
def test_the_arm_that_a_level_begins_with_needs_no_lead_to_come_back(num_requests: int) -> None:
    first, second = FIRST[num_requests], SECOND[num_requests]
    assert arm_after(second, {first: 1.001, second: 1.0, PLAIN: 0.5}, num_requests) == first
    assert arm_after(second, {first: 1.0, second: 1.01, PLAIN: 0.5}, num_requests) == second


@pytest.mark.parametrize("num_requests", [1, 8])
def test_any_other_needs_one(num_requests: int) -> None:
    first, second = FIRST[num_requests], SECOND[num_requests]
    assert arm_after(first, {first: 1.0, second: 1.04, PLAIN: 0.5}, num_requests) == first
    assert arm_after(first, {first: 1.0, second: 1.06, PLAIN: 0.5}, num_requests) == second
    assert arm_after(PLAIN, {first: 1.04, second: 0.5, PLAIN: 1.0}, num_requests) == PLAIN
    assert arm_after(PLAIN, {first: 1.06, second: 0.5, PLAIN: 1.0}, num_requests) == first


def test_several_requests_begin_with_trimmed_rounds_only_where_deciding_is_known_to_take_next_to_no_time() -> None:
    alike = {UNIFORM: 1.0, SERIAL: 1.0, PLAIN: 0.5}
    free = replace(MODEL, overhead=replace(MODEL.overhead, trim_us=0.0, trim_sequence_us=0.1))
    assert arm_after(None, alike, 8) == UNIFORM
    assert arm_after(None, alike, 8, free) == SERIAL
    assert arm_after(UNIFORM, alike | {SERIAL: 1.001}, 8, free) == SERIAL, "it needs no lead to come back"
    assert arm_after(None, alike, 8, replace(free, is_measured=False)) == UNIFORM, "a guess is not knowledge"


def test_the_tokens_of_one_probe_do_not_make_a_lead() -> None:
    corrections = Corrections()
    corrections.place = PLACE[1]
    for _ in range(8):  # steps of one request that go well
        corrections.observe_yield(UNIFORM, 1, emitted=3.2, promised=2.6)
    assert 1.0 < corrections.yield_ratio(UNIFORM) < 1.03


def test_an_arm_is_chosen_for_the_contexts_to_come() -> None:
    """Attention makes plain decoding, of which each step reads all keys for one token, the dearer one as texts grow."""
    start = np.zeros(1)
    keys = Curve.from_slopes(start, 0.0, np.array([2.0]))
    target = CallCost(Curve.from_slopes(start, 300.0, np.array([60.0])), keys)
    model = replace(MODEL, segments={**MODEL.segments, (TARGET, WHOLE): (target,)})
    policy = Faser(knowledge_of(model), MAX_ADAPTIVE_TOKENS)
    sequences = batch("g" * 8)
    policy.decide(sequences)
    now = sequences[0].num_tokens
    assert policy._context_to_come == now + HORIZON // 2 < now + LEFT_SHARE * sequences[0].num_remaining_tokens
    now_speeds = [promise(policy._pricer, arm, 8, now).tokens_per_us for arm in (UNIFORM, PLAIN)]
    coming_speeds = [policy._promises[arm].tokens_per_us for arm in (UNIFORM, PLAIN)]
    assert coming_speeds[0] / coming_speeds[1] > now_speeds[0] / now_speeds[1]


def test_plain_decoding_waits_until_speculation_was_seen_on_its_level() -> None:
    lead = {UNIFORM: 0.9, SERIAL: 0.5, PLAIN: 1.0}
    assert arm_after(UNIFORM, lead, 8) == UNIFORM, "it never ran, so its speed is a guess"
    assert arm_after(UNIFORM, lead | {UNIFORM: 0.8}, 8) == PLAIN, "a guess that far behind is taken"


def test_plain_decoding_is_not_looked_at_while_a_batch_grows() -> None:
    corrections = Corrections()
    corrections.place = PLACE[8]
    corrections.observe(PLAIN, 1, 100.0, 100.0, is_chosen=False)  # seen elsewhere
    for is_growing in (True, False):
        prober = Prober(corrections)
        prober.consider(UNIFORM, 1, 100.0, {PLAIN: 100.0, SERIAL: 1e9}, is_growing=is_growing)
        assert (prober.arm(UNIFORM) == PLAIN) is not is_growing
