"""Bodies that are costly to parse, and their cost for the OpenAI server that they are sent to."""

from __future__ import annotations

import time
from pathlib import Path

from faser_backend.lab.abuse.clients import PAUSE_S, Reply, ask_http
from faser_backend.lab.abuse.served import memory_mib
from faser_backend.serving.processes import cpu_seconds

LIMIT = 4 << 20  # bytes of a body
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_ARGUMENTS = '{"messages":[{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"f","arguments":"['
# By name: the path; a body's beginning, a unit repeated up to the limit (units differ by their number at %d), and its
# end; or a whole body.
BODIES: dict[str, tuple[str, ...]] = {
    "ids, then a text": (COMPLETIONS, '{"prompt":[', "1,", '"a"]}'),
    "objects as prompts": (COMPLETIONS, '{"prompt":[', '{"":0},', "1]}"),
    "a text of commas": (COMPLETIONS, '{"prompt":"', ",", '"}'),
    "logit_bias, many keys": (COMPLETIONS, '{"prompt":[1],"logit_bias":{', '"%d":1,', '"1":1}}'),
    "bad parts": (CHAT, '{"messages":[{"role":"user","content":[', "{},", "{}]}]}"),
    "arguments": (CHAT, _ARGUMENTS, "[],", '[]]"}}]}]}'),
    "just enough ids": (COMPLETIONS, '{"prompt":[' + "1," * 262_000 + "1]}"),
}


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


def send_body(port: int, pid: int, name: str) -> tuple[Reply, float, float]:
    """Sends a body to the server, whose process is pid. Returns the reply, the megabytes by which its memory grew, and
    the seconds of the processor."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the peak
    before_mib, before_s = memory_mib(pid), cpu_seconds(pid)
    reply = ask_http(port, BODIES[name][0], body_of(name))
    time.sleep(5 * PAUSE_S)
    growth_mb = (memory_mib(pid, "VmHWM") - before_mib) * 1.048576
    return reply, growth_mb, cpu_seconds(pid) - before_s
