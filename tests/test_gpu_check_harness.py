"""Parts of the GPU check that raise, hang or die: each is recorded, and costs no other part anything."""

from __future__ import annotations

import time

from lab.gpu.harness import Harness, Outcome, Part, Setting

CPU = Setting("cpu", is_tiny=True)


def run_parts(*names: str, budget_s: float = 60.0, setting: Setting = CPU, **changes) -> dict[str, Outcome]:
    """Parts of gpu_check_parts by name, with limits of a second; the last of their outcomes."""
    outcomes: dict[str, Outcome] = {}
    options = {"limit_s": 1.0} | changes
    parts = [Part(name, name, f"tests.gpu_check_parts:{name}", **options) for name in names]
    Harness(setting, budget_s, 60.0, outcomes.__setitem__).run(parts)
    return outcomes


def test_a_part_that_raises_is_recorded_with_what_it_knew_and_the_next_runs():
    outcomes = run_parts("raises", "well")
    assert outcomes["raises"].status == "failed"
    assert outcomes["raises"].result == {"known": 1}
    assert "ValueError: as it had to" in outcomes["raises"].error
    assert outcomes["well"].status == "done"
    assert outcomes["well"].result["earlier"] == ["raises"]


def test_a_part_that_hangs_is_killed_at_its_limit_and_the_next_runs():
    start = time.monotonic()
    outcomes = run_parts("hangs", "well")
    assert outcomes["hangs"].status == "timed out"
    assert outcomes["hangs"].result == {"known": 2}
    assert outcomes["well"].status == "done"
    assert time.monotonic() - start < 60.0


def test_a_part_that_takes_its_process_down_is_recorded_and_the_next_runs():
    outcomes = run_parts("dies", "well")
    assert outcomes["dies"].status == "died" and "SIGKILL" in outcomes["dies"].error
    assert outcomes["well"].status == "done"


def test_what_a_part_prints_is_no_event_and_what_is_no_json_is_its_error():
    outcomes = run_parts("prints", "holds_no_json")
    assert outcomes["prints"].result == {"printed": True}
    assert outcomes["holds_no_json"].status == "failed"


def test_children_are_kept_between_parts_unless_a_part_wants_a_fresh_one():
    def processes(**changes) -> set[int]:
        found = []
        harness = Harness(CPU, 60.0, 60.0, lambda _, outcome: found.append(outcome.result["process"]))
        part = Part("well", "", "tests.gpu_check_parts:well", 5.0, **changes)
        harness.run([part, part])
        return set(found)

    assert len(processes()) == 1
    assert len(processes(is_fresh=True)) == 2


def test_parts_past_the_budget_or_without_a_gpu_are_skipped():
    assert "out of budget" in run_parts("well", budget_s=0.0)["well"].error
    assert run_parts("well", needs_gpu=True)["well"].error == "needs a GPU"
