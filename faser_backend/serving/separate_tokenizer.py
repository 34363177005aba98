"""A tokenizer in a process of its own, for the one model whose process holds the engine and takes text: the llmapi
contract's. What a text costs in memory and in time under the interpreter's lock, no step of the engine sees.

Two processes: one for short texts, one, started with the first, for long ones, which short ones need not wait for.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from faser_backend.core.errors import FaserError, RequestError
from faser_backend.serving.frames import FrameSocket
from faser_backend.serving.long_texts import LONG_TEXT_BYTES
from faser_backend.serving.packing import pack, unpack
from faser_backend.serving.prompts import PromptFormat
from faser_backend.serving.tokenizer import TextTokenizer, load_tokenizer

MAX_FRAME_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Text:
    """What is asked of the process."""

    text: str
    add_special_tokens: bool


@dataclass(frozen=True, slots=True)
class Ids:
    """Its answer. token_ids [n] int32, or what the library said."""

    token_ids: np.ndarray | None = None
    error: str | None = None


class SeparateTokenizer(TextTokenizer):
    """Encodes elsewhere and decodes here. Thread-safe: texts of a kind are encoded one at a time."""

    def __init__(self, path: Path, prompts: PromptFormat) -> None:
        """Raises ConfigError naming the file where it is missing or not a tokenizer."""
        super().__init__(load_tokenizer(path), prompts)
        self._short, self._long = _Worker(path), _Worker(path)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        worker = self._long if len(text) > LONG_TEXT_BYTES else self._short
        return worker.encode(Text(text, add_special_tokens))

    def close(self) -> None:
        super().close()
        self._short.close()
        self._long.close()


class _Worker:
    """One process, started when it is first needed or when it has died."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._frames: FrameSocket | None = None

    def encode(self, text: Text) -> list[int]:
        """Raises RequestError where the text cannot be encoded or the process dies of it."""
        with self._lock:
            try:
                frames = self._frames or self._start()
                frames.send(pack(text))
                data = frames.receive()
                answer = Ids(error="its process ended") if data is None else unpack(Ids, data)
            except (OSError, FaserError) as error:
                answer = Ids(error=str(error))
            if answer.token_ids is None:
                self._end()
                raise RequestError("text", text.text, f"could not be tokenised: {answer.error}")
        return answer.token_ids.tolist()

    def close(self) -> None:
        with self._lock:
            self._end()

    def _start(self) -> FrameSocket:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", __name__, str(self._path), str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self._frames = FrameSocket(ours, max_received=MAX_FRAME_BYTES, max_sent=MAX_FRAME_BYTES)
        return self._frames

    def _end(self) -> None:
        if self._frames is not None:
            self._frames.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._frames = self._process = None


def answer_texts(path: Path, stream: socket.socket) -> None:
    """The process: tokenises until the other end is closed."""
    tokenizer = TextTokenizer.from_file(path)
    frames = FrameSocket(stream, max_received=MAX_FRAME_BYTES, max_sent=MAX_FRAME_BYTES)
    while (data := frames.receive()) is not None:
        text = unpack(Text, data)
        try:
            ids = tokenizer.encode(text.text, add_special_tokens=text.add_special_tokens)
            answer = Ids(np.array(ids, np.int32))
        except BaseException as error:  # a panic of the library too costs the one text
            answer = Ids(error=f"{type(error).__name__}: {error}")
        frames.send(pack(answer))


if __name__ == "__main__":
    answer_texts(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
