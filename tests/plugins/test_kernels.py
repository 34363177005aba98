"""GPU kernels: numerics in the interpreter (in separate processes), launchers without a GPU, and tile sizes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from faser_backend.cpu.noise import GumbelNoise, seed_keys
from faser_backend.lab.gpu.kernel_cases import Call, Shape, make_call
from faser_backend.plugins.add_rms_norm import add_rms_norm
from faser_backend.plugins.attention_config import (
    MAX_SPLITS,
    SHARED_LIMITS,
    choose_num_splits,
    count_parts,
    launch_config,
    padded_head_dim,
    shared_bytes,
    shared_limit,
)
from faser_backend.plugins.exit_scores import exit_scores
from faser_backend.plugins.gated_silu import gated_silu
from faser_backend.plugins.launch import runs_kernel
from faser_backend.plugins.perturb_logits import perturb_logits
from faser_backend.plugins.product import FEW_OUTPUTS, MatrixProduct, parts_of
from faser_backend.plugins.pruned_chunk_attention import pruned_chunk_attention, pruned_chunk_attention_kernel
from faser_backend.plugins.rotate_heads import rotate_heads
from tests.support.kernel_cases import check

ROOT = Path(__file__).resolve().parents[2]
torch.set_num_threads(1)


@pytest.mark.timeout(900)
def test_interpreted_kernels_match_their_references():
    files = [f"tests/support/interpreted_{name}.py" for name in ("kernels", "plugin_kernels", "segment")]
    done = subprocess.run(
        [
            sys.executable,
            *["-m", "pytest", "-W", "ignore", "-p", "no:cacheprovider", "-p", "tests.support.fast_interpreter"],
            *files,
        ],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=880,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def run(call: Call, **options) -> None:
    pruned_chunk_attention(*call, max_rows=max(1, int(call.cu_rows.diff().max())), **options)


def dense_attention(call: Call, *, is_causal: bool) -> torch.Tensor:
    """Computes attention row by row from contiguous tokens, independently of the reference."""
    out, size = call.out.clone(), call.k_pool.shape[2]
    group = call.q.shape[1] // call.k_pool.shape[0]
    for b, context in enumerate(call.context_lens.tolist()):
        begin, end = call.cu_rows[b : b + 2].tolist()
        slots = [call.block_table[b, p // size] * size + p % size for p in range(context)]
        for row in range(begin, end):
            own = slice(begin, row + 1 if is_causal else end)
            keys, values = (
                torch.cat([pool.flatten(1, 2)[:, slots], new[own].transpose(0, 1)], 1).repeat_interleave(group, 0)
                for pool, new in ((call.k_pool, call.k_new), (call.v_pool, call.v_new))
            )
            scores = torch.einsum("hd,hnd->hn", call.q[row], keys) / keys.shape[-1] ** 0.5
            out[row] = torch.einsum("hn,hnd->hd", scores.softmax(-1), values)
    return out


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("group", [1, 3])
def test_reference_says_what_attention_is(group, is_causal):
    shape = Shape(rows=(3, 0, 1), contexts=(9, 5, 0), group=group, head_dim=16, num_padding_rows=1, is_fused=True)
    call = make_call(shape, 0)
    expected, other = (dense_attention(call, is_causal=flag) for flag in (is_causal, not is_causal))
    run(call, is_causal=is_causal)
    torch.testing.assert_close(call.out, expected, atol=1e-6, rtol=0)
    assert ((call.out - other).abs().amax((1, 2)) > 1e-3).tolist() == [True, True, False, False, False], "last rows"
    first_slots = call.slot_mapping[:3].long()
    for new, pool in ((call.k_new, call.k_pool), (call.v_new, call.v_pool)):
        assert torch.equal(pool.flatten(1, 2)[:, first_slots], new[:3].transpose(0, 1))


def test_launchers_run_references_on_the_cpu():
    assert not runs_kernel(pruned_chunk_attention_kernel, torch.zeros(1))
    check(make_call(Shape(rows=(2, 5), contexts=(8, 3)), 1), lambda call: run(call, num_splits=2))
    hidden, head = torch.randn(3, 8), torch.randn(20, 8)
    candidates, scores = torch.tensor([[1, 2], [3, 4], [19, 0]]), torch.zeros(3, 2)
    exit_scores(hidden, head, candidates, scores)
    torch.testing.assert_close(scores, (hidden @ head.T).gather(1, candidates))


@pytest.mark.parametrize(
    ("field", "replace", "message"),
    [
        ("context_lens", lambda t: t.long(), r"context_lens: dtype torch.int64, expected torch.int32"),
        ("v_new", lambda t: t[:, :1], r"v_new: shape \[3, 1, 32\], expected \[3, 2, 32\]"),
        ("k_new", lambda t: t.half(), r"k_new: dtype torch.float16, expected torch.float32"),
        ("q", lambda t: t[:, :3], r"q: 3 heads, not a multiple of the pool's 2"),
        ("k_pool", lambda t: t.mT, r"k_pool: shape"),
        ("out", lambda t: t.mT.contiguous().mT, r"out: strides .*must be contiguous"),
        ("cu_rows", lambda t: t[:-1], r"cu_rows: shape \[2\], expected \[3\]"),
    ],
)
def test_bad_tensors_are_named(field, replace, message):
    call = make_call(Shape(rows=(2, 1), contexts=(4, 4)), 0)
    with pytest.raises(ValueError, match=message):
        pruned_chunk_attention(*call._replace(**{field: replace(getattr(call, field))}), max_rows=2)
    with pytest.raises(ValueError, match="max_rows = 0"):
        pruned_chunk_attention(*call, max_rows=0)


def test_rows_whose_shapes_and_types_do_not_fit_are_refused():
    rows, weight = torch.zeros(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match="weight: dtype"):
        add_rms_norm(rows, None, weight.half(), 1e-5, None, rows.clone())
    with pytest.raises(ValueError, match="delta and summed: give both or neither"):
        add_rms_norm(rows, rows, weight, 1e-5, None, rows.clone())
    with pytest.raises(ValueError, match="hidden_size = 20000: must be at most 16384"):
        add_rms_norm(torch.zeros(1, 20_000), None, weight, 1e-5, None, rows)
    with pytest.raises(ValueError, match=r"gate_up: shape \[2, 8\], expected \[2, 6\]"):
        gated_silu(rows, torch.zeros(2, 3))
    for name, given in (("weight", (rows[:, 1:],)), ("bias", (rows, rows[0])), ("out", (rows, None, rows))):
        with pytest.raises(ValueError, match=f"{name}: shape"):
            MatrixProduct(rows.device)(rows, *given)
    qkv, table, positions = torch.zeros(2, 4, 8), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="q_norm and k_norm"):
        rotate_heads(qkv, positions, table, table, torch.zeros(2, 3, 8), num_heads=2, q_norm=weight)
    with pytest.raises(ValueError, match=r"out: shape \[2, 4, 8\], expected \[2, 3, 8\]"):
        rotate_heads(qkv, positions, table, table, qkv, num_heads=2)
    with pytest.raises(ValueError, match="positions: dtype"):
        rotate_heads(qkv, positions.int(), table, table, torch.zeros(2, 3, 8), num_heads=2)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("keys", torch.zeros(3, dtype=torch.int64)),
        ("scale", torch.zeros(4, 2)[:, 0]),
        ("table", torch.zeros(9, dtype=torch.int32)),
        ("out", torch.zeros(4, 8, dtype=torch.float16)),
    ],
)
def test_tensors_that_do_not_fit_are_named(name: str, broken: torch.Tensor) -> None:
    words, column, logits = torch.zeros(4, dtype=torch.int64), torch.zeros(4), torch.zeros(4, 8)
    tensors = {"keys": words, "positions": words, "scale": column, "is_random": column, "out": logits}
    tensors["table"] = torch.zeros((1 << 20) + 8, dtype=torch.int32)
    tensors[name] = broken
    with pytest.raises(ValueError, match=f"{name}: "):
        perturb_logits(logits, log2_size=20, **tensors)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU with torch for CUDA")
@pytest.mark.parametrize("vocab_size", [97, 2048, 151_936])
def test_on_a_gpu_noise_is_the_hosts(vocab_size: int) -> None:
    from faser_backend.cuda.sampler import TorchNoise

    rng, device = np.random.default_rng(vocab_size), torch.device("cuda", torch.cuda.current_device())
    keys, positions = seed_keys(rng.integers(0, 2**63, 9).astype(np.uint64)), rng.integers(0, 10**6, 9)
    column = torch.ones(9, device=device)
    scores = TorchNoise(vocab_size, device).perturbed(
        torch.zeros((9, vocab_size), device=device),
        torch.from_numpy(keys.view(np.int64)).to(device),
        torch.from_numpy(positions).to(device),
        column,
        column,
    )
    expected = -GumbelNoise(vocab_size).log_exponentials(keys, positions)
    np.testing.assert_allclose(scores.cpu().numpy(), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("capability", SHARED_LIMITS)
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("head_dim", [32, 80, 128, 256])
def test_launches_fit_their_device(capability, element_bytes, head_dim):
    for group in range(1, 17):
        for max_rows in (1, 5, 17, 512):
            config = launch_config(element_bytes, head_dim, group, max_rows, capability)
            row_bytes = padded_head_dim(head_dim) * element_bytes
            used = shared_bytes(config.block_m, config.block_n, config.num_stages, row_bytes)
            assert config.num_stages >= 2 and used <= shared_limit(capability) + 7_000  # real use is less
            assert config.block_m >= max(16, group)
            assert config.block_n == launch_config(element_bytes, head_dim, 1, 1, capability).block_n, "one for all"
            assert all(n & (n - 1) == 0 for n in config[:2])


def test_parts_of_sums_are_few_long_and_cover_them():
    for num_outputs in (1, 64, 65, 960, 1024, 4096, 6144, 151_936):
        for size in (1, 8, 576, 1023, 1024, 1100, 3072, 12_288):
            num_parts, length = parts_of(num_outputs, size)
            assert (num_parts - 1) * length < size <= num_parts * length and length % 128 == 0
            assert num_parts == 1 or (length >= 512 and -(-num_outputs // FEW_OUTPUTS) <= 64)
    assert [parts_of(*shape)[0] for shape in ((6144, 4096), (4096, 4096), (1024, 3072), (64, 12_288))] == [1, 2, 4, 16]


@pytest.mark.parametrize(("head_dim", "group", "name"), [(0, 1, "head_dim"), (257, 1, "head_dim"), (64, 33, "query")])
def test_launches_that_no_program_can_hold_are_refused(head_dim, group, name):
    with pytest.raises(ValueError, match=name):
        launch_config(4, head_dim, group, 1)


@pytest.mark.parametrize(
    ("num_kv_heads", "num_parts", "num_sms", "num_tiles", "expected"),
    [
        (8, 4, 132, 9, 1),  # enough programs
        (8, 4, 132, 8, 4),
        (8, 40, 16, 1, 40),  # a small partition
        (8, MAX_SPLITS + 1, 132, 1, 1),
    ],
)
def test_contexts_are_split_to_fill_the_device(num_kv_heads, num_parts, num_sms, num_tiles, expected):
    assert choose_num_splits(num_kv_heads, num_parts, num_sms, num_tiles) == expected


def test_parts_are_few_where_contexts_are_long():
    counts = [count_parts(tokens) for tokens in (1, 256, 257, 4096, 4097, 4609, 8192, 8193, 131_072, 262_144)]
    assert counts == [1, 1, 2, 16, 17, 18, 24, 25, 56, MAX_SPLITS]
