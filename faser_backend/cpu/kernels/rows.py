# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""Operations of a decoder layer on single rows, inlined into the CPU's kernels: norms, rotary embedding, SwiGLU.

A row's bits depend on the row alone: every row runs through the same code.
"""

from __future__ import annotations

import numba
import numpy as np

from faser_backend.cpu.kernels.compilation import WITHIN_KERNELS
from faser_backend.cpu.kernels.vectors import exp2

LOG2_E = np.float32(np.log2(np.e))
ONE = np.float32(1)
inlined = numba.njit(forceinline=True, **WITHIN_KERNELS)
spliced = numba.njit(inline="always", **WITHIN_KERNELS)
# For sums of a whole row. Their order depends on the row's size alone, because each loop is compiled once.
inlined_reassociated = numba.njit(
    forceinline=True, fastmath={"reassoc", "contract", "nsz", "arcp", "nnan", "ninf"}, **WITHIN_KERNELS
)


@inlined
def normalise_rows(out, rows, weight, eps, first, last):
    """Normalises rows first .. last - 1."""
    for row in range(first, last):
        normalise(out[row], rows[row], weight, eps)


@inlined_reassociated
def normalise(out, x, weight, eps):
    """Computes the RMSNorm of one row; out may be x."""
    total = np.float32(0)
    for d in range(x.size):
        total += x[d] * x[d]
    factor = ONE / np.sqrt(total / np.float32(x.size) + eps)
    for d in range(x.size):
        out[d] = x[d] * factor * weight[d]  # weight may be longer than the row


@inlined
def rotate(x, cos, sin):
    """Applies the rotary embedding to one head in place, to the pairs of values i and i + half."""
    half = cos.size
    for i in range(half):
        a, b = x[i], x[i + half]
        x[i] = a * cos[i] - b * sin[i]
        x[i + half] = b * cos[i] + a * sin[i]


@inlined
def gated_silu(gate, up):
    """Computes gate = silu(gate) * up in place."""
    for j in range(gate.size):
        gate[j] = gate[j] / (ONE + exp2(-gate[j] * LOG2_E)) * up[j]  # pyright: ignore[reportCallIssue]
