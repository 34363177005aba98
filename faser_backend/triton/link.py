"""How a front end in another process reaches the engine: a Unix socket, calls one way and news the other.

Triton forwards a cancelled request only to the model that the client called: inside an ensemble the
running step never hears of it. So every text model has a frontend and a process of its own, which
tokenises, detokenises and answers; token ids cross this link. Messages are plain data (packing.py) in
frames of limited size; the socket lies in a folder that only this user can enter.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import struct
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

from faser_backend.core.errors import ConfigError, ErrorCode, FailedError, Failure, FaserError, UnavailableError, blamed
from faser_backend.core.request import EngineOutput, FinishReason, Limits, Request
from faser_backend.serving.engine_loop import EngineLoop, Subscription
from faser_backend.text.prompts import PromptFormat
from faser_backend.triton.packing import PackingError, pack, unpack
from faser_backend.triton.tensor_values import MIN_TEXT_BYTES

_log = logging.getLogger(__name__)
LEAVE_POLL_S = 0.02
CLOSE_S = 1.0  # for a frontend to take what it is sent last
MAX_SOCKET_PATH = 100  # sun_path holds 108 bytes
MAX_CALL_BYTES = 64 << 20  # of a frame to the engine: a prompt of a million tokens and all that may come with it
MAX_NEWS_BYTES = 3 << 30  # of a frame from it: the logits of one output
_LENGTH = struct.Struct(">Q")
_CHUNK = 1 << 20  # memory is taken as bytes arrive, not as a header promises them


@dataclass(frozen=True, slots=True)
class Hello:
    """Describes the engine to a frontend; sent once per connection."""

    tokenizer_file: Path
    limits: Limits
    end_ids: tuple[int, ...]
    max_queue_size: int
    out_of_vocab: Literal["reject", "clamp"]
    excludes_input: bool
    cancellation_period_s: float
    prompts: PromptFormat = field(default_factory=PromptFormat)
    kv_block_size: int = 16
    max_text_bytes: int = MIN_TEXT_BYTES  # of one prompt or conversation, before it is tokenised
    takes_stop_requests: bool = True


@dataclass(frozen=True, slots=True)
class Call:
    """A command of a frontend. id: the request's, or the client's for submit and stop_client."""

    verb: Literal["submit", "cancel", "stop", "stop_client"]
    id: str
    request: Request | None = None


@dataclass(frozen=True, slots=True)
class News:
    """A message of the engine to a frontend: hello once, then outputs; an error before it hangs up."""

    hello: Hello | None = None
    outputs: list[EngineOutput] = field(default_factory=list)
    error: Failure | None = None


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


def socket_path(server_pid: int) -> Path:
    """The socket of the engine under one Triton server process. Raises ConfigError on an unsafe folder."""
    base = tempfile.gettempdir()
    folder = Path(base if len(base) < MAX_SOCKET_PATH - 40 else "/tmp") / f"faser-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"{folder}: must be a folder that only user {os.getuid()} can enter (mode 0700)")
    return folder / f"engine-{server_pid}.sock"


def remove_stale_sockets(folder: Path) -> None:
    """Removes what servers that were killed have left behind."""
    for path in folder.glob("engine-*"):
        if not Path("/proc", path.stem.removeprefix("engine-")).exists():
            path.unlink(missing_ok=True)


def socket_id(path: Path) -> tuple[int, ...]:
    """Returns what distinguishes an engine's socket from another in its place; empty where there is none."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_mtime_ns


class LinkServer:
    """Accepts frontends and gives each a subscription of its own.

    The socket takes the place of that of an engine before this one, whose frontends then move here.
    """

    def __init__(self, loop: EngineLoop, hello: Hello, path: Path) -> None:
        self._loop = loop
        self._hello = hello
        self._path = path
        self._served: list[tuple[Subscription, threading.Thread]] = []
        self._lock = threading.Lock()
        self._num_linked = 0  # frontends
        remove_stale_sockets(path.parent)
        fresh = path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(fresh))
        self._listener.listen(16)
        self._id = socket_id(fresh)
        fresh.replace(path)
        threading.Thread(target=self._accept, name="link-accept", daemon=True).start()

    @property
    def is_superseded(self) -> bool:
        """Whether another engine listens in this one's place."""
        return socket_id(self._path) not in ((), self._id)

    def wait_left(self, timeout_s: float) -> None:
        """Waits until every frontend has moved to the engine in this one's place and has its last answer from here."""
        deadline_s = time.monotonic() + timeout_s
        while self._num_linked and time.monotonic() < deadline_s:
            time.sleep(LEAVE_POLL_S)
        if self._num_linked:
            _log.warning("%d frontends are still here after %.0f s; they are hung up on", self._num_linked, timeout_s)

    def close(self) -> None:
        """Takes no more frontends; those that are there are sent what there is for them."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        if not self.is_superseded:
            self._path.unlink(missing_ok=True)
        for subscription, writer in self._served:
            subscription.close()
            writer.join(CLOSE_S)

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:  # closed
                return
            frames = FrameSocket(stream, max_received=MAX_CALL_BYTES, max_sent=MAX_NEWS_BYTES)
            subscription = self._loop.subscribe()
            reader, writer = (
                threading.Thread(target=target, args=(frames, subscription), name="link", daemon=True)
                for target in (self._read, self._write)
            )
            self._served.append((subscription, writer))
            self._count_linked(1)
            reader.start()
            writer.start()

    def _count_linked(self, change: int) -> None:
        with self._lock:
            self._num_linked += change

    def _read(self, frames: FrameSocket, subscription: Subscription) -> None:
        try:
            while (data := frames.receive()) is not None:
                self._execute(subscription, unpack(Call, data))
        except (FrameError, PackingError) as error:
            # Whoever writes such frames is no frontend of this version: it is told, and hung up on.
            _log.warning("a frontend was hung up on: %s", error)
            with contextlib.suppress(FaserError, OSError):
                frames.send(pack(News(error=error.failure)))
        except OSError:
            pass
        frames.close()
        self._count_linked(-1)
        subscription.close()  # the frontend is gone: its requests give back their blocks

    def _execute(self, subscription: Subscription, call: Call) -> None:
        if call.verb == "submit":
            if call.request is None:
                raise PackingError("Call.request = None: submit needs a request")
            self._submit(subscription, call.request, call.id)
        else:
            getattr(subscription, call.verb)(call.id)  # one of three names: unpack has checked it

    def _submit(self, subscription: Subscription, request: Request, client_id: str) -> None:
        try:
            subscription.submit(request, client_id)
        except FaserError as error:
            refusal = EngineOutput(request.request_id, [], finish_reason=FinishReason.ERROR, error=error.failure)
            subscription.outputs.put([refusal])

    def _write(self, frames: FrameSocket, subscription: Subscription) -> None:
        try:
            self._tell(frames, subscription)
        except FaserError as error:  # the frontend would wait for ever for what cannot be sent
            _log.error("a frontend was hung up on: %s", error)
            frames.close()
        except OSError:
            pass  # the reader notices that the frontend is gone and ends this queue

    def _tell(self, frames: FrameSocket, subscription: Subscription) -> None:
        frames.send(pack(News(hello=self._hello)))
        while (batch := subscription.outputs.get()) is not None:
            while not subscription.outputs.empty() and not _has_logits(batch):
                more = subscription.outputs.get()
                if more is None:
                    return
                batch = batch + more
            if not _has_logits(batch):
                frames.send(pack(News(outputs=batch)))
                continue
            for output in batch:
                try:
                    frames.send(pack(News(outputs=[output])))
                except OSError:
                    raise
                except Exception as error:  # its logits are more than a frame or memory holds, and nothing was sent
                    subscription.cancel(output.request_id)
                    failed = EngineOutput(output.request_id, [], finish_reason=FinishReason.ERROR)
                    failed.error = blamed(_logits_field(output), error)
                    frames.send(pack(News(outputs=[failed])))


def _has_logits(batch: list[EngineOutput]) -> bool:
    """Outputs with logits take frames of their own, so that no frame holds those of two."""
    return any(output.context_logits is not None or output.generation_logits is not None for output in batch)


def _logits_field(output: EngineOutput) -> str:
    return "return_context_logits" if output.context_logits is not None else "return_generation_logits"


class SocketLink:
    """A frontend's end. Raises UnavailableError if no engine answers within `timeout_s`, or FaserError with what the
    engine's end has to say."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.outputs: SimpleQueue[list[EngineOutput] | None] = SimpleQueue()
        self._frames = _connect(path, timeout_s)
        self._failure: FaserError | None = None
        hello = self._receive()
        if hello is None or hello.hello is None:
            raise UnavailableError(f"the engine at {path} hung up before it said anything")
        self.hello: Hello = hello.hello
        threading.Thread(target=self._read, name="link-read", daemon=True).start()

    def submit(self, request: Request, client_id: str) -> None:
        """Raises RequestError where the request cannot be sent, or what the engine's end said before it hung up."""
        self._send(Call("submit", client_id, request))

    def cancel(self, request_id: str) -> None:
        self._send(Call("cancel", request_id))

    def stop(self, request_id: str) -> None:
        self._send(Call("stop", request_id))

    def stop_client(self, client_id: str) -> None:
        self._send(Call("stop_client", client_id))

    def close(self) -> None:
        self._frames.close()

    def _send(self, call: Call) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            self._frames.send(pack(call))
        except OSError as error:
            raise UnavailableError(f"the engine process is gone ({error})") from None

    def _receive(self) -> News | None:
        """None once the engine has hung up. Raises what it said before."""
        data = self._frames.receive()
        if data is None:
            return None
        news = unpack(News, data)
        if news.error is not None:
            raise FailedError(news.error)
        return news

    def _read(self) -> None:
        try:
            while (news := self._receive()) is not None:
                self.outputs.put(news.outputs)
        except FaserError as error:
            _log.warning("the link to the engine ended: %s", error)
            self._failure = error
        except OSError:
            pass
        self.outputs.put(None)


# How a frontend reaches the engine: in its process, or behind a socket. `outputs` yields lists of EngineOutput, None
# once the engine is gone. Refusals arrive there too (finish reason ERROR) or are raised by `submit`.
EngineLink = Subscription | SocketLink


def _connect(path: Path, timeout_s: float) -> FrameSocket:
    deadline_s = time.monotonic() + timeout_s
    while True:
        stream = socket.socket(socket.AF_UNIX)
        try:
            stream.connect(str(path))
            return FrameSocket(stream, max_received=MAX_NEWS_BYTES, max_sent=MAX_CALL_BYTES)
        except OSError as error:
            stream.close()
            if time.monotonic() >= deadline_s:
                reason = f"no engine answers at {path} ({error}); is the model 'tensorrt_llm' loaded?"
                raise UnavailableError(reason) from None
            time.sleep(0.05)
