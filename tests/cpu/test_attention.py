"""The CPU's attention kernel: equal to numpy, with the same bits in any batch, and blind to masked positions."""

from __future__ import annotations

import copy
import errno
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba.core import caching, config
from numpy.typing import DTypeLike

from faser_backend.cpu.kernels import compilation
from faser_backend.cpu.kernels.attention import PAIRS, POOL_DTYPES, attend_item, space_size, tile_rows, write_rows
from faser_backend.cpu.kernels.attention_vectors import COLUMNS
from faser_backend.cpu.kernels.compilation import Kernel, compile_kernel, f32, i32, i64
from faser_backend.cpu.kernels.vector_products import HAS_DOTS

ROOT = Path(__file__).resolve().parents[2]


@cache
def attention_kernel(head_dim: int, pool_dtype: str = "fp32", dots: int = 0) -> Kernel:
    """Returns a kernel for Python that writes keys and values, then computes items; halves are passed as uint16."""
    pool = numba.types.Array(POOL_DTYPES[pool_dtype], 4, "C")
    arrays = (f32[3], f32[3], f32[3], pool, pool, i64[2], i64[1], i64[1], f32[3], i64[2], f32[1], i32[1])
    signature = numba.void(*arrays, numba.float32)

    def kernel(  # noqa: PLR0917 - kernels take their arguments by position
        q, k, v, k_pool, v_pool, block_table, cu_rows, context_lens, attended, items, space, pool_rows, scale
    ):  # fmt: skip
        for unit in range(context_lens.size * k.shape[1]):
            b, kv_head = unit // k.shape[1], unit % k.shape[1]
            blocks, context, rows = block_table[b], context_lens[b], slice(cu_rows[b], cu_rows[b + 1])
            write_rows(k_pool[kv_head], blocks, context, k[rows, kv_head], head_dim)
            write_rows(v_pool[kv_head], blocks, context, v[rows, kv_head], head_dim)
        for i in range(items.shape[0]):
            b, kv_head, first, num_rows = items[i, 0], items[i, 1], items[i, 2], items[i, 3]
            position, blocks = context_lens[b] + first - cu_rows[b], block_table[b]
            attend_item(
                dots, q, k_pool, v_pool, blocks, position, first, num_rows, 0, kv_head, attended, space, pool_rows,
                scale, head_dim,
            )  # fmt: skip

    return compile_kernel(kernel, signature)


@dataclass
class Call:
    """One call of the kernel; unused blocks and positions after a context hold NaN."""

    q: np.ndarray  # [T, H, head_dim]
    k: np.ndarray  # [T, Hkv, head_dim]
    v: np.ndarray
    k_pool: np.ndarray  # [Hkv, NB, block, head_dim] float32 or float16
    v_pool: np.ndarray
    block_table: np.ndarray  # [B, MB]
    cu_rows: np.ndarray  # [B + 1]
    context_lens: np.ndarray  # [B]
    scale: float
    dots: int = 0  # 1: VDPBF16PS multiplies

    def items(self, tile: int) -> np.ndarray:
        """Returns all items, of up to `tile` rows."""
        items = [(b, kv_head, first, min(tile, end - first)) for b, (begin, end) in enumerate(pairwise(self.cu_rows))
                 for first in range(begin, end, tile) for kv_head in range(self.k.shape[1])]  # fmt: skip
        return np.array(items, np.int64)

    def run(self, items: np.ndarray | None = None) -> np.ndarray:
        """Writes the pools and computes the items, all by default."""
        heads_per_kv = self.q.shape[1] // self.k.shape[1]
        items = self.items(tile_rows(heads_per_kv)) if items is None else items
        attended = np.full_like(self.q, np.nan)
        space = np.full(space_size(self.q.shape[2], heads_per_kv), np.nan, np.float32)
        has_halves = self.k_pool.dtype == np.float16
        pools = (pool.view(np.uint16) if has_halves else pool for pool in (self.k_pool, self.v_pool))
        packed = (self.q, self.k, self.v, *pools, self.block_table, self.cu_rows, self.context_lens)
        kernel = attention_kernel(self.q.shape[2], "fp16" if has_halves else "fp32", self.dots)
        kernel(*packed, attended, items, space, np.full(2 * COLUMNS, -1, np.int32), self.scale)
        return attended

    def expected(self) -> np.ndarray:
        """Returns `run`'s result in float64 from the pools after it."""
        out = np.empty(self.q.shape)
        heads_per_kv = self.q.shape[1] // self.k.shape[1]
        for b, (begin, end) in enumerate(pairwise(self.cu_rows)):
            for row in range(begin, end):
                num_visible = self.context_lens[b] + row - begin + 1
                for kv_head in range(self.k.shape[1]):
                    heads = slice(kv_head * heads_per_kv, (kv_head + 1) * heads_per_kv)
                    keys, values = (
                        pool[kv_head, self.block_table[b]].reshape(-1, self.q.shape[2])[:num_visible].astype(float)
                        for pool in (self.k_pool, self.v_pool)
                    )
                    scores = self.q[row, heads].astype(float) @ keys.T * self.scale
                    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                    out[row, heads] = weights @ values / weights.sum(axis=1, keepdims=True)
        return out

    def alone(self, sequence: int) -> Call:
        """Returns a call of one sequence, in other blocks of another pool."""
        rows, num_blocks = slice(*self.cu_rows[sequence : sequence + 2]), self.block_table.shape[1]
        table = np.arange(num_blocks)[::-1].copy()
        pools = [np.full_like(pool[:, :num_blocks], np.nan) for pool in (self.k_pool, self.v_pool)]
        for mine, pool in zip(pools, (self.k_pool, self.v_pool), strict=True):
            mine[:, table] = pool[:, self.block_table[sequence]]
        context_lens = self.context_lens[sequence : sequence + 1]
        packed = [x[rows].copy() for x in (self.q, self.k, self.v)]
        return Call(*packed, *pools, table[None], np.array([0, len(packed[0])]), context_lens, self.scale, self.dots)


def make_call(
    rng: np.random.Generator,
    num_rows: list[int],
    context_lens: list[int],
    *,
    num_kv_heads: int = 2,
    heads_per_kv: int = 1,
    block: int = 16,
    sharpness: float = 1.0,
    dtype: DTypeLike = np.float32,
    dots: int = 0,
) -> Call:
    head_dim = (88, 96)[dots]  # each is compiled: 64 numbers at once, 16 at once, and one by one
    longest = max(context + rows for context, rows in zip(context_lens, num_rows, strict=True))
    num_blocks, num_sequences = -(-longest // block), len(num_rows)
    block_table = rng.permutation(num_sequences * num_blocks + 3)[: num_sequences * num_blocks]
    block_table = block_table.reshape(num_sequences, num_blocks)
    pools = [np.full((num_kv_heads, num_sequences * num_blocks + 3, block, head_dim), np.nan, dtype) for _ in "kv"]
    for pool in pools:
        for blocks, context in zip(block_table, context_lens, strict=True):
            position = np.arange(context)
            known = rng.standard_normal((num_kv_heads, context, head_dim))
            pool[:, blocks[position // block], position % block] = known
    total = sum(num_rows)
    q = rng.standard_normal((total, num_kv_heads * heads_per_kv, head_dim)).astype(np.float32) * np.float32(sharpness)
    k, v = (rng.standard_normal((total, num_kv_heads, head_dim)).astype(np.float32) for _ in "kv")
    cu_rows = np.concatenate([[0], np.cumsum(num_rows)])
    return Call(q, k, v, *pools, block_table, cu_rows, np.array(context_lens), head_dim**-0.5, dots)


def random_call(seed: int, **options) -> Call:
    rng = np.random.default_rng(seed)
    num_sequences = rng.integers(1, 6)
    num_rows = rng.choice([0, 1, 2, 3, 5, 8, 17, 40], num_sequences).tolist()
    num_rows[-1] = max(num_rows[-1], 1)
    return make_call(rng, num_rows, rng.integers(0, 201, num_sequences).tolist(), **options)


# Relative to the largest value. bfloat16 holds numbers to 2^-9; scores that are off by as much move weights further.
TOLERANCE = {0: 2e-6, 1: 2**-7}
DOTS = pytest.param(1, marks=pytest.mark.skipif(not HAS_DOTS, reason="this CPU has no VDPBF16PS"))
BOTH_DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float16])


@BOTH_DTYPES
@pytest.mark.parametrize(("heads_per_kv", "block"), [(1, 16), (3, 1), (2, 4), (8, 6), (100, 16)])
def test_rows_attend_to_what_numpy_says_and_to_nothing_hidden(heads_per_kv: int, block: int, dtype: DTypeLike):
    call = random_call(10 * block + heads_per_kv, block=block, heads_per_kv=heads_per_kv, dtype=dtype)
    assert np.abs(call.run() - call.expected()).max() <= TOLERANCE[0] * np.abs(call.v).max()
    call.q[-1, 0] = np.nan
    assert np.isnan(call.run()).any(axis=2).sum() == 1


@BOTH_DTYPES
def test_keys_and_values_reach_their_positions_and_no_others(dtype: DTypeLike):
    call = random_call(3, block=4, dtype=dtype)
    expected = {"k": call.k_pool.copy(), "v": call.v_pool.copy()}
    for b, (begin, end) in enumerate(pairwise(call.cu_rows)):
        position = call.context_lens[b] + np.arange(end - begin)
        for name, new in (("k", call.k), ("v", call.v)):
            expected[name][:, call.block_table[b, position // 4], position % 4] = new[begin:end].swapaxes(0, 1)
    assert np.isnan(call.run(call.items(8)[:0])).all()
    np.testing.assert_array_equal(call.k_pool, expected["k"])
    np.testing.assert_array_equal(call.v_pool, expected["v"])


@BOTH_DTYPES
def test_halves_are_rounded_as_numpy_rounds_and_stay_finite(dtype: DTypeLike):
    """Ties go to even, subnormals included, and values beyond the largest half become that."""
    call = make_call(np.random.default_rng(7), [40], [0], dtype=dtype)
    call.k[:] = call.k * 2.0 ** np.random.default_rng(8).integers(-26, 15, call.k.shape)
    call.k[0, 0, :4] = [1 + 2**-11, 1 + 3 * 2**-11, 2**-25, -(2**-24)]  # halfway up and down, and subnormal
    call.v[:] = call.k[::-1]
    call.k[1, 1, :4] = [65504, 65520, 1e30, -1e30]
    call.run(call.items(8)[:0])
    most = np.finfo(dtype).max
    for pool, new in ((call.k_pool, call.k), (call.v_pool, call.v)):
        found = pool[:, call.block_table[0]].reshape(2, -1, call.q.shape[2])[:, :40].swapaxes(0, 1)
        np.testing.assert_array_equal(found, np.clip(new, -most, most).astype(dtype))


@BOTH_DTYPES
@pytest.mark.parametrize("dots", [0, DOTS])
def test_any_tiles_in_any_order_give_the_same_bits(dots: int, dtype: DTypeLike):
    rng = np.random.default_rng(5)
    options = {"heads_per_kv": 2, "num_kv_heads": 3, "dtype": dtype, "dots": dots}
    call = make_call(rng, [130, 1, 0, 47], [0, 70, 3, 119], **options)
    attended = call.run()
    assert np.abs(attended - call.expected()).max() <= TOLERANCE[dots] * np.abs(call.v).max()
    for tile in (1, 3, 16, 31, 48):
        np.testing.assert_array_equal(call.run(rng.permutation(call.items(tile))), attended)


ANOTHER_CPU = """
import sys
from faser_backend.cpu.kernels import attention_vectors
attention_vectors.PAIRS = int(sys.argv[1])
attention_vectors.HAS_MANY_REGISTERS = not attention_vectors.HAS_MANY_REGISTERS
from faser_backend.cpu.kernels import attention
from tests.cpu.test_attention import np, runs
assert attention.PAIRS == int(sys.argv[1])
np.save(sys.argv[2], runs())
"""


def runs() -> np.ndarray:
    """Returns results without dots and, where the CPU has them, with dots."""
    found = [random_call(7, heads_per_kv=3, dots=dots).run() for dots in range(1 + HAS_DOTS)]
    return np.concatenate([attended.ravel() for attended in found])


def test_pairs_of_another_cpu_give_the_same_bits(tmp_path: Path):
    """Inner loops take 4 or 6 pairs. Compiled code is kept per process and folder: another CPU is another of both."""
    command = [sys.executable, "-c", ANOTHER_CPU, str(10 - PAIRS), str(tmp_path / "other.npy")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run(command, env=environment, check=True, timeout=200)
    np.testing.assert_array_equal(np.load(tmp_path / "other.npy"), runs())


@pytest.mark.parametrize("dots", [0, DOTS])
def test_8000_tokens_are_as_exact_as_few_and_another_order_of_columns_would_be_noticed(dots: int):
    """Negative control: the same columns in reverse give the same numbers, rounded otherwise."""
    call = make_call(np.random.default_rng(9), [2], [7998], heads_per_kv=3, num_kv_heads=1, dots=dots)
    attended = call.run()
    assert np.abs(attended - call.expected()).max() <= TOLERANCE[dots] * np.abs(call.v).max()
    call.cu_rows, call.context_lens = np.array([0, 1]), np.array([7999])
    call.q, call.k, call.v = (x[1:].copy() for x in (call.q, call.k, call.v))
    np.testing.assert_array_equal(call.run(), attended[1:])
    for pool, last in ((call.k_pool, call.k), (call.v_pool, call.v)):
        pool[:, call.block_table[0]] = pool[:, call.block_table[0, ::-1], ::-1]
        last[0] = pool[:, call.block_table[0, -1], -1]
    turned = call.run()
    assert (turned != attended[1:]).any()
    assert np.abs(turned - attended[1:]).max() <= 2 * TOLERANCE[dots] * np.abs(call.v).max()


def run_one_by_one(call: Call, after: Callable[..., None] = lambda *_: None) -> np.ndarray:
    """Runs the rows of the call's one sequence in separate calls. after(k_pool, v_pool) follows each call."""
    attended = []
    for row in range(call.q.shape[0]):
        step = [x[row : row + 1].copy() for x in (call.q, call.k, call.v)]
        pools, context_lens = (call.k_pool, call.v_pool), call.context_lens + row
        attended.append(
            Call(*step, *pools, call.block_table, np.array([0, 1]), context_lens, call.scale, call.dots).run()
        )
        after(*pools)
    return np.concatenate(attended)


@BOTH_DTYPES
@pytest.mark.parametrize(
    ("heads_per_kv", "block", "dots"),
    [(1, 16, 0), (2, 4, 0), (3, 1, 0), pytest.param(3, 4, *DOTS.values, marks=DOTS.marks)],
)
def test_a_row_has_the_same_bits_in_any_company(heads_per_kv: int, block: int, dots: int, dtype: DTypeLike):
    """Compares chunks that end anywhere in a block with their rows one by one: what is verified changes no bit."""
    rng = np.random.default_rng(heads_per_kv)
    num_rows, contexts = list(range(1, 10)), rng.integers(0, 120, 9).tolist()
    options = {"heads_per_kv": heads_per_kv, "block": block, "dtype": dtype, "dots": dots}
    call = make_call(rng, num_rows, contexts, **options)
    calls = [call.alone(b) for b in range(9)]  # from the pools before the call
    attended = call.run()
    np.testing.assert_array_equal(np.concatenate([run_one_by_one(each) for each in calls]), attended)


def test_rows_that_are_read_before_they_are_rounded_would_be_noticed():
    """Negative control: halves, but a call's own writes are rounded only after it."""

    def to_halves(*pools: np.ndarray) -> None:
        for pool in pools:
            pool[:] = pool.astype(np.float16)

    call = make_call(np.random.default_rng(8), [9], [37], heads_per_kv=2, block=4)
    to_halves(call.k_pool, call.v_pool)
    steps = copy.deepcopy(call)
    is_other = (run_one_by_one(steps, after=to_halves) != call.run()).any(axis=(1, 2))
    assert is_other.tolist() == [False] + 8 * [True], "a row sees itself before it is rounded either way"


def test_large_scores_stay_finite():
    call = make_call(np.random.default_rng(2), [5, 1], [60, 0], sharpness=60.0)
    scores = np.einsum("thd,thd->th", call.q, call.k) * call.scale
    assert np.abs(scores).max() > 80
    attended = call.run()
    assert np.abs(attended - call.expected()).max() <= 1e-4 * np.abs(call.v).max()  # the rounding of scores


def test_the_comparison_would_notice_a_row_that_sees_one_column_more_or_less():
    call = make_call(np.random.default_rng(4), [3], [200])
    attended = call.run()
    call.context_lens = call.context_lens - 1
    assert np.abs(attended - call.expected()).max() > 1e-3


def counting_kernel(amount: int = 1) -> Kernel:
    def kernel(counts):
        counts[0] += amount

    return compile_kernel(kernel, numba.void(i64[1]))


@pytest.mark.parametrize("trouble", ["no directory", "no room"])
def test_a_kernel_that_cannot_be_kept_is_compiled_all_the_same(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if trouble == "no directory":
        monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    else:
        monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(caching.IndexDataCacheFile, "_open_for_write", fail)
    compilation.warn_once.cache_clear()
    kernel, counts = counting_kernel(), np.zeros(1, np.int64)
    [record] = [record for record in caplog.records if "again" in record.message]
    assert record.levelname == "WARNING"
    assert "NUMBA_CACHE_DIR" in record.message
    kernel(counts)
    assert counts[0] == 1


def test_every_file_of_the_kernels_changes_the_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compilation, "__file__", str(tmp_path / "compilation.py"))
    stamps = {compilation.source_stamp()}
    for name in ("segment.py", "vectors.py"):
        (tmp_path / name).write_text(name)
        stamps.add(compilation.source_stamp())
    assert len(stamps) == 3


def test_a_kept_kernel_is_loaded_until_its_vector_code_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    num_loaded, reported = [], []
    compilation.warn_once.cache_clear()
    for stamp in (1, 1, 2):
        monkeypatch.setattr(compilation, "source_stamp", lambda stamp=stamp: stamp)
        kernel: Any = counting_kernel()
        num_loaded.append(sum(kernel.stats.cache_hits.values()))
        reported.append("compiling kernels" in caplog.text)
        caplog.clear()
        compilation.warn_once.cache_clear()
    assert num_loaded == [0, 1, 0] and reported == [True, False, True], "only compilations are reported"


@pytest.mark.parametrize("damage", ["cut", "empty", "another"])
def test_a_file_that_does_not_hold_the_kernel_is_written_again(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    counting_kernel(amount=1)
    [path] = tmp_path.rglob("*.nbc")
    stored = path.read_bytes()
    counting_kernel(amount=2)
    [other] = set(tmp_path.rglob("*.nbc")) - {path}
    path.write_bytes({"cut": stored[:-1], "empty": b"", "another": other.read_bytes()}[damage])
    for num_loaded in (0, 1):
        kernel: Any = counting_kernel(amount=1)
        counts = np.zeros(1, np.int64)
        kernel(counts)
        assert counts[0] == 1 and sum(kernel.stats.cache_hits.values()) == num_loaded
