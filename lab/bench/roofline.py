"""How far a target call is from what the machine can do: its bytes and FLOPs over peaks that numpy measures.

The peaks are copying a buffer as large as the weights (so the same caches serve it), and a large float32 product.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from faser_backend.manifest import ModelSpec
from lab.shapes import row_flops

REPEATS = 7
MATMUL_SIZE = 1024


def roofline(spec: ModelSpec, weight_bytes: int) -> dict[str, float]:
    """Floors of one target call of 1 row and of R rows, without attention and KV traffic."""
    source = np.ones(weight_bytes // 4, np.float32)
    sink, square = np.empty_like(source), np.ones((MATMUL_SIZE, MATMUL_SIZE), np.float32)
    bandwidth = 2 * source.nbytes / _best_s(lambda: np.copyto(sink, source))
    peak = 2.0 * MATMUL_SIZE**3 / _best_s(lambda: square @ square)
    memory_s, row_s = weight_bytes / bandwidth, row_flops(spec) / peak
    return {
        "weight_bytes": weight_bytes,
        "flops_per_row": row_flops(spec),
        "copy_gb_per_s": bandwidth / 1e9,
        "matmul_gflops": peak / 1e9,
        "floor_us_1_row": 1e6 * max(memory_s, row_s),
        "floor_us_per_row": 1e6 * row_s,
        "memory_bound_rows": memory_s / row_s,
    }


def _best_s(run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
