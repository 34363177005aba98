"""Opening partitions: the splits, their reasons, shared pools, lanes and sessions on them, and complete cleanup."""

import dataclasses
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_backend.core.decision import WHOLE
from faser_backend.core.errors import ConfigError
from faser_backend.core.ports import Partition
from faser_backend.cpu import weights
from faser_backend.cpu.runner import LlvmRunner
from faser_backend.cpu.runtime import LlvmRuntime, useful_splits
from faser_backend.device.partition import CorePartition, PartitionMenu, ThreadLanes, core_partitions, split_name
from faser_backend.device.runtime import ModelPair
from faser_backend.engines.build import build_engines
from faser_backend.manifest import EngineManifest, FileSpec
from faser_backend.profiling.measure import shares_of
from faser_backend.serving.compose import open_partitions
from tests.support.tiny_models import make_rows, run_all, write_checkpoint

CORES = sorted(os.sched_getaffinity(0))
# Both shares exist even on a machine of one core; they then alternate.
TASKS = Path("/proc/self/task")
PAIR = CorePartition("draft", (CORES[0],)), CorePartition("target", (CORES[-1],))
MENU = PartitionMenu(CorePartition("whole", tuple(CORES)), (PAIR,), "as tested")
NUM_BLOCKS, BLOCK_SIZE = 12, 4


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("partitions")
    target, draft = write_checkpoint(root / "target"), write_checkpoint(root / "draft", seed=1, num_hidden_layers=1)
    build_engines(target, draft, root / "engine", runtime="llvm", exit_layers=(1,), kv_block_size=BLOCK_SIZE)
    return root / "engine"


def pair_of(manifest: EngineManifest) -> ModelPair:
    return ModelPair(manifest.target, manifest.draft)


def open_on(
    engine: Path,
    menu: PartitionMenu[CorePartition] = MENU,
    *,
    is_drafting: bool = True,
    names: tuple[str, ...] = (WHOLE, "1/1", "2/2"),
):
    manifest = EngineManifest.load(engine)
    runtime, models = LlvmRuntime(engine, manifest, menu=menu), pair_of(manifest)
    sampler = runtime.open_sampler(models.vocab_size, 4)
    return open_partitions(runtime, models, sampler, num_blocks=NUM_BLOCKS, names=names, is_drafting=is_drafting)


def runners_of(partition: Partition) -> tuple[LlvmRunner, LlvmRunner]:
    assert isinstance(partition.target, LlvmRunner) and isinstance(partition.draft, LlvmRunner)
    return partition.target, partition.draft


def test_a_split_continues_what_the_whole_began(engine: Path) -> None:
    """Both models at once also compute what they compute serially."""
    partitions, close = open_on(engine)
    whole, split, lanes = runners_of(partitions[WHOLE]), runners_of(partitions["1/1"]), partitions["1/1"].lanes
    assert lanes is not None and partitions[WHOLE].lanes is None
    sequence, table = [np.arange(12) * 5 % 97], np.array([[8, 3, 11]])
    wanted = [run_all(runner, make_rows(sequence, [0], [12], table)) for runner in whole]
    for runner in whole:
        runner.pool.storage[:] = 0.0
        run_all(runner, make_rows(sequence, [0], [7], table))
    rest = make_rows(sequence, [7], [5], table)
    found = lanes.run_both(lambda: run_all(split[0], rest), lambda: run_all(split[1], rest))
    for logits, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(logits, expected[7:], atol=1e-4)
    close()


def test_helper_threads_of_a_split_stay_on_its_shares(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names each core twice, so that each runner computes with two threads on it."""
    monkeypatch.setattr(weights, "ONE_THREAD_BYTES", 0)
    draft, target = (CorePartition(share.name, share.cores * 2) for share in PAIR)

    def affinities() -> dict[int, set[int]]:
        return {int(task.name): os.sched_getaffinity(int(task.name)) for task in TASKS.iterdir()}

    before = affinities()
    partitions, close = open_on(engine, PartitionMenu(PAIR[0], ((draft, target),), "as tested"))
    assert list(partitions) == [WHOLE, "2/2"]
    lanes, (on_target, on_draft) = partitions["2/2"].lanes, runners_of(partitions["2/2"])
    assert lanes is not None and (on_target.num_threads, on_draft.num_threads) == (2, 2)
    rows = make_rows([np.arange(4)], [0], [4], np.array([[0]]))
    lanes.run_both(lambda: run_all(on_target, rows), lambda: run_all(on_draft, rows))
    started = [cores for thread, cores in affinities().items() if thread not in before]
    close()
    shares = [set(draft.cores), set(target.cores)] * 2  # a lane and a helper
    assert sorted(map(sorted, started)) == sorted(map(sorted, shares))


@pytest.mark.parametrize(
    ("menu", "wishes"),
    [
        (MENU, {"names": (WHOLE,)}),
        (MENU, {"is_drafting": False}),
        (MENU, {"names": (WHOLE, "1/3")}),
        (core_partitions((CORES[0],)), {}),
    ],
)
def test_no_split_where_none_is_wanted_or_possible(engine: Path, menu: PartitionMenu, wishes: dict) -> None:
    partitions, close = open_on(engine, menu, **wishes)
    assert list(partitions) == [WHOLE]
    assert (partitions[WHOLE].draft is None) == ("is_drafting" in wishes)
    close()


def test_close_ends_every_lane_and_may_be_repeated(engine: Path) -> None:
    num_before = threading.active_count()
    partitions, close = open_on(engine)
    assert threading.active_count() == num_before + 2
    close()
    close()
    assert threading.active_count() == num_before
    lanes = partitions["1/1"].lanes
    assert lanes is not None
    with pytest.raises(RuntimeError, match="shutdown"):
        lanes.run_both(lambda: 1, lambda: 2)


def test_a_split_that_cannot_be_opened_leaves_nothing_open(engine: Path) -> None:
    num_before = threading.active_count()
    menu = dataclasses.replace(MENU, splits=(PAIR, (PAIR[0], CorePartition("target", (100_000,)))))
    with pytest.raises(ConfigError, match="partition target"):
        open_on(engine, menu)
    assert threading.active_count() == num_before


class TestUsefulSplits:
    EIGHT = core_partitions(tuple(range(8)))

    @pytest.mark.parametrize(
        ("draft_mib", "num_threads", "expected", "reason"),
        [
            (50, None, ["1/7", "2/6", "4/4"], "3 of 3 (1/7, 2/6, 4/4)"),
            (50, 8, ["1/7", "2/6", "4/4"], "3 of 3 (1/7, 2/6, 4/4)"),
            (5, None, ["1/7"], "cannot use more than 1 core"),
            (50, 7, [], "none (num_threads = 7 of 8 cores: a split uses them all)"),
        ],
    )
    def test_splits_give_a_draft_no_cores_that_it_cannot_use_and_need_a_thread_on_each(
        self, engine: Path, draft_mib: int, num_threads: int | None, expected: list[str], reason: str
    ) -> None:
        models = pair_of(EngineManifest.load(engine))
        target, draft = (
            dataclasses.replace(model, weights=FileSpec("weights", "0" * 64, size_mib << 20))
            for model, size_mib in zip(models.present, (100, draft_mib), strict=True)
        )
        splits, why = useful_splits(self.EIGHT, ModelPair(target, draft), num_threads)
        assert [split_name(*split) for split in splits] == expected and reason in why

    @pytest.mark.parametrize(
        ("limit", "num_threads"),
        [("390000 100000", 3), ("50000 100000", 1), ("max 100000", None), ("800000 100000", 8)],
    )
    def test_a_limit_of_the_control_group_limits_threads(
        self, limit: str, num_threads: int | None, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(weights, "_CONTROL_GROUP", tmp_path)
        (tmp_path / "cpu.max").write_text(limit)
        assert weights.cpu_quota() == num_threads
        note = LlvmRuntime(engine, EngineManifest.load(engine), menu=self.EIGHT).splits_note
        assert (f"num_threads = {num_threads} of 8 cores" in note) == (num_threads in {1, 3})

    @pytest.mark.parametrize("num_cores", [2, 7, 64])
    def test_splits_are_named_as_the_profile_names_them(self, num_cores: int) -> None:
        menu = core_partitions(tuple(range(num_cores)))
        measured = {share.partition for share in shares_of(menu)} - {WHOLE}
        assert {split_name(*split) for split in menu.splits} == measured
        assert all(name in menu.note for name in measured)


def test_one_core_has_one_partition_and_says_so() -> None:
    menu = core_partitions((3,))
    assert menu.whole.cores == (3,) and not menu.splits and "1 core" in menu.note


@given(num_cores=st.integers(2, 300))
def test_splits_are_disjoint_and_use_every_core(num_cores: int) -> None:
    menu = core_partitions(tuple(range(num_cores)))
    assert menu.splits
    for draft, target in menu.splits:
        assert sorted(draft.cores + target.cores) == list(range(num_cores))
        assert 1 <= draft.size <= target.size
    assert "split" in menu.note


WAIT_S = 20.0


@pytest.fixture
def lanes() -> Iterator[ThreadLanes]:
    lanes = ThreadLanes(*PAIR)
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
    assert [draft[1], target[1]] == [set(share.cores) for share in PAIR]
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
