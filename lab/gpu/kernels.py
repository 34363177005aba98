"""Checks the project's kernels against their references on the device, over random cases.

Each function draws a case of a type, runs kernel and reference, and returns the largest error relative to 1 +
|reference|. Outputs are poisoned before, so that an unwritten entry is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from faser_backend.cuda.pool import DTYPES
from faser_backend.cuda.sampler import TorchNoise
from faser_backend.lab.gpu.harness import Context, Result
from faser_backend.lab.gpu.kernel_cases import SENTINEL, Call, make_call, random_shape
from faser_backend.plugins import reference
from faser_backend.plugins.add_rms_norm import add_rms_norm
from faser_backend.plugins.exit_scores import exit_scores
from faser_backend.plugins.gated_silu import gated_silu
from faser_backend.plugins.product import MatrixProduct
from faser_backend.plugins.pruned_chunk_attention import pruned_chunk_attention
from faser_backend.plugins.rotate_heads import rotate_heads

NUM_CASES = 24  # of each type
# Largest difference from the float32 reference, relative to 1 + its size. Products of float32 are exact in the kernel;
# half types round the weights of the mix and the result.
TOLERANCES = {"fp32": 1e-5, "fp16": 4e-3, "bf16": 3e-2}
WIDTHS = (64, 1000, 4096)  # of hidden states
WEIGHTS = ((4096, 1024), (1024, 3072))  # outputs and inputs of products
ROW_COUNTS = (1, 5, 16, 33, 64, 65, 200, 512)
POISON = 7.0
# Heads and blocks by type. They are few because each is compiled; tests without a GPU cover many more.
COMMON = {"num_kv_heads": 8, "group": 4, "head_dim": 128, "kv_block_size": 16}
GEOMETRIES = {
    "fp32": (COMMON, {"num_kv_heads": 2, "group": 2, "head_dim": 64, "kv_block_size": 16}),
    "fp16": (COMMON, {"num_kv_heads": 1, "group": 5, "head_dim": 96, "kv_block_size": 8}),
    "bf16": (COMMON, {**COMMON, "group": 2}),
}


def correctness(context: Context) -> Result:
    """Checks every kernel against its reference over random cases; errors are relative to 1 + |reference|."""
    found: Result = {"cases": [], "tolerances": TOLERANCES}
    num_cases = 3 if context.is_tiny else NUM_CASES
    for name, dtype in DTYPES.items():
        rng = np.random.default_rng([context.seed, len(name), dtype.itemsize])
        for kernel, check in CHECKS.items():
            errors = [check(name, context.device, rng) for _ in range(num_cases) if context.time_left_s > 0]
            if not errors:
                break
            case = {"kernel": kernel, "dtype": name, "num_cases": len(errors), "max_error": max(errors)}
            found["cases"].append(case | {"is_right": bool(max(errors) <= TOLERANCES[name])})
        context.save(found)
    return found


def _random_call(name: str, device: str, rng: np.random.Generator) -> Call:
    """Draws a call whose contexts are five times as long as those of the tests."""
    shape = random_shape(rng, DTYPES[name])
    own = GEOMETRIES[name][int(rng.integers(len(GEOMETRIES[name])))]
    contexts = tuple(5 * context for context in shape.contexts)
    return make_call(replace(shape, contexts=contexts, **own), int(rng.integers(1 << 31))).to(device)


def _check_attention(name: str, device: str, rng: np.random.Generator) -> float:
    """Also compares bits of results with other tiles and parts."""
    call = _random_call(name, device, rng)
    expected, other, used = call.with_own_results(), call.with_own_results(), int(call.cu_rows[-1])
    longest, is_causal = max(1, int(call.cu_rows.diff().max())), rng.random() < 0.7
    for each, max_rows, num_splits in zip((call, other), (longest, 1), rng.permutation((1, 8)), strict=True):
        options = {"num_splits": int(num_splits), "num_sms": int(rng.integers(2, 133)), "is_causal": is_causal}
        pruned_chunk_attention(*each, max_rows=max_rows, **options)
    reference.pruned_chunk_attention(*expected, is_causal=is_causal)
    is_left = bool((call.out[used:] == SENTINEL).all()) and torch.equal(call.out, other.out)
    is_left &= _same_bits(call, expected)
    return _error(call.out[:used], expected.out[:used]) if is_left else math.inf


def _same_bits(call: Call, expected: Call) -> bool:
    """Returns whether the pools are equal bit by bit, NaN included."""
    kind = torch.int32 if call.q.dtype == torch.float32 else torch.int16
    pairs = ((call.k_pool, expected.k_pool), (call.v_pool, expected.v_pool))
    return all(torch.equal(found.view(kind), wanted.view(kind)) for found, wanted in pairs)


def _check_exit_scores(name: str, device: str, rng: np.random.Generator) -> float:
    num_rows, vocab_size = (int(rng.integers(1, top)) for top in (70, 900))
    hidden_size, num_candidates = int(rng.choice(WIDTHS)), int(rng.choice([1, 3, 8]))
    hidden, head = (normal(DTYPES[name], device, rng, count, hidden_size) for count in (num_rows, vocab_size))
    candidates = torch.tensor(rng.integers(0, vocab_size, (num_rows, num_candidates)), device=device)
    out = torch.empty(num_rows, num_candidates, device=device)
    error = _compare(exit_scores, reference.exit_scores, (hidden, head, candidates), out)
    return error / math.sqrt(hidden_size)  # a sum of this many products of unit normals


def _check_norm(name: str, device: str, rng: np.random.Generator) -> float:
    hidden = _random_rows(name, device, rng, int(rng.choice(WIDTHS)))
    delta = normal(hidden.dtype, device, rng, *hidden.shape)
    inputs = (hidden, delta, normal(torch.float32, device, rng, hidden.shape[1]), 1e-6)
    return _compare(add_rms_norm, reference.add_rms_norm, inputs, hidden, hidden)


def _check_rotation(name: str, device: str, rng: np.random.Generator) -> float:
    kv_heads, group, head_dim, _ = GEOMETRIES[name][int(rng.integers(2))].values()
    heads = kv_heads * group
    qkv = normal(DTYPES[name], device, rng, int(rng.integers(1, 70)), heads + 2 * kv_heads, head_dim)
    positions = torch.tensor(rng.integers(0, 500, len(qkv)), device=device)
    angles = torch.outer(torch.arange(500), 10_000.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2))).to(device)
    norm = normal(torch.float32, device, rng, head_dim) if rng.random() < 0.5 else None

    rotate = partial(rotate_heads, num_heads=heads, q_norm=norm, k_norm=norm, eps=1e-6)

    def expect(qkv: Any, positions: Any, cos: Any, sin: Any, out: Any) -> None:
        reference.rotate_heads(qkv, positions, cos, sin, norm, norm, 1e-6, heads, out)

    return _compare(rotate, expect, (qkv, positions, angles.cos(), angles.sin()), qkv[:, : heads + kv_heads])


def _check_gate(name: str, device: str, rng: np.random.Generator) -> float:
    gate_up = _random_rows(name, device, rng, 2 * int(rng.choice(WIDTHS)))
    return _compare(gated_silu, reference.gated_silu, (gate_up,), gate_up.chunk(2, dim=1)[0])


def _check_product(name: str, device: str, rng: np.random.Generator) -> float:
    """Also compares bits of rows between calls; a CPU's products differ, so there is one call there."""
    shape = WEIGHTS[int(rng.integers(len(WEIGHTS)))]
    weight = normal(DTYPES[name], device, rng, *shape) / math.sqrt(shape[1])
    counts, product = (ROW_COUNTS if weight.is_cuda else (3,)), MatrixProduct(weight.device)
    rows, given = normal(weight.dtype, device, rng, counts[-1], shape[1]), (weight, weight[:, 0].clone())
    *others, found = (product(rows[:n], *given, torch.full((n, shape[0]), POISON, device=device)) for n in counts)
    reference.product(rows, *given, expected := torch.empty_like(found))
    is_equal = all(torch.equal(other, found[: len(other)]) for other in others)
    return _error(found, expected) if is_equal else math.inf


def _check_noise(_: str, device: str, rng: np.random.Generator) -> float:
    """Compares scores with noise on the device with the host's definition, always in float32."""
    num_rows, vocab_size = int(rng.integers(1, 20)), 5000
    logits = normal(torch.float32, device, rng, num_rows, vocab_size)
    keys, positions = (torch.tensor(rng.integers(0, 1 << 62, num_rows), device=device) for _ in range(2))
    scale = torch.tensor(rng.uniform(0.5, 2.0, num_rows), dtype=torch.float32, device=device)
    weight = torch.tensor(rng.integers(0, 2, num_rows), dtype=torch.float32, device=device)
    arguments = (logits, keys, positions, scale, weight)
    found = TorchNoise(vocab_size, torch.device(device)).perturbed(*arguments)
    expected = TorchNoise(vocab_size, torch.device("cpu")).perturbed(*(each.cpu() for each in arguments))
    return _error(found.cpu(), expected)


def _random_rows(name: str, device: str, rng: np.random.Generator, width: int) -> torch.Tensor:
    return normal(DTYPES[name], device, rng, int(rng.integers(1, 70)), width)


def _compare(
    kernel: Callable[..., None], expect: Callable[..., None], inputs: tuple[Any, ...], *like: torch.Tensor
) -> float:
    """Returns the largest error over outputs of these shapes, which are poisoned before."""
    outputs = [
        [torch.full(each.shape, POISON, dtype=each.dtype, device=each.device) for each in like] for _ in range(2)
    ]
    for run, own in zip((kernel, expect), outputs, strict=True):
        run(*inputs, *own)
    return max(_error(*pair) for pair in zip(*outputs, strict=True))


CHECKS: dict[str, Callable[[str, str, np.random.Generator], float]] = {
    "pruned_chunk_attention": _check_attention,
    "exit_scores": _check_exit_scores,
    "add_rms_norm": _check_norm,
    "rotate_heads": _check_rotation,
    "gated_silu": _check_gate,
    "product": _check_product,
    "perturb_logits": _check_noise,
}


def normal(dtype: torch.dtype, device: str, rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.tensor(rng.standard_normal(shape), dtype=dtype, device=device)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest difference relative to 1 + |expected|; NaN counts as infinite."""
    if not found.numel():
        return 0.0
    error = ((found.float() - expected.float()).abs() / (1.0 + expected.float().abs())).nan_to_num(nan=math.inf)
    return float(error.max())
