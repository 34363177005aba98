"""The soak, the fuzzer and a kill in short, on the demo pair; and that each would see what it is there to see."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.abuse import faults
from lab.abuse.cases import CONTRACTS, MAX_DEPTH, make_case
from lab.abuse.clients import Reply
from lab.abuse.faults import refused
from lab.abuse.flight import Outcome, kill_process, stop_as_a_stranger
from lab.abuse.fuzz import broken_promise, fuzz
from lab.abuse.schemas import attack
from lab.abuse.served import Served, serving
from lab.abuse.soak import NUM_BURST, SERVE_OPTIONS, Sample, Usage, growth, judge, sample, soak

SOAK_S, NUM_CASES = 9.0, 100  # of the latter for each contract
FULL = "Exceeds maximum queue size. Maximum queue size of 8 requests is reached; retry later"


def cases(contract: str) -> list:
    return [(number, make_case(0, number, contract)) for number in range(NUM_CASES)]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(*SERVE_OPTIONS) as served:
        yield served


def test_a_short_soak_loses_nothing_and_holds_nothing(server: Served):
    result = soak(server, SOAK_S, num_pauses=3, seed=0)
    assert result.broken == [], "\n".join(result.broken)  # what a process that is gone said last, too
    assert result.num_preemptions > 0
    assert {"faser serve", "tritonserver", "tensorrt_llm", "ensemble"} <= set(result.samples[-1].processes)
    assert all(result.num_done[f"{name}: exact"] > 3 for name in ("stream", "unary", "http", "tokens", "batch"))
    assert result.num_done["overflow: refused"] >= NUM_BURST - 20 and result.num_done["stop: short"]


def test_hostile_schemas_disturb_nobody(server: Served):
    outcome = attack(server, 2.0)
    assert outcome.broken == [] and outcome.then == "runs on", outcome.saw


def test_a_stranger_who_stops_the_answers_of_others_is_noticed(server: Served):
    """The control: without --stop-requests off. The refusal is tested in test_server_launch.py."""
    assert "a stop request was taken" in stop_as_a_stranger(server).broken


def test_fuzz_cases_disturb_nobody(server: Served):
    outcome = fuzz(server, "inflight_batcher", cases("inflight_batcher"), "")
    assert outcome.broken == [] and outcome.num_cases == NUM_CASES
    assert 0 < outcome.num_answered < NUM_CASES // 2 and outcome.row()["broken promises"] == 0


def test_a_killed_engine_ends_the_server_and_is_noticed(server: Served):
    outcome = kill_process(server, "tensorrt_llm")
    assert outcome.broken == []
    (gone,) = sample(server, {"tensorrt_llm": os.getpid() + 2**22}, [], 0.0)
    assert gone.startswith("gone or not ready: tensorrt_llm")
    # On a busy machine some streams may end before the last one begins.
    assert " ended by an error" in outcome.saw and "4 of 4 streams whole" not in outcome.saw
    assert "status 1 and all its processes" in outcome.then


def test_fuzz_cases_of_the_llm_api_disturb_nobody():
    with serving("--contract", "llmapi", "--num-threads", 1) as served:
        outcome = fuzz(served, "llmapi", cases("llmapi"), "")
        assert outcome.broken == [] and outcome.num_cases == NUM_CASES and 0 < outcome.num_answered < NUM_CASES // 2
        # Control: a server that goes meanwhile is noticed, and no more cases are sent.
        outcome = fuzz(served, "llmapi", killing(served, cases("llmapi")), "")
        assert any("the server was gone" in line for line in outcome.broken)
        assert any("the server is not ready" in line for line in outcome.broken)
        assert 20 <= outcome.num_cases < NUM_CASES


def killing(served: Served, numbered: list) -> Iterator:
    for number, case in numbered:
        if number == 20:
            os.kill(served.processes()["tritonserver"], signal.SIGKILL)
        yield number, case


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_case_is_remade_from_its_number_and_spares_triton(contract: str):
    made = [make_case(3, number, contract) for number in range(400)]
    assert made == [make_case(3, number, contract) for number in range(400)]
    assert made != [make_case(4, number, contract) for number in range(400)]
    assert {case.request is None for case in made} == {True, False}
    for case in made:
        assert case.body.count(b"[") <= 2 * MAX_DEPTH + 10 and "Transfer-Encoding" not in case.headers


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (Reply({0: "abc"}, num_finals=1), "exact"),
        (Reply({0: "ab"}, num_finals=1), "wrong"),
        (Reply({0: "abd"}, num_finals=1), "wrong"),
        (Reply({0: "abc"}, num_finals=2), "wrong"),
        (Reply({0: "abc"}), "wrong"),
        (Reply({0: "abc"}, num_finals=1, is_lost=True), "wrong"),
        (Reply({0: "ab"}, is_cut=True), "left"),
        (Reply({0: "b"}, is_cut=True), "wrong"),
        (Reply(errors=[FULL], num_finals=1), "refused"),
        (Reply(errors=[FULL, FULL], num_finals=2), "wrong"),
        (Reply(errors=["the server is shutting down"], num_finals=1), "wrong"),
    ],
)
def test_answers_are_judged(reply: Reply, outcome: str):
    found, wrong = judge(reply, ["abc"])
    assert found == outcome and (wrong is not None) == (outcome == "wrong")
    is_short = reply == Reply({0: "ab"}, num_finals=1)  # as what was stopped may be, and no other
    assert judge(reply, ["abc"], may_be_short=True)[0] == ("short" if is_short else outcome)


@pytest.mark.parametrize("held", [Usage(20, 10, 100), Usage(5, 40, 100), Usage(5, 10, 200)], ids=Usage._fields)
def test_growth_is_a_broken_promise(held: Usage):
    first = Usage(5, 10, 100)

    def held_after(minutes: float, share: float) -> Sample:
        now = Usage(*(one + share * (other - one) for one, other in zip(first, held, strict=True)))
        return Sample(minutes, {"model": now, "steady": first})

    (line,) = growth([held_after(step, step / 8) for step in range(9)])
    assert line.startswith("model: ")
    assert growth([held_after(step, float(step > 1)) for step in range(9)]) == []  # all of it while it warmed up
    assert growth([held_after(step, float(step > 6)) for step in range(12)]) == []  # in one step


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(num_finals=0), "0 ends"),
        (Reply(errors=["a", "b"], num_finals=2), "2 ends"),
        (Reply(errors=['Traceback (most recent call last):\n  File "x.py"'], num_finals=1), "a traceback"),
        (Reply(num_finals=1, seconds=61.0), "no answer within 60 s"),
    ],
)
def test_a_case_must_be_answered_once_and_plainly(reply: Reply, words: str):
    assert words in (broken_promise(reply, is_http=False) or "")
    assert broken_promise(Reply(errors=["x = 1: must lie in [2, 3]"], num_finals=1), is_http=False) is None


@pytest.mark.parametrize(
    ("script", "broken"),
    [
        ("echo 'error: port 1 is in use'; exit 1", []),
        ("echo 'error: port 1 is in use'", ["status 0"]),
        ("echo 'Traceback'; echo 'error: port 1'; exit 1", ["2 lines in place of one error"]),
        ("echo 'OSError: port 1'; exit 1", ["no error but 'OSError: port 1'"]),
        ("echo 'error: taken'; exit 1", ["does not name 'port 1'"]),
        ("exit 1", ["0 lines in place of one error"]),
    ],
)
def test_a_server_that_cannot_start_says_so_in_one_line(tmp_path: Path, script: str, broken: list[str]):
    served = Served([], tmp_path / "log", before=["sh", "-c", script])
    assert refused(served, Outcome("x"), *(["port 1"] if "echo" in script else [])).broken == broken


def test_faults_that_need_a_mount_say_that_they_were_not_tried(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(faults, "may_mount", lambda: False)
    nobody: Any = None
    assert faults.FAULTS["full cache"](nobody).saw == "not tried: this user may not mount"
