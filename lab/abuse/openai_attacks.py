"""`scripts/fuzz.py --openai`: bodies that are costly to read, and half-sent heads, for the OpenAI server.

Measures how long another client waits meanwhile, and the server's memory. Knows HTTP and the server's process.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import resource
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from lab.abuse.served import DOOR, serving, wait_for_line
from lab.bench.servers import free_ports
from lab.tables import markdown_table

LIMIT = 4 << 20  # bytes of a body
PAUSE_S = 0.02  # of the well-behaved client, between an answer and its next request
TIMEOUT_S = 120.0
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"


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
    "long texts": (COMPLETIONS, lambda: json.dumps({"prompt": ["a b\n" * 16_000] * 40}).encode()),
    "just enough ids": (COMPLETIONS, lambda: b'{"prompt":[' + b"1," * 262_000 + b"1]}"),
    "just enough messages": (CHAT, lambda: json.dumps({"messages": [_PARTS] * 4096}).encode()),
    "just enough names": (CHAT, lambda: json.dumps(_JUST_A_SCHEMA).encode()),
    "a long value of metadata": (RESPONSES, filled('{"input":"x","stream":true,"metadata":{"k":"', "x", '"}}')),
}


LIMIT_MS, LIMIT_MB = 100.0, 100.0  # what a body may cost others, beside their usual wait, and in memory
FLOOD_MS = 10_000.0  # of many connections: where too many wait to be accepted, the kernel tries again after 1 s and 3 s
TRIES = 3  # of an attack beyond LIMIT_MS: of a machine that others use, the shortest of the longest waits counts
NUM_HALF_SENT, NUM_SENDERS = 3000, 8
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@dataclass(frozen=True, slots=True)
class Seen:
    """An attack's answer, and what it did to others and to the server's memory."""

    attack: str
    status: int
    message: str
    seconds: float
    longest_wait_ms: float  # of a client that asks for the list of models
    growth_mb: float
    processor_s: float  # that the server took, for the other client too

    def row(self) -> dict[str, object]:
        return {
            "attack": self.attack, "status": self.status, "answered after s": round(self.seconds, 2),
            "longest wait of another ms": round(self.longest_wait_ms), "memory MB": round(self.growth_mb),
            "processor s": round(self.processor_s, 2),
        }  # fmt: skip

    def broken(self, usual_ms: float) -> list[str]:
        broken = []
        if self.longest_wait_ms > (LIMIT_MS + usual_ms if self.status else FLOOD_MS):
            broken.append(f"another client waited {self.longest_wait_ms:.0f} ms, usually {usual_ms:.0f}")
        if self.growth_mb > LIMIT_MB:
            broken.append(f"it took {self.growth_mb:.0f} MB")
        if self.status not in (0, 400, 413) or (self.status and "error" not in json.loads(self.message)):
            broken.append(f"status {self.status}: {self.message[:100]}")
        return [f"{self.attack}: {each}" for each in broken]


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


def answer_to(port: int, path: str, body: bytes | None) -> tuple[int, str]:
    status, _, text = ask(port, path, body)
    return status, text


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
            try:
                ask(self._port, "/v1/models", None)
                self.longest_s = max(self.longest_s, time.monotonic() - start_s)
            except (OSError, http.client.HTTPException):  # no answer
                self.longest_s = TIMEOUT_S
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


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def measured(port: int, pid: int, name: str, act: Callable[[], tuple[int, str]]) -> Seen:
    """act: what is done to the server; gives status and text of the answer, 0 for none."""
    forget_peak(pid)
    before_mb, before_s = memory_mb(pid, "VmRSS"), processor_s(pid)
    with Watch(port) as watch:
        start_s = time.monotonic()
        try:
            status, text = act()
        except (OSError, http.client.HTTPException) as error:
            status, text = 0, f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - start_s
    growth_mb, taken_s = memory_mb(pid, "VmHWM") - before_mb, processor_s(pid) - before_s
    return Seen(name, status, text, seconds, watch.longest_s * 1e3, growth_mb, taken_s)


def send_body(port: int, pid: int, name: str) -> Seen:
    path, make = BODIES[name]
    body = make()
    return measured(port, pid, name, lambda: answer_to(port, path, body))


def send_side_by_side(port: int, pid: int, name: str) -> Seen:
    """The body from NUM_SENDERS clients at once."""
    path, make = BODIES[name]
    body = make()

    def act() -> tuple[int, str]:
        with ThreadPoolExecutor(NUM_SENDERS) as pool:
            return max(pool.map(lambda _: answer_to(port, path, body), range(NUM_SENDERS)))

    return measured(port, pid, f"{name}, {NUM_SENDERS} times at once", act)


def send_chunks(port: int, pid: int) -> Seen:
    """A body in chunks of a byte."""

    def act() -> tuple[int, str]:
        with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
            connection.sendall(head_of(COMPLETIONS, {"transfer-encoding": "chunked"}))
            with contextlib.suppress(OSError):  # closed before all was sent
                connection.sendall(b"1\r\n \r\n" * 600_000 + b"0\r\n\r\n")
            return 0, ""

    return measured(port, pid, "600,000 chunks of a byte", act)


def send_half(port: int, pid: int) -> Seen:
    """Heads that never end, and a look at how many of their connections are left."""
    most = min(NUM_HALF_SENT, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200)

    num_open = 0

    def act() -> tuple[int, str]:
        nonlocal num_open
        with contextlib.ExitStack() as stack:
            for _ in range(most):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S))
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nX-")
            time.sleep(1.0)
            num_open = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return 0, ""

    seen = measured(port, pid, "", act)
    return replace(seen, attack=f"{most} half-sent heads, {num_open} descriptors then open")


def attack(port: int, pid: int) -> tuple[list[Seen], list[str]]:
    """What was seen, and the promises that it broke."""
    usual = measured(port, pid, "nothing", lambda: answer_to(port, "/health", None))
    attacks = [functools.partial(send_body, name=name) for name in BODIES]
    attacks += [functools.partial(send_side_by_side, name=name) for name in ("ids, then a text", "just enough ids")]
    all_seen, broken = [usual], []
    for act in [*attacks, send_chunks, send_half]:
        tries: list[Seen] = []
        while not tries or (len(tries) < TRIES and tries[-1].longest_wait_ms > usual.longest_wait_ms + LIMIT_MS):
            tries.append(act(port, pid))
        best = min(tries, key=lambda seen: seen.longest_wait_ms)
        all_seen.append(replace(best, growth_mb=max(seen.growth_mb for seen in tries)))
        broken += all_seen[-1].broken(usual.longest_wait_ms)
    return all_seen, broken


def run(serve_options: Sequence[object]) -> int:
    """Attacks a server of its own. Returns 1 where a promise was broken."""
    [port] = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="faser-fuzz-") as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE)
        options = [*serve_options, "--openai-port", port, "--chat-template", template]
        with serving(options, Path(folder) / "log") as served:
            wait_for_line(served, "ready: ")
            all_seen, broken = attack(port, served.processes()[DOOR])
    rows = [seen.row() for seen in all_seen]
    print("\n".join(markdown_table(list(rows[0]), rows)))
    print("\n".join(f"broken promise: {line}" for line in broken), file=sys.stderr)
    return int(bool(broken))
