"""Streams do not wait for each other by themselves: every use of a KV pool, and of a result, must be ordered.

The real engine and lanes, and runners on their shares, over streams that only remember their order, under random
decisions.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from faser_backend.core.batch import RowBatch
from faser_backend.core.decision import WHOLE
from faser_backend.core.errors import ConfigError
from faser_backend.core.ports import Lanes, Partition
from faser_backend.cuda.streams import SmPartition, StreamLanes, on_share, open_menu
from faser_backend.device.partition import PartitionMenu, ThreadLanes
from tests.pipeline.test_engine import alone, random_requests
from tests.support.fake_cuda import FakeCuda, FakeDriver
from tests.support.fakes import HashRunner
from tests.support.forced_engine import open_forced
from tests.support.forcing import random_everything
from tests.support.harness import SPLIT, FakeEngine, drive


class Recorded:
    """A runner whose calls write its model's pool and a result, and read the hidden states that they are given."""

    def __init__(self, runner: HashRunner, cuda: FakeCuda, model: str, name: str, share: SmPartition | None) -> None:
        self.on_share = nullcontext if share is None else share.current
        self.num_segments = runner.num_segments
        self.num_layers = runner.num_layers
        self.exits = runner.exits
        self.vocab_size = runner.vocab_size
        self.max_logit_rows, self.max_mixed_rows = runner.max_logit_rows, runner.max_mixed_rows
        self._runner = runner
        self._cuda = cuda
        self._model = model
        self._name = name

    @on_share
    def run_segment(self, segment: int, rows: RowBatch, hidden: np.ndarray | None) -> np.ndarray:
        self._touch(hidden)
        return self._runner.run_segment(segment, rows, hidden)

    @on_share
    def run_segment_with_scores(self, segment: int, rows: RowBatch, hidden: np.ndarray | None, candidates: np.ndarray):
        self._touch(hidden)
        return self._runner.run_segment_with_scores(segment, rows, hidden, candidates)

    @on_share
    def take_rows(self, hidden: np.ndarray, kept: np.ndarray) -> np.ndarray:
        self._touch(hidden)
        return self._runner.take_rows(hidden, kept)

    def close(self) -> None: ...

    def _touch(self, hidden: np.ndarray | None) -> None:
        self._cuda.touch(f"{self._name} {self._model} runner")
        self._cuda.touch(f"{self._model} pool")
        self._cuda.touch(f"{self._model} result")


def record_sampler(sampler: Any, cuda: FakeCuda) -> None:
    """Notes reads of logits as reads of both models' results on this thread's lane, and of the parameters of slots."""

    def around(name: str, resources: Callable[[Any], list[str]], *, is_write: bool) -> None:
        inner = getattr(sampler, name)

        def recorded(*arguments: Any, **options: Any) -> Any:
            for resource in resources(arguments):
                cuda.touch(resource, is_write=is_write)
            return inner(*arguments, **options)

        setattr(sampler, name, recorded)

    for name in ("add", "append", "remove"):
        around(name, lambda _: ["slots"], is_write=True)
    for name, model in (("sample", "target"), ("candidate_margins", "target"), ("sample_draft", "draft")):
        around(name, lambda _, model=model: ["slots", f"{model} result"], is_write=False)


def open_recorded(
    seed: int, make_lanes: Callable[[SmPartition, SmPartition], Lanes], *, hops: bool = True
) -> tuple[FakeEngine, FakeCuda, PartitionMenu[SmPartition]]:
    """hops: runners of a split compute on their share in any thread."""
    cuda = FakeCuda()
    menu = open_menu(cuda, 0, FakeDriver).menu
    draft, target = menu.splits[0]
    lanes = make_lanes(draft, target)
    fake = open_forced("fixed:4", random_everything(seed), lanes)
    record_sampler(fake.step_runner.sampler, cuda)

    def on(share: SmPartition, runner: HashRunner, model: str, name: str) -> Any:
        return Recorded(runner, cuda, model, name, share if hops else None)

    for index, (name, shares) in enumerate({WHOLE: (menu.whole, menu.whole), SPLIT: (draft, target)}.items()):
        fake.step_runner.partitions[name] = Partition(  # type: ignore[index]
            on(shares[1], fake.targets[index], "target", name),
            on(shares[0], fake.drafts[index], "draft", name),
            lanes if name == SPLIT else None,
        )
    menu.whole.bind_current_thread()
    return fake, cuda, menu


@pytest.mark.parametrize("seed", range(6))
def test_every_use_of_pools_and_results_is_ordered(seed: int) -> None:
    requests = random_requests(seed, 6)
    fake, cuda, menu = open_recorded(seed, StreamLanes)
    assert drive(fake.engine, requests, seed=seed).tokens == alone(requests)
    cuda.check_order()
    streams = {name: {use.stream for use in uses} for name, uses in cuda.uses.items()}
    (draft, target), whole = menu.splits[0], menu.whole
    assert streams["1/1 target runner"] == {target.stream.cuda_stream}
    assert streams["1/1 draft runner"] == {draft.stream.cuda_stream}
    assert streams["whole target runner"] == {whole.stream.cuda_stream}
    fake.step_runner.partitions[SPLIT].lanes.close()  # type: ignore[union-attr]


def test_without_a_fork_and_a_join_nothing_is_ordered() -> None:
    fake, cuda, _ = open_recorded(0, ThreadLanes)
    drive(fake.engine, random_requests(0, 6), seed=0)
    with pytest.raises(AssertionError, match="does not wait"):
        cuda.check_order()
    fake.step_runner.partitions[SPLIT].lanes.close()  # type: ignore[union-attr]


def test_a_split_that_runs_in_turn_would_leave_its_share() -> None:
    fake, cuda, menu = open_recorded(0, StreamLanes, hops=False)
    drive(fake.engine, random_requests(0, 6), seed=0)
    cuda.check_order()
    assert menu.whole.stream.cuda_stream in {use.stream for use in cuda.uses["1/1 target runner"]}
    fake.step_runner.partitions[SPLIT].lanes.close()  # type: ignore[union-attr]


class TestLanes:
    def open(self) -> tuple[StreamLanes, FakeCuda]:
        cuda = FakeCuda()
        menu = open_menu(cuda, 0, FakeDriver).menu
        menu.whole.bind_current_thread()
        return StreamLanes(*menu.splits[0]), cuda

    def test_what_a_failed_phase_queued_is_joined_too(self) -> None:
        lanes, cuda = self.open()

        def fails() -> None:
            cuda.touch("target pool")
            raise ValueError("told to fail")

        cuda.touch("target pool")
        with pytest.raises(ValueError, match="told to fail"):
            lanes.run_both(fails, lambda: cuda.touch("draft pool"))
        cuda.touch("target pool")
        cuda.touch("draft pool")
        cuda.check_order()
        lanes.close()

    def test_work_on_one_lane_is_between_a_fork_and_a_join(self) -> None:
        lanes, cuda = self.open()
        for _ in range(3):
            cuda.touch("weights")
            assert lanes.on_draft(lambda: cuda.touch("weights")) is None
            lanes.on_target(lambda: cuda.touch("weights"))
        cuda.check_order()
        lanes.close()

    def test_phases_do_not_wait_for_each_other(self) -> None:
        lanes, cuda = self.open()
        lanes.run_both(lambda: cuda.touch("both"), lambda: cuda.touch("both"))
        with pytest.raises(AssertionError, match="both"):
            cuda.check_order()
        lanes.close()

    def test_lanes_that_cannot_be_bound_leave_no_thread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda = FakeCuda()
        menu = open_menu(cuda, 0, FakeDriver).menu

        def fails(stream: Any) -> None:
            raise RuntimeError("CUDA error: out of memory")

        monkeypatch.setattr(cuda, "set_stream", fails)
        with pytest.raises(ConfigError, match=r"partition draft: .*out of memory"):
            StreamLanes(*menu.splits[0])
