"""`scripts/fuzz.py --openai`: bodies that are costly to parse, and unfinished heads, for the OpenAI server.

Measures another client's longest wait meanwhile, and the server's memory.
"""

from __future__ import annotations

import contextlib
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

from faser_backend.lab.abuse.clients import PAUSE_S, TIMEOUT_S, Neighbour, Reply, ask_http
from faser_backend.lab.abuse.served import OPENAI, memory_mib, report, serving
from faser_backend.lab.checks.servers import free_ports
from faser_backend.serving.processes import cpu_seconds

LIMIT = 4 << 20  # bytes of a body
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
_USER = '{"messages":[{"role":"user","content":'
_MESSAGE = '{"role":"user","content":"x"}'
_CHAT = f'{{"messages":[{_MESSAGE}],'
_CALLS = '{"messages":[{"role":"assistant","tool_calls":['
_ARGUMENTS = _CALLS + '{"id":"1","function":{"name":"f","arguments":"['
_SCHEMA = _CHAT + '"response_format":{"type":"json_schema","json_schema":{"schema":'
_PARTS = {"role": "user", "content": [{"type": "text", "text": "x"}] * 2}
_NAMES = ",".join(f'"p{index}"' for index in range(25_000))
# By name: the path; a body's beginning, a unit repeated up to the limit (units differ by their number at %d), and its
# end; or a whole body.
BODIES: dict[str, tuple[str, ...]] = {
    "ids, then a text": (COMPLETIONS, '{"prompt":[', "1,", '"a"]}'),
    "too many ids": (COMPLETIONS, '{"prompt":[', "1,", "1]}"),
    "ids of five digits": (COMPLETIONS, '{"prompt":[', "12345,", "1]}"),
    "lists as prompts": (COMPLETIONS, '{"prompt":[', "[],", "[1]]}"),
    "lists of one id": (COMPLETIONS, '{"prompt":[', "[1],", '["a"]]}'),
    "objects as prompts": (COMPLETIONS, '{"prompt":[', '{"":0},', "1]}"),
    "texts as prompts": (COMPLETIONS, '{"prompt":[', '"ab",', '"a"]}'),
    "a long text": (COMPLETIONS, '{"prompt":"', "x ", '"}'),
    "a text of escapes": (COMPLETIONS, '{"prompt":"', "\\u4e2d", '"}'),
    "a text of quotes": (COMPLETIONS, '{"prompt":"', '\\"', '"}'),
    "a text of commas": (COMPLETIONS, '{"prompt":"', ",", '"}'),
    "fractions": (COMPLETIONS, '{"prompt":[', "1.5e3,", "1]}"),
    "a huge number": (COMPLETIONS, '{"prompt":[1],"seed":', "9", "}"),
    "logit_bias, many keys": (COMPLETIONS, '{"prompt":[1],"logit_bias":{', '"%d":1,', '"1":1}}'),
    "one key over and over": (COMPLETIONS, '{"prompt":[1],', '"n":1,', '"seed":1}'),
    "unknown keys": (COMPLETIONS, '{"prompt":[1],', '"k%d":1,', '"k":1}'),
    "stop, many words": (COMPLETIONS, '{"prompt":[1],"stop":[', '"a",', '"a"]}'),
    "nested lists": (COMPLETIONS, '{"prompt":', "[", ""),
    "nested objects": (CHAT, _SCHEMA, '{"a":', ""),
    "numbers as parts": (CHAT, _USER + "[", "0,", "0]}]}"),
    "parts": (CHAT, _USER + "[", '{"type":"text","text":""},', '{"type":"text"}]}]}'),
    "bad parts": (CHAT, _USER + "[", "{},", "{}]}]}"),
    "messages": (CHAT, '{"messages":[', _MESSAGE + ",", _MESSAGE + "]}"),
    "bad messages": (CHAT, '{"messages":[', "{},", "{}]}"),
    "calls": (CHAT, _CALLS, "{},", "{}]}]}"),
    "arguments": (CHAT, _ARGUMENTS, "[],", '[]]"}}]}]}'),
    "tools": (CHAT, _CHAT + '"tools":[', "{},", "{}]}"),
    "a wide schema": (CHAT, _SCHEMA + '{"type":"object","properties":{', '"p%d":{},', '"p":{}}}}}}'),
    "a schema of names": (CHAT, _SCHEMA + '{"enum":[', '"p%d",', '"p"]}}}}'),
    "a long schema": (CHAT, _SCHEMA + '{"description":"', "x", '"}}}}'),
    "modalities": (CHAT, _CHAT + '"modalities":[', "0,", "0]}"),
    "a refused field": (CHAT, _CHAT + '"functions":[', "0,", "0]}"),
    "instructions": (RESPONSES, '{"input":"x","instructions":"', "x", '"}'),
    "metadata": (RESPONSES, '{"input":"x","metadata":{', '"k%d":"v",', '"k":"v"}}'),
    "a long value of metadata": (RESPONSES, '{"input":"x","stream":true,"metadata":{"k":"', "x", '"}}'),
    "long texts": (COMPLETIONS, json.dumps({"prompt": ["a b\n" * 16_000] * 40})),
    "just enough ids": (COMPLETIONS, '{"prompt":[' + "1," * 262_000 + "1]}"),
    "just enough messages": (CHAT, json.dumps({"messages": [_PARTS] * 4096})),
    "just enough names": (CHAT, f'{_SCHEMA}{{"enum":[{_NAMES}]}}}}}}}}'),
}
SIDE_BY_SIDE = ("ids, then a text", "just enough ids")  # also sent NUM_SENDERS times at once
NUM_HALF_SENT, NUM_SENDERS = 3000, 8
LIMIT_MS, LIMIT_MB = 100.0, 100.0  # allowed wait of others beyond the usual, and memory, per body
FLOOD_MS = 10_000.0  # for many connections: where too many wait, the kernel retries after 1 s and 3 s
TRIES = 3  # of an attack beyond LIMIT_MS: on a shared machine the shortest of the longest waits counts
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def body_of(name: str) -> bytes:
    begin, *more = BODIES[name][1:]
    if not more:
        return begin.encode()
    unit, end = more
    room = LIMIT - len(begin) - len(end)
    if "%d" in unit:
        return (begin + "".join(unit % index for index in range(room // (len(unit) + 5))) + end).encode()
    return (begin + unit * (room // len(unit)) + end).encode()


def head_of(path: str, headers: dict[str, str]) -> bytes:
    """Returns the head of a POST as sent."""
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


@dataclass(frozen=True, slots=True)
class Seen:
    """An attack's answer, and its effect on other clients and on the server's memory."""

    attack: str
    reply: Reply
    longest_wait_ms: float  # of a client that requests the list of models
    growth_mb: float
    processor_s: float  # CPU time of the server, for the other client too

    def row(self) -> dict[str, object]:
        return {
            "attack": self.attack, "status": self.reply.status, "answered after s": round(self.reply.seconds, 2),
            "longest wait of another ms": round(self.longest_wait_ms), "memory MB": round(self.growth_mb),
            "processor s": round(self.processor_s, 2),
        }  # fmt: skip

    def broken(self, usual_ms: float) -> list[str]:
        broken, status = [], self.reply.status
        if self.longest_wait_ms > (LIMIT_MS + usual_ms if status else FLOOD_MS):
            broken.append(f"another client waited {self.longest_wait_ms:.0f} ms, usually {usual_ms:.0f}")
        if self.growth_mb > LIMIT_MB:
            broken.append(f"it took {self.growth_mb:.0f} MB")
        if status not in (0, 400, 413) or (status and "error" not in json.loads(self.reply.body)):
            broken.append(f"status {status}: {self.reply.body[:100]}")
        return [f"{self.attack}: {each}" for each in broken]


def measured(port: int, pid: int, name: str, act: Callable[[], Reply]) -> Seen:
    """Runs an attack, and measures its cost for the server and another client."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the peak
    before_mib, before_s = memory_mib(pid), cpu_seconds(pid)
    with Neighbour(lambda: ask_http(port, "/v1/models")) as neighbour:
        time.sleep(5 * PAUSE_S)
        reply = act()
        time.sleep(5 * PAUSE_S)
    growth_mb = (memory_mib(pid, "VmHWM") - before_mib) * 1.048576
    return Seen(name, reply, max(neighbour.waits) * 1e3, growth_mb, cpu_seconds(pid) - before_s)


def send_body(port: int, pid: int, name: str, num_senders: int = 1) -> Seen:
    """Sends a body from num_senders clients at once."""
    path, body = BODIES[name][0], body_of(name)

    def act() -> Reply:
        with ThreadPoolExecutor(num_senders) as pool:
            replies = pool.map(lambda _: ask_http(port, path, body), range(num_senders))
            return max(replies, key=lambda reply: reply.status)

    return measured(port, pid, name + f", {num_senders} times at once" * (num_senders > 1), act)


def send_chunks(port: int, pid: int) -> Seen:
    """Sends a body in chunks of one byte."""

    def act() -> Reply:
        with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
            connection.sendall(head_of(COMPLETIONS, {"transfer-encoding": "chunked"}))
            with contextlib.suppress(OSError):  # closed before all was sent
                connection.sendall(b"1\r\n \r\n" * 600_000 + b"0\r\n\r\n")
        return Reply()

    return measured(port, pid, "600,000 chunks of a byte", act)


def send_half(port: int, pid: int) -> Seen:
    """Sends heads that never end. Reports how many of their connections remain."""
    most, num_open = min(NUM_HALF_SENT, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200), 0

    def act() -> Reply:
        nonlocal num_open
        with contextlib.ExitStack() as stack:
            for _ in range(most):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S))
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nX-")
            time.sleep(1.0)
            num_open = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return Reply()

    seen = measured(port, pid, "", act)
    return replace(seen, attack=f"{most} half-sent heads, {num_open} descriptors then open")


def attack(act: Callable[[], Seen], usual_ms: float) -> Seen:
    """Returns the best of a few tries, with the highest memory of all."""
    tries = [act()]
    while len(tries) < TRIES and tries[-1].longest_wait_ms > usual_ms + LIMIT_MS:
        tries.append(act())
    best = min(tries, key=lambda seen: seen.longest_wait_ms)
    return replace(best, growth_mb=max(seen.growth_mb for seen in tries))


def run(serve_options: Sequence[object]) -> int:
    """Attacks a new server. Returns 1 if a promise is broken."""
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="faser-fuzz-") as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE)
        options = [*serve_options, "--openai-port", port, "--chat-template", template]
        with serving(*options) as served:
            served.wait_for("ready: ")
            place = port, served.processes()[OPENAI]
            usual = measured(*place, "nothing", lambda: ask_http(port, "/health"))
            acts: list[Callable[[], Seen]] = [partial(send_body, *place, name) for name in BODIES]
            acts += [partial(send_body, *place, name, NUM_SENDERS) for name in SIDE_BY_SIDE]
            acts += [partial(send_chunks, *place), partial(send_half, *place)]
            found = [attack(act, usual.longest_wait_ms) for act in acts]
    rows = [seen.row() for seen in (usual, *found)]
    return report(rows, [line for seen in found for line in seen.broken(usual.longest_wait_ms)])
