"""Engines with fp16 keys and values: opening, tokens, and distance from float32."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import ConfigError
from faser_backend.cpu.kernels import attention
from faser_backend.cpu.runtime import LlvmRuntime
from faser_backend.device.runtime import ModelPair
from faser_backend.engines.build import build_engines
from faser_backend.manifest import EngineManifest
from faser_backend.serving.compose import build_engine, choose_num_blocks
from tests.cpu.test_runner import BLOCK_SIZE, NUM_BLOCKS, open_runner
from tests.support.tiny_models import VOCAB_SIZE, make_rows, run_all, write_checkpoint, write_draft

LENGTH = 40
HALF_ULP = 2.0**-11  # the largest relative rounding error of a half
SEQUENCES = [np.random.default_rng(seed).integers(0, VOCAB_SIZE, LENGTH) for seed in (0, 1)]
TABLES = np.random.default_rng(2).permutation(NUM_BLOCKS)[: 2 * LENGTH // BLOCK_SIZE].reshape(2, -1)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Builds one pair per kv_cache_dtype."""
    root = tmp_path_factory.mktemp("halves")
    target = write_checkpoint(root / "target")
    draft = write_draft(target, root / "draft")
    for dtype in ("fp32", "fp16"):
        build_engines(target, draft, root / dtype, exit_layers=(1,), kv_block_size=BLOCK_SIZE, kv_cache_dtype=dtype)
    return {dtype: root / dtype for dtype in ("fp32", "fp16")}


def open_runtime(directory: Path) -> tuple[LlvmRuntime, ModelPair]:
    manifest = EngineManifest.load(directory)
    return LlvmRuntime(directory, manifest), ModelPair(manifest.target, manifest.draft)


def logits_of(directory: Path) -> np.ndarray:
    """Returns [2 * LENGTH, vocab_size] of both sequences, read in chunks."""
    runner, parts = open_runner(directory, 1), []
    for start in range(0, LENGTH, 7):
        rows = make_rows(SEQUENCES, [start] * 2, [min(7, LENGTH - start)] * 2, TABLES)
        parts.append(run_all(runner, rows))
    runner.pool.check_integrity()
    return np.concatenate(parts)


def test_a_runtime_opens_pools_of_half_the_bytes(engines: dict[str, Path]):
    (full, models), (half, _) = (open_runtime(engines[dtype]) for dtype in ("fp32", "fp16"))
    for model in models.present:
        assert 2 * half.bytes_per_block(model.spec) == full.bytes_per_block(model.spec)
        pool = half.open_pool(model, 5)
        assert pool.storage.dtype == np.float16 and pool.storage.nbytes == 5 * half.bytes_per_block(model.spec)
        half.fill_pool(pool, np.full(model.spec.head_dim, 0.1, np.float32))
        assert pool.storage.min() == pool.storage.max() == np.float16(0.1)


def test_what_a_draft_head_reads_stays_float32(engines: dict[str, Path]):
    runtime, models = open_runtime(engines["fp16"])
    spec = models.target.spec
    head_spec = replace(spec, feature_layers=(0, 1, 2))
    pool = runtime.open_pool(replace(models.target, spec=head_spec), 5)
    assert {array.dtype for array in pool.features.values()} == {np.dtype(np.float32)}
    num_bytes = pool.storage.nbytes + sum(array.nbytes for array in pool.features.values())
    assert num_bytes == 5 * runtime.bytes_per_block(head_spec)
    more_bytes = runtime.bytes_per_block(head_spec) - runtime.bytes_per_block(spec)
    assert more_bytes == 3 * spec.hidden_size * BLOCK_SIZE * 4


def test_the_same_memory_holds_twice_the_blocks(engines: dict[str, Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LlvmRuntime, "free_bytes", lambda _: 3_000_001)
    full, half = (
        choose_num_blocks(*open_runtime(engines[dtype]), EngineConfig(max_num_seqs=64)) for dtype in ("fp32", "fp16")
    )
    assert half in (2 * full, 2 * full + 1)


def test_a_cpu_that_cannot_convert_halves_is_told_what_to_do(engines: dict[str, Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "has_halves", lambda: False)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype = fp16: .* build the engine with --kv-cache-dtype fp32"):
        build_engine(engines["fp16"], EngineConfig())
    build_engine(engines["fp32"], EngineConfig()).close()


def test_integrity_notices_a_half_that_is_not_finite(engines: dict[str, Path]):
    runner = open_runner(engines["fp16"], 1)
    runner.pool.check_integrity()
    runner.pool.keys(2)[1, 3, 2, 1] = np.inf
    with pytest.raises(AssertionError, match="finite"):
        runner.pool.check_integrity()


def test_logits_are_near_those_of_float32(engines: dict[str, Path]):
    """In each layer every key and value is off by at most HALF_ULP of itself. The bound adds all errors at their
    maximum, which random ones do not reach."""
    wanted = logits_of(engines["fp32"])
    error = logits_of(engines["fp16"]) - wanted
    num_roundings = 2 * EngineManifest.load(engines["fp16"]).target.spec.num_layers
    assert 0 < np.sqrt((error**2).mean()) < num_roundings * HALF_ULP * wanted.std()
