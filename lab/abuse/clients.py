"""Clients of a server under abuse, replies that record all responses, and a neighbour.

A gRPC call carries one request and is read to its end, so that an answer that comes twice, or never, is seen.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2_grpc

TIMEOUT_S = 60.0  # for an answer; none here takes a tenth of it
PAUSE_S = 0.02  # of a neighbour, between an answer and the next request
MAX_SHOWN_WRONG = 3  # wrong answers of a neighbour
REFUSAL = "Maximum queue size"  # part of the error when the queue is full


@dataclass
class Reply:
    """Everything that one request received."""

    texts: dict[int, str] = field(default_factory=dict)  # by prompt of the batch; streamed parts are joined
    errors: list[str] = field(default_factory=list)
    num_finals: int = 0  # announced ends: an error, a final response, a complete HTTP body
    is_cut: bool = False  # this client left early
    is_lost: bool = False  # no end within TIMEOUT_S, or the connection broke
    seconds: float = 0.0
    status: int = 0  # of HTTP; 0: no answer
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""

    @property
    def text(self) -> str:
        return self.texts.get(0, "")


class GrpcClient:
    """One connection, which threads may share."""

    def __init__(self, url: str) -> None:
        self._channel = grpc.insecure_channel(url, [("grpc.use_local_subchannel_pool", 1)])
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def ask(
        self,
        request: Any,
        *,
        is_unary: bool = False,
        leave_after: int | None = None,
        on_first: Callable[[], object] = lambda: None,
    ) -> Reply:
        """Sends a request and reads its responses.

        leave_after: cancels a stream after this many responses, unless that was the last. on_first:
        called at the first response.
        """
        reply, start_s = Reply(), time.monotonic()
        try:
            if is_unary:
                self._stub.ModelInfer(request, timeout=TIMEOUT_S)
                reply.num_finals = 1
            else:
                call = self._stub.ModelStreamInfer(iter([request]), timeout=TIMEOUT_S)
                if leave_after == 0:
                    reply.is_cut = call.cancel()
                for num_seen, response in enumerate(call, 1):
                    _read_response(response, reply)
                    if num_seen == 1:
                        on_first()
                    if num_seen == leave_after and not reply.num_finals:
                        reply.is_cut = True
                        call.cancel()
        except grpc.RpcError as error:
            if not reply.is_cut:
                code = error.code()  # pyright: ignore[reportAttributeAccessIssue]
                reply.errors.append(f"{code.name}: {error.details()}")  # pyright: ignore[reportAttributeAccessIssue]
                # Triton refuses unary requests as UNAVAILABLE, too.
                is_broken = code is grpc.StatusCode.UNAVAILABLE and not is_unary
                reply.is_lost = is_broken or code is grpc.StatusCode.DEADLINE_EXCEEDED
                reply.num_finals += not reply.is_lost
        reply.seconds = time.monotonic() - start_s
        return reply

    def close(self) -> None:
        """Cancels open calls."""
        self._channel.close()


def _read_response(response: Any, reply: Reply) -> None:
    """Adds one message of a stream to the reply; token ids as text."""
    if response.error_message:
        reply.errors.append(response.error_message)
        reply.num_finals += 1
        return
    inner = response.infer_response
    reply.num_finals += inner.parameters["triton_final_response"].bool_param
    raw = {output.name: content for output, content in zip(inner.outputs, inner.raw_output_contents, strict=False)}
    index = int(np.frombuffer(raw["batch_index"], np.int32)[0]) if raw.get("batch_index") else 0
    text = raw.get("text_output", b"")[4:].decode(errors="replace")
    text += "".join(f"{token_id} " for token_id in np.frombuffer(raw.get("output_ids", b""), np.int32))
    reply.texts[index] = reply.texts.get(index, "") + text


def ask_http(
    port: int,
    path: str,
    body: bytes | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    method: str | None = None,
    leave_after: int | None = None,
) -> Reply:
    """Sends a POST with a JSON body, or a GET without one. leave_after: bytes of the answer after which the socket
    closes."""
    reply, start_s = Reply(), time.monotonic()
    kind = {} if body is None else {"Content-Type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, body, {**kind, **(headers or {})})
        if leave_after != 0:
            response = connection.getresponse()
            reply.status, reply.headers = response.status, dict(response.getheaders())
            reply.body = response.read(leave_after).decode(errors="replace")
        reply.is_cut = leave_after is not None
        if not reply.is_cut:
            _read_body(reply)
    except (OSError, http.client.HTTPException) as error:
        reply.errors.append(f"{type(error).__name__}: {error}")
        reply.is_lost = True
    finally:
        connection.close()
        reply.seconds = time.monotonic() - start_s
    return reply


def _read_body(reply: Reply) -> None:
    """Reads texts and errors from a complete HTTP answer: one object or a stream of events."""
    reply.num_finals += 1
    if reply.status != 200:
        reply.errors.append(reply.body)
        return
    lines = reply.body.splitlines()
    for event in [line.removeprefix("data: ") for line in lines if line.startswith("data: ")] or [reply.body]:
        try:
            content = json.loads(event)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            reply.errors.append(f"no JSON object: {event[:200]}")
        elif "error" in content:
            reply.errors.append(str(content["error"]))
        else:
            reply.texts[0] = reply.text + str(content.get("text_output", ""))


def judge(reply: Reply, expected: Sequence[str], *, may_be_short: bool = False) -> tuple[str, str | None]:
    """Returns the outcome of a request, and what is wrong with it. expected: the text of each of its prompts.

    A refusal because the queue is full counts as an answer.
    """
    found = [reply.texts.get(i, "") for i in range(len(expected))]
    is_beginning = all(text.startswith(part) for part, text in zip(found, expected, strict=True))
    if reply.is_cut and is_beginning:
        return "left", None
    if not reply.is_cut and (reply.is_lost or reply.num_finals != 1):
        return "wrong", f"answered {reply.num_finals} times, errors {reply.errors}"
    if len(reply.errors) == 1 and REFUSAL in reply.errors[0]:
        return "refused", None
    if not reply.errors and not reply.is_cut and found == list(expected):
        return "exact", None
    if not reply.errors and may_be_short and is_beginning:
        return "short", None
    return "wrong", f"{found} in place of {list(expected)}, errors {reply.errors}"


class Neighbour:
    """A well-behaved client that asks for the same answer again and again, in a thread for the time of the block.

    waits: seconds of each answer, TIMEOUT_S for none. wrong: the first few answers that differ from the first.
    """

    def __init__(self, ask: Callable[[], Reply]) -> None:
        self._ask = ask
        first = ask()
        if first.errors:
            raise RuntimeError(f"no answer to compare with: {first.errors}")
        self.expected = first.text
        self.waits: list[float] = []
        self.wrong: list[str] = []

    def ask_once(self) -> None:
        reply = self._ask()
        wrong = judge(reply, [self.expected])[1]
        self.waits.append(TIMEOUT_S if reply.is_lost else reply.seconds)
        if wrong is not None and len(self.wrong) < MAX_SHOWN_WRONG:
            self.wrong.append(f"a well-behaved client: {wrong}")

    def _run(self) -> None:
        while not self._is_over.wait(PAUSE_S):
            self.ask_once()

    def __enter__(self) -> Neighbour:
        self.waits, self._is_over, self._thread = [], threading.Event(), threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self._thread.join()
