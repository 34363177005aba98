"""How a front end in another process reaches the engine: a Unix socket and five messages.

Triton forwards a cancelled request only to the model that the client called: inside an ensemble the
running step never hears of it. So every text model has a frontend and a process of its own, which
tokenises, detokenises and answers; token ids cross this link. Messages are pickled tuples; the
socket lies in a folder that only this user can enter.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import stat
import tempfile
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, Protocol

from faser_backend.core.errors import ConfigError, FaserError, RequestError
from faser_backend.core.request import FinishReason, Limits, Request, RequestOutput
from faser_backend.serving.engine_loop import EngineLoop, Subscription
from faser_backend.serving.prompts import PromptFormat

_log = logging.getLogger(__name__)
CLOSE_S = 1.0  # for a frontend to take what it is sent last
MAX_SOCKET_PATH = 100  # sun_path holds 108 bytes


@dataclass(frozen=True, slots=True)
class Hello:
    """What a frontend must know of the engine; sent once per connection."""

    tokenizer_file: Path
    limits: Limits
    end_ids: tuple[int, ...]
    max_queue_size: int
    out_of_vocab: Literal["reject", "clamp"]
    excludes_input: bool
    cancellation_period_s: float
    prompts: PromptFormat = field(default_factory=PromptFormat)
    kv_block_size: int = 16


class EngineLink(Protocol):
    """A front end's view of the engine, in process or behind a socket.

    `outputs` yields lists of RequestOutput, None once the engine is gone. Refusals arrive there too
    (finish reason ERROR) or are raised by `submit`.
    """

    outputs: SimpleQueue[list[RequestOutput] | None]

    def submit(self, request: Request, client_id: str) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def stop(self, request_id: str) -> None: ...
    def stop_client(self, client_id: str) -> None: ...
    def close(self) -> None: ...


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
    for path in folder.glob("engine-*.sock"):
        if not Path("/proc", path.stem.removeprefix("engine-")).exists():
            path.unlink(missing_ok=True)


class LinkServer:
    """Accepts frontends and gives each a subscription of its own."""

    def __init__(self, loop: EngineLoop, hello: Hello, path: Path) -> None:
        self._loop = loop
        self._hello = hello
        self._path = path
        self._served: list[tuple[Subscription, threading.Thread]] = []
        remove_stale_sockets(path.parent)
        path.unlink(missing_ok=True)
        self._listener = Listener(str(path), family="AF_UNIX", backlog=16)
        threading.Thread(target=self._accept, name="link-accept", daemon=True).start()

    def close(self) -> None:
        """Takes no more frontends; those that are there are sent what there is for them."""
        self._listener.close()
        self._path.unlink(missing_ok=True)
        for subscription, writer in self._served:
            subscription.close()
            writer.join(CLOSE_S)

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:  # closed
                return
            subscription = self._loop.subscribe()
            reader, writer = (
                threading.Thread(target=target, args=(connection, subscription), name="link", daemon=True)
                for target in (self._read, self._write)
            )
            self._served.append((subscription, writer))
            reader.start()
            writer.start()

    def _read(self, connection: Connection, subscription: Subscription) -> None:
        try:
            while True:
                verb, *arguments = connection.recv()
                if verb == "submit":
                    self._submit(subscription, *arguments)
                else:
                    getattr(subscription, {"cancel": "cancel", "stop": "stop", "stop_client": "stop_client"}[verb])(
                        *arguments
                    )
        except (EOFError, OSError):
            subscription.close()  # the frontend is gone: its requests give back their blocks

    def _submit(self, subscription: Subscription, request: Request, client_id: str) -> None:
        try:
            subscription.submit(request, client_id)
        except FaserError as error:
            message = str(error)
            refusal = RequestOutput(request.request_id, [], finish_reason=FinishReason.ERROR, error=message)
            subscription.outputs.put([refusal])

    def _write(self, connection: Connection, subscription: Subscription) -> None:
        with contextlib.suppress(OSError):  # the reader notices that the frontend is gone and ends this queue
            connection.send(self._hello)
            while (batch := subscription.outputs.get()) is not None:
                while not subscription.outputs.empty():
                    more = subscription.outputs.get()
                    if more is None:
                        return
                    batch = batch + more
                connection.send_bytes(pickle.dumps([_pack(output) for output in batch], pickle.HIGHEST_PROTOCOL))


def _pack(output: RequestOutput) -> tuple:
    return (
        output.request_id,
        output.token_ids,
        output.log_probs,
        output.finish_reason,
        output.error,
        output.stats,
        output.context_logits,
        output.generation_logits,
    )


class SocketLink:
    """A frontend's end. Raises ConfigError if no engine answers within `timeout_s`."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.outputs: SimpleQueue[list[RequestOutput] | None] = SimpleQueue()
        self._lock = threading.Lock()  # several request threads share the connection
        self._connection = _connect(path, timeout_s)
        self.hello: Hello = self._connection.recv()
        threading.Thread(target=self._read, name="link-read", daemon=True).start()

    def submit(self, request: Request, client_id: str) -> None:
        self._send("submit", request, client_id)

    def cancel(self, request_id: str) -> None:
        self._send("cancel", request_id)

    def stop(self, request_id: str) -> None:
        self._send("stop", request_id)

    def stop_client(self, client_id: str) -> None:
        self._send("stop_client", client_id)

    def close(self) -> None:
        # A shutdown, not a close: the reader's blocked read would keep the socket open.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)

    def _send(self, *message: object) -> None:
        try:
            with self._lock:
                self._connection.send(message)
        except OSError as error:
            raise RequestError("engine", "unreachable", f"the engine process is gone ({error})") from None

    def _read(self) -> None:
        try:
            while True:
                packed = pickle.loads(self._connection.recv_bytes())
                self.outputs.put([RequestOutput(*fields) for fields in packed])
        except (EOFError, OSError):
            self.outputs.put(None)


def _connect(path: Path, timeout_s: float) -> Connection:
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return Client(str(path), family="AF_UNIX")
        except OSError as error:
            if time.monotonic() >= deadline_s:
                reason = f"no engine answers at {path} ({error}); is the model 'tensorrt_llm' loaded?"
                raise ConfigError(reason) from None
            time.sleep(0.05)
