"""What the device can do at best: copies, reads, matrix products. The ceilings of every other part."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lab.gpu.report import query_gpu
from lab.gpu.timing import take_turns
from lab.gpu.worker import Context, Result

GEMM_ROWS = (1, 8, 32, 64, 160, 320, 512, 8192)
REPEATS = 15


def run(context: Context) -> Result:
    """Copy bandwidth over buffer sizes; bf16 products of a tall weight with few rows, and of a large square."""
    sizes = (1 << 16, 1 << 20) if context.is_tiny else (4 << 20, 32 << 20, 256 << 20, 1 << 30, 4 << 30)
    found: Result = {"copies": [], "products": []}
    for num_bytes in sizes:
        rate = copy_bytes_per_s(context.device, num_bytes)
        found["copies"].append({"mib": num_bytes / 2**20, "gb_per_s": rate / 1e9})
        context.save(found)
    width, depth = (64, 64) if context.is_tiny else (12288, 4096)
    rows = (1, 8) if context.is_tiny else GEMM_ROWS
    for num_rows in rows:
        found["products"].append(_product(context.device, num_rows, depth, 8192 if num_rows == 8192 else width))
        context.save(found)
    if context.is_cuda:
        found["clocks"] = query_gpu()  # right after the largest product, before the device rests
    found["copy_gb_per_s"] = max(row["gb_per_s"] for row in found["copies"][-2:])
    found["gemm_tflops"] = max(row["tflops"] for row in found["products"])
    return found


def copy_bytes_per_s(device: str, num_bytes: int) -> float:
    """Bytes read and written per second by a copy between two buffers of num_bytes each."""
    source = torch.empty(num_bytes // 4, dtype=torch.float32, device=device).normal_()
    sink = torch.empty_like(source)
    return 2 * num_bytes / _best_us(device, lambda: sink.copy_(source)) * 1e6


def _product(device: str, num_rows: int, depth: int, width: int) -> dict[str, float]:
    """x [num_rows, depth] @ w [width, depth]^T, over several weights so that none stays in the cache."""
    copies = 1 if num_rows == 8192 else 4
    weights = [torch.empty(width, depth, dtype=torch.bfloat16, device=device).normal_() for _ in range(copies)]
    x = torch.empty(num_rows, depth, dtype=torch.bfloat16, device=device).normal_()

    def multiply() -> None:
        for weight in weights:
            torch.nn.functional.linear(x, weight)

    each_us = _best_us(device, multiply) / copies
    return {
        "rows": num_rows,
        "us": each_us,
        "tflops": 2.0 * num_rows * depth * width / each_us / 1e6,
        "weight_gb_per_s": 2.0 * depth * width / each_us / 1e3,
    }


def _best_us(device: str, work: Callable[[], object]) -> float:
    """The median: peaks are what can be had again and again."""
    return take_turns(device, {"": work}, 3 if device == "cpu" else REPEATS)[""].median_us
