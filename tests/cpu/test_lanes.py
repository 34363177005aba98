"""ThreadLanes: two threads run at once on their cores, and both phases end before a failure is raised."""

import os
import threading
import time
from collections.abc import Iterator

import pytest

from faser_backend.device.partition import CorePartition, ThreadLanes

CORES = sorted(os.sched_getaffinity(0))
DRAFT, TARGET = CorePartition("draft", (CORES[0],)), CorePartition("target", (CORES[-1],))
WAIT_S = 20.0


@pytest.fixture
def lanes() -> Iterator[ThreadLanes]:
    lanes = ThreadLanes(DRAFT, TARGET)
    yield lanes
    lanes.close()


def where_am_i() -> tuple[int, set[int]]:
    return threading.get_ident(), os.sched_getaffinity(0)


def test_both_run_at_once_and_each_result_has_its_place(lanes: ThreadLanes) -> None:
    barrier = threading.Barrier(2)  # needs both at once

    def reach(name: str) -> str:
        barrier.wait(WAIT_S)
        return name

    for _ in range(3):
        assert lanes.run_both(lambda: reach("verified"), lambda: reach("proposed")) == ("verified", "proposed")


def test_each_lane_is_one_lasting_thread_on_its_cores(lanes: ThreadLanes) -> None:
    before = os.sched_getaffinity(0)
    target, draft = lanes.run_both(where_am_i, where_am_i)
    assert draft[1] == set(DRAFT.cores) and target[1] == set(TARGET.cores)
    assert len({draft[0], target[0], threading.get_ident()}) == 3
    for _ in range(3):
        assert lanes.run_both(where_am_i, where_am_i) == (target, draft)
        assert lanes.on_draft(where_am_i) == draft and lanes.on_target(where_am_i) == target
    assert os.sched_getaffinity(0) == before, "the calling thread is never pinned"


def failing(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("fails_first", ["target", "draft"])
def test_a_failure_waits_for_the_other_phase(lanes: ThreadLanes, fails_first: str) -> None:
    done = []

    def slow() -> None:
        time.sleep(0.05)
        done.append(True)

    phases = (lambda: failing(ValueError("quick")), slow)
    with pytest.raises(ValueError, match="quick"):
        lanes.run_both(*(phases if fails_first == "target" else phases[::-1]))
    assert done
    assert lanes.run_both(lambda: 1, lambda: 2) == (1, 2), "the lanes go on after a failure"


def test_of_two_failures_the_targets_is_raised(lanes: ThreadLanes) -> None:
    with pytest.raises(KeyError, match="verify"):
        lanes.run_both(lambda: failing(KeyError("verify")), lambda: failing(ValueError("propose")))


def test_errors_of_single_lane_work_reach_the_caller(lanes: ThreadLanes) -> None:
    with pytest.raises(ValueError, match="draft"):
        lanes.on_draft(lambda: failing(ValueError("draft")))
    with pytest.raises(ValueError, match="target"):
        lanes.on_target(lambda: failing(ValueError("target")))
