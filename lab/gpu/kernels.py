"""Kernels on the device: right first, then how near to the copy bandwidth, then launches around the table's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from lab import shapes
from lab.gpu.device import copy_bytes_per_s
from lab.gpu.kernel_cases import DTYPES, TOLERANCES, timed_calls
from lab.gpu.kernel_checks import CHECKS, normal
from lab.gpu.timing import Timing, as_graph, take_turns
from lab.gpu.worker import Context, Result
from lab.shapes import AttentionShape
from plugins import pruned_chunk_attention as attention_module
from plugins.attention_config import LaunchConfig, choose_num_splits, launch_config
from plugins.exit_scores import exit_scores
from plugins.kv_write import write_kv
from plugins.pruned_chunk_attention import pruned_chunk_attention
from plugins.row_compaction import compact_rows
from plugins.split_combine import workspace_numel

NUM_CASES = 24  # of each type
ROTATED_BYTES = 192 << 20  # copies of a call go through so much memory: several times the largest cache
MAX_COPIES = 128
REPEATS = 15
SIZES = ((32, 1024, 5), (32, 1024, 1), (8, 1024, 5), (1, 1024, 5), (32, 4096, 5), (64, 1024, 5))
SPLITS = (1, 2, 4, 8, 16)


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
    found: Result = {"copy_gb_per_s": copied / 1e9, "attention": [], "small": []}
    sizes = itertools.product((1, 8, 32, 64), (256, 1024, 4096), (1, 5))
    chosen = [AttentionShape(*size) for size in sizes]
    if context.is_tiny:
        chosen = [AttentionShape(2, 40, 5, 4, 2, 32)]
    for shape in sorted(
        chosen, key=lambda shape: (shape.num_sequences, shape.context) != (32, 1024)
    ):  # the goal's first
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
    found["small"] = _small_kernels(context, copied)
    return found


def time_attention(
    context: Context,
    shape: AttentionShape,
    *,
    num_splits: int | None = None,
    launched_as: AbstractContextManager[None] | None = None,
) -> tuple[Timing, int]:
    """Time of one call in bf16, and into how many parts its context was split. launched_as: what holds while it is
    launched."""
    num_bytes = shapes.attention_bytes(shape, 2)
    num_copies = min(MAX_COPIES, max(2, math.ceil(ROTATED_BYTES / num_bytes)))
    calls = timed_calls(shape, 2 if context.is_tiny else num_copies, torch.bfloat16, context.device, context.seed)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count if context.is_cuda else 132
    num_splits = num_splits or choose_num_splits(shape.num_sequences, shape.num_kv_heads, shape.context, num_sms)
    numel = workspace_numel(shape.num_sequences * shape.rows, shape.num_heads, shape.head_dim, num_splits)
    workspace = torch.empty(numel, dtype=torch.float32, device=context.device)

    attend: Any = pruned_chunk_attention

    def run() -> None:
        for call in calls:
            attend(*call.tensors, call.out, max_rows=call.max_rows, num_splits=num_splits, workspace=workspace)

    with launched_as or nullcontext():
        work = as_graph(context.device, run)
        timing = take_turns(context.device, {"attention": work}, 2 if context.is_tiny else REPEATS)["attention"]
    return Timing(*(value / len(calls) for value in timing)), num_splits


def _small_kernels(context: Context, copied: float) -> list[dict[str, Any]]:
    """Exit scores, row compaction and the pool write at the sizes of a verification of 32 x 5 rows."""
    num_rows, hidden_size, vocab_size = (10, 64, 100) if context.is_tiny else (160, 4096, 151_936)
    device, rng = context.device, np.random.default_rng(context.seed)
    head = torch.empty(vocab_size, hidden_size, dtype=torch.bfloat16, device=device).normal_()
    hidden = normal(torch.bfloat16, device, rng, num_rows, hidden_size)
    candidates = [torch.tensor(rng.integers(0, vocab_size, (num_rows, 8)), device=device) for _ in range(8)]
    scores = torch.empty(num_rows, 8, device=device)
    kept = torch.arange(0, num_rows, 2, device=device)
    out = torch.empty(kept.numel(), hidden_size, dtype=torch.bfloat16, device=device)
    (call,) = timed_calls(AttentionShape(num_rows // 5, 64, 5), 1, torch.bfloat16, device, 0)
    _, k_new, v_new, k_pool, v_pool, *_, slots = call.tensors

    def score() -> None:
        for chosen in candidates:
            exit_scores(hidden, head, chosen, scores)

    def compact() -> None:
        for _ in candidates:
            compact_rows(hidden, kept, out)

    def write() -> None:
        for _ in candidates:
            write_kv(k_new, v_new, slots, k_pool, v_pool)

    works = {"exit_scores": score, "compact_rows": compact, "write_kv": write}
    timings = take_turns(device, {name: as_graph(device, work) for name, work in works.items()}, REPEATS)
    num_bytes = {
        "exit_scores": shapes.exit_score_bytes(num_rows, hidden_size, 8, 2),
        "compact_rows": shapes.compaction_bytes(kept.numel(), hidden_size, 2),
        "write_kv": shapes.kv_write_bytes(num_rows, k_new.shape[1], k_new.shape[2], 2),
    }
    rows = []
    for name, timing in timings.items():
        each = Timing(*(value / len(candidates) for value in timing))
        rate = num_bytes[name] / each.median_us * 1e6
        rows.append(
            {
                "kernel": name,
                "rows": num_rows,
                **as_fields(each),
                "gb_per_s": rate / 1e9,
                "share_of_copy": rate / copied,
            }
        )
    return rows


def as_fields(timing: Timing) -> dict[str, float]:
    """For JSON."""
    return {"us": timing.median_us, "spread": timing.spread}


def sweep(context: Context) -> Result:
    """For each shape: every launch near the table's, then the table's launch with its context cut differently."""
    chosen = [AttentionShape(2, 40, 5, 4, 2, 32)] if context.is_tiny else [AttentionShape(*size) for size in SIZES]
    found: Result = {"shapes": []}
    for shape in chosen:
        table = launch_config(2, shape.head_dim, shape.num_heads // shape.num_kv_heads, shape.rows)
        row: Result = {"shape": list(shape), "table": list(table)}
        launches = {
            str(list(config)): lambda config=config, shape=shape: time_attention(
                context, shape, launched_as=_launched_as(config)
            )
            for config in neighbours(table)
        }
        splits = {
            str(count): lambda count=count, shape=shape: time_attention(context, shape, num_splits=count)
            for count in SPLITS
        }
        for name, works in (("launches", launches), ("splits", splits)):
            row[name] = [
                {"choice": choice, **_timed_or_error(work)} for choice, work in works.items() if context.has_time(1.0)
            ]
        found["shapes"].append(row)
        context.save(found)
    return found


def neighbours(table: LaunchConfig) -> Iterator[LaunchConfig]:
    """The table's own launch first, then others that hold the same rows."""
    yield table
    for block_n, num_warps, num_stages in itertools.product((32, 64, 128), (4, 8), (2, 3)):
        config = table._replace(
            block_n=block_n, block_c=min(block_n, table.block_c), num_warps=num_warps, num_stages=num_stages
        )
        if config != table:
            yield config


def _timed_or_error(work: Callable[[], tuple[Timing, int]]) -> dict[str, Any]:
    """Times, or why it could not be launched, as one that asks for more memory than an SM has."""
    try:
        return as_fields(work()[0])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:160]}


@contextmanager
def _launched_as(config: LaunchConfig) -> Iterator[None]:
    """The launcher takes this configuration in place of its table's."""
    table = attention_module.launch_config
    attention_module.launch_config = lambda *_: config
    try:
        yield
    finally:
        attention_module.launch_config = table
