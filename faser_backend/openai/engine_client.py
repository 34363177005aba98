"""The client of the engine of the same launch: token ids over its socket, without Triton between.

A step's outputs come in one message for all requests. After a reload, new requests go to the new engine, and the old
one answers its own.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncGenerator, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from faser_backend.core.errors import ErrorCode, FailedError, Failure, FaserError
from faser_backend.core.request import EngineOutput, FinishReason
from faser_backend.openai.bodies import MAX_TOP_LOGPROBS
from faser_backend.openai.requests import Generation
from faser_backend.serving.request_reports import Listener, RequestLife, SequenceLife, report_ended
from faser_backend.serving.served_model import ServedModel
from faser_backend.text.answer_stream import AnswerStream, condense
from faser_backend.text.guides import read_guide
from faser_backend.triton.link import DIRECT, GONE, SocketLink, socket_id

FOLLOW_POLL_S = 0.2  # between two checks for a new engine
CONNECT_S = 5.0
SEND_S = 5.0  # time for the engine to take a request
NOT_READY = Failure(ErrorCode.UNAVAILABLE, "the engine is not ready")
CANCELLED = Failure(ErrorCode.CANCELLED, "Request cancelled")


class _Connection:
    """One engine's socket, and the requests that wait for its outputs. Making one blocks until the engine answers."""

    def __init__(self, path: Path, events: asyncio.AbstractEventLoop) -> None:
        self.waiting: dict[str, asyncio.Queue[EngineOutput]] = {}  # by request id
        self.is_gone = False
        self._events = events
        self.link = SocketLink(path, CONNECT_S, self._take)
        AnswerStream(self.link.handshake.model.tokenizer)  # makes its table of bytes before a client waits for it

    def open(self) -> None:
        """Begins to read. Call on the event loop's thread, as `close`."""
        self._events.add_reader(self.link.stream, lambda: self.link.read() or self.close())

    def close(self) -> None:
        """May be called again."""
        if self.link.stream.fileno() >= 0:
            self._events.remove_reader(self.link.stream)
            self.link.close()

    def _take(self, outputs: list[EngineOutput] | None) -> None:
        if outputs is None:
            self.is_gone = True
            outputs = [EngineOutput(one, [], finish_reason=FinishReason.ERROR, error=GONE) for one in self.waiting]
        for output in outputs:
            condense(output, MAX_TOP_LOGPROBS)  # a slow reader's outputs wait in the queue
            if (queue := self.waiting.get(output.request_id)) is not None:
                queue.put_nowait(output)


class EngineClient:
    """Generates over the engine's socket. Belongs to one event loop.

    listeners: called with every request that has ended.
    """

    def __init__(self, socket: Path, listeners: Sequence[Listener]) -> None:
        self._listeners = listeners
        self._connection: _Connection | None = None
        self._numbers = itertools.count()
        self._follower = asyncio.create_task(self._follow(socket))

    @property
    def model(self) -> ServedModel:
        """The model of the engine that gets new requests. Raises FailedError until one is reached."""
        if self._connection is None:
            raise FailedError(NOT_READY)
        return self._connection.link.handshake.model

    async def is_ready(self) -> bool:
        return self._connection is not None and not self._connection.is_gone

    async def generate(
        self, wanted: Sequence[Generation], headers: dict[str, str], stopped: Set[int]
    ) -> AsyncGenerator[tuple[int, EngineOutput], None]:
        """Yields outputs with the index of their generation, until all have ended. They share a guide.

        headers: of the client's trace. stopped: the indices whose further outputs the caller does not want. Closing the
        iterator cancels in the engine what still runs. Raises the error of the first that fails, a FaserError.
        """
        running: dict[str, tuple[int, RequestLife]] = {}  # by request id
        queue = asyncio.Queue[EngineOutput]()
        connection: _Connection | None = None
        life: RequestLife | None = None  # of the generation that fails, if one does
        try:
            guide = wanted[0].guide and await asyncio.to_thread(read_guide, wanted[0].guide.kind, wanted[0].guide.text)
            if (connection := self._connection) is None:
                raise FailedError(NOT_READY)
            for index, one in enumerate(wanted):
                request = replace(one.request, request_id=f"{DIRECT}{os.getpid()}-{next(self._numbers)}", guide=guide)
                life = RequestLife(request.request_id, time.perf_counter_ns(), parameters=headers)
                life.model, life.error = connection.link.handshake.model.name, CANCELLED.message
                life.sequences[life.request_id] = SequenceLife.of(request)
                running[life.request_id], connection.waiting[life.request_id] = (index, life), queue
                await _taken(connection.link.submit(request, ""))
            while running:
                output = await queue.get()
                if output.request_id not in running:  # stopped
                    continue
                index, life = running[output.request_id]
                life.sequences[life.request_id].add(output, time.perf_counter_ns())
                if output.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
                    raise FailedError(output.error or CANCELLED)
                yield index, output
                if output.is_final or index in stopped:
                    del running[life.request_id]
                    life.error = ""
                    self._end(connection, life, is_running=not output.is_final)
        except FaserError as error:
            if life is not None:
                life.error = str(error)
            raise wanted[0].named(error) from None
        finally:
            for _, life in running.values():
                assert connection is not None
                self._end(connection, life, is_running=True)

    def _end(self, connection: _Connection, life: RequestLife, *, is_running: bool) -> None:
        del connection.waiting[life.request_id]
        if is_running:
            with suppress(FaserError):
                (connection.link.cancel if life.error else connection.link.stop)(life.request_id)
        self._close_replaced(connection)
        report_ended(life, self._listeners)

    async def close(self) -> None:
        self._follower.cancel()
        connection, self._connection = self._connection, None
        self._close_replaced(connection)

    async def _follow(self, path: Path) -> None:
        while True:
            old = self._connection
            known = () if old is None or old.is_gone else old.link.socket_id
            if socket_id(path) not in ((), known):
                with suppress(Exception):  # tried again; meanwhile a lost engine's requests fail
                    self._connection = await asyncio.to_thread(_Connection, path, asyncio.get_running_loop())
                    self._connection.open()
                    if old is None:
                        print("the engine is reached", flush=True)  # `faser serve` waits for this line
                    self._close_replaced(old)
            await asyncio.sleep(FOLLOW_POLL_S)

    def _close_replaced(self, connection: _Connection | None) -> None:
        if connection is not None and connection is not self._connection and not connection.waiting:
            connection.close()
            tokenizer = connection.link.handshake.model.tokenizer
            asyncio.get_running_loop().run_in_executor(None, tokenizer.close)  # a conversation may be rendered now


async def _taken(sent: Future[None]) -> None:
    """Waits until the engine has taken a request. Raises FailedError."""
    try:
        await asyncio.wait_for(asyncio.wrap_future(sent), SEND_S)
    except TimeoutError:
        raise FailedError(Failure(ErrorCode.UNAVAILABLE, f"the engine took no request for {SEND_S:g} s")) from None
    except OSError:
        raise FailedError(GONE) from None
