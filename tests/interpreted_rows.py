"""Row kernels of a decoder layer against their references in the Triton-language interpreter, on the CPU.

The interpreter is chosen when a kernel is defined, so these run in a process of their own, which
test_row_kernels.py starts with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
import torch

from plugins import decoder_reference
from plugins.add_rms_norm import add_rms_norm, add_rms_norm_kernel
from plugins.gated_silu import gated_silu
from plugins.launch import runs_kernel
from plugins.rotate_heads import rotate_heads

torch.set_num_threads(1)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Sums in another order, and one rounding to the type; of bfloat16 two, as the interpreter cuts the sum too.
TOLERANCES = {torch.float32: (2e-6, 2e-6), torch.float16: (1e-3, 1e-3), torch.bfloat16: (1.6e-2, 1.6e-2)}
EPS = 1e-5


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    atol, rtol = TOLERANCES[wanted.dtype]
    torch.testing.assert_close(got, wanted, atol=atol, rtol=rtol)
    assert wanted.abs().max() > 0.1, "a comparison of nothing"


def test_kernels_are_interpreted():
    assert runs_kernel(add_rms_norm_kernel, torch.zeros(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", [8, 100, 640])
@pytest.mark.parametrize("has_delta", [False, True])
def test_add_rms_norm(dtype, hidden_size, has_delta):
    torch.manual_seed(0)
    hidden, delta = (torch.randn(5, hidden_size).to(dtype) for _ in range(2))
    weight = torch.rand(hidden_size) + 0.5
    results = []
    for implementation in (add_rms_norm, decoder_reference.add_rms_norm):
        summed, out = (torch.full_like(hidden, 77.0) for _ in range(2))
        given = (delta, summed) if has_delta else (None, None)
        implementation(hidden, given[0], weight, EPS, given[1], out)
        results.append((summed, out))
    (summed, out), (wanted_sum, wanted) = results
    # The interpreter cuts bfloat16 where a GPU rounds.
    torch.testing.assert_close(summed, wanted_sum, atol=0, rtol=8e-3 if dtype == torch.bfloat16 else 0)
    close(out, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 8), (3, 3, 20), (8, 1, 64)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rotate_heads(dtype, num_heads, num_kv_heads, head_dim, has_norm):
    torch.manual_seed(1)
    num_rows, num_all = 5, num_heads + 2 * num_kv_heads
    wide = torch.randn(num_rows, (num_all + 3) * head_dim).to(dtype)  # rows lie further apart than they are long
    qkv = wide[:, : num_all * head_dim].unflatten(1, (num_all, head_dim))
    angles = torch.rand(40, head_dim // 2) * 6
    positions = torch.tensor([0, 39, 7, 7, 1])
    norms = {"q_norm": torch.rand(head_dim) + 0.5, "k_norm": torch.rand(head_dim) + 0.5} if has_norm else {}
    out, wanted = (torch.full((num_rows, num_heads + num_kv_heads, head_dim), 77.0, dtype=dtype) for _ in range(2))
    tables = positions, angles.cos(), angles.sin()
    rotate_heads(qkv, *tables, out, num_heads=num_heads, eps=EPS, **norms)
    weights = norms.get("q_norm"), norms.get("k_norm")
    decoder_reference.rotate_heads(qkv, *tables, *weights, EPS, num_heads, wanted)
    close(out, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [3, 48, 1500])
def test_gated_silu(dtype, size):
    torch.manual_seed(2)
    gate_up = torch.randn(4, 2 * size).to(dtype) * 3
    out, wanted = (torch.full((4, size), 77.0, dtype=dtype) for _ in range(2))
    gated_silu(gate_up, out)
    decoder_reference.gated_silu(gate_up, wanted)
    close(out, wanted)
