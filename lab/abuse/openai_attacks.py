"""`scripts/fuzz.py --openai`: bodies that are costly to read, and half-sent heads, for the OpenAI server.

Measures how long another client waits meanwhile, and the server's memory. Knows HTTP and the server's process.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from faser_backend.serving.processes import cpu_seconds
from lab.abuse.clients import TIMEOUT_S, fetch
from lab.abuse.served import DOOR, Bystander, report, serving, wait_until
from lab.bench.servers import START_TIMEOUT_S, free_ports

LIMIT = 4 << 20  # bytes of a body
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"


class Body(NamedTuple):
    """A unit over and over between two texts; with %d in it, it holds its number, and commas part the units."""

    path: str
    before: str
    unit: str
    after: str
    count: int = 0  # 0: as many as the limit allows

    def content(self) -> bytes:
        num = LIMIT - len(self.before) - len(self.after)
        if "%d" in self.unit:
            count = self.count or num // (len(self.unit) + 5)
            return (self.before + ",".join(self.unit % index for index in range(count)) + self.after).encode()
        return (self.before + self.unit * (self.count or num // len(self.unit)) + self.after).encode()


_USER = '{"messages":[{"role":"user","content":'
_MESSAGE = '{"role":"user","content":"x"}'
_CHAT = f'{{"messages":[{_MESSAGE}],'
_CALL = '{"id":"1","function":{"name":"f","arguments":'
_ARGUMENTS = '{"messages":[{"role":"assistant","tool_calls":[' + _CALL + '"['
_SCHEMA = _CHAT + '"response_format":{"type":"json_schema","json_schema":{"schema":'
_PARTS = '{"role":"user","content":[{"type":"text","text":"x"},{"type":"text","text":"x"}]}'
BODIES = {
    "ids, then a text": Body(COMPLETIONS, '{"prompt":[', "1,", '"a"]}'),
    "too many ids": Body(COMPLETIONS, '{"prompt":[', "1,", "1]}"),
    "ids of five digits": Body(COMPLETIONS, '{"prompt":[', "12345,", "1]}"),
    "lists as prompts": Body(COMPLETIONS, '{"prompt":[', "[],", "[1]]}"),
    "lists of one id": Body(COMPLETIONS, '{"prompt":[', "[1],", '["a"]]}'),
    "objects as prompts": Body(COMPLETIONS, '{"prompt":[', '{"":0},', "1]}"),
    "texts as prompts": Body(COMPLETIONS, '{"prompt":[', '"ab",', '"a"]}'),
    "a long text": Body(COMPLETIONS, '{"prompt":"', "x ", '"}'),
    "a text of escapes": Body(COMPLETIONS, '{"prompt":"', "\\u4e2d", '"}'),
    "a text of quotes": Body(COMPLETIONS, '{"prompt":"', '\\"', '"}'),
    "a text of commas": Body(COMPLETIONS, '{"prompt":"', ",", '"}'),
    "fractions": Body(COMPLETIONS, '{"prompt":[', "1.5e3,", "1]}"),
    "a huge number": Body(COMPLETIONS, '{"prompt":[1],"seed":', "9", "}"),
    "logit_bias, many keys": Body(COMPLETIONS, '{"prompt":[1],"logit_bias":{', '"%d":1', "}}"),
    "one key over and over": Body(COMPLETIONS, '{"prompt":[1],', '"n":1,', '"seed":1}'),
    "unknown keys": Body(COMPLETIONS, '{"prompt":[1],', '"k%d":1', "}"),
    "stop, many words": Body(COMPLETIONS, '{"prompt":[1],"stop":[', '"a",', '"a"]}'),
    "nested lists": Body(COMPLETIONS, '{"prompt":', "[", ""),
    "nested objects": Body(CHAT, _SCHEMA, '{"a":', ""),
    "numbers as parts": Body(CHAT, _USER + "[", "0,", "0]}]}"),
    "parts": Body(CHAT, _USER + "[", '{"type":"text","text":""},', '{"type":"text"}]}]}'),
    "bad parts": Body(CHAT, _USER + "[", "{},", "{}]}]}"),
    "messages": Body(CHAT, '{"messages":[', _MESSAGE + ",", _MESSAGE + "]}"),
    "bad messages": Body(CHAT, '{"messages":[', "{},", "{}]}"),
    "calls": Body(CHAT, '{"messages":[{"role":"assistant","tool_calls":[', "{},", "{}]}]}"),
    "arguments": Body(CHAT, _ARGUMENTS, "[],", '[]]"}}]}]}'),
    "tools": Body(CHAT, _CHAT + '"tools":[', "{},", "{}]}"),
    "a wide schema": Body(CHAT, _SCHEMA + '{"type":"object","properties":{', '"p%d":{}', "}}}}}"),
    "a schema of names": Body(CHAT, _SCHEMA + '{"enum":[', '"p%d"', "]}}}}"),
    "a long schema": Body(CHAT, _SCHEMA + '{"description":"', "x", '"}}}}'),
    "modalities": Body(CHAT, _CHAT + '"modalities":[', "0,", "0]}"),
    "a refused field": Body(CHAT, _CHAT + '"functions":[', "0,", "0]}"),
    "instructions": Body(RESPONSES, '{"input":"x","instructions":"', "x", '"}'),
    "metadata": Body(RESPONSES, '{"input":"x","metadata":{', '"k%d":"v"', "}}"),
    "long texts": Body(COMPLETIONS, '{"prompt":["a"', ',"' + "a b\\n" * 16_000 + '"', "]}", 40),
    "just enough ids": Body(COMPLETIONS, '{"prompt":[', "1,", "1]}", 262_000),
    "just enough messages": Body(CHAT, '{"messages":[' + _PARTS, "," + _PARTS, "]}", 4095),
    "just enough names": Body(CHAT, _SCHEMA + '{"enum":[', '"p%d"', "]}}}}", 25_000),
    "a long value of metadata": Body(RESPONSES, '{"input":"x","stream":true,"metadata":{"k":"', "x", '"}}'),
}
LIMIT_MS, LIMIT_MB = 100.0, 100.0  # what a body may cost others, beside their usual wait, and in memory
FLOOD_MS = 10_000.0  # of many connections: where too many wait to be accepted, the kernel tries again after 1 s and 3 s
TRIES = 3  # of an attack beyond LIMIT_MS: of a machine that others use, the shortest of the longest waits counts
NUM_HALF_SENT, NUM_SENDERS = 3000, 8
SIDE_BY_SIDE = ("ids, then a text", "just enough ids")  # bodies that come from NUM_SENDERS clients at once, too
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
Act = Callable[[int, int], tuple[int, str]]  # port and process -> status and text of the answer, 0 for none


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


def head_of(path: str, headers: dict[str, str]) -> bytes:
    """The head of a POST, as it goes over the wire."""
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


def memory_mb(pid: int, line: str) -> float:
    """VmRSS, or VmHWM: the most since clear_refs was written."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(each.split()[1]) for each in status.splitlines() if each.startswith(line)) * 1024 / 1e6


def measured(port: int, pid: int, name: str, act: Act) -> Seen:
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    before_mb, before_s = memory_mb(pid, "VmRSS"), cpu_seconds(pid)

    def ask() -> str | None:
        try:
            fetch(port, "/v1/models")
        except (OSError, http.client.HTTPException) as error:
            return f"no answer: {error}"
        return None

    with Bystander(ask) as another:
        start_s = time.monotonic()
        try:
            status, text = act(port, pid)
        except (OSError, http.client.HTTPException) as error:
            status, text = 0, f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - start_s
    growth_mb, taken_s = memory_mb(pid, "VmHWM") - before_mb, cpu_seconds(pid) - before_s
    longest_s = TIMEOUT_S if another.wrong else max(another.waits)
    return Seen(name, status, text, seconds, longest_s * 1e3, growth_mb, taken_s)


def send_body(port: int, pid: int, name: str, num_senders: int = 1) -> Seen:
    """The body from so many clients at once."""
    body = BODIES[name].content()

    def act(port: int, _: int) -> tuple[int, str]:
        with ThreadPoolExecutor(num_senders) as pool:
            answers = pool.map(lambda _: fetch(port, BODIES[name].path, body), range(num_senders))
            return max((status, text) for status, _, text in answers)

    return measured(port, pid, name if num_senders == 1 else f"{name}, {num_senders} times at once", act)


def send_chunks(port: int, _: int) -> tuple[int, str]:
    """A body in chunks of a byte."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
        connection.sendall(head_of(COMPLETIONS, {"transfer-encoding": "chunked"}))
        with contextlib.suppress(OSError):  # closed before all was sent
            connection.sendall(b"1\r\n \r\n" * 600_000 + b"0\r\n\r\n")
    return 0, ""


def send_half(port: int, pid: int) -> tuple[int, str]:
    """Heads that never end. Their message says how many of their connections are left."""
    with contextlib.ExitStack() as stack:
        for _ in range(min(NUM_HALF_SENT, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200)):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S))
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nX-")
        time.sleep(1.0)
        return 0, f"{len(list(Path(f'/proc/{pid}/fd').iterdir()))} descriptors then open"


def attack(port: int, pid: int) -> tuple[list[Seen], list[str]]:
    """What was seen, and the promises that it broke."""
    usual = measured(port, pid, "nothing", lambda port, _: (fetch(port, "/health")[0], ""))
    attacks = [partial(send_body, port, pid, name) for name in BODIES]
    attacks += [partial(send_body, port, pid, name, NUM_SENDERS) for name in SIDE_BY_SIDE]
    attacks += [partial(measured, port, pid, "600,000 chunks of a byte", send_chunks)]
    attacks += [partial(measured, port, pid, f"{NUM_HALF_SENT} half-sent heads", send_half)]
    all_seen, broken = [usual], []
    for act in attacks:
        tries = [act()]
        while len(tries) < TRIES and tries[-1].longest_wait_ms > usual.longest_wait_ms + LIMIT_MS:
            tries.append(act())
        best = min(tries, key=lambda seen: seen.longest_wait_ms)
        all_seen.append(replace(best, growth_mb=max(seen.growth_mb for seen in tries)))
        broken += all_seen[-1].broken(usual.longest_wait_ms)
    return all_seen, broken


def run(serve_options: Sequence[object]) -> int:
    """Attacks a server of its own. Returns 1 where a promise was broken."""
    [port] = free_ports(1)
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
        template.write(TEMPLATE)
        template.flush()
        with serving(*serve_options, "--openai-port", port, "--chat-template", template.name) as served:
            wait_until(lambda: "ready: " in served.log_tail(), START_TIMEOUT_S)
            all_seen, broken = attack(port, served.processes()[DOOR])
    return report([seen.row() for seen in all_seen], broken)
