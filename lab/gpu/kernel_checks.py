"""Kernels of the project against their references on the device, over random cases: a function each.

Every function draws a case of a type, runs kernel and reference, and returns the largest error relative to
1 + |reference|. Outputs are poisoned before, so that what a kernel does not write shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from faser_backend.device.cuda.noise import TorchNoise
from lab.gpu.kernel_cases import DTYPES, GEOMETRIES, AttentionCall, Geometry, random_call
from plugins import decoder_reference, reference
from plugins.add_rms_norm import add_rms_norm
from plugins.exit_scores import exit_scores
from plugins.gated_silu import gated_silu
from plugins.kv_write import write_kv
from plugins.pruned_chunk_attention import pruned_chunk_attention
from plugins.rotate_heads import rotate_heads
from plugins.row_compaction import compact_rows

WIDTHS = (64, 1000, 4096)  # of hidden states
POISON = 7.0


def _check_attention(name: str, device: str, rng: np.random.Generator) -> float:
    call = _random_call(name, device, rng)
    expected = call.cloned()
    scale, num_splits = call.tensors[0].shape[2] ** -0.5, int(rng.choice([1, 2, 5]))
    attend: Any = pruned_chunk_attention
    attend(*call.tensors, call.out, max_rows=call.max_rows, num_splits=num_splits, scale=scale)
    expect: Any = reference.pruned_chunk_attention
    expect(*expected.tensors, expected.out, scale)
    used = int(call.tensors[6][-1])
    pairs = [(call.out[:used], expected.out[:used])]
    pairs += [(call.tensors[index], expected.tensors[index]) for index in (3, 4)]
    return max(_error(*pair) for pair in pairs)


def _check_exit_scores(name: str, device: str, rng: np.random.Generator) -> float:
    num_rows, vocab_size = (int(rng.integers(1, top)) for top in (70, 900))
    hidden_size, num_candidates = int(rng.choice(WIDTHS)), int(rng.choice([1, 3, 8]))
    hidden, head = (normal(DTYPES[name], device, rng, count, hidden_size) for count in (num_rows, vocab_size))
    candidates = torch.tensor(rng.integers(0, vocab_size, (num_rows, num_candidates)), device=device)
    out = torch.empty(num_rows, num_candidates, device=device)
    error = _compare(exit_scores, reference.exit_scores, (hidden, head, candidates), out)
    return error / math.sqrt(hidden_size)  # of sums of so many products of unit normals


def _check_compaction(name: str, device: str, rng: np.random.Generator) -> float:
    hidden = _random_rows(name, device, rng, int(rng.choice(WIDTHS)))
    kept = torch.tensor(np.flatnonzero(rng.random(len(hidden)) < 0.6), device=device)
    return _compare(compact_rows, reference.compact_rows, (hidden, kept), hidden[: len(kept)])


def _check_kv_write(name: str, device: str, rng: np.random.Generator) -> float:
    call = _random_call(name, device, rng)
    expected = call.cloned()
    for tensors, write in ((call.tensors, write_kv), (expected.tensors, reference.write_kv)):
        _, k_new, v_new, k_pool, v_pool, *_, slots = tensors
        write(k_new, v_new, slots, k_pool, v_pool)
    return max(_error(call.tensors[index], expected.tensors[index]) for index in (3, 4))


def _check_norm(name: str, device: str, rng: np.random.Generator) -> float:
    hidden = _random_rows(name, device, rng, int(rng.choice(WIDTHS)))
    delta, weight = (
        normal(hidden.dtype, device, rng, *hidden.shape),
        normal(torch.float32, device, rng, hidden.shape[1]),
    )
    inputs = (hidden, delta, weight, 1e-6)
    return _compare(add_rms_norm, decoder_reference.add_rms_norm, inputs, hidden, hidden)


def _check_rotation(name: str, device: str, rng: np.random.Generator) -> float:
    heads, kv_heads, head_dim, _ = _geometry(name, rng)
    qkv = normal(DTYPES[name], device, rng, int(rng.integers(1, 70)), heads + 2 * kv_heads, head_dim)
    positions = torch.tensor(rng.integers(0, 500, len(qkv)), device=device)
    angles = torch.outer(torch.arange(500), 10_000.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2))).to(device)
    norm = normal(torch.float32, device, rng, head_dim) if rng.random() < 0.5 else None

    def rotate(*arguments: Any) -> None:
        rotate_heads(*arguments, num_heads=heads, q_norm=norm, k_norm=norm, eps=1e-6)

    def expect(qkv: Any, positions: Any, cos: Any, sin: Any, out: Any) -> None:
        decoder_reference.rotate_heads(qkv, positions, cos, sin, norm, norm, 1e-6, heads, out)

    return _compare(rotate, expect, (qkv, positions, angles.cos(), angles.sin()), qkv[:, : heads + kv_heads])


def _check_gate(name: str, device: str, rng: np.random.Generator) -> float:
    width = int(rng.choice(WIDTHS))
    gate_up = _random_rows(name, device, rng, 2 * width)
    return _compare(gated_silu, decoder_reference.gated_silu, (gate_up,), gate_up[:, :width])


def _check_noise(name: str, device: str, rng: np.random.Generator) -> float:
    """Always float32: scores with noise on the device against the definition on the host."""
    del name
    num_rows, vocab_size = int(rng.integers(1, 20)), 5000
    logits = normal(torch.float32, device, rng, num_rows, vocab_size)
    keys, positions = (torch.tensor(rng.integers(0, 1 << 62, num_rows), device=device) for _ in range(2))
    scale = torch.tensor(rng.uniform(0.5, 2.0, num_rows), dtype=torch.float32, device=device)
    weight = torch.tensor(rng.integers(0, 2, num_rows), dtype=torch.float32, device=device)
    arguments = (logits, keys, positions, scale, weight)
    found = TorchNoise(vocab_size, torch.device(device)).perturbed(*arguments)
    expected = TorchNoise(vocab_size, torch.device("cpu")).perturbed(*(each.cpu() for each in arguments))
    return _error(found.cpu(), expected)


def _geometry(name: str, rng: np.random.Generator) -> Geometry:
    return GEOMETRIES[name][int(rng.integers(len(GEOMETRIES[name])))]


def _random_call(name: str, device: str, rng: np.random.Generator) -> AttentionCall:
    return random_call(_geometry(name, rng), DTYPES[name], device, rng)


def _random_rows(name: str, device: str, rng: np.random.Generator, width: int) -> torch.Tensor:
    return normal(DTYPES[name], device, rng, int(rng.integers(1, 70)), width)


def _compare(
    kernel: Callable[..., None], expect: Callable[..., None], inputs: tuple[Any, ...], *like: torch.Tensor
) -> float:
    """The largest error over outputs of these shapes, poisoned before."""
    outputs = [
        [torch.full(each.shape, POISON, dtype=each.dtype, device=each.device) for each in like] for _ in range(2)
    ]
    for run, own in zip((kernel, expect), outputs, strict=True):
        run(*inputs, *own)
    return max(_error(*pair) for pair in zip(*outputs, strict=True))


CHECKS: dict[str, Callable[[str, str, np.random.Generator], float]] = {
    "pruned_chunk_attention": _check_attention,
    "exit_scores": _check_exit_scores,
    "compact_rows": _check_compaction,
    "write_kv": _check_kv_write,
    "add_rms_norm": _check_norm,
    "rotate_heads": _check_rotation,
    "gated_silu": _check_gate,
    "perturb_logits": _check_noise,
}


def normal(dtype: torch.dtype, device: str, rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.tensor(rng.standard_normal(shape), dtype=dtype, device=device)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference relative to 1 + |expected|; NaN counts as infinite."""
    if not found.numel():
        return 0.0
    error = ((found.float() - expected.float()).abs() / (1.0 + expected.float().abs())).nan_to_num(nan=math.inf)
    return float(error.max())
