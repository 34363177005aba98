"""Row kernels of a decoder layer: interpreted against their references, compiled for GPUs, refused where wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plugins.add_rms_norm import add_rms_norm, add_rms_norm_kernel, num_warps
from plugins.compile import CAPABILITIES, compile_kernel
from plugins.gated_silu import gated_silu, gated_silu_kernel
from plugins.rotate_heads import rotate_heads, rotate_heads_kernel

ROOT = Path(__file__).resolve().parents[1]


def test_interpreted_kernels_give_what_their_references_give():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/interpreted_rows.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernels_compile_without_spills(capability: int, dtype: str):
    data, block_d = f"*{dtype}:16", 4096
    norm = compile_kernel(
        add_rms_norm_kernel,
        {
            **dict.fromkeys(["hidden", "delta", "summed", "out"], data),
            "weight": "*fp32:16",
            "eps": "fp32",
            "hidden_size": "i32:16",
        },
        {"BLOCK_D": block_d},
        capability,
        num_warps=num_warps(block_d),
    )
    rotation = compile_kernel(
        rotate_heads_kernel,
        {
            **dict.fromkeys(["qkv", "out"], data),
            **dict.fromkeys(["cos", "sin", "q_norm", "k_norm"], "*fp32:16"),
            "positions": "*i64:16",
            "eps": "fp32",
            "row_stride": "i32:16",
            "num_heads": "i32",
        },
        {"HALF": 64, "BLOCK_H": 64},
        capability,
        num_warps=1,
    )
    gate = compile_kernel(
        gated_silu_kernel, {"gate_up": data, "size": "i32:16", "out": data}, {"BLOCK": 1024}, capability
    )
    for compiled in (norm, rotation, gate):
        assert compiled.spill_bytes == 0, compiled.name
        assert "ld.global.v" in compiled.ptx, f"{compiled.name} loads several values at once"


def test_kernels_compile_without_what_is_optional():
    """The first norm of a model has nothing to add, and most models do not norm their heads."""
    norm = {"weight": "*fp32:16", "eps": "fp32", "hidden_size": "i32:16", "hidden": "*bf16:16", "out": "*bf16:16"}
    assert compile_kernel(add_rms_norm_kernel, norm, {"delta": None, "summed": None, "BLOCK_D": 1024}, 90).cubin
    rotation = {
        "qkv": "*bf16:16",
        "positions": "*i64:16",
        "cos": "*fp32:16",
        "sin": "*fp32:16",
        "eps": "fp32",
        "row_stride": "i32:16",
        "num_heads": "i32",
        "out": "*bf16:16",
    }
    constants = {"q_norm": None, "k_norm": None, "HALF": 32, "BLOCK_H": 32}
    assert compile_kernel(rotate_heads_kernel, rotation, constants, 90, num_warps=1).cubin


def test_shapes_and_types_that_do_not_fit_are_refused():
    rows, weight = torch.zeros(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match="weight: dtype"):
        add_rms_norm(rows, None, weight.half(), 1e-5, None, rows.clone())
    with pytest.raises(ValueError, match="delta and summed: both or neither"):
        add_rms_norm(rows, rows, weight, 1e-5, None, rows.clone())
    with pytest.raises(ValueError, match="hidden_size = 20000: must be at most 16384"):
        add_rms_norm(torch.zeros(1, 20_000), None, weight, 1e-5, None, rows)
    with pytest.raises(ValueError, match=r"gate_up: shape \[2, 8\], expected \[2, 6\]"):
        gated_silu(rows, torch.zeros(2, 3))
    qkv, table, positions = torch.zeros(2, 4, 8), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="q_norm and k_norm"):
        rotate_heads(qkv, positions, table, table, torch.zeros(2, 3, 8), num_heads=2, q_norm=weight)
    with pytest.raises(ValueError, match=r"out: shape \[2, 4, 8\], expected \[2, 3, 8\]"):
        rotate_heads(qkv, positions, table, table, qkv, num_heads=2)
    with pytest.raises(ValueError, match="positions: dtype"):
        rotate_heads(qkv, positions.int(), table, table, torch.zeros(2, 3, 8), num_heads=2)
