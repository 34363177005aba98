"""Kernels on the device: right first, then how near to the copy bandwidth."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch

from lab import shapes
from lab.gpu.device import copy_bytes_per_s
from lab.gpu.kernel_cases import DTYPES, TOLERANCES, timed_calls
from lab.gpu.kernel_checks import CHECKS
from lab.gpu.timing import Timing, as_graph, take_turns
from lab.gpu.worker import Context, Result
from lab.shapes import AttentionShape
from plugins.attention_config import choose_num_splits
from plugins.pruned_chunk_attention import pruned_chunk_attention
from plugins.split_combine import workspace_numel

NUM_CASES = 24  # of each type
ROTATED_BYTES = 192 << 20  # copies of a call go through so much memory: several times the largest cache
MAX_COPIES = 128
REPEATS = 15


def correctness(context: Context) -> Result:
    """Every kernel against its reference over random cases; errors relative to 1 + |reference|."""
    found: Result = {"cases": [], "tolerances": TOLERANCES}
    num_cases = 3 if context.is_tiny else NUM_CASES
    for name, dtype in DTYPES.items():
        rng = np.random.default_rng([context.seed, len(name), dtype.itemsize])
        for kernel, check in CHECKS.items():
            worst = [check(name, context.device, rng) for _ in range(num_cases) if context.has_time()]
            if not worst:
                break
            error = max(worst)
            found["cases"].append(
                {
                    "kernel": kernel,
                    "dtype": name,
                    "num_cases": len(worst),
                    "max_error": error,
                    "is_right": bool(error <= TOLERANCES[name]),
                }
            )
        context.save(found)
    return found


def bandwidth(context: Context) -> Result:
    """Achieved bandwidth of each kernel beside the copy bandwidth that was measured in the same minute."""
    copied = copy_bytes_per_s(context.device, 1 << 20 if context.is_tiny else 1 << 30)
    found: Result = {"copy_gb_per_s": copied / 1e9, "attention": []}
    sizes = itertools.product((1, 8, 32, 64), (256, 1024, 4096), (1, 5))
    chosen = [AttentionShape(*size) for size in sizes]
    if context.is_tiny:
        chosen = [AttentionShape(2, 40, 5, 4, 2, 32)]
    for shape in sorted(chosen, key=lambda shape: (shape.num_sequences, shape.context) != (32, 1024)):
        if not context.has_time(2.0):
            break
        timing, num_splits = time_attention(context, shape)
        rate = shapes.attention_bytes(shape, 2) / timing.median_us * 1e6
        found["attention"].append(
            {
                "batch": shape.num_sequences,
                "context": shape.context,
                "rows": shape.rows,
                "num_splits": num_splits,
                **as_fields(timing),
                "gb_per_s": rate / 1e9,
                "share_of_copy": rate / copied,
            }
        )
        context.save(found)
    found["attention"].sort(key=lambda row: (row["batch"], row["context"], row["rows"]))
    return found


def time_attention(context: Context, shape: AttentionShape) -> tuple[Timing, int]:
    """Time of one call in bf16, and into how many parts its context was split."""
    num_bytes = shapes.attention_bytes(shape, 2)
    num_copies = min(MAX_COPIES, max(2, math.ceil(ROTATED_BYTES / num_bytes)))
    calls = timed_calls(shape, 2 if context.is_tiny else num_copies, torch.bfloat16, context.device, context.seed)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count if context.is_cuda else 132
    num_splits = choose_num_splits(shape.num_sequences, shape.num_kv_heads, shape.context, num_sms)
    numel = workspace_numel(shape.num_sequences * shape.rows, shape.num_heads, shape.head_dim, num_splits)
    workspace = torch.empty(numel, dtype=torch.float32, device=context.device)

    attend: Any = pruned_chunk_attention

    def run() -> None:
        for call in calls:
            attend(*call.tensors, call.out, max_rows=call.max_rows, num_splits=num_splits, workspace=workspace)

    work = as_graph(context.device, run)
    timing = take_turns(context.device, {"attention": work}, 2 if context.is_tiny else REPEATS)["attention"]
    return Timing(*(value / len(calls) for value in timing)), num_splits


def as_fields(timing: Timing) -> dict[str, float]:
    """For JSON."""
    return {"us": timing.median_us, "spread": timing.spread}
