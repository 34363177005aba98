"""Peaks of the device (copies, matrix products, graph replays) and the share of them that attention reaches.

Times are medians, by events on a GPU and by the host's clock on a CPU: a peak can be reached repeatedly.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable

import numpy as np
import torch

from faser_backend.lab.environment import query_gpu
from faser_backend.lab.gpu.harness import Context, Result
from faser_backend.lab.gpu.kernel_cases import Shape, make_call
from faser_backend.lab.shapes import AttentionShape, attention_bytes
from faser_backend.plugins.attention_config import PART_TOKENS, choose_num_splits
from faser_backend.plugins.product import MatrixProduct
from faser_backend.plugins.pruned_chunk_attention import pruned_chunk_attention

GEMM_ROWS = (1, 8, 32, 64, 160, 320, 512, 8192)
ROTATED_BYTES = 192 << 20  # copies of a call cycle through this much memory, several times the largest cache
MAX_COPIES = 128
WARMUPS, REPEATS, CPU_REPEATS = 2, 15, 3

Work = Callable[[], object]


def median_us(device: str, work: Work) -> float:
    """Returns the median time of `work`, queued on the current stream, until the device has done it."""
    samples = []
    for _ in range(WARMUPS + (REPEATS if device == "cuda" else CPU_REPEATS)):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) * 1e3)
        else:
            start = time.perf_counter()
            work()
            samples.append((time.perf_counter() - start) * 1e6)
    return float(np.median(samples[WARMUPS:]))


def as_graph(device: str, work: Work) -> Work:
    """Returns the work as a captured graph, so that launches cost no host time; the work itself on a CPU."""
    if device != "cuda":
        return work
    work()  # compiles before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def copy_bytes_per_s(device: str, num_bytes: int) -> float:
    """Returns the bytes read and written per second by a copy between two buffers of num_bytes each."""
    source = torch.empty(num_bytes // 4, dtype=torch.float32, device=device).normal_()
    sink = torch.empty_like(source)
    return 2 * num_bytes / median_us(device, lambda: sink.copy_(source)) * 1e6


def peaks(context: Context) -> Result:
    """Measures copy bandwidth over buffer sizes, and bf16 products by rows, torch's and the project's."""
    sizes = (1 << 16, 1 << 20) if context.is_tiny else (4 << 20, 32 << 20, 256 << 20, 1 << 30, 4 << 30)
    found: Result = {"copies": [], "products": []}
    for num_bytes in sizes:
        rate = copy_bytes_per_s(context.device, num_bytes)
        found["copies"].append({"mib": num_bytes / 2**20, "gb_per_s": rate / 1e9})
        context.save(found)
    width, depth = (64, 64) if context.is_tiny else (12288, 4096)
    for num_rows in (1, 8) if context.is_tiny else GEMM_ROWS:
        found["products"].append(_product(context.device, num_rows, depth, width))
        context.save(found)
    if context.is_cuda:
        found["clocks"] = query_gpu()  # right after the largest product, while clocks are still those under load
    return found


def _product(device: str, num_rows: int, depth: int, width: int) -> dict[str, float]:
    """Times x [num_rows, depth] @ w [width, depth]^T over several weights, so that none stays in the cache."""
    weights = [torch.empty(width, depth, dtype=torch.bfloat16, device=device).normal_() for _ in range(4)]
    x = torch.empty(num_rows, depth, dtype=torch.bfloat16, device=device).normal_()

    def each_us(multiply: Callable[[torch.Tensor, torch.Tensor], object]) -> float:
        return median_us(device, as_graph(device, lambda: [multiply(x, weight) for weight in weights])) / 4

    us, own_us = each_us(torch.nn.functional.linear), each_us(MatrixProduct(x.device))
    return {
        "rows": num_rows,
        "us": us,
        "own_us": own_us,  # by plugins.product
        "tflops": 2.0 * num_rows * depth * width / us / 1e6,
        "weight_gb_per_s": 2.0 * depth * width / us / 1e3,
    }


def bandwidth(context: Context) -> Result:
    """Compares attention's bandwidth with the copy bandwidth measured in the same minute."""
    copied = copy_bytes_per_s(context.device, 1 << 20 if context.is_tiny else 1 << 30)
    found: Result = {"copy_gb_per_s": copied / 1e9, "attention": []}
    chosen = [AttentionShape(*size) for size in itertools.product((1, 8, 32, 64), (256, 1024, 4096), (1, 5))]
    if context.is_tiny:
        chosen = [AttentionShape(2, 40, 5, 4, 2, 32)]
    for shape in sorted(chosen, key=lambda shape: (shape.num_sequences, shape.context) != (32, 1024)):
        if context.time_left_s < 2.0:
            break
        us, num_splits = _time_attention(context, shape)
        rate = attention_bytes(shape, 2) / us * 1e6
        sizes = {"batch": shape.num_sequences, "context": shape.context, "rows": shape.rows, "num_splits": num_splits}
        found["attention"].append(sizes | {"us": us, "gb_per_s": rate / 1e9, "share_of_copy": rate / copied})
        context.save(found)
    found["attention"].sort(key=lambda row: (row["batch"], row["context"], row["rows"]))
    return found


def _time_attention(context: Context, shape: AttentionShape) -> tuple[float, int]:
    """Returns the microseconds of one call in bf16, and the number of parts of its context. Copies of the call have
    pools of their own, so that each is read from memory and not from the cache."""
    num_copies = math.ceil(ROTATED_BYTES / attention_bytes(shape, 2))
    num_copies = 2 if context.is_tiny else min(max(2, num_copies), MAX_COPIES)
    b, context_len, rows, heads, kv_heads, head_dim, size = shape
    uniform = Shape((rows,) * b, (context_len,) * b, kv_heads, heads // kv_heads, head_dim, size, torch.bfloat16)
    calls = [make_call(uniform, context.seed + copy).to(context.device) for copy in range(num_copies)]
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count if context.is_cuda else 132
    num_parts = -(-(context_len + rows) // PART_TOKENS)
    num_splits = choose_num_splits(kv_heads, num_parts, num_sms, b)

    def run() -> None:
        for call in calls:
            pruned_chunk_attention(*call, max_rows=rows, num_splits=num_splits)

    return median_us(context.device, as_graph(context.device, run)) / num_copies, num_splits
