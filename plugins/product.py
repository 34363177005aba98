# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""Matrix products whose rows have the same bits in every call, whatever the number of its rows.

Libraries choose a kernel, and with it the order of a sum, by the number of rows. Here an element is always summed in
float32 in ascending order within parts, and then over parts in order, and the parts depend on the weight's shape alone.
A call of few rows is bound by reading the weight: each part has its own program, and the last to arrive adds them.
On a GPU, any tile adds in ascending order (shown for sm_90 by `scripts/gpu_check.py`), so tiles are free to choose.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from faser_backend.plugins import reference
from faser_backend.plugins.attention_config import ANY, shared_limit
from faser_backend.plugins.launch import FLOAT_DTYPES, check_tensor, compute_capability, on_grid, runs_kernel

NUM_SMS = 128  # of a GPU, about
FEW_OUTPUTS = 64  # of a program in calls of few rows
MIN_PART = 512  # values
MAX_SPLIT_ROWS, MAX_SPLIT_TILES = 192, 64  # of calls with a program per part


class ProductTile(NamedTuple):
    block_n: int  # outputs
    block_t: int  # rows
    block_k: int
    num_warps: int
    num_stages: int

    def count(self, num_rows: int, num_outputs: int) -> int:
        return -(-num_rows // self.block_t) * -(-num_outputs // self.block_n)

    def constants(self, size: int, *, in_turn: bool) -> dict[str, int]:
        """Returns the constants of the kernel for sums of `size` products."""
        return {**self.blocks, "HAS_TAIL": size % self.block_k > 0, "IN_TURN": in_turn}

    @property
    def blocks(self) -> dict[str, int]:
        return {"BLOCK_N": self.block_n, "BLOCK_T": self.block_t, "BLOCK_K": self.block_k}


HALF_TILES = {  # by the most rows of a call
    16: ProductTile(FEW_OUTPUTS, 16, 128, 4, 4),
    32: ProductTile(FEW_OUTPUTS, 32, 128, 4, 3),
    64: ProductTile(FEW_OUTPUTS, 64, 128, 4, 3),
    128: ProductTile(FEW_OUTPUTS, 64, 64, 4, 5),
    ANY: ProductTile(128, 128, 64, 8, 4),
}
FLOAT_TILES = {16: ProductTile(FEW_OUTPUTS, 16, 32, 4, 2), ANY: ProductTile(FEW_OUTPUTS, 64, 16, 4, 2)}
PARTED_TILE = ProductTile(FEW_OUTPUTS, 64, 128, 4, 4)  # of 128 rows, for sums in several parts
NARROW_TILE = ProductTile(64, 128, 64, 4, 4)  # where larger ones leave SMs idle
# With descriptors, for the same cases; the wide one's sums fill the registers.
SMALL_TILE, USUAL_TILE, WIDE_TILE = (ProductTile(128, 64, 64, 4, 5), HALF_TILES[ANY], ProductTile(256, 128, 64, 8, 4))
WIDE_COST = 1.7  # of its program, measured on an H100, over one of 128 outputs


def parts_of(num_outputs: int, size: int) -> tuple[int, int]:
    """Returns the number of parts of a sum of `size` products, and their length."""
    parts, programs = 1, -(-num_outputs // FEW_OUTPUTS)
    while 2 * parts * programs <= NUM_SMS and size >= 2 * parts * MIN_PART:
        parts *= 2
    length = -(-size // (parts * 128)) * 128  # a multiple of every block_k, so that parts end with a step
    return -(-size // length), length


def tile_of(
    num_rows: int, num_outputs: int, num_parts: int, element_bytes: int, capability: int = 90
) -> tuple[ProductTile, bool]:
    """Returns the tile of a call, with as many stages as shared memory holds, and whether each part has a program."""
    tiles, has_warp_groups = FLOAT_TILES if element_bytes == 4 else HALF_TILES, capability // 10 == 9
    tile = next(tile for most, tile in tiles.items() if num_rows <= most)
    if tile is HALF_TILES[128] and num_parts > 1:
        tile = PARTED_TILE
    count = tile.count(num_rows, num_outputs)
    is_split = num_parts > 1 and num_rows <= MAX_SPLIT_ROWS and count <= MAX_SPLIT_TILES
    if tile is HALF_TILES[ANY] and not is_split and 2 * count <= NUM_SMS:
        tile = NARROW_TILE
    fitting = shared_limit(capability) // ((tile.block_n + tile.block_t) * tile.block_k * element_bytes)
    # A warp-group product reads its operands in shared memory; others hold one stage in registers.
    return tile._replace(num_stages=min(tile.num_stages, fitting + (not has_warp_groups))), is_split


def described_tile(num_rows: int, num_outputs: int) -> ProductTile:
    """Returns the tile of a call of many rows that reads by descriptors."""
    waves, wide_waves = (-(-tile.count(num_rows, num_outputs) // NUM_SMS) for tile in (USUAL_TILE, WIDE_TILE))
    if WIDE_COST * wide_waves < waves:
        return WIDE_TILE
    return SMALL_TILE if 2 * USUAL_TILE.count(num_rows, num_outputs) <= NUM_SMS else USUAL_TILE


@triton.jit
def sum_part(
    inputs, weights, dims, is_row, is_output, start, length, size, BLOCK_K: tl.constexpr, HAS_TAIL: tl.constexpr
):
    """Returns the sums [BLOCK_N, BLOCK_T] of a part's products, from value `start` on, in ascending order."""
    sums = tl.zeros([is_output.shape[0], is_row.shape[1]], tl.float32)
    for first in range(start, tl.minimum(start + length, size), BLOCK_K):
        is_dim = first + dims < size
        left = tl.load(weights + first, mask=(is_output & is_dim[None, :]) if HAS_TAIL else is_output, other=0.0)
        right = tl.load(inputs + first, mask=(is_row & is_dim[:, None]) if HAS_TAIL else is_row, other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    rows,  # [T, size], rows row_stride apart
    weight,  # [num_outputs, size]
    bias,  # [num_outputs]; None without
    row_stride,
    num_rows,
    num_outputs,
    size,
    part_length,
    num_parts,
    part_sums,  # [num_parts, T, num_outputs] float32; None unless each part has its program
    arrived,  # [num_programs(0) * num_programs(1)] int32, zero before and after
    out,  # [T, num_outputs]
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_TAIL: tl.constexpr,  # size is no multiple of BLOCK_K
    IN_TURN: tl.constexpr,  # a program adds all parts
):
    """Grid: (T / BLOCK_T, num_outputs / BLOCK_N, num_parts or 1), rounded up; a weight's tile is read by neighbours."""
    row = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[None, :]
    output = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    is_row, is_output = row < num_rows, output < num_outputs
    dims = tl.arange(0, BLOCK_K)
    inputs = rows + row * row_stride + dims[:, None]
    weights = weight + output * size + dims[None, :]
    operands = (inputs, weights, dims, is_row, is_output)
    if IN_TURN:
        sums = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for start in range(0, size, part_length):
            sums += sum_part(*operands, start, part_length, size, BLOCK_K, HAS_TAIL)
    else:
        sums = sum_part(*operands, tl.program_id(2) * part_length, part_length, size, BLOCK_K, HAS_TAIL)
    elements, is_element = row * num_outputs + output, is_row & is_output
    if part_sums is not None:
        stride = num_rows.to(tl.int64) * num_outputs
        tl.store(part_sums + tl.program_id(2) * stride + elements, sums, mask=is_element)
        tl.debug_barrier()  # one thread counts for all
        counter = arrived + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") < num_parts - 1:
            return
        tl.store(counter, 0)
        sums = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for part in range(num_parts):  # from L2, which the other programs wrote to
            sums += tl.load(part_sums + part * stride + elements, mask=is_element, other=0.0, cache_modifier=".cg")
    if bias is not None:
        sums += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + elements, sums.to(out.dtype.element_ty), mask=is_element)


@triton.jit(do_not_specialize=["size", "part_length"])
def described_product_kernel(
    rows,  # descriptors of [T, size] in [BLOCK_T, BLOCK_K]; what lies outside is zero
    weight,  # of [num_outputs, size] in [BLOCK_N, BLOCK_K]
    bias,  # [num_outputs]; None without
    num_outputs,
    size,
    part_length,
    out,  # a descriptor of [T, num_outputs] in [BLOCK_T, BLOCK_N]
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Adds all parts in turn, as product_kernel does. Grid: (T / BLOCK_T, num_outputs / BLOCK_N), rounded up."""
    first_row, first_output = tl.program_id(0) * BLOCK_T, tl.program_id(1) * BLOCK_N
    sums = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for start in range(0, size, part_length):  # also of one part: without this loop the products would not overlap
        part = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        for first in range(start, tl.minimum(start + part_length, size), BLOCK_K):
            right = weight.load([first_output, first])
            part = tl.dot(rows.load([first_row, first]), right.T, part, input_precision="ieee")
        sums += part
    if bias is not None:
        output = first_output + tl.arange(0, BLOCK_N)
        sums += tl.load(bias + output, mask=output < num_outputs, other=0.0).to(tl.float32)[None, :]
    out.store([first_row, first_output], sums.to(out.dtype))


class MatrixProduct:
    """Products of one caller, whose calls never overlap: streams that may run at the same time have one each.

    It owns the counters of programs, which lie outside of any CUDA graph and are zero between calls.
    """

    def __init__(self, device: torch.device) -> None:
        self.arrived = torch.zeros(MAX_SPLIT_TILES, dtype=torch.int32, device=device)

    def __call__(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns rows [T, K] @ weight [N, K]^T + bias [N], [T, N], in `out` if given; queued on the current stream.

        All are of one type, except that `out` may be float32. Raises ValueError if shapes or types do not match.
        """
        (num_rows, size), num_outputs = rows.shape, weight.shape[0]
        out = rows.new_empty(num_rows, num_outputs) if out is None else out
        check_tensor("rows", rows, (num_rows, size), *FLOAT_DTYPES, may_have_row_stride=True)
        check_tensor("weight", weight, (num_outputs, size), rows.dtype)
        if bias is not None:
            check_tensor("bias", bias, (num_outputs,), rows.dtype)
        check_tensor("out", out, (num_rows, num_outputs), rows.dtype, torch.float32)
        if not runs_kernel(product_kernel, rows):
            reference.product(rows, weight, bias, out)
            return out
        if not num_rows:
            return out
        num_parts, length = parts_of(num_outputs, size)
        capability = compute_capability(rows)
        if num_rows > MAX_SPLIT_ROWS and capability // 10 == 9 and can_describe(rows, weight, out):
            tile = described_tile(num_rows, num_outputs)
            on_grid(described_product_kernel, -(-num_rows // tile.block_t), -(-num_outputs // tile.block_n))(
                TensorDescriptor.from_tensor(rows, [tile.block_t, tile.block_k]),
                TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k]),
                *(bias, num_outputs, size, length),
                TensorDescriptor.from_tensor(out, [tile.block_t, tile.block_n]),
                **tile.blocks,
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )
            return out
        tile, is_split = tile_of(num_rows, num_outputs, num_parts, rows.element_size(), capability)
        sums = out.new_empty(num_parts, num_rows, num_outputs, dtype=torch.float32) if is_split else None
        grid = -(-num_rows // tile.block_t), -(-num_outputs // tile.block_n), num_parts if is_split else 1
        on_grid(product_kernel, *grid)(
            *(rows, weight, bias, rows.stride(0), num_rows, num_outputs, size, length, num_parts),
            *(sums, self.arrived if is_split else None, out),
            **tile.constants(size, in_turn=num_parts > 1 and not is_split),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        return out


def can_describe(*tensors: torch.Tensor) -> bool:
    """Tells whether descriptors can have the tensors: halves, whose tiles fit, at multiples of 16 bytes."""
    alignments = (tensor.data_ptr() | tensor.stride(0) * tensor.itemsize for tensor in tensors)
    return all(each.itemsize == 2 for each in tensors) and not any(each % 16 for each in alignments)
