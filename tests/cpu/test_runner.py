"""Models whose layers are the project's kernels: bits that depend on a row's inputs only, formats, threads, refusals.

test_families.py compares logits of every family.
"""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from faser_backend.cpu import weights
from faser_backend.cpu.kv_pool import KvPool
from faser_backend.cpu.runner import LlvmRunner
from faser_backend.device.partition import CorePartition
from faser_backend.engines.build import build_engines
from faser_backend.engines.checkpoint import CheckpointError
from faser_backend.manifest import EngineManifest
from tests.engines.test_families import BLOCK_SIZE, NUM_BLOCKS
from tests.engines.test_families import build as build_any
from tests.engines.test_weight_formats import round_matrices
from tests.support.cpu_products import assert_computed_alike
from tests.support.gathered_runner import GatheredRunner
from tests.support.tiny_models import VOCAB_SIZE, make_rows, run_all, write_checkpoint, write_draft

pytestmark = pytest.mark.usefixtures("every_model_is_worth_two_threads")
FORMATS = ("fp32", "fp16", "bf16", "int8", "int4")
RUN_FORMATS = ("fp32", "bf16", "int8", "int4")  # each is compiled; the demo pair of other tests is fp16


def build(source: Path, directory: Path, **options) -> EngineManifest:
    return build_any(source, directory, runtime="llvm", compute="bf16x2", **options)


def open_runner(directory: Path, num_threads: int = 2) -> LlvmRunner:
    manifest = EngineManifest.load(directory)
    pool = KvPool(manifest.target.spec, NUM_BLOCKS, BLOCK_SIZE, dtype=manifest.kv_cache_dtype)
    cores = CorePartition("test", tuple(range(num_threads)))
    return LlvmRunner(manifest.target, directory, cores, pool, num_threads=num_threads, compute=manifest.compute)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Builds one checkpoint per format of its matrices, and one of fp32 matrices with an fp16 pool, "pool"."""
    root = tmp_path_factory.mktemp("llvm")
    source = write_checkpoint(root / "source", tie_word_embeddings=True, hidden_size=72, intermediate_size=104)
    for name in FORMATS:
        build(source, root / name, weights=name, draft_weights=name, exit_layers=(1,))
    build(source, root / "pool", kv_cache_dtype="fp16")
    return {name: root / name for name in (*FORMATS, "pool", "source")}


def logits_of(runner: LlvmRunner, chunk: int, *, is_packed: bool) -> np.ndarray:
    """Returns [3, 40, vocab_size] of three sequences, read in chunks, packed or one by one."""
    sequences = [np.random.default_rng(seed).integers(0, VOCAB_SIZE, 40) for seed in range(3)]
    tables = np.random.default_rng(9).permutation(NUM_BLOCKS)[:30].reshape(3, 10)
    parts = []
    for first in range(0, 40, chunk):
        count = min(chunk, 40 - first)
        if is_packed:
            logits = run_all(runner, make_rows(sequences, [first] * 3, [count] * 3, tables))
            parts.append(logits.reshape(3, count, -1))
        else:
            alone = [run_all(runner, make_rows([s], [first], [count], tables[[i]])) for i, s in enumerate(sequences)]
            parts.append(np.stack(alone))
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("weights", [*RUN_FORMATS, "pool"])
def test_a_row_has_the_same_bits_in_any_company_on_any_threads(weights: str, engines: dict[str, Path]) -> None:
    check_bits(engines[weights])


def check_bits(directory: Path) -> None:
    expected = logits_of(open_runner(directory, 1), 1, is_packed=False)
    assert np.isfinite(expected).all() and expected.std() > 0.01
    for num_threads in (1, 2, 3):
        runner = open_runner(directory, num_threads)
        for chunk, is_packed in ((40, True), (7, True), (1, True), (40, False), (5, False)):
            np.testing.assert_array_equal(logits_of(runner, chunk, is_packed=is_packed), expected)
        runner.close()


def test_halves_compute_as_a_checkpoint_rounded_by_hand(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    build(source, tmp_path / "half", weights="bf16")
    build(source, tmp_path / "plain")
    round_matrices(source, torch.bfloat16)
    build(source, tmp_path / "rounded")
    half, plain, rounded = (
        logits_of(open_runner(tmp_path / name), 9, is_packed=True) for name in ("half", "plain", "rounded")
    )
    assert_computed_alike(half, rounded)
    assert np.abs(half - plain).max() > 1e-3


def test_integers_are_near_float32(engines: dict[str, Path]) -> None:
    plain, int8, int4 = (
        logits_of(open_runner(engines[weights]), 40, is_packed=True) for weights in ("fp32", "int8", "int4")
    )
    errors = [float(np.sqrt(((logits - plain) ** 2).mean()) / plain.std()) for logits in (int8, int4)]
    assert 0 < errors[0] < 0.1 and 2 * errors[0] < errors[1] < 1


@pytest.mark.parametrize("weights", RUN_FORMATS)
def test_exit_scores_are_logits_of_the_exit(weights: str, engines: dict[str, Path], tmp_path: Path) -> None:
    """Scores by the last norm and the head at the exit equal a model that ends there, bit for bit."""
    runner = open_runner(engines[weights])
    candidates = np.random.default_rng(2).integers(0, VOCAB_SIZE, (9, 4))
    rows = make_rows([np.arange(9)], [0], [9], np.array([[5, 7, 2]]))
    hidden, scores = runner.run_segment_with_scores(0, rows, None, candidates)
    first, scores = hidden.copy(), scores.copy()
    np.testing.assert_array_equal(runner.run_segment(0, rows, None), first)
    alone = make_rows([np.arange(9)], [3], [1], np.array([[5, 7, 2]]))
    np.testing.assert_array_equal(runner.run_segment_with_scores(0, alone, None, candidates[[3]])[1], scores[[3]])
    reference = GatheredRunner(engines["source"], tmp_path, exit_layers=(1,), block_size=BLOCK_SIZE)
    expected = reference.run_segment_with_scores(0, rows, None, candidates)[1]
    assert expected is not None
    with pytest.raises(AssertionError, match="segment 1 has no exit scores"):
        runner.run_segment_with_scores(1, rows, hidden, candidates)
    tolerance = {"fp32": 1e-4, "int4": 0.5}.get(weights, 0.05) * expected.std()
    assert np.sqrt(((scores - expected) ** 2).mean()) < tolerance


def test_only_the_wanted_logits_and_only_the_slots_of_the_rows(engines: dict[str, Path]) -> None:
    runner = open_runner(engines["fp32"])
    sequences, tables = [np.arange(12), np.arange(30, 42)], np.array([[5, 9, 2], [7, 1, 20]])
    every = run_all(runner, make_rows(sequences, [0, 0], [12, 12], tables))
    rng = np.random.default_rng(0)
    for wanted in (np.array([3, 11, 17]), np.zeros(0, np.int64)):
        storage = runner.pool.storage
        storage[:] = rng.standard_normal(storage.shape).astype(np.float32)
        before = storage.copy()
        found = run_all(runner, make_rows(sequences, [0, 0], [12, 12], tables, wanted))
        np.testing.assert_array_equal(found, every[wanted])
        changed = (before != storage).any(axis=5).all(axis=(0, 1, 2))  # [num_blocks, block_size], of every layer
        assert set(np.flatnonzero(changed.all(axis=1))) == set(tables.ravel()) and changed.sum() == 24


def test_a_block_outside_the_pool_is_an_error_and_the_runner_goes_on(engines: dict[str, Path]) -> None:
    runner = open_runner(engines["fp32"])
    wanted = run_all(runner, make_rows([np.arange(4)], [0], [4], np.array([[0]])))
    for block in (NUM_BLOCKS, -1):
        with pytest.raises(IndexError, match=f"blocks of the pool are 0 to {NUM_BLOCKS - 1}"):
            run_all(runner, make_rows([np.arange(4)], [0], [4], np.array([[block]])))
    np.testing.assert_array_equal(run_all(runner, make_rows([np.arange(4)], [0], [4], np.array([[0]]))), wanted)


@pytest.fixture
def threads() -> Iterator[set[threading.Thread]]:
    before = set(threading.enumerate())
    yield before
    assert set(threading.enumerate()) <= before


def test_close_ends_the_threads_and_may_come_twice(threads: set[threading.Thread], engines: dict[str, Path]) -> None:
    runner = open_runner(engines["fp32"], 3)
    run_all(runner, make_rows([np.arange(4)], [0], [4], np.array([[0]])))
    assert len(set(threading.enumerate()) - threads) == 2
    runner.close()
    runner.close()


@pytest.mark.parametrize("fails_here", [False, True])
def test_an_error_on_any_thread_reaches_the_caller_and_the_next_call_is_whole(
    fails_here: bool, engines: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the caller's own share fails too, its error is raised, and the helper's does not wait for the next call."""
    runner, rows = open_runner(engines["fp32"]), make_rows([np.arange(4)], [0], [4], np.array([[0]]))
    expected, caller = run_all(runner, rows), threading.current_thread()

    def fail(*_: object) -> None:
        if threading.current_thread() is not caller:
            raise ValueError("on a helper")
        if fails_here:
            raise ValueError("on the caller")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_kernel", fail)
        with pytest.raises(ValueError, match="on the caller" if fails_here else "on a helper"):
            run_all(runner, rows)
    np.testing.assert_array_equal(run_all(runner, rows), expected)
    runner.close()


def test_the_file_is_as_large_as_its_format(engines: dict[str, Path]) -> None:
    models = {weights: EngineManifest.load(engines[weights]).target for weights in FORMATS}
    sizes = {weights: model.num_weight_bytes for weights, model in models.items()}
    assert models["fp16"].weights is not None and sizes["fp16"] == models["fp16"].weights.num_bytes
    assert sizes["fp32"] > sizes["fp16"] == sizes["bf16"] > sizes["int8"] > sizes["int4"]


def test_weights_are_copied_once_if_memory_allows_and_else_mapped(
    engines: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pages").write_text("always [madvise] never")
    monkeypatch.setattr(weights, "_HUGE_PAGES", tmp_path / "pages")
    path = tmp_path / "target.safetensors"
    path.write_bytes((engines["fp16"] / path.name).read_bytes())
    copied = weights.open_weights(path)
    assert weights.open_weights(path) is copied and not copied.data.flags.writeable
    path.write_bytes((engines["int8"] / path.name).read_bytes())
    assert copied.data.tobytes() != weights.open_weights(path).data.tobytes() == path.read_bytes()
    monkeypatch.setattr(weights, "available_memory", lambda: 2 * path.stat().st_size - 1)
    assert weights.choose_copy(path.stat().st_size) == (False, "mapped: more than half of the 0 MiB that are available")
    (tmp_path / "pages").write_text("always madvise [never]")
    assert weights.choose_copy(1 << 30)[1].startswith("mapped: this system has no large pages")
    mapped = weights.open_weights(engines["fp16"] / path.name)
    assert copied.data.tobytes() == mapped.data.tobytes()


def test_sixteen_bits_of_a_checkpoint_are_kept(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target", dtype=torch.bfloat16)
    draft = write_draft(write_checkpoint(tmp_path / "source"), tmp_path / "draft")
    manifest = build_engines(target, draft, tmp_path / "engine", runtime="llvm")
    assert manifest.draft is not None
    assert (manifest.target.weight_format.name, manifest.draft.weight_format.name) == ("bf16", "fp32")


def test_what_cannot_be_built_or_opened_is_refused_by_name(engines: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="weights of target = 'int3': must be one of fp32, "):
        build(engines["source"], tmp_path / "engine", weights="int3")
    assert not (tmp_path / "engine").exists()
