# ruff: noqa: PLR0917 (kernels take their arguments by position)
"""LoRA adapters beside the products of a segment: rows x of a matrix get (x @ a) @ b, summed in float32.

The rows of a call are cut into runs with one adapter each. A row's bits depend on its own inputs and adapter alone, as
`products` guarantees.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np

from faser_backend.core.adapter import ADAPTED, AdapterMatrices
from faser_backend.core.batch import RowBatch
from faser_backend.cpu.kernels.compilation import WITHIN_KERNELS
from faser_backend.cpu.kernels.layouts import LANES, store_halves
from faser_backend.cpu.kernels.products import ADDS, HALVES_CODE, REPLACES, multiply_rows, share_of
from faser_backend.cpu.kernels.threads import barrier_wait
from faser_backend.cpu.kv_pool import aligned_zeros

# Columns of a table of adapters: the rank, then for each layer and matrix the addresses of a and b; -1 without.
RANK, FIRST_ADDRESS, NUM_ADAPTED = 0, 1, len(ADAPTED)
MAX_RUN = 32  # rows, so that threads can share x @ a of a long prompt
NO_ADAPTERS = (*[np.zeros((0, 3), np.int64)] * 3, np.zeros((2, 0), np.float32))


class StoredAdapter:
    """An adapter as kernels read it: its row of the table, and the memory that its addresses point into."""

    def __init__(self, matrices: AdapterMatrices, num_layers: int) -> None:
        addresses, parts, end = np.full((num_layers, NUM_ADAPTED, 2), -1), [], 0
        for (layer, name), pair in matrices.items():
            for part, matrix in enumerate(pair):
                addresses[layer, ADAPTED.index(name), part] = end
                parts.append(store_halves(matrix))
                end += parts[-1].size
        self.num_bytes, self._memory = end, aligned_zeros((end,), np.uint8)
        np.concatenate(parts, out=self._memory)
        addresses[addresses >= 0] += self._memory.ctypes.data
        self.row = np.append(pair[1].shape[0], addresses)


def adapter_arguments(rows: RowBatch, view: Callable[..., np.ndarray]) -> tuple[np.ndarray, ...]:
    """Returns the kernel's runs, logit_runs, adapters and lowered. view: Workspace.view."""
    if not any(rows.adapters):
        return NO_ADAPTERS
    indices: dict[StoredAdapter | None, int] = {None: -1}
    for adapter in rows.adapters:
        indices.setdefault(adapter, len(indices) - 1)
    table = np.stack([adapter.row for adapter in indices if adapter is not None])
    of_rows = np.repeat([indices[adapter] for adapter in rows.adapters], rows.rows_per_sequence)
    lowered = view("lowered", 2, rows.num_rows * int(table[:, RANK].max()))
    return adapter_runs(of_rows), adapter_runs(of_rows[rows.logit_rows]), table, lowered


def adapter_runs(adapters: np.ndarray) -> np.ndarray:
    """Returns [N, 3]: the first row of each run, the row behind its last, and its adapter. adapters: [T], -1 without.

    Runs of one adapter follow each other, so that its matrices are still in the cache.
    """
    changes = np.flatnonzero(np.diff(adapters, prepend=-2))
    firsts = np.union1d(changes, np.arange(0, adapters.size, MAX_RUN))
    runs = np.stack([firsts, np.append(firsts, adapters.size)[1:], adapters[firsts]], axis=1)
    runs = runs[runs[:, 2] >= 0]
    return runs[np.argsort(runs[:, 2], kind="stable")]


@numba.njit(**WITHIN_KERNELS)
def adapt(output, inputs, layer, matrix, runs, adapters, lowered, crew, file):
    """Adds adapters to a thread's columns of output, the product of inputs with a matrix.

    The threads share x @ a by run and block of columns; between the two products is a barrier, so while some threads
    read one matrix's x @ a, others write at most the next one's.
    """
    (thread, num_threads, barrier, _), (weights, _, scratch) = crew, file
    most_floats, item = lowered.shape[1] // inputs.shape[0], matrix  # of a row; threads take turns in beginning
    at = FIRST_ADDRESS + 2 * (layer * NUM_ADAPTED + matrix)
    for is_second in range(2):
        for i in range(runs.shape[0]):
            first, last, adapter = runs[i, 0], runs[i, 1], adapters[runs[i, 2]]
            num_rows, rank = last - first, adapter[RANK]
            if adapter[at] < 0:
                continue
            a, b = adapter[at] - weights.ctypes.data, adapter[at + 1] - weights.ctypes.data
            low = lowered[matrix % 2, first * most_floats :][: num_rows * rank].reshape(num_rows, rank)
            if is_second:
                begin, end = share_of(output.shape[1], thread, num_threads)
                rows = output[first:last]
                multiply_rows(HALVES_CODE, rows, low, scratch, weights, b, begin, end, num_rows, ADDS, scratch)
                continue
            for block in range(-(-rank // LANES)):
                if item % num_threads == thread:
                    multiply_rows(
                        HALVES_CODE, low, inputs[first:last], scratch, weights, a, block, block + 1,
                        num_rows, REPLACES, scratch,
                    )  # fmt: skip
                item += 1
        if not is_second:
            barrier_wait(barrier, num_threads)
