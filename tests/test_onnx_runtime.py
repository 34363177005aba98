"""The reference runner's own promises: rows written in place, bad numbers refused; and core partitions."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.build import build_engines
from faser_backend.core.errors import ConfigError
from faser_backend.device.kv_pool import KvPool
from faser_backend.device.onnx_runtime import OrtRunner
from faser_backend.device.partition import CorePartition, core_partitions
from faser_backend.manifest import EngineManifest
from tests.tiny_models import make_rows, run_all, write_checkpoint

ONE_CORE = CorePartition("test", (0,))
NUM_BLOCKS, BLOCK_SIZE = 24, 4


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runner")
    source = write_checkpoint(root / "source")
    build_engines(source, source, root / "engine", exit_layers=(1,), kv_block_size=BLOCK_SIZE)
    return root / "engine"


@pytest.fixture
def runner(engine: Path) -> OrtRunner:
    return open_runner(engine)


def open_runner(engine: Path, **options) -> OrtRunner:
    target = EngineManifest.load(engine).target
    arguments = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "partition": ONE_CORE, **options}
    return OrtRunner(target, engine, **arguments)


def test_only_the_slots_of_the_rows_change(runner: OrtRunner) -> None:
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 97, 12) for _ in range(2)]
    tables = np.array([[5, 9, 2], [7, 1, 20]])
    storage = runner.pool.storage
    storage[:] = rng.standard_normal(storage.shape).astype(np.float32)
    before = storage.copy()
    run_all(runner, make_rows(sequences, [3, 6], [3, 1], tables))
    changed = (before != storage).any(axis=(0, 1, 2, 5))  # [num_blocks, block_size]
    written = {(5, 3), (9, 0), (9, 1), (1, 2)}
    assert {(int(block), int(offset)) for block, offset in np.argwhere(changed)} == written
    per_layer = (before != storage).any(axis=5)[:, :, :, [5, 9, 9, 1], [3, 0, 1, 2]]
    assert per_layer.all(), "every layer and head writes its key and value"


def test_ragged_and_uniform_batches_agree(runner: OrtRunner) -> None:
    """One sequence's logits do not depend on who shares the batch."""
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, 97, 10) for _ in range(3)]
    tables = np.arange(9).reshape(3, 3)
    counts = [7, 1, 4]
    alone = [run_all(runner, make_rows([sequences[i]], [0], [counts[i]], tables[i : i + 1])) for i in range(3)]
    together = run_all(runner, make_rows(sequences, [0, 0, 0], counts, tables))
    np.testing.assert_allclose(together, np.concatenate(alone), atol=1e-4)


def test_wider_tables_than_needed_change_nothing(runner: OrtRunner) -> None:
    sequence = [np.arange(6)]
    narrow = run_all(runner, make_rows(sequence, [0], [6], np.array([[3, 4]])))
    wide = np.zeros((1, 16), np.int64)
    wide[0, :2] = 3, 4
    np.testing.assert_allclose(run_all(runner, make_rows(sequence, [0], [6], wide)), narrow, atol=1e-6)


def test_runners_of_one_pool_see_each_others_tokens(engine: Path) -> None:
    cores = core_partitions().whole.cores
    first = open_runner(engine)
    second = open_runner(engine, pool=first.pool, partition=CorePartition("all", cores))
    alone = open_runner(engine)
    sequence, table = [np.arange(12)], np.array([[8, 3, 11]])
    wanted = run_all(alone, make_rows(sequence, [0], [12], table))
    parts = [
        run_all(first, make_rows(sequence, [0], [5], table)),
        run_all(second, make_rows(sequence, [5], [4], table)),
        run_all(first, make_rows(sequence, [9], [3], table)),
    ]
    np.testing.assert_allclose(np.concatenate(parts), wanted, atol=1e-4)


def test_a_block_outside_the_pool_is_an_error_and_the_runner_goes_on(runner: OrtRunner) -> None:
    sequence = [np.arange(4)]
    wanted = run_all(runner, make_rows(sequence, [0], [4], np.array([[0]])))
    for block in (NUM_BLOCKS, -1):
        with pytest.raises(IndexError, match=f"blocks of the pool are 0 to {NUM_BLOCKS - 1}"):
            run_all(runner, make_rows(sequence, [0], [4], np.array([[block]])))
    with pytest.raises(IndexError, match="5 tokens need more than 1 blocks of 4"):
        run_all(runner, make_rows([np.arange(5)], [0], [5], np.array([[0]])))
    again = run_all(runner, make_rows(sequence, [0], [4], np.array([[0]])))
    np.testing.assert_array_equal(again, wanted)


def test_integrity_notices_a_value_that_is_not_finite(runner: OrtRunner) -> None:
    runner.check_integrity()
    runner.pool.values(1)[0, 3, 2, 1] = np.nan
    with pytest.raises(AssertionError, match="finite"):
        runner.check_integrity()


def test_numbers_out_of_range_and_broken_files_are_refused(engine: Path, tmp_path: Path) -> None:
    target = EngineManifest.load(engine).target
    with pytest.raises(ConfigError, match="num_kv_blocks = 0"):
        open_runner(engine, num_blocks=0)
    with pytest.raises(ConfigError, match="num_threads = 0"):
        open_runner(engine, num_threads=0)
    for segment in target.segments:
        (tmp_path / segment.file.name).write_bytes(b"not a graph")
    with pytest.raises(ConfigError, match=r"target\.0\.onnx"):
        OrtRunner(target, tmp_path, 4, 4, ONE_CORE)


def test_pool_bytes_are_what_a_block_costs(engine: Path) -> None:
    spec = EngineManifest.load(engine).target.spec
    pool = KvPool(spec, 10, BLOCK_SIZE)
    assert pool.num_bytes == 10 * KvPool.bytes_per_block(spec, BLOCK_SIZE)


def test_one_core_has_one_partition_and_says_so() -> None:
    menu = core_partitions((3,))
    assert menu.whole.cores == (3,) and not menu.can_split and "1 core" in menu.note


@given(num_cores=st.integers(2, 300))
def test_splits_are_disjoint_and_use_every_core(num_cores: int) -> None:
    menu = core_partitions(tuple(range(num_cores)))
    assert menu.can_split
    for draft, target in menu.splits:
        assert sorted(draft.cores + target.cores) == list(range(num_cores))
        assert 1 <= draft.size <= target.size
    assert "split" in menu.note


def test_bad_core_sets_are_refused() -> None:
    for cores in ((), (1, 1)):
        with pytest.raises(ValueError, match="cores"):
            core_partitions(cores)


def test_pinning_binds_the_calling_thread_alone() -> None:
    before, inside = os.sched_getaffinity(0), set()
    core = min(before)

    def pinned() -> None:
        CorePartition("draft", (core,)).bind_current_thread()
        inside.update(os.sched_getaffinity(0))

    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join()
    assert inside == {core} and os.sched_getaffinity(0) == before
