"""How the attention kernel is divided into programs: tile sizes, warps, stages, and parts of the context.

The tables are the one place to tune; nothing is tuned at run time. This module needs no torch and no compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

# The shared memory limit of one program, in bytes, by compute capability.
SHARED_LIMITS = {80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
MAX_HEAD_DIM = 256
MAX_SPLITS = 64
MAX_DOUBLINGS = 10  # contexts of 4 million tokens
PART_TOKENS = 256  # with fewer, reading the parts back costs more than parallelism saves
LEAST_SPLIT = 4  # programs for each of a call; with fewer, memory for parts grows for little
PROGRAMS_PER_SM = 2  # resident at once in decode and verification; see docs/kernels.md


class LaunchConfig(NamedTuple):
    block_m: int  # (row, query head) pairs of a program
    block_n: int  # tokens per iteration
    num_warps: int
    num_stages: int

    def constants(self, *, num_kv_heads: int, group: int, head_dim: int, kv_block_size: int) -> dict[str, int | float]:
        """Returns the constants of an attention kernel."""
        return {
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "GROUP": group,
            "KV_BLOCK_SIZE": kv_block_size,
            "SCALE_LOG2": head_dim**-0.5 * math.log2(math.e),
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_D": padded_head_dim(head_dim),
            "MOST_PARTS": MAX_SPLITS,
        }


ANY = 1 << 30


class Tile(NamedTuple):
    """A row of a table: the tile for at most `num_pairs` (row, query head) pairs of a sequence and KV head."""

    num_pairs: int
    block_m: int
    num_warps: int
    num_stages: int


TILE_BYTES = {2: 16_384, 4: 8_192}  # keys per iteration, by the bytes of an element; bits depend on it, so not on pairs
HALF_TILES = (  # float16 and bfloat16, on tensor cores
    Tile(16, 16, 4, 3),
    Tile(32, 32, 4, 3),
    Tile(256, 64, 4, 3),
    Tile(ANY, 128, 8, 3),
)
WIDE_HALF_TILES = (*HALF_TILES[:2], Tile(ANY, 64, 8, 3))  # head_dim above 128, or no warp-group products
FLOAT_TILES = (  # float32: exact products without tensor cores, so small tiles
    Tile(16, 16, 8, 3),
    Tile(ANY, 32, 8, 2),
)


def padded_head_dim(head_dim: int) -> int:
    """Returns the next power of two, at least 16. The kernel masks the rest."""
    return max(16, 1 << (head_dim - 1).bit_length())


def launch_config(element_bytes: int, head_dim: int, group: int, max_rows: int, capability: int = 90) -> LaunchConfig:
    """Returns the launch of a call with at most `max_rows` rows per sequence and `group` query heads per KV head.

    Raises ValueError if no program can hold the group, or the head dimension is out of range.
    """
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim = {head_dim}: must be 1 to {MAX_HEAD_DIM}")
    has_warp_groups = capability // 10 == 9
    row_bytes = padded_head_dim(head_dim) * element_bytes
    half_tiles = HALF_TILES if has_warp_groups and head_dim <= 128 else WIDE_HALF_TILES
    tiles = FLOAT_TILES if element_bytes == 4 else half_tiles
    if not 1 <= group <= tiles[-1].block_m:
        raise ValueError(f"query heads per KV head = {group}: must be 1 to {tiles[-1].block_m}")
    tile = next(t for t in tiles if t.num_pairs >= group * max_rows and t.block_m >= group)
    block_n = min(64, max(16, TILE_BYTES[element_bytes] // row_bytes))
    num_stages = tile.num_stages
    while num_stages > 2 and shared_bytes(tile.block_m, block_n, num_stages, row_bytes) > shared_limit(capability):
        num_stages -= 1
    return LaunchConfig(tile.block_m, block_n, tile.num_warps, num_stages)


def shared_bytes(block_m: int, block_n: int, num_stages: int, row_bytes: int) -> int:
    """Returns an upper bound of a program's shared memory: keys and values of each stage, queries, weights."""
    # A warp-group product (64 pairs and more) reads its tile late, so one more is held.
    num_buffers = num_stages if block_m >= 64 else num_stages - 1
    return 2 * num_buffers * block_n * row_bytes + block_m * row_bytes + 4 * block_m * block_n + 1024


def shared_limit(capability: int) -> int:
    """Returns the limit of a capability, or of the next lower one in the table."""
    return SHARED_LIMITS[max((c for c in SHARED_LIMITS if c <= capability), default=min(SHARED_LIMITS))]


def num_tiles(num_rows: int, num_sequences: int, tile_rows: int) -> int:
    """Returns an upper bound of the tiles for num_rows rows of num_sequences sequences."""
    return num_rows // tile_rows + num_sequences


def count_parts(tokens: Any, smaller: Callable[[Any, int], Any] = min) -> Any:
    """Returns the number of parts of a sequence of at least one token.

    There are 16 of PART_TOKENS, then 8 of twice as many, and so on: short contexts are cut finely and long ones have
    few parts. Numbers may be a compiler's expressions, with a minimum of theirs.
    """
    last, size, doublings = tokens + -1, PART_TOKENS, 0  # expressions know no minus
    for n in range(MAX_DOUBLINGS):
        is_beyond = smaller(last // (16 * PART_TOKENS << n), 1)
        size, doublings = (is_beyond + 1) * size, is_beyond + doublings
    return last // size + doublings * 8 + 1


def choose_num_splits(num_kv_heads: int, num_parts: int, num_sms: int, num_tiles: int) -> int:
    """Returns num_parts if parts get programs of their own, else 1, so that a call fills `num_sms`.

    num_tiles: row tiles of the call per KV head.
    """
    is_small = LEAST_SPLIT * num_kv_heads * num_tiles <= PROGRAMS_PER_SM * num_sms
    return num_parts if is_small and num_parts <= MAX_SPLITS else 1
