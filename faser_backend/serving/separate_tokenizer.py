"""A tokenizer in a process of its own, for the one model whose process holds the engine and takes text: the llmapi
contract's. What a text costs in memory and in time under the interpreter's lock, no step of the engine sees.

Two processes: one for short texts, one, started with the first, for long ones, which short ones need not wait for.
"""

from __future__ import annotations

import contextlib
import json
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from faser_backend.core.errors import RequestError
from faser_backend.serving.long_texts import LONG_TEXT_BYTES
from faser_backend.serving.prompts import PromptFormat
from faser_backend.serving.tokenizer import TextTokenizer, load_tokenizer
from faser_backend.serving.worker import Worker, WorkerError


class SeparateTokenizer(TextTokenizer):
    """Encodes elsewhere and decodes here. Thread-safe: texts of a kind are encoded one at a time."""

    def __init__(self, path: Path, prompts: PromptFormat) -> None:
        """Raises ConfigError naming the file where it is missing or not a tokenizer."""
        super().__init__(load_tokenizer(path), prompts)
        self._short, self._long = Worker("-m", __name__, str(path)), Worker("-m", __name__, str(path))

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
