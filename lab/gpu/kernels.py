"""Kernels of the project against their references on the device, over random cases: a function each.

Every function draws a case of a type, runs kernel and reference, and returns the largest error relative to
1 + |reference|. Outputs are poisoned before, so that what a kernel does not write shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from faser_backend.device.cuda.noise import TorchNoise
from faser_backend.device.cuda.pool import DTYPES
from lab.gpu.harness import Context, Result
from plugins import decoder_reference, reference
from plugins.add_rms_norm import add_rms_norm
from plugins.exit_scores import exit_scores
from plugins.gated_silu import gated_silu
from plugins.kv_write import write_kv
from plugins.pruned_chunk_attention import pruned_chunk_attention
from plugins.rotate_heads import rotate_heads
from plugins.row_compaction import compact_rows

NUM_CASES = 24  # of each type
# Largest difference from the float32 reference, relative to 1 + its size. Products of float32 are exact in the kernel;
# half types round the weights of the mix and the result.
TOLERANCES = {"fp32": 1e-5, "fp16": 4e-3, "bf16": 3e-2}
WIDTHS = (64, 1000, 4096)  # of hidden states
POISON = 7.0


class Geometry(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_block_size: int


# Few, because each is compiled anew; tests without a GPU cover many more.
GEOMETRIES = {
    "fp32": (Geometry(32, 8, 128, 16), Geometry(4, 2, 64, 16)),
    "fp16": (Geometry(32, 8, 128, 16), Geometry(5, 1, 96, 8)),
    "bf16": (Geometry(32, 8, 128, 16), Geometry(16, 8, 128, 16)),
}


def correctness(context: Context) -> Result:
    """Every kernel against its reference over random cases; errors relative to 1 + |reference|."""
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


# -- calls of attention ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """The tensors of one call, in the launcher's order, and what the host knows of it."""

    tensors: tuple[torch.Tensor, ...]  # q, k_new, v_new, k_pool, v_pool, block_table, cu_rows, context_lens, slots
    out: torch.Tensor
    max_rows: int

    def cloned(self) -> AttentionCall:
        """The same call on pools and an output of its own."""
        q, k_new, v_new, k_pool, v_pool, *rest = self.tensors
        return AttentionCall((q, k_new, v_new, k_pool.clone(), v_pool.clone(), *rest), self.out.clone(), self.max_rows)


def attention_call(
    geometry: Geometry,
    dtype: torch.dtype,
    device: str,
    rng: np.random.Generator,
    *,
    contexts: np.ndarray,
    counts: np.ndarray,
    num_padding: int = 0,
    written_share: float = 1.0,
) -> AttentionCall:
    """A call of sequences with these contexts and rows, in blocks at random. written_share: of rows that have slots."""
    heads, kv_heads, head_dim, size = geometry
    cu_rows = np.concatenate([[0], np.cumsum(counts)])
    used, total = int(cu_rows[-1]), int(cu_rows[-1]) + num_padding
    num_columns = max(1, int(-(-(contexts + counts).max() // size)))
    num_blocks = counts.size * num_columns + 3
    table = rng.permutation(num_blocks)[: counts.size * num_columns].reshape(counts.size, num_columns)
    sequence = np.repeat(np.arange(counts.size), counts)
    position = contexts[sequence] + np.arange(used) - cu_rows[sequence]
    slots = np.full(total, -1)
    is_written = rng.random(used) < written_share
    slots[:used] = np.where(is_written, table[sequence, position // size] * size + position % size, -1)
    generator = torch.Generator(device).manual_seed(int(rng.integers(1 << 31)))

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

    def ints(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    pool = (kv_heads, num_blocks, size, head_dim)
    tensors = (
        *(normal(total, heads, head_dim), normal(total, kv_heads, head_dim), normal(total, kv_heads, head_dim)),
        *(normal(*pool), normal(*pool)),
        *(ints(table), ints(cu_rows), ints(contexts), ints(slots)),
    )
    out = torch.full((total, heads, head_dim), POISON, dtype=dtype, device=device)
    return AttentionCall(tensors, out, max(1, int(counts.max())))


def random_call(geometry: Geometry, dtype: torch.dtype, device: str, rng: np.random.Generator) -> AttentionCall:
    """Empty chunks, single rows, block borders, contexts of nothing, rows without slots and rows that are nobody's."""
    num_sequences = int(rng.integers(1, 7))
    counts = rng.integers(0, 9, num_sequences) * (rng.random() > 0.1)  # now and then all rows are pruned
    contexts = rng.integers(0, 300, num_sequences)
    snapped = rng.random(num_sequences) < 0.3
    contexts[snapped] -= contexts[snapped] % geometry.kv_block_size
    return attention_call(
        geometry,
        dtype,
        device,
        rng,
        contexts=contexts,
        counts=counts,
        num_padding=int(rng.integers(0, 4)),
        written_share=0.8,
    )


def _random_call(name: str, device: str, rng: np.random.Generator) -> AttentionCall:
    return random_call(_geometry(name, rng), DTYPES[name], device, rng)


def _geometry(name: str, rng: np.random.Generator) -> Geometry:
    return GEOMETRIES[name][int(rng.integers(len(GEOMETRIES[name])))]


# -- a check per kernel ----------------------------------------------------------------------------------------------
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
