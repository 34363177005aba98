"""Keep a client with a long text from holding up those with short ones, and the engine.

A model's process hears of requests on one thread. Requests with little text are read there, in order; those with much
are read on two threads beside it, where tokenising lets the others run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from faser_backend.core.errors import SHUTTING_DOWN, QueueFullError, RequestError, UnavailableError
from faser_backend.text.prompts import PromptFormat
from faser_backend.text.tokenizer import TextTokenizer, load_tokenizer
from faser_backend.text.worker import Worker, WorkerError
from faser_backend.triton.tensor_values import num_text_bytes
from faser_backend.triton.tensors import Tensors

_log = logging.getLogger(__name__)
LONG_TEXT_BYTES = 16 << 10  # tokenised in 5 to 10 ms
NUM_THREADS = 2
DRAIN_POLL_S = 0.02
PROGRAM = "faser_backend.triton.long_texts"


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


class SeparateTokenizer(TextTokenizer):
    """Encodes in processes of its own and decodes here, for the one model whose process holds the engine and takes
    text, the llmapi contract's: what a text costs in memory and under the interpreter's lock, no step sees.

    Two processes: one for short texts, one, started with the first, for long ones. Thread-safe: texts of a kind are
    encoded one at a time.
    """

    def __init__(self, path: Path, prompts: PromptFormat) -> None:
        """Raises ConfigError naming the file where it is missing or not a tokenizer."""
        super().__init__(load_tokenizer(path), prompts)
        self._short, self._long = (Worker("-m", PROGRAM, str(path)) for _ in range(2))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        worker = self._long if len(text) > LONG_TEXT_BYTES else self._short
        try:
            answer = worker.call(json.dumps([text, add_special_tokens]).encode())
        except WorkerError as error:
            raise RequestError("text", text, f"could not be tokenised: {error}") from None
        return np.frombuffer(answer, np.int32).tolist()

    def close(self) -> None:
        super().close()
        self._short.close()
        self._long.close()


def answer_texts(path: Path, connection: Connection) -> None:
    """The process: tokenises until the other end is closed, or a text makes the library fail."""
    tokenizer = TextTokenizer.from_file(path)
    with contextlib.suppress(EOFError):
        while True:
            text, add_special_tokens = json.loads(connection.recv_bytes())
            ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
            connection.send_bytes(np.array(ids, np.int32).tobytes())


if __name__ == "__main__":
    answer_texts(Path(sys.argv[1]), Connection(int(sys.argv[2])))
