"""The kernel of temperature and noise: numerics in the interpreter, compiled for three architectures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from faser_backend.device.noise import GumbelNoise, seed_keys
from plugins.compile import CAPABILITIES, compile_kernel
from plugins.perturb_logits import BLOCK_V, NUM_WARPS, perturb_logits, perturb_logits_kernel

ROOT = Path(__file__).resolve().parents[1]
SIGNATURE = {
    "logits": "*fp32:16",
    "table": "*i32:16",
    "keys": "*i64:16",
    "positions": "*i64:16",
    "scale": "*fp32",
    "is_random": "*fp32",
    "vocab_size": "i32:16",
    "out": "*fp32:16",
}


def test_the_interpreted_kernel_matches_its_definition() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-W", "ignore", "tests/interpreted_perturb_logits.py"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_logarithms_are_not_approximated(capability: int) -> None:
    """Near 1, where the largest noise comes from, the fast logarithm of a GPU has hardly a true digit."""
    constants = {"LOG2_SIZE": 20, "BLOCK_V": BLOCK_V}
    compiled = compile_kernel(perturb_logits_kernel, SIGNATURE, constants, capability, num_warps=NUM_WARPS)
    assert "lg2.approx" not in compiled.ptx
    assert compiled.spill_bytes == 0 and compiled.shared_bytes == 0


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
    from faser_backend.device.cuda.noise import TorchNoise

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
