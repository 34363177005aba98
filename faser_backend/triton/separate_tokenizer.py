"""Encodes texts in separate processes, for a model whose process holds the engine.

The llmapi contract's model reads texts and runs steps in one process. Tokenising elsewhere keeps the memory of texts,
and their time under the interpreter's lock, away from the steps.
"""

from __future__ import annotations

import contextlib
import json
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from faser_backend.core.errors import RequestError
from faser_backend.text.prompts import PromptFormat
from faser_backend.text.tokenizer import TextTokenizer, load_tokenizer
from faser_backend.text.worker import Worker, WorkerError

LONG_TEXT_CHARS = 16 << 10  # longer texts go to the second process
PROGRAM = "faser_backend.triton.separate_tokenizer"


class SeparateTokenizer(TextTokenizer):
    """A tokenizer that encodes in two processes, one for short texts and one for long ones, and decodes in this one.

    Each process starts with its first text. Thread-safe: each encodes one text at a time.
    """

    def __init__(self, path: Path, prompts: PromptFormat) -> None:
        """Raises ConfigError naming the file if it is missing or not a tokenizer."""
        super().__init__(load_tokenizer(path), prompts, path)
        self._short, self._long = (Worker("-m", PROGRAM, str(path)) for _ in range(2))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        worker = self._long if len(text) > LONG_TEXT_CHARS else self._short
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
    """Runs the process: encodes texts until the other end closes, or the library fails."""
    tokenizer = TextTokenizer.from_file(path)
    with contextlib.suppress(EOFError):
        while True:
            text, add_special_tokens = json.loads(connection.recv_bytes())
            ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
            connection.send_bytes(np.array(ids, np.int32).tobytes())


if __name__ == "__main__":
    answer_texts(Path(sys.argv[1]), Connection(int(sys.argv[2])))
