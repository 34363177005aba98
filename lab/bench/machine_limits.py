"""What a machine can do at most: bytes read from memory, and float32 operations a second, on so many threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np

READ_BYTES = 1 << 28  # of a thread: no cache holds them
MATRIX_SIZE = 1024


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _sum_of(words):
    total = 0
    for i in range(words.size):
        total += words[i]
    return total


class MachineLimits:
    """Measures on num_threads threads, which wait in between. numpy's library must run on one thread (environment
    variable OPENBLAS_NUM_THREADS = 1 before numpy is loaded), for here each thread is a caller of its own."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads)
        self._words = [np.ones(READ_BYTES // 8, np.int64) for _ in range(num_threads)]
        self._matrices = [np.ones((MATRIX_SIZE, MATRIX_SIZE), np.float32) for _ in range(num_threads)]
        _sum_of(self._words[0])

    def bandwidth(self) -> float:
        """Bytes a second that all threads together read."""
        return self._rate(lambda thread: _sum_of(self._words[thread]), READ_BYTES)

    def peak(self) -> float:
        """Operations a second of a large product of matrices; a multiplication and an addition are two."""
        return self._rate(lambda thread: self._matrices[thread] @ self._matrices[thread], 2 * MATRIX_SIZE**3)

    def close(self) -> None:
        self._threads.shutdown()

    def _rate(self, work: Callable[[int], object], amount: int) -> float:
        began = time.perf_counter()
        list(self._threads.map(work, range(self._num_threads)))
        return amount * self._num_threads / (time.perf_counter() - began)
