"""Attention spread over threads: the same bits for any number of them, and errors and endings that reach everyone."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from faser_backend.core.batch import RowBatch
from faser_backend.core.model import ModelSpec
from faser_backend.device import host_attention
from faser_backend.device.host_attention import HostAttention
from faser_backend.device.kv_pool import DTYPES, KvPool
from plugins.host_attention import attention_kernel

SPEC = ModelSpec(2, 64, 6, 3, 24, 64, 97, 256, 1e4, 1e-5, tie_word_embeddings=False)
BLOCK = 4


@pytest.fixture(autouse=True)
def every_number_is_worth_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_attention, "FEWEST_NUMBERS_PER_THREAD", 1)


@pytest.fixture
def opened() -> Iterator[list[HostAttention]]:
    """Whatever a test puts here is closed after it."""
    attentions: list[HostAttention] = []
    yield attentions
    for attention in attentions:
        attention.close()


def attention_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "attention"}


def random_batch(rng: np.random.Generator) -> tuple[RowBatch, np.ndarray]:
    """Ragged: 1 to 7 sequences of 1 to 12 rows on up to 120 tokens, in shuffled blocks."""
    num_sequences = int(rng.integers(1, 8))
    counts, context_lens = rng.integers(1, 13, num_sequences), rng.integers(0, 121, num_sequences)
    num_blocks = -(-int((counts + context_lens).max()) // BLOCK)
    rows = RowBatch(
        token_ids=np.zeros(counts.sum(), np.int64),
        cu_rows=np.concatenate([[0], np.cumsum(counts)]),
        context_lens=context_lens,
        block_tables=rng.permutation(num_sequences * num_blocks).reshape(num_sequences, num_blocks),
        logit_rows=np.zeros(0, np.int64),
    )
    return rows, counts


def random_qkv(rng: np.random.Generator, num_rows: int) -> tuple[np.ndarray, ...]:
    heads = (SPEC.num_heads, SPEC.num_kv_heads, SPEC.num_kv_heads)
    return tuple(rng.standard_normal((num_rows, n, 1, SPEC.head_dim)).astype(np.float32) for n in heads)


def filled_pool(dtype: str = "fp32") -> KvPool:
    pool = KvPool(SPEC, 7 * 34, BLOCK, dtype=dtype)
    pool.storage[:] = np.random.default_rng(1).standard_normal(pool.storage.shape)
    return pool


def attention_of(opened: list[HostAttention], num_threads: int, pool: KvPool | None = None) -> HostAttention:
    opened.append(HostAttention(SPEC, pool or filled_pool(), num_threads))
    return opened[-1]


def room_for(rows: RowBatch) -> np.ndarray:
    return np.full((rows.num_rows, SPEC.num_heads * SPEC.head_dim), np.nan, np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_have_the_same_bits_on_one_two_and_three_threads(opened: list[HostAttention], dtype: str):
    pools = [filled_pool(dtype) for _ in range(3)]
    attentions = [attention_of(opened, index + 1, pool) for index, pool in enumerate(pools)]
    before = attention_threads()
    rng = np.random.default_rng(0)
    for _ in range(40):
        rows, counts = random_batch(rng)
        qkv = [random_qkv(rng, rows.num_rows) for _ in range(SPEC.num_layers)]
        results = []
        for attention in attentions:
            attention.begin(rows, counts)
            results.append([room_for(rows) for _ in qkv])
            for layer, ((q, k, v), out) in enumerate(zip(qkv, results[-1], strict=True)):
                attention.run(layer, q, k, v, out, attends=True)
        assert np.isfinite(results[0]).all()
        for result, pool in zip(results[1:], pools[1:], strict=True):
            np.testing.assert_array_equal(result, results[0])
            np.testing.assert_array_equal(pool.storage, pools[0].storage)
    assert len(attention_threads() - before) == 0 + 1 + 2


def test_small_calls_wake_nobody(opened: list[HostAttention], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_attention, "FEWEST_NUMBERS_PER_THREAD", 1 << 40)
    rng, before = np.random.default_rng(2), attention_threads()
    rows, counts = random_batch(rng)
    attention, out = attention_of(opened, 3), room_for(rows)
    attention.begin(rows, counts)
    attention.run(0, *random_qkv(rng, rows.num_rows), out, attends=True)
    assert np.isfinite(out).all() and attention_threads() == before


def test_where_nobody_wants_the_result_it_is_left_alone_and_the_pool_is_written(opened: list[HostAttention]):
    rng = np.random.default_rng(3)
    rows, counts = random_batch(rng)
    qkv = random_qkv(rng, rows.num_rows)
    pools, outs = [filled_pool() for _ in range(2)], [room_for(rows) for _ in range(2)]
    for pool, out, attends in zip(pools, outs, (True, False), strict=True):
        attention = attention_of(opened, 2, pool)
        attention.begin(rows, counts)
        attention.run(1, *qkv, out, attends=attends)
    assert np.isfinite(outs[0]).all() and np.isnan(outs[1]).all()
    np.testing.assert_array_equal(pools[0].storage, pools[1].storage)
    assert (pools[1].storage[0] == filled_pool().storage[0]).all(), "the other layer's"
    assert (pools[1].storage[1] != filled_pool().storage[1]).any()


@pytest.mark.parametrize("fails_here", [False, True])
def test_an_error_on_any_thread_reaches_the_caller_and_the_next_call_is_whole(
    fails_here: bool, opened: list[HostAttention], monkeypatch: pytest.MonkeyPatch
):
    """Where the caller's own share fails too, its error goes first and the helper's does not wait for the next call."""
    rng, kernel = np.random.default_rng(4), attention_kernel(SPEC.head_dim)
    rows, counts = random_batch(rng)
    assert counts.size * SPEC.num_kv_heads > 1
    qkv, out = random_qkv(rng, rows.num_rows), room_for(rows)
    caller = threading.current_thread()

    def failing(*arguments: object) -> None:
        if threading.current_thread() is not caller:
            raise ValueError("on a helper")
        if fails_here:
            raise ValueError("on the caller")
        kernel(*arguments)

    attention = attention_of(opened, 2)
    attention.begin(rows, counts)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "_kernel", failing)
        with pytest.raises(ValueError, match="on the caller" if fails_here else "on a helper"):
            attention.run(0, *qkv, out, attends=True)
    assert np.isnan(out).any()
    attention.run(0, *qkv, out, attends=True)
    assert np.isfinite(out).all()


def test_close_ends_the_threads_and_may_come_twice(opened: list[HostAttention]):
    rng, before = np.random.default_rng(5), attention_threads()
    rows, counts = random_batch(rng)
    attention = attention_of(opened, 3)
    attention.begin(rows, counts)
    attention.run(0, *random_qkv(rng, rows.num_rows), room_for(rows), attends=True)
    started = attention_threads() - before
    assert len(started) == 2
    attention.close()
    attention.close()
    assert not any(thread.is_alive() for thread in started)
