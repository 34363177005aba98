"""Keeps a client with a long text from holding up those with short ones.

A model's process hears of requests on one thread. Requests with little text are read there, in order; those with much
are read on two threads beside it, where tokenising lets the others run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from faser_backend.core.errors import SHUTTING_DOWN, QueueFullError, UnavailableError
from faser_backend.serving.tensor_values import num_text_bytes
from faser_backend.serving.tensors import Tensors

_log = logging.getLogger(__name__)
LONG_TEXT_BYTES = 16 << 10  # tokenised in 5 to 10 ms
NUM_THREADS = 2
DRAIN_POLL_S = 0.02


class LongTexts:
    """Runs what reads a request, here or beside. Thread-safe."""

    def __init__(self, max_waiting: int) -> None:
        """max_waiting: long texts that may wait to be read; 0: any number."""
        self._max_waiting = max_waiting
        self._pool = ThreadPoolExecutor(NUM_THREADS, "long-texts")
        self._lock = threading.Lock()
        self._num_waiting = 0

    def run(self, tensors: Tensors, read: Callable[[], None]) -> None:
        """Calls read, which answers its own errors, now or soon. Raises QueueFullError where too many wait,
        and UnavailableError once closed."""
        if num_text_bytes(tensors) <= LONG_TEXT_BYTES:
            read()
            return
        with self._lock:
            if self._max_waiting and self._num_waiting >= self._max_waiting:
                raise QueueFullError(self._max_waiting)
            self._num_waiting += 1
        try:
            self._pool.submit(self._read, read)
        except RuntimeError:  # the pool is shut
            with self._lock:
                self._num_waiting -= 1
            raise UnavailableError(SHUTTING_DOWN) from None

    def drain(self) -> None:
        """Waits until every long text has been read."""
        while self._num_waiting:
            time.sleep(DRAIN_POLL_S)

    def close(self) -> None:
        """Takes no more; what waits is still read."""
        self._pool.shutdown()

    def _read(self, read: Callable[[], None]) -> None:
        try:
            read()
        except Exception:
            _log.exception("a long text was not answered")
        finally:
            with self._lock:
                self._num_waiting -= 1
