"""How far a target call is from what the machine can do: its bytes and FLOPs over measured peaks.

The peaks are numpy's: copying a buffer as large as the weights (so the same caches serve it), and a
large float32 matrix product.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from faser_backend.manifest import ModelSpec

REPEATS = 7
MATMUL_SIZE = 1024


def roofline(spec: ModelSpec, weight_bytes: int) -> dict[str, float]:
    """Floors of one target call of 1 row and of R rows, without attention and KV traffic."""
    head = spec.hidden_size * spec.vocab_size
    attention = spec.hidden_size * spec.head_dim * (2 * spec.num_heads + 2 * spec.num_kv_heads)
    layer = attention + 3 * spec.hidden_size * spec.intermediate_size
    flops_per_row = 2.0 * (spec.num_layers * layer + head)
    bandwidth = _copy_bytes_per_s(weight_bytes)
    peak = _matmul_flops_per_s()
    return {
        "weight_bytes": weight_bytes,
        "flops_per_row": flops_per_row,
        "copy_gb_per_s": bandwidth / 1e9,
        "matmul_gflops": peak / 1e9,
        "floor_us_1_row": 1e6 * max(weight_bytes / bandwidth, flops_per_row / peak),
        "floor_us_per_row": 1e6 * flops_per_row / peak,
        "memory_bound_rows": (weight_bytes / bandwidth) / (flops_per_row / peak),
    }


def _copy_bytes_per_s(num_bytes: int) -> float:
    """Bytes read and written per second."""
    source = np.ones(num_bytes // 4, np.float32)
    sink = np.empty_like(source)
    return 2 * source.nbytes / _best_s(lambda: np.copyto(sink, source))


def _matmul_flops_per_s() -> float:
    a = np.ones((MATMUL_SIZE, MATMUL_SIZE), np.float32)
    return 2.0 * MATMUL_SIZE**3 / _best_s(lambda: a @ a)


def _best_s(run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
