"""Threads that run a call's kernels, and how the units of attention are shared out among them.

A unit is one KV head of one sequence (plugins/host_attention.py). Knows pools and numbers of rows; nothing of models.
"""

from __future__ import annotations

from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

import numpy as np

from faser_backend.core.model import ModelSpec
from faser_backend.device.kv_pool import KvPool

if TYPE_CHECKING:
    from plugins.host_compile import Kernel

ROWS_TO_READ = 5  # rows whose arithmetic takes as long as it takes to read what they attend to


def numbers_read(spec: ModelSpec, counts: np.ndarray, last_tokens: np.ndarray) -> np.ndarray:
    """[B] keys and values that attention reads for each sequence, in numbers; arithmetic in what it could read
    meanwhile. counts [B] rows, last_tokens [B] tokens that the last row sees."""
    reads = (counts * (spec.num_heads // spec.num_kv_heads) + (ROWS_TO_READ - 1)) / ROWS_TO_READ
    return reads * last_tokens * (2 * spec.num_kv_heads * spec.head_dim)


def unit_bounds(spec: ModelSpec, numbers: np.ndarray, num_threads: int) -> list[int]:
    """Units of attention (one KV head of one sequence) of each thread: between two neighbours of num_threads + 1."""
    bounds = [0, numbers.size * spec.num_kv_heads]
    if num_threads > 1:
        before = np.concatenate([[0], np.cumsum(numbers)])
        goals = before[-1] * np.arange(1, num_threads) / num_threads
        units = np.interp(goals, before, np.arange(numbers.size + 1) * spec.num_kv_heads)
        bounds[1:1] = np.rint(units).astype(np.int64).tolist()
    return bounds


def check_blocks(pool: KvPool, block_tables: np.ndarray, num_tokens: int) -> None:
    """Kernels trust their indices. Raises IndexError before anything is read or written."""
    num_blocks, size = pool.num_blocks, pool.kv_block_size
    least, most = int(block_tables.min()), int(block_tables.max())
    if least < 0 or most >= num_blocks:
        raise IndexError(f"block_tables = {least} to {most}: blocks of the pool are 0 to {num_blocks - 1}")
    if num_tokens > block_tables.shape[1] * size:
        raise IndexError(f"block_tables: {num_tokens} tokens need more than {block_tables.shape[1]} blocks of {size}")


class Helper:
    """A thread that runs kernels. Queues hand over in a fraction of what a thread pool's futures take."""

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Kernel, tuple] | None] = SimpleQueue()
        self._errors: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread: Thread | None = None

    def start(self, kernel: Kernel, arguments: tuple) -> None:
        """The first time, starts the thread on the cores of the caller's."""
        if self._thread is None:
            self._thread = Thread(target=self._serve, name="kernels", daemon=True)
            self._thread.start()
        self._work.put((kernel, arguments))

    def wait(self) -> BaseException | None:
        """Until what was started has ended. Returns what it raised."""
        return self._errors.get()

    def close(self) -> None:
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            kernel, arguments = work
            try:
                kernel(*arguments)
            except BaseException as error:
                self._errors.put(error)
            else:
                self._errors.put(None)
