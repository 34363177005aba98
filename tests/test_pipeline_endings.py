"""Requests that leave in the middle of overlapped steps: cancelled, or failed with a lane."""

from __future__ import annotations

import pytest

from faser_backend.core.decision import PipelineMode
from faser_backend.core.request import FinishReason
from tests.forced_engine import LANES, Case, agrees, open_forced
from tests.forcing import forced
from tests.harness import drive, request
from tests.test_engine import alone, random_requests

_, RUN_AHEAD, PING_PONG = PipelineMode


@pytest.fixture(scope="module")
def case() -> Case:
    requests = random_requests(1, 12)
    return Case(requests, alone(requests))


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("mode", [RUN_AHEAD, PING_PONG])
def test_cancellation_takes_chains_along(case: Case, mode: PipelineMode, lanes: str):
    requests, expected = case.requests, case.expected
    fake = open_forced("fixed:4", forced(mode), LANES[lanes](), num_blocks=40)
    cancel = {r.request_id: index % 4 for index, r in enumerate(requests) if index % 3}
    result = drive(fake.engine, requests, seed=2, cancel=cancel)
    ended = [r for r in requests if result.final[r.request_id].finish_reason is FinishReason.CANCELLED]
    for r in requests:
        tokens = result.tokens[r.request_id]
        assert tokens == expected[r.request_id][: len(tokens) if r in ended else None]
    assert ended
    again = [request(f"again {r.request_id}", r.prompt_ids.tolist(), r.max_tokens) for r in requests]
    agrees(fake, Case(again, alone(again)), 3)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("mode", [RUN_AHEAD, PING_PONG])
@pytest.mark.parametrize("fails_draft", [True, False])
@pytest.mark.parametrize("at_call", [1, 2, 7])
def test_a_failing_lane_fails_its_step_alone(
    case: Case, mode: PipelineMode, lanes: str, fails_draft: bool, at_call: int
):
    fake = open_forced("fixed:3", forced(mode), LANES[lanes]())
    requests = [request(f"r{i}", [1, 2, 3 + i], 30) for i in range(3)]
    expected = alone(requests)
    runner = (fake.drafts if fails_draft else fake.targets)[1]
    runner.fails_at_call = at_call
    result = drive(fake.engine, requests)
    failed = {i for i, output in result.final.items() if output.finish_reason is FinishReason.ERROR}
    assert failed and all("told to fail" in str(result.final[i].error) for i in failed)
    for r in requests:
        tokens = result.tokens[r.request_id]
        assert tokens == expected[r.request_id][: len(tokens) if r.request_id in failed else None]
    assert fake.engine.metrics().num_failed_steps == 1
    agrees(fake, case, 4)


def test_a_failing_step_spares_the_chains_that_wait():
    """In ping-pong, a sequence whose chain waits for the next step is in no lane of this one."""
    fake = open_forced("fixed:3", forced(PING_PONG))
    requests = [request(f"r{i}", [1, 2, 3 + i], 30) for i in range(3)]
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
