"""Loads that take turns: whose time goes on when, and that turns change no answer."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from engines.build import build_engines
from faser_backend.config import EngineConfig
from faser_backend.core.errors import FaserError
from lab import drive
from lab.answers import jobs_of
from lab.drive import ClosedLoop, InProcess, OpenLoop, OwnClock, take_turns, turn_orders
from lab.prompts import Prompt
from tests.serving_pair import write_pair


class MachineTime:
    """Stands in for the machine's clock."""

    def __init__(self) -> None:
        self.s = 100.0

    def perf_counter_ns(self) -> int:
        return round(self.s * 1e9)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> MachineTime:
    machine = MachineTime()
    monkeypatch.setattr(drive, "time", machine)
    return machine


def worker(machine: MachineTime, clock: OwnClock, num_steps: int, step_s: float) -> Generator[float, None, float]:
    """Returns how long it believes to have worked."""
    start_s = clock.now_s()
    for step in range(num_steps):
        machine.s += step_s
        yield (step + 1) / num_steps
    return clock.now_s() - start_s


def test_time_is_each_ones_own(machine: MachineTime):
    clocks = {"quick": OwnClock(), "slow": OwnClock()}
    shares: list[float] = []
    runs = {"slow": worker(machine, clocks["slow"], 10, 0.5), "quick": worker(machine, clocks["quick"], 100, 0.01)}
    assert take_turns(runs, clocks, shares.append, 0.1) == pytest.approx({"slow": 5.0, "quick": 1.0})
    assert machine.s == pytest.approx(106.0)
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert shares[0] == pytest.approx(0.05)  # a step that is longer than a turn ends it
    assert shares[1] == pytest.approx(0.1)  # ten steps make a turn
    before_s = clocks["slow"].now_s()
    machine.s += 1.0
    assert clocks["slow"].now_s() - before_s == pytest.approx(1.0)  # afterwards clocks run as ever


def test_a_clock_skips_what_is_only_waiting(machine: MachineTime):
    clock = OwnClock()
    start_s = clock.now_s()
    clock.skip(3.0)
    clock.skip(-1.0)
    assert clock.now_s() - start_s == pytest.approx(3.0)


def test_an_error_ends_all_and_stops_no_clock(machine: MachineTime):
    def failing() -> Generator[float, None, float]:
        yield 0.5
        raise FaserError("no")

    clocks = {"a": OwnClock(), "b": OwnClock()}
    with pytest.raises(FaserError, match="no"):
        take_turns({"a": worker(machine, clocks["a"], 9, 1.0), "b": failing()}, clocks, lambda share: None, 0.1)
    before = [clock.now_ns() for clock in clocks.values()]
    machine.s += 1.0
    assert [clock.now_ns() - ns for clock, ns in zip(clocks.values(), before, strict=True)] == [10**9, 10**9]


def test_another_one_begins_each_repeat():
    assert list(turn_orders(["a", "b", "c"], 2)) == [["a", "b", "c"], ["b", "c", "a"]]


def test_turns_change_no_answer_and_idle_time_is_not_waited_for(tmp_path):
    pair = write_pair(tmp_path / "pair")
    build_engines(pair / "target", pair / "draft", tmp_path / "engine")
    config = {name: EngineConfig.from_options(policy=name, enable_prefix_reuse=False) for name in ("none", "fixed:3")}
    place = InProcess(tmp_path / "engine", config)
    try:
        jobs = jobs_of([Prompt("def f(x):"), Prompt("return")], 6, 12, 0.8, 5)
        alone, _ = place.run("none", jobs, 2)
        together = place.serve_in_turns(["fixed:3", "none"], jobs, ClosedLoop(2))
        assert list(together) == ["fixed:3", "none"]
        for traces, seconds in together.values():
            assert [trace.digest for trace in traces] == [trace.digest for trace in alone]
            assert max(trace.response_s[-1] for trace in traces) - min(trace.start_s for trace in traces) <= seconds
        # Requests an hour apart: each begins when it is due by the run's own clock.
        traces, seconds = place.serve("none", jobs[:3], OpenLoop([0.0, 3600.0, 7200.0]))
        assert [round(trace.start_s - traces[0].start_s) for trace in traces] == [0, 3600, 7200]
        assert 7200.0 <= seconds < 7300.0
    finally:
        place.close()
