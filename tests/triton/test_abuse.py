"""Runs short soaks, fuzzing and kills on the demo pair, and controls that each of them must detect."""

import json
import os
import signal
from collections.abc import Iterator

import pytest

from faser_backend.lab.abuse.cases import CONTRACTS, Case, make_case
from faser_backend.lab.abuse.clients import Reply, judge
from faser_backend.lab.abuse.faults import Outcome, kill_process
from faser_backend.lab.abuse.fuzz import fuzz
from faser_backend.lab.abuse.served import Served, Usage, serving
from faser_backend.lab.abuse.soak import EVERYTHING, SERVE_OPTIONS, Sample, Soak, growth, sample, soak
from faser_backend.lab.bench.wire import tensor_request
from tests.text.test_structured_output import SCHEMAS

SOAK_S, NUM_CASES = 4.0, 50  # of the latter for each contract
FULL = "Exceeds maximum queue size. Maximum queue size of 8 requests is reached; retry later"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(*SERVE_OPTIONS) as served:
        yield served


def test_a_short_soak_loses_nothing_and_holds_nothing(server: Served):
    result = soak(server, SOAK_S, num_pauses=2, seed=0)
    # What a process that is gone said last, too.
    assert Soak().missing == list(EVERYTHING) and result.broken == [], "\n".join(result.broken)
    assert [sample.blocks for sample in result.samples] == [0] * 2 and result.num_preemptions > 0
    assert set(result.samples[0].processes) >= {"faser serve", "tritonserver", "tensorrt_llm", "ensemble"}


def test_fuzz_cases_and_hostile_schemas_disturb_nobody(server: Served):
    found = fuzz(server, CONTRACTS[0], lambda number: make_case(0, number, CONTRACTS[0]), range(NUM_CASES))
    assert found.broken == [] and found.num_cases == NUM_CASES
    assert 0 < found.num_answered < NUM_CASES // 2 and found.waits

    def with_schema(number: int) -> Case:
        guide = json.dumps(list(SCHEMAS.values())[number % len(SCHEMAS)])
        guided = {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": guide}
        return Case(guide, tensor_request("ensemble", {"text_input": "x = ", "max_tokens": 24, **guided}))

    found = fuzz(server, CONTRACTS[0], with_schema, range(12))
    assert found.broken == [] and max(found.waits) < 2.0  # five times what an idle machine takes
    assert found.errors and all("guided_decoding_guide" in error for error in found.errors)


def test_a_killed_engine_is_noticed(server: Served):
    outcome = Outcome("kill")
    kill_process(server, "tensorrt_llm", outcome)
    assert outcome.broken == [] and "status 1 and all its processes" in outcome.then
    # On a busy machine some streams may end before the last one begins.
    assert " ended by an error" in outcome.saw and "4 of 4 streams whole" not in outcome.saw
    (gone,) = sample(server, {"tensorrt_llm": os.getpid() + 2**22}, [], 0.0)
    assert gone.startswith("gone or not ready: tensorrt_llm")


def test_fuzz_cases_of_the_llm_api_disturb_nobody_until_the_server_goes(capsys: pytest.CaptureFixture[str]):
    with serving("--contract", "llmapi", "--num-threads", 1) as served:

        def make(number: int) -> Case:
            if number == NUM_CASES:
                os.kill(served.processes()["tritonserver"], signal.SIGKILL)
            return make_case(0, number, "llmapi")

        found = fuzz(served, "llmapi", make, range(4 * NUM_CASES))
    assert 0 < found.num_answered < NUM_CASES // 2 and NUM_CASES <= found.num_cases < 4 * NUM_CASES
    assert any("the server was gone" in line for line in found.broken) and "gone\n" in capsys.readouterr().err
    assert any(line.startswith("the server is not ready") for line in found.broken)
    assert all("the server" in line or line.startswith("a well-behaved client") for line in found.broken)


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (Reply({0: "abc"}, num_finals=1), "exact"),
        (Reply({0: "ab"}, num_finals=1), "wrong"),
        (Reply({0: "abc"}, num_finals=2), "wrong"),
        (Reply({0: "abc"}, num_finals=1, is_lost=True), "wrong"),
        (Reply({0: "ab"}, is_cut=True), "left"),
        (Reply(errors=[FULL], num_finals=1), "refused"),
        (Reply(errors=[FULL, FULL], num_finals=2), "wrong"),
    ],
)
def test_answers_are_judged(reply: Reply, outcome: str):
    found, wrong = judge(reply, ["abc"])
    assert found == outcome and (wrong is not None) == (outcome == "wrong")
    is_beginning = reply.text == "ab" and not reply.is_cut
    assert (judge(reply, ["abc"], may_be_short=True)[0] == "short") == is_beginning


@pytest.mark.parametrize("held", [Usage(20, 10, 100), Usage(5, 40, 100), Usage(5, 10, 200)], ids=Usage._fields)
def test_growth_is_a_broken_promise(held: Usage):
    first = Usage(5, 10, 100)

    def at(minutes: float, share: float) -> Sample:
        now = Usage(*(one + share * (other - one) for one, other in zip(first, held, strict=True)))
        return Sample(minutes, 0, {"model": now, "steady": first})

    (line,) = growth([at(step, step / 8) for step in range(9)])
    assert line.startswith("model: ")
    assert growth([at(step, float(step > 1)) for step in range(9)]) == []  # all of it while it warmed up
    assert growth([at(step, float(step > 6)) for step in range(12)]) == []  # in one step
