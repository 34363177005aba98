# ruff: noqa: PLR0917 (the arguments of the kernels)
"""What the row kernels of a decoder layer compute, in plain torch: readable, on any device.

Launchers run these where a tensor is not on a GPU; the kernels are checked against them. All arithmetic is
float32, rounded once to the type of `out`.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def add_rms_norm(hidden, delta, weight, eps, summed, out) -> None:
    """summed = hidden + delta in hidden's type, where there is a delta; out = the RMS norm of that."""
    if delta is not None:
        hidden = torch.add(hidden, delta, out=summed)
    out.copy_(functional.rms_norm(hidden.float(), weight.shape, weight, eps))


def rotate_heads(qkv, positions, cos, sin, q_norm, k_norm, eps, num_heads, out) -> None:
    """Queries and keys of qkv [T, H + 2 * Hkv, hd], normed per head where there are weights, turned by position."""
    heads = qkv[:, : out.shape[1]].float()
    if q_norm is not None:
        weight = torch.cat((q_norm.expand(num_heads, -1), k_norm.expand(out.shape[1] - num_heads, -1)))
        heads = functional.rms_norm(heads, q_norm.shape, None, eps) * weight
    first, second = heads.chunk(2, dim=2)
    cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # [T, 1, hd / 2]
    out.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2))


def gated_silu(gate_up, out) -> None:
    """out [T, I] = silu of the first half of gate_up [T, 2 * I] times the second."""
    gate, up = gate_up.float().chunk(2, dim=1)
    out.copy_(functional.silu(gate) * up)
