"""Launches of the attention kernel around its table's: what a better line of the table would gain."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lab.gpu.byte_model import AttentionShape
from lab.gpu.kernels_part import as_fields, time_attention
from lab.gpu.timing import Timing
from lab.gpu.worker import Context, Result
from plugins import pruned_chunk_attention as attention_module
from plugins.attention_config import LaunchConfig, launch_config

SIZES = ((32, 1024, 5), (32, 1024, 1), (8, 1024, 5), (1, 1024, 5), (32, 4096, 5), (64, 1024, 5))
SPLITS = (1, 2, 4, 8, 16)


def run(context: Context) -> Result:
    """For each shape: every launch near the table's, then the table's launch with its context cut differently."""
    shapes = [AttentionShape(2, 40, 5, 4, 2, 32)] if context.is_tiny else [AttentionShape(*size) for size in SIZES]
    found: Result = {"shapes": []}
    for shape in shapes:
        table = launch_config(2, shape.head_dim, shape.num_heads // shape.num_kv_heads, shape.rows)
        row: Result = {"shape": list(shape), "table": list(table)}
        launches = {str(list(config)): _timed_as(context, shape, config) for config in neighbours(table)}
        splits = {str(count): _timed_in(context, shape, count) for count in SPLITS}
        for name, works in (("launches", launches), ("splits", splits)):
            row[name] = [
                {"choice": choice, **_outcome(work)} for choice, work in works.items() if context.has_time(1.0)
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


def _timed_as(context: Context, shape: AttentionShape, config: LaunchConfig) -> Callable[[], Timing]:
    return lambda: time_attention(context, shape, launched_as=_launched_as(config))[0]


def _timed_in(context: Context, shape: AttentionShape, num_splits: int) -> Callable[[], Timing]:
    return lambda: time_attention(context, shape, num_splits=num_splits)[0]


def _outcome(work: Callable[[], Timing]) -> dict[str, Any]:
    """Times, or why it could not be launched, as one that asks for more memory than an SM has."""
    try:
        return as_fields(work())
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
