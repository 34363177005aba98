# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""A matrix times packed rows on a CPU, shared among threads by blocks of columns: row_products for compiled callers.

Threads need not meet for a product: each writes columns of its own. Knows nothing of layers.
"""

from __future__ import annotations

from functools import cache

import numba
import numpy as np
from numba.misc.special import literally

from plugins import row_products
from plugins.host_attention import f32
from plugins.host_compile import WITHIN_KERNELS, Kernel, compile_kernel, source_stamp
from plugins.host_rows import inlined
from plugins.row_products import LANES, multiply_rows

STORED = numba.types.Array(numba.uint8, 1, "C", readonly=True)  # a weight file
# Typed, so that `multiply` is compiled for all such values at once and not for each of them.
NO_BIAS, REPLACES, ADDS = np.int64(-1), np.bool_(False), np.bool_(True)


@inlined
def share_of(num_columns, thread, num_threads):
    """The blocks [first, last) of a matrix's columns that are this thread's."""
    num_blocks = -(-num_columns // LANES)
    return num_blocks * thread // num_threads, num_blocks * (thread + 1) // num_threads


@numba.njit(**WITHIN_KERNELS)
def multiply(code, out, rows, offset, bias_offset, adds, thread, num_threads, num_rows, weights, vectors, strip):
    """A thread's columns of out = rows @ matrix + bias, or of out += it. code is a constant of the caller's."""
    code = literally(code)
    num_inputs, num_outputs = rows.shape[1], out.shape[1]
    first, last = share_of(num_outputs, thread, num_threads)
    multiply_rows(code, out, rows, weights, offset, num_inputs, num_outputs, first, last, num_rows, adds, strip)
    if bias_offset >= 0:
        for row in range(num_rows):
            for column in range(first * LANES, min(last * LANES, num_outputs)):
                out[row, column] += vectors[bias_offset + column]


@cache
def product_kernel(weight_format: str) -> Kernel:
    """out = rows @ matrix alone; the matrix in weight_format, of row_products.FORMATS.

    Compiled once per CPU and kept on disk. Every thread of a call runs it; as of a segment's, nothing is checked.
    """
    code = row_products.FORMATS.index(weight_format)
    stamp = source_stamp()
    signature = numba.void(numba.int64, numba.int64, f32[2], f32[2], STORED, numba.int64, f32[1])

    def kernel(
        thread,
        num_threads,
        out,  # [T, num_outputs]
        rows,  # [T, num_inputs]
        weights,
        offset,  # of the matrix, bytes into weights
        strip,  # [row_products.scratch_size(num_inputs)]: this thread's own
    ):
        _ = stamp
        num_rows = rows.shape[0]
        multiply(code, out, rows, offset, NO_BIAS, REPLACES, thread, num_threads, num_rows, weights, strip, strip)

    return compile_kernel(kernel, signature)
