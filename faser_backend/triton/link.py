"""Connects a frontend in another process to the engine: a Unix socket, commands one way and events the other.

Triton forwards a cancellation only to the model that the client called, so an ensemble's inner model would never get
it. Every text model is therefore a process with a frontend that tokenises and answers, and token ids cross this link.
Messages are MessagePack in frames of limited size. pydantic reads them as the types that the reader expects, so nothing
in them can execute. The socket lies in a folder that only this user can enter.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

import msgpack
import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from faser_backend.core.errors import (
    ConfigError,
    ErrorCode,
    FailedError,
    Failure,
    FaserError,
    UnavailableError,
    blamed,
    refusal_of,
)
from faser_backend.core.request import EngineOutput, FinishReason, Request
from faser_backend.serving.engine_loop import Deliver, EngineLoop, Subscription
from faser_backend.serving.served_model import ServedModel
from faser_backend.text.prompts import PromptFormat
from faser_backend.text.tokenizer import TextTokenizer

T = TypeVar("T")
ARRAY_TYPES = frozenset({"bool", "int32", "int64", "float16", "float32"})
_ARRAY, _TOKENIZER = 1, 2  # MessagePack's extension types
_READING = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
_log = logging.getLogger(__name__)
GONE = Failure(ErrorCode.UNAVAILABLE, "the engine process is gone")
CLOSE_S = 1.0  # for a frontend to receive its last outputs
DIRECT = "openai-"  # prefix of the ids of the OpenAI server's requests
MAX_SOCKET_PATH = 100  # sun_path holds 108 bytes
MAX_COMMAND_BYTES = 64 << 20  # of a frame to the engine: a prompt of a million tokens and its fields
MAX_EVENT_BYTES = 3 << 30  # of a frame from the engine: the logits of one output
SMALL_BYTES = 16 << 10  # Linux calls a socket writable while three quarters of its 200 kB are free


@dataclass(frozen=True, slots=True)
class Handshake:
    """The served model and the server's options, sent to a frontend once per connection."""

    model: ServedModel
    max_queue_size: int
    out_of_vocab: Literal["reject", "clamp"]
    excludes_input: bool
    cancellation_period_s: float
    takes_stop_requests: bool = True


@dataclass(frozen=True, slots=True)
class Command:
    """A frontend's command. id: of the request, or of the client for submit and stop_client."""

    __pydantic_config__ = _READING

    verb: Literal["submit", "cancel", "stop", "stop_client"]
    id: str
    request: Request | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """The engine's message to a frontend: the handshake once, then outputs, or an error before it disconnects."""

    __pydantic_config__ = _READING

    handshake: Handshake | None = None
    outputs: list[EngineOutput] = field(default_factory=list)
    error: Failure | None = None


class FrameSocket:
    """One end of a connection, in frames of limited size. `send` is thread-safe; one thread receives."""

    def __init__(self, stream: socket.socket, *, max_received: int, max_sent: int) -> None:
        """max_received, max_sent: bytes of one frame."""
        self.stream = stream
        self._connection = Connection(os.dup(stream.fileno()))
        self._writable = select.poll()
        self._writable.register(self._connection, select.POLLOUT)
        self._max_received, self._max_sent = max_received, max_sent
        self._lock = threading.Lock()

    def check(self, data: bytes) -> bytes:
        """Returns the frame. Raises PackingError if it is too long."""
        if len(data) > self._max_sent:
            error = PackingError(f"frame = {len(data)} bytes: must be at most {self._max_sent}")
            error.code = ErrorCode.TOO_LONG
            raise error
        return data

    def send(self, data: bytes) -> None:
        """Blocks while the other end reads nothing. Raises PackingError, and OSError if the other end has closed."""
        with self._lock:
            self._connection.send_bytes(self.check(data))

    def send_now(self, data: bytes) -> bool:
        """Sends a frame unless that might block, and returns whether it did. Raises as `send` does."""
        with self._lock:
            if len(data) > SMALL_BYTES or not self._writable.poll(0):
                return False
            self._connection.send_bytes(self.check(data))
        return True

    def receive(self) -> bytes | None:
        """Returns the next frame, or None if the other end has closed or sends a frame that is too long."""
        try:
            return self._connection.recv_bytes(self._max_received)
        except (EOFError, OSError):
            return None

    def close(self) -> None:
        """Ends the connection. A `receive` on another thread returns."""
        with contextlib.suppress(OSError):
            self.stream.shutdown(socket.SHUT_RDWR)
        self.stream.close()


def socket_path(server_pid: int) -> Path:
    """Returns the path of a Triton server's engine socket. Raises ConfigError if its folder is unsafe."""
    base = tempfile.gettempdir()
    folder = Path(base if len(base) < MAX_SOCKET_PATH - 40 else "/tmp") / f"faser-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"{folder}: must be a folder that only user {os.getuid()} can enter (mode 0700)")
    return folder / f"engine-{server_pid}.sock"


def remove_stale_sockets(folder: Path) -> None:
    """Removes the sockets of servers that no longer run."""
    for path in folder.glob("engine-*"):
        if not Path("/proc", path.stem.removeprefix("engine-")).exists():
            path.unlink(missing_ok=True)


def only_socket() -> Path:
    """Returns the socket of this user's only engine. Raises ConfigError if there is none, or another one."""
    folder = socket_path(0).parent
    remove_stale_sockets(folder)
    found = sorted(str(path) for path in folder.glob("engine-*.sock") if not path.is_symlink())
    if len(found) != 1:
        limit = f"name one of {', '.join(found)}" if found else "no server with an engine runs here; start it first"
        raise ConfigError(f"engine-socket: {limit}")
    return Path(found[0])


def socket_id(path: Path) -> tuple[int, ...]:
    """Returns an id that changes when another engine's socket takes this path. Empty: there is none."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_mtime_ns


class LinkServer:
    """A server that accepts frontends and gives each its own subscription to the engine.

    Its socket replaces an earlier engine's at the same path, and the frontends of that engine reconnect here.
    """

    def __init__(self, loop: EngineLoop, handshake: Handshake, path: Path) -> None:
        self._loop, self._handshake, self._path = loop, handshake, path
        self._served: list[_ServedFrontend] = []
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
        """True once another engine's socket has replaced this one."""
        return socket_id(self._path) not in ((), self._id)

    def wait_for_disconnects(self, timeout_s: float) -> None:
        """Waits until every frontend has its last answer and has disconnected, to use the new engine."""
        deadline_s = time.monotonic() + timeout_s
        for one in self._served:
            one.reader.join(max(0.0, deadline_s - time.monotonic()))
        if num_left := sum(one.reader.is_alive() for one in self._served):
            _log.warning("disconnecting %d frontends that still wait for answers after %.0f s", num_left, timeout_s)

    def close(self) -> None:
        """Accepts no more frontends, and ends each connection after its pending outputs."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        if not self.is_superseded:
            self._path.unlink(missing_ok=True)
        for one in self._served:
            one.subscription.close()
            one.writer.join(CLOSE_S)

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:  # closed
                return
            frames = FrameSocket(stream, max_received=MAX_COMMAND_BYTES, max_sent=MAX_EVENT_BYTES)
            self._served = [one for one in self._served if one.reader.is_alive() or one.writer.is_alive()]
            self._served.append(_ServedFrontend(frames, self._loop, self._handshake))


class _ServedFrontend:
    """The engine's end of one connection: a thread that reads commands, and one that sends what must wait.

    While the frontend keeps up, the thread that runs steps sends by itself, before it plans the next step: other
    processes then work while cores are free, and no thread waits for Python's lock.
    """

    def __init__(self, frames: FrameSocket, loop: EngineLoop, handshake: Handshake) -> None:
        self._frames = frames
        self._waiting: SimpleQueue[list[EngineOutput] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_behind = True  # the writer has something to send, at first the handshake
        self.subscription = loop.subscribe(self._deliver)
        self.reader = threading.Thread(target=self._read, name="link-read", daemon=True)  # until it disconnects
        self.writer = threading.Thread(target=self._write, args=(handshake,), name="link-write", daemon=True)
        self.reader.start()
        self.writer.start()

    def _read(self) -> None:
        try:
            while (data := self._frames.receive()) is not None:
                self._execute(unpack(Command, data))
        except PackingError as error:
            # The peer has another version, or is no frontend.
            _log.warning("disconnecting a frontend that sent an invalid message: %s", error)
            with contextlib.suppress(FaserError, OSError):
                self._frames.send(pack(Event(error=error.failure)))
        self._frames.close()
        self.subscription.close()  # its requests free their KV blocks

    def _execute(self, command: Command) -> None:
        request = command.request
        if command.verb != "submit":
            getattr(self.subscription, command.verb)(command.id)  # unpack has checked that it is one of three names
            return
        if request is None:
            raise PackingError("Command.request = None: submit needs a request")
        try:
            self.subscription.submit(request, command.id)
        except Exception as error:
            failure = blamed(None, error)
            self._deliver([EngineOutput(request.request_id, [], finish_reason=FinishReason.ERROR, error=failure)])

    def _deliver(self, batch: list[EngineOutput] | None) -> None:
        with self._lock, self._sending():
            must_wait = batch is None or self._is_behind or _has_arrays(batch)
            if must_wait or not self._frames.send_now(pack(Event(outputs=batch or []))):
                self._is_behind = True
                self._waiting.put(batch)

    def _write(self, handshake: Handshake) -> None:
        with self._sending():
            self._frames.send(pack(Event(handshake=handshake)))
            while (batch := self._next_batch()) is not None:
                self._send(batch)
            self._frames.close()

    def _next_batch(self) -> list[EngineOutput] | None:
        with self._lock:
            self._is_behind = not self._waiting.empty()
        return self._waiting.get()

    @contextlib.contextmanager
    def _sending(self) -> Iterator[None]:
        """Handles errors: a frontend must not wait forever for an event that cannot be sent."""
        try:
            yield
        except FaserError as error:
            _log.error("disconnecting a frontend, as an event cannot be sent to it: %s", error)
            self._frames.close()
        except OSError:
            pass  # the frontend is gone: the reader ends the subscription

    def _send(self, batch: list[EngineOutput]) -> None:
        if not _has_arrays(batch):
            self._frames.send(pack(Event(outputs=batch)))
            return
        for output in batch:
            try:
                self._frames.send(pack(Event(outputs=[output])))
            except (FaserError, MemoryError) as error:  # its logits exceed a frame or the memory; nothing was sent
                self.subscription.cancel(output.request_id)
                name = "return_generation_logits" if output.context_logits is None else "return_context_logits"
                failed = EngineOutput(output.request_id, [], finish_reason=FinishReason.ERROR)
                failed.error = blamed(name, error)
                self._frames.send(pack(Event(outputs=[failed])))


def _has_arrays(batch: list[EngineOutput]) -> bool:
    """Returns whether a batch holds arrays; a frame holds those of one output at most."""
    names = ("context_logits", "generation_logits", "context_log_probs")
    return any(getattr(output, name) is not None for output in batch for name in names)


class SocketLink:
    """A frontend's end of the link. Raises UnavailableError if no engine answers in time, or the engine's error.

    Commands are sent in order by a thread of the link, so an engine that reads nothing blocks no caller.
    """

    def __init__(self, path: Path, timeout_s: float, deliver: Deliver | None = None) -> None:
        """deliver: takes the lists instead of `outputs`, on the thread that calls `read`; without it a thread reads."""
        self.outputs: SimpleQueue[list[EngineOutput] | None] = SimpleQueue()
        self._deliver = deliver or self.outputs.put
        before = socket_id(path)  # before connecting, so that an engine that starts meanwhile is noticed
        self._frames = _connect(path, timeout_s)
        self.stream = self._frames.stream  # by which an event loop knows when to call `read`
        self._sender = ThreadPoolExecutor(1, "link-send")
        self.socket_id = before or socket_id(path)  # unset if the first engine started while the link waited
        self._failure: FaserError | None = None
        event = self._receive()
        if event is None or event.handshake is None:
            raise UnavailableError(f"the engine at {path} closed the connection without a handshake")
        self.handshake: Handshake = event.handshake
        if deliver is None:
            threading.Thread(target=self._read, name="link-read", daemon=True).start()

    def submit(self, request: Request, client_id: str) -> Future[None]:
        """Returns a future that ends when the engine has taken the request; until it begins, it can be cancelled.

        Raises FaserError if the request cannot be sent, or the error with which the engine closed the link.
        """
        return self._send(Command("submit", client_id, request))

    def cancel(self, request_id: str) -> None:
        self._send(Command("cancel", request_id))

    def stop(self, request_id: str) -> None:
        self._send(Command("stop", request_id))

    def stop_client(self, client_id: str) -> None:
        self._send(Command("stop_client", client_id))

    def close(self) -> None:
        self._frames.close()

    def _send(self, command: Command) -> Future[None]:
        if self._failure is not None:
            raise self._failure
        return self._sender.submit(self._frames.send, self._frames.check(pack(command)))

    def read(self) -> bool:
        """Waits for the next frame and delivers its outputs. Returns False at the end of the connection."""
        outputs = None
        try:
            event = self._receive()
            outputs = event and event.outputs
        except FaserError as error:
            _log.warning("the link to the engine ended: %s", error)
            self._failure = error
        if outputs is None and self._failure is None:
            self._failure = FailedError(GONE)
        self._deliver(outputs)
        return outputs is not None

    def _receive(self) -> Event | None:
        """Returns the next event, or None once the engine has closed the link. Raises the engine's error."""
        data = self._frames.receive()
        event = None if data is None else unpack(Event, data)
        if event is not None and event.error is not None:
            raise FailedError(event.error)
        return event

    def _read(self) -> None:
        while self.read():
            pass


# A frontend's engine, in its own process or behind a socket. `outputs` yields lists of EngineOutput, and None once the
# engine is gone. Refusals arrive there too (finish reason ERROR), or `submit` raises them.
EngineLink = Subscription | SocketLink


def _connect(path: Path, timeout_s: float) -> FrameSocket:
    deadline_s = time.monotonic() + timeout_s
    while True:
        stream = socket.socket(socket.AF_UNIX)
        try:
            stream.connect(str(path))
            return FrameSocket(stream, max_received=MAX_EVENT_BYTES, max_sent=MAX_COMMAND_BYTES)
        except OSError as error:
            stream.close()
            if time.monotonic() >= deadline_s:
                reason = f"no engine answers at {path} ({error}); is the model 'tensorrt_llm' loaded?"
                raise UnavailableError(reason) from None
            time.sleep(0.05)


# -- values <-> bytes -------------------------------------------------------------------------------------------------
# A dataclass travels as a map of the fields that differ from their defaults; an array and a tokenizer are extension
# types. Reading refuses an unknown field, a value that its field's type cannot hold, and an array whose bytes do not
# fill it.


class PackingError(FaserError):
    """Bytes from another process are malformed, or a value cannot be sent."""

    code = ErrorCode.INTERNAL


def pack(value: Any) -> bytes:
    """Raises PackingError for anything but plain data, for instance a compiled grammar."""
    try:
        return bytes(msgpack.packb(value, default=_plain) or b"")
    except (TypeError, ValueError, OverflowError) as error:
        raise PackingError(f"a {type(value).__name__} cannot be sent: {error}") from None


def unpack(kind: type[T], data: bytes | bytearray) -> T:
    """Returns the dataclass `kind` in data. Raises PackingError with the field, its value and the limit."""
    try:
        plain = msgpack.unpackb(data, strict_map_key=False, ext_hook=_read_extension)
    except Exception as error:  # the library raises many classes, plain Exception among them
        reason = str(error) or type(error).__name__
        raise PackingError(f"{kind.__name__}: {len(data)} bytes that are no MessagePack ({reason})") from None
    try:
        return _adapter(kind).validate_python(plain)
    except ValidationError as error:
        raise PackingError(str(refusal_of(error, kind.__name__))) from None


_adapter = cache(TypeAdapter)  # because outputs come with every step


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if str(value.dtype) not in ARRAY_TYPES:
            raise TypeError(f"an array of {value.dtype}")
        return msgpack.ExtType(_ARRAY, pack([str(value.dtype), value.shape, np.ascontiguousarray(value).tobytes()]))
    if is_dataclass(value) and not isinstance(value, type):
        pairs = ((name, getattr(value, name), default) for name, default in _defaults(type(value)))
        return {name: item for name, item, default in pairs if isinstance(item, np.ndarray) or item != default}
    if isinstance(value, TextTokenizer):
        return msgpack.ExtType(_TOKENIZER, pack([os.fsencode(value.file or ""), value.prompts]))
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no plain data")


@cache
def _defaults(kind: Any) -> list[tuple[str, Any]]:
    return [(field.name, field.default) for field in fields(kind)]


def _read_extension(code: int, data: bytes) -> np.ndarray | TextTokenizer:
    if code == _ARRAY:
        kind, shape, content = msgpack.unpackb(data)
        if kind not in ARRAY_TYPES:
            raise ValueError(f"array of {kind!r:.80}: must be one of {', '.join(sorted(ARRAY_TYPES))}")
        return np.frombuffer(content, kind).reshape(shape)
    if code == _TOKENIZER:
        file, prompts = msgpack.unpackb(data)
        return TextTokenizer.from_file(Path(os.fsdecode(file)), PromptFormat(**prompts))
    raise ValueError(f"extension type {code}: unknown")
