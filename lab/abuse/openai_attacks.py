"""`scripts/fuzz.py --openai`: attacks on the OpenAI server, and what a well-behaved client notices of them.

Bodies up to the size limit that are costly to read, values that no field may hold, half-sent heads and bodies,
requests as a hostile web page makes them. Knows HTTP and the process of the server, nothing of what is behind it.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT = 4 << 20  # bytes of a body
PAUSE_S = 0.02  # of the well-behaved client, between an answer and its next request
TIMEOUT_S = 120.0
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
BASE: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": [5, 6, 7], "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    RESPONSES: {"input": "x", "max_output_tokens": 2},
}


def filled(before: str, unit: str, after: str) -> Callable[[], bytes]:
    """A body of as many units as the limit allows."""

    def make() -> bytes:
        return (before + unit * ((LIMIT - len(before) - len(after)) // len(unit)) + after).encode()

    return make


def numbered(before: str, unit: str, after: str) -> Callable[[], bytes]:
    """A body of units that differ: their number stands at %d."""

    def make() -> bytes:
        num = (LIMIT - len(before) - len(after)) // (len(unit % 0) + 6)
        return (before + ",".join(unit % index for index in range(num)) + after).encode()

    return make


_USER = '{"messages":[{"role":"user","content":'
_MESSAGE = '{"role":"user","content":"x"}'
_CHAT = f'{{"messages":[{_MESSAGE}],'
_CALL = '{"id":"1","function":{"name":"f","arguments":'
_ARGUMENTS = '{"messages":[{"role":"assistant","tool_calls":[' + _CALL + '"['
_SCHEMA = _CHAT + '"response_format":{"type":"json_schema","json_schema":{"schema":'
_PARTS = {"role": "user", "content": [{"type": "text", "text": "x"}] * 2}
_JUST_A_SCHEMA = json.loads(_SCHEMA + '{"enum":' + json.dumps([f"p{index}" for index in range(25_000)]) + "}}}}")
BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "ids, then a text": (COMPLETIONS, filled('{"prompt":[', "1,", '"a"]}')),
    "too many ids": (COMPLETIONS, filled('{"prompt":[', "1,", "1]}")),
    "ids of five digits": (COMPLETIONS, filled('{"prompt":[', "12345,", "1]}")),
    "lists as prompts": (COMPLETIONS, filled('{"prompt":[', "[],", "[1]]}")),
    "lists of one id": (COMPLETIONS, filled('{"prompt":[', "[1],", '["a"]]}')),
    "objects as prompts": (COMPLETIONS, filled('{"prompt":[', '{"":0},', "1]}")),
    "texts as prompts": (COMPLETIONS, filled('{"prompt":[', '"ab",', '"a"]}')),
    "a long text": (COMPLETIONS, filled('{"prompt":"', "x ", '"}')),
    "a text of escapes": (COMPLETIONS, filled('{"prompt":"', "\\u4e2d", '"}')),
    "a text of quotes": (COMPLETIONS, filled('{"prompt":"', '\\"', '"}')),
    "a text of commas": (COMPLETIONS, filled('{"prompt":"', ",", '"}')),
    "fractions": (COMPLETIONS, filled('{"prompt":[', "1.5e3,", "1]}")),
    "a huge number": (COMPLETIONS, filled('{"prompt":[1],"seed":', "9", "}")),
    "logit_bias, many keys": (COMPLETIONS, numbered('{"prompt":[1],"logit_bias":{', '"%d":1', "}}")),
    "one key over and over": (COMPLETIONS, filled('{"prompt":[1],', '"n":1,', '"seed":1}')),
    "unknown keys": (COMPLETIONS, numbered('{"prompt":[1],', '"k%d":1', "}")),
    "stop, many words": (COMPLETIONS, filled('{"prompt":[1],"stop":[', '"a",', '"a"]}')),
    "nested lists": (COMPLETIONS, filled('{"prompt":', "[", "")),
    "nested objects": (CHAT, filled(_SCHEMA, '{"a":', "")),
    "numbers as parts": (CHAT, filled(_USER + "[", "0,", "0]}]}")),
    "parts": (CHAT, filled(_USER + "[", '{"type":"text","text":""},', '{"type":"text"}]}]}')),
    "bad parts": (CHAT, filled(_USER + "[", "{},", "{}]}]}")),
    "messages": (CHAT, filled('{"messages":[', _MESSAGE + ",", _MESSAGE + "]}")),
    "bad messages": (CHAT, filled('{"messages":[', "{},", "{}]}")),
    "calls": (CHAT, filled('{"messages":[{"role":"assistant","tool_calls":[', "{},", "{}]}]}")),
    "arguments": (CHAT, filled(_ARGUMENTS, "[],", '[]]"}}]}]}')),
    "tools": (CHAT, filled(_CHAT + '"tools":[', "{},", "{}]}")),
    "a wide schema": (CHAT, numbered(_SCHEMA + '{"type":"object","properties":{', '"p%d":{}', "}}}}}")),
    "a schema of names": (CHAT, numbered(_SCHEMA + '{"enum":[', '"p%d"', "]}}}}")),
    "a long schema": (CHAT, filled(_SCHEMA + '{"description":"', "x", '"}}}}')),
    "modalities": (CHAT, filled(_CHAT + '"modalities":[', "0,", "0]}")),
    "a refused field": (CHAT, filled(_CHAT + '"functions":[', "0,", "0]}")),
    "instructions": (RESPONSES, filled('{"input":"x","instructions":"', "x", '"}')),
    "metadata": (RESPONSES, numbered('{"input":"x","metadata":{', '"k%d":"v"', "}}")),
    "just enough ids": (COMPLETIONS, lambda: b'{"prompt":[' + b"1," * 262_000 + b"1]}"),
    "just enough messages": (CHAT, lambda: json.dumps({"messages": [_PARTS] * 4096}).encode()),
    "just enough names": (CHAT, lambda: json.dumps(_JUST_A_SCHEMA).encode()),
    "a long value of metadata": (RESPONSES, filled('{"input":"x","stream":true,"metadata":{"k":"', "x", '"}}')),
}


@dataclass(frozen=True, slots=True)
class Seen:
    """An attack's answer, and what it did to others and to the server's memory."""

    attack: str
    status: int
    message: str
    seconds: float
    longest_wait_ms: float  # of a client that asks for the list of models
    growth_mb: float

    def row(self) -> dict[str, object]:
        return {
            "body": self.attack, "status": self.status, "answered after s": round(self.seconds, 2),
            "longest wait of another ms": round(self.longest_wait_ms), "memory MB": round(self.growth_mb),
            "answer": self.message[:90],
        }  # fmt: skip


def ask(
    port: int, path: str, body: bytes | None, headers: dict[str, str] | None = None, method: str | None = None
) -> tuple[int, dict[str, str], str]:
    """Status, headers and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        kind = {"content-type": "application/json"} if body is not None else {}
        connection.request(method or ("GET" if body is None else "POST"), path, body, kind | (headers or {}))
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def head_of(path: str, headers: dict[str, str]) -> bytes:
    """Of a POST, as it goes over the wire."""
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


class Watch:
    """A well-behaved client, for the time of the block."""

    def __init__(self, port: int) -> None:
        self.longest_s = 0.0
        self._port, self._is_over = port, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while True:
            start_s = time.monotonic()
            ask(self._port, "/v1/models", None)
            self.longest_s = max(self.longest_s, time.monotonic() - start_s)
            if self._is_over.wait(PAUSE_S):
                return

    def __enter__(self) -> Watch:
        self._thread.start()
        time.sleep(5 * PAUSE_S)
        return self

    def __exit__(self, *exception: object) -> None:
        time.sleep(5 * PAUSE_S)
        self._is_over.set()
        self._thread.join()


def memory_mb(pid: int, line: str) -> float:
    """VmRSS, or VmHWM: the most since `forget_peak`."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(each.split()[1]) for each in status.splitlines() if each.startswith(line)) * 1024 / 1e6


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def send_body(port: int, pid: int, name: str) -> Seen:
    path, make = BODIES[name]
    body = make()
    forget_peak(pid)
    before_mb = memory_mb(pid, "VmRSS")
    with Watch(port) as watch:
        start_s = time.monotonic()
        try:
            status, _, text = ask(port, path, body)
        except OSError as error:
            status, text = 0, f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - start_s
    growth_mb = memory_mb(pid, "VmHWM") - before_mb
    return Seen(name, status, text, seconds, watch.longest_s * 1e3, growth_mb)
