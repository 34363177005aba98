"""`Worker`: a Python program in a separate process, which answers one message after the other.

A message that makes the program loop, fill memory or crash fails alone; the next one starts a new process.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Pipe

from faser_backend.core.errors import FaserError


class WorkerError(FaserError):
    """The process ended before it answered. status: its exit status."""

    def __init__(self, status: int, last_line: str) -> None:
        super().__init__(f"its process ended with status {status}: {last_line}")
        self.status = status


class Worker:
    """A process that starts with the first call, and again after it has died. Thread-safe: one call at a time."""

    def __init__(self, *arguments: str) -> None:
        """arguments: of Python. The descriptor of the socket for messages is appended.

        The program must end when that socket is closed.
        """
        self._arguments = arguments
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def call(self, message: bytes) -> bytes:
        """Raises WorkerError."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._end()
                self._start()
            assert self._connection is not None and self._process is not None
            try:
                self._connection.send_bytes(message)
                return self._connection.recv_bytes()
            except (OSError, EOFError):
                raise WorkerError(*self._end()) from None

    def close(self) -> None:
        """Ends the process; a later call starts another."""
        with self._lock:
            self._end()

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        command = [sys.executable, *self._arguments, str(theirs.fileno())]
        null = subprocess.DEVNULL
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=null, stdout=null, stderr=subprocess.PIPE, pass_fds=[theirs.fileno()]
            )

    def _end(self) -> tuple[int, str]:
        """Returns the exit status and the last line of stderr."""
        process, connection, self._process, self._connection = self._process, self._connection, None, None
        if process is None or connection is None:
            return 0, ""
        connection.close()
        process.kill()
        _, errors = process.communicate()
        return process.returncode, errors.decode(errors="replace").strip().rpartition("\n")[2]
