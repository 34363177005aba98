# ruff: noqa: PLR0917 (broken steps take the arguments of the steps)
"""Kernels against their references in the Triton-language interpreter, on the CPU.

Whether a kernel is interpreted is settled when it is defined, so these run in processes of their own,
which test_kernels.py starts with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from plugins import pruned_chunk_attention as attention
from plugins import reference
from plugins.attention_config import LaunchConfig
from plugins.exit_scores import exit_scores
from plugins.kv_write import write_kv
from plugins.launch import runs_kernel
from plugins.row_compaction import compact_rows
from plugins.split_combine import workspace_numel
from tests.kernel_cases import NAN, SENTINEL, Call, Shape, check, make_call, random_shape, small_tiles

torch.set_num_threads(1)
CASES = [("fp32", torch.float32, 50), ("fp16", torch.float16, 26), ("bf16", torch.bfloat16, 26)]


@pytest.fixture(autouse=True)
def _bfloat16_products(monkeypatch):
    """The interpreter (3.6.0) holds bfloat16 as integers and multiplies them as such in `dot`: widen them first."""
    dot = interpreter.InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    monkeypatch.setattr(
        interpreter.InterpreterBuilder, "create_dot", lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest)
    )


def run(call: Call, *, num_splits: int = 1, max_rows: int | None = None) -> None:
    """The launcher, with a workspace of NaN."""
    num_rows, num_heads, head_dim = call.q.shape
    workspace = torch.full((workspace_numel(num_rows, num_heads, head_dim, num_splits),), NAN)
    max_rows = max_rows or max(1, int(call.cu_rows.diff().max()))
    attention.pruned_chunk_attention(*call, max_rows=max_rows, num_splits=num_splits, workspace=workspace)


def test_kernels_are_interpreted():
    assert runs_kernel(attention.pruned_chunk_attention_kernel, torch.zeros(1))


@pytest.mark.parametrize(
    ("dtype", "seed"), [pytest.param(dtype, seed, id=f"{name}-{seed}") for name, dtype, n in CASES for seed in range(n)]
)
def test_attention_of_random_ragged_calls(monkeypatch, dtype, seed):
    rng = np.random.default_rng(1000 + seed)
    shape = random_shape(rng, dtype)
    if seed % 2:
        tiles = small_tiles(rng, shape.group)
        monkeypatch.setattr(attention, "launch_config", lambda *_: tiles)
    num_results = sum(shape.rows) * shape.num_kv_heads * shape.group  # the interpreter joins parts one by one
    num_splits = int(rng.choice([1, 2, 4], p=[0.4, 0.3, 0.3])) if num_results <= 24 else 1
    bound = max(1, *shape.rows) + int(rng.integers(0, 3))  # the host may know only a bound
    check(make_call(shape, seed), lambda call: run(call, num_splits=num_splits, max_rows=bound))


@pytest.mark.parametrize("context", [0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 128, 129])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_attention_at_block_and_tile_borders(monkeypatch, context, num_splits):
    monkeypatch.setattr(attention, "launch_config", lambda *_: LaunchConfig(16, 16, 16, 4, 2))
    shape = Shape(rows=(1, 17 if num_splits == 1 else 3), contexts=(context, context), num_kv_heads=1, head_dim=16)
    check(make_call(shape, context), lambda call: run(call, num_splits=num_splits))


def test_attention_where_everything_was_pruned():
    check(make_call(Shape(rows=(0, 0, 0), contexts=(9, 0, 16), num_padding_rows=4), 0), run)


def test_attention_of_a_longer_context_under_the_launch_of_a_captured_graph():
    """Only max_rows, T, B and the table's columns are the host's: lengths are read where the kernel runs."""
    captured = make_call(Shape(rows=(3, 1), contexts=(8, 8), num_padding_rows=2), 0)
    run(captured, max_rows=4)
    replayed = make_call(Shape(rows=(2, 4), contexts=(40, 0)), 1)
    check(replayed, lambda call: run(call, max_rows=4))


def sees_next_row(query, k, v, k_stride, v_stride, row, *rest, chunk=attention.attend_chunk, **constants):
    return chunk(query, k, v, k_stride, v_stride, row + 1, *rest, **constants)


def context_off_by(offset: int):
    def attend(query, k, v, table, num_blocks, start, end, *rest, context=attention.attend_context, **constants):
        return context(query, k, v, table, num_blocks, start, end + offset, *rest, **constants)

    return attend


def table_of_one_block(query, k, v, table, num_blocks, *rest, context=attention.attend_context, **constants):
    return context(query, k, v, table, 1, *rest, **constants)  # the clamp then leads to block 0 alone


def writes_next_slot(rows, stride, slot, *rest, write=attention.write_rows, **constants):
    return write(rows, stride, slot + 1, *rest, **constants)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("attend_chunk", sees_next_row),
        ("attend_context", context_off_by(1)),
        ("attend_context", context_off_by(-1)),
        ("attend_context", table_of_one_block),
        ("write_rows", writes_next_slot),
    ],
)
def test_the_check_fails_a_broken_kernel(monkeypatch, name, broken):
    call = make_call(Shape(rows=(3, 1), contexts=(11, 20), num_padding_rows=1), 5)
    check(call, run)
    monkeypatch.setattr(attention, name, broken)
    with pytest.raises(AssertionError):
        check(call, run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_rows", "num_candidates", "hidden_size"), [(1, 1, 16), (5, 8, 48), (3, 5, 1100), (0, 4, 16), (4, 0, 16)]
)
def test_exit_scores(dtype, num_rows, num_candidates, hidden_size):
    generator = torch.Generator().manual_seed(num_rows)
    hidden = torch.randn(num_rows, hidden_size, generator=generator).to(dtype)
    head = torch.randn(50, hidden_size, generator=generator).to(dtype)
    head[7] = NAN  # no candidate
    candidates = torch.randint(8, 50, (num_rows, num_candidates), generator=generator)
    expected, actual = torch.full((2, num_rows, num_candidates), SENTINEL)
    reference.exit_scores(hidden, head, candidates, expected)
    exit_scores(hidden, head, candidates, actual)
    torch.testing.assert_close(actual, expected, atol=1e-5 * hidden_size**0.5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [[], [4], [0, 2, 3], [4, 4, 0, 1, 2, 3]])
def test_row_compaction_copies_bits(dtype, kept):
    hidden = torch.randn(5, 3000).to(dtype)
    hidden[1, 5] = NAN
    expected, actual = torch.zeros(2, len(kept), 3000, dtype=dtype)
    reference.compact_rows(hidden, torch.tensor(kept, dtype=torch.int64), expected)
    compact_rows(hidden, torch.tensor(kept, dtype=torch.int64), actual)
    torch.testing.assert_close(actual, expected, atol=0, rtol=0, equal_nan=True)
    assert len(kept) < 5 or actual.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 80])
def test_kv_write_touches_its_slots_alone(dtype, head_dim):
    fused = torch.randn(6, 5, head_dim).to(dtype)
    new = fused[:, :2], fused[:, 3:]
    slots = torch.tensor([3, -1, 17, 0, -1, 31], dtype=torch.int32)
    expected, actual = ([torch.full((2, 4, 8, head_dim), SENTINEL, dtype=dtype) for _ in range(2)] for _ in range(2))
    reference.write_kv(*new, slots, *expected)
    write_kv(*new, slots, *actual)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
    assert sum(int((pool[0, ..., 0] != SENTINEL).sum()) for pool in actual) == 8
