"""Frames of bytes over a stream socket: eight bytes of length, then as many bytes, never more than a limit.

Knows nothing of what is in a frame (packing.py).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

from faser_backend.core.errors import ErrorCode, FaserError

_LENGTH = struct.Struct(">Q")
_CHUNK = 1 << 20  # memory is taken as bytes arrive, not as a header promises them


class FrameError(FaserError):
    """A frame is longer than may be, or ends before it is whole."""

    code = ErrorCode.INTERNAL

    @classmethod
    def too_long(cls, num_bytes: int, limit: int) -> FrameError:
        error = cls(f"frame = {num_bytes} bytes: must be at most {limit}")
        error.code = ErrorCode.TOO_LONG
        return error


class FrameSocket:
    """One end. `send` is thread-safe; one thread receives."""

    def __init__(self, stream: socket.socket, *, max_received: int, max_sent: int) -> None:
        """max_received, max_sent: bytes of one frame."""
        self._stream = stream
        self._max_received, self._max_sent = max_received, max_sent
        self._lock = threading.Lock()

    def send(self, data: bytes) -> None:
        """Raises FrameError for a frame that is too long, and OSError where the other end is gone."""
        if len(data) > self._max_sent:
            raise FrameError.too_long(len(data), self._max_sent)
        with self._lock:
            self._stream.sendall(_LENGTH.pack(len(data)) + data if len(data) < _CHUNK else _LENGTH.pack(len(data)))
            if len(data) >= _CHUNK:
                self._stream.sendall(data)

    def receive(self) -> bytes | None:
        """The next frame; None where the other end has closed between two. Raises FrameError and OSError."""
        header = self._take(_LENGTH.size)
        if not header:
            return None
        if len(header) < _LENGTH.size:
            raise FrameError(f"frame: ends after {len(header)} bytes of its length")
        (length,) = _LENGTH.unpack(header)
        if length > self._max_received:
            raise FrameError.too_long(length, self._max_received)
        data = self._take(length)
        if len(data) < length:
            raise FrameError(f"frame: ends after {len(data)} of {length} bytes")
        return bytes(data)

    def close(self) -> None:
        """Ends the connection; a `receive` that waits on another thread returns."""
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()

    def _take(self, length: int) -> bytearray:
        """`length` bytes, or fewer at the end of the stream."""
        taken = bytearray()
        while len(taken) < length:
            part = self._stream.recv(min(length - len(taken), _CHUNK))
            if not part:
                break
            taken += part
        return taken
