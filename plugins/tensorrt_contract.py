"""Attention as two TensorRT plugins, `AttendSplits` and `CombineSplits`: tensors, attributes, grid and arguments.

All functions take numbers and names, so that they are tested without TensorRT. Dimensions may be integers or a
compiler's expressions; `DimensionOps` combines those. Each op is a kernel that is compiled into the engine, see
docs/tensorrt-plugin.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from faser_backend.plugins.attention_config import (
    LEAST_SPLIT,
    MAX_SPLITS,
    PROGRAMS_PER_SM,
    LaunchConfig,
    count_parts,
    launch_config,
    num_tiles,
)

NAMESPACE = "faser"
VERSION = "1"
ATTEND_OP = "AttendSplits"  # the first kernel
COMBINE_OP = "CombineSplits"  # the second; its output is [T, num_heads, head_dim]

ATTENTION_INPUTS = (
    "q",  # [T, num_heads, head_dim]
    "k_new",  # [T, num_kv_heads, head_dim]
    "v_new",
    "k_pool",  # [num_kv_heads, num_blocks, kv_block_size, head_dim], written in place
    "v_pool",
    "block_table",  # [B, MB] int32
    "cu_rows",  # [B + 1] int32
    "context_lens",  # [B] int32
    "slot_mapping",  # [T] int32
)
ATTEND_OUTPUTS = ("mixed_parts", "stat_parts", "k_pool_out", "v_pool_out")  # [P, num_heads, head_dim | 2] float32
COMBINE_INPUTS = ("mixed_parts", "stat_parts", "q", "block_table", "cu_rows")  # q and block_table for their shapes
INDEX_INPUTS = ATTENTION_INPUTS[5:]  # int32
FLOAT_DTYPES = {"FLOAT": "fp32", "HALF": "fp16", "BF16": "bf16"}  # TensorRT's name: Triton-language's
ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
# Parts are allocated for this many rows more than a call has. With few rows, which leave programs idle, each row can
# have many parts; with many rows, a program takes all parts of its rows.
EXTRA_PART_ROWS = 2048


class DimensionOps(NamedTuple):
    """Operations on dimensions beside + * //, which their type defines."""

    constant: Any  # int -> dimension
    smaller: Any  # (a, b) -> dimension
    larger: Any
    ceil_div: Any


@dataclass(frozen=True, slots=True)
class Geometry:
    """Both ops' attributes, all integers: the plugins' serialised fields, in this order."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_block_size: int
    tile_rows: int  # rows of one sequence per program
    num_sms: int  # SMs that calls fill
    capability: int  # compute capability of the GPU, e.g. 90

    @property
    def group(self) -> int:
        """The number of query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_fields(cls, values: Mapping[str, int]) -> Geometry:
        """Makes the geometry from attributes, whose names TensorRT has checked."""
        return cls(**{name: int(value) for name, value in values.items()})

    def launch_config(self, dtype: str) -> LaunchConfig:
        return launch_config(ELEMENT_BYTES[dtype], self.head_dim, self.group, self.tile_rows, self.capability)


GEOMETRY_FIELDS = tuple(field.name for field in fields(Geometry))


def part_rows(num_rows: Any) -> Any:
    """Returns P, the rows that parts are allocated for. It rises with num_rows, so the largest call needs most."""
    return num_rows + EXTRA_PART_ROWS


def num_splits(
    geometry: Geometry, config: LaunchConfig, ops: DimensionOps, num_rows: Any, table_shape: Sequence[Any]
) -> Any:
    """Returns the most parts of a context, as attention_config.choose_num_splits, or 1 where part_rows has no room.

    table_shape: (B, MB), bounds of any call: the parts fill the SMs if all rows belong to one sequence. Integer
    operations let a compiler evaluate it on shapes.
    """
    one = ops.constant(1)
    tiles = ops.ceil_div(num_rows, ops.constant(config.block_m // geometry.group))
    parts = count_parts(table_shape[1] * geometry.kv_block_size, lambda a, b: ops.smaller(a, ops.constant(b)))
    programs = ops.constant(PROGRAMS_PER_SM * geometry.num_sms)
    fits = ops.smaller(programs // (tiles * geometry.num_kv_heads * LEAST_SPLIT), one)
    has_room = ops.smaller(part_rows(num_rows) // (num_rows * parts), one)
    return ops.larger(parts * fits * has_room * ops.smaller(ops.constant(MAX_SPLITS) // parts, one), one)


class Launch(NamedTuple):
    """A kernel's grid and integer arguments, in the order of its parameters."""

    grid: tuple[Any, Any, Any]
    scalars: tuple[Any, ...]


def attend_launch(
    geometry: Geometry,
    config: LaunchConfig,
    ops: DimensionOps,
    num_rows: Any,
    table_shape: Sequence[Any],
    *,
    num_blocks: Any,
) -> Launch:
    """Returns the launch of the first kernel: as many programs as are resident, or as have work at most."""
    splits = num_splits(geometry, config, ops, num_rows, table_shape)
    tiles = num_tiles(num_rows, table_shape[0], ops.constant(config.block_m // geometry.group))
    resident = ops.ceil_div(ops.constant(PROGRAMS_PER_SM * geometry.num_sms), ops.constant(geometry.num_kv_heads))
    grid = (ops.smaller(tiles * splits, resident), ops.constant(geometry.num_kv_heads), ops.constant(1))
    return Launch(grid, (num_rows, num_blocks, *table_shape, splits))


def combine_launch(
    geometry: Geometry, config: LaunchConfig, ops: DimensionOps, num_rows: Any, table_shape: Sequence[Any]
) -> Launch:
    """Returns the launch of the second kernel: one program per row and query head."""
    splits = num_splits(geometry, config, ops, num_rows, table_shape)
    grid = (num_rows, ops.constant(geometry.num_heads), ops.constant(1))
    return Launch(grid, (table_shape[0], splits))
