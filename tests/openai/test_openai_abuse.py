"""Hostile clients of the OpenAI server get errors, and other clients are not affected."""

import contextlib
import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from starlette.testclient import TestClient

from faser_backend.core.errors import ConfigError
from faser_backend.core.request import EngineOutput, FinishReason, Limits
from faser_backend.lab.abuse.clients import PAUSE_S, Reply, ask_http
from faser_backend.lab.abuse.served import memory_mib
from faser_backend.lab.checks.servers import free_ports
from faser_backend.openai import app as app_module
from faser_backend.openai import bodies
from faser_backend.openai import server as server_module
from faser_backend.openai.app import Callers
from faser_backend.openai.bodies import ChatBody, CompletionBody
from faser_backend.openai.server import check_origins
from faser_backend.places import DEMO_PAIR
from faser_backend.serving.engine_loop import EngineLoop
from faser_backend.serving.processes import cpu_seconds
from faser_backend.text.prompts import PromptFormat
from faser_backend.text.tokenizer import TextTokenizer
from faser_backend.triton.link import LinkServer
from tests.support.chat_templates import HERMES
from tests.support.harness import fake_engine
from tests.support.openai_cases import BASE, FIELDS, MESSAGES, PATHS, WEATHER
from tests.support.processes import wait_until
from tests.triton.test_link import HANDSHAKE, MODEL


class FakeClient:
    """A fake EngineClient: three tokens whose logits are NaN. With `fails` it raises after the first token."""

    fails, model = False, replace(MODEL, limits=Limits(2048, 1024), max_text_bytes=1 << 16)

    def __init__(self, *_: Any) -> None: ...
    async def is_ready(self) -> bool:
        return True

    async def close(self) -> None: ...

    async def generate(self, wanted: Any, *_: Any) -> AsyncIterator[tuple[int, EngineOutput]]:
        for token_id in (70, 71, 72):
            logits = np.full((1, 2048), np.nan, np.float32) if wanted[0].num_top else None
            yield 0, EngineOutput("", [token_id], [float("-inf")], generation_logits=logits)
            if FakeClient.fails:
                raise LookupError("an unexpected failure")
        yield 0, EngineOutput("", [], finish_reason=FinishReason.STOPPED)


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    prompts = PromptFormat(HERMES, {"bos_token": "", "eos_token": ""})
    tokenizer = TextTokenizer.from_file(DEMO_PAIR / "target" / "tokenizer.json", prompts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeClient, "model", replace(FakeClient.model, tokenizer=tokenizer))
        patch.setattr(app_module, "EngineClient", FakeClient)
        yield app_module.make_app(Path(), Callers())
    tokenizer.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """Starts an OpenAI server before a fake engine. Returns its port and process id."""
    path, [port] = tmp_path_factory.mktemp("openai") / "engine.sock", free_ports(1)
    loop = EngineLoop(fake_engine()[0])
    engine = LinkServer(loop, HANDSHAKE, path)
    given = ["--engine-socket", path, "--port", port, "--allow-origin", "https://chat.example"]
    command = [sys.executable, "-m", "faser_backend.cli", "openai", *map(str, given)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline().startswith("OpenAI's API")
        assert process.stdout.readline() == "the engine is reached\n"
        yield port, process.pid
    finally:
        process.kill()
        process.communicate()
        engine.close()
        loop.close()


def error_of(reply: Reply) -> dict[str, Any]:
    return json.loads(reply.body)["error"]


# -- bodies ----------------------------------------------------------------------------------------------------------
LIMIT = 4 << 20  # bytes of a body
COMPLETIONS, CHAT = PATHS[CompletionBody], PATHS[ChatBody]
ARGUMENTS = '{"messages":[{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"f","arguments":"['


@pytest.mark.parametrize(
    ("path", "begin", "unit", "end", "size", "words"),
    [
        (COMPLETIONS, '{"prompt":[', "1,", '"a"]}', LIMIT, ""),
        (COMPLETIONS, '{"prompt":[', "1,", "1]}", 524_014, ""),  # just enough ids
        (COMPLETIONS, '{"prompt":[', '{"":0},', "1]}", LIMIT, ""),
        (COMPLETIONS, '{"prompt":"', ",", '"}', LIMIT, "prompt length = "),  # commas in strings do not count
        (COMPLETIONS, '{"prompt":[1],"logit_bias":{', '"%d":1,', '"1":1}}', LIMIT, ""),
        (CHAT, '{"messages":[{"role":"user","content":[', "{},", "{}]}]}", LIMIT, ""),
        (CHAT, ARGUMENTS, "[],", '[]]"}}]}]}', LIMIT, ""),
    ],
)
def test_a_large_body_costs_others_little(  # noqa: PLR0917
    server: tuple[int, int], path: str, begin: str, unit: str, end: str, size: int, words: str
):
    port, pid = server
    num_units = (size - len(begin + end)) // len(unit.replace("%d", "1234567"))
    body = begin + "".join(unit.replace("%d", str(index)) for index in range(num_units)) + end
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the peak
    before_mib, before_s = memory_mib(pid), cpu_seconds(pid)
    reply = ask_http(port, path, body.encode())
    time.sleep(5 * PAUSE_S)
    assert reply.status in (400, 413, 503) and error_of(reply)["message"].startswith(words)
    # Without the limits: up to 4,200 MiB and 57 s.
    assert memory_mib(pid, "VmHWM") - before_mib < 95 and cpu_seconds(pid) - before_s < 3


def head_of(path: str, headers: dict[str, str]) -> bytes:
    """Returns the head of a POST as sent."""
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


def test_bodies_on_their_way_are_limited_together(app: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bodies, "MAX_HELD_BYTES", 100_000)
    large = json.dumps({"prompt": "x" * 60_000}).encode()
    with listening(app) as port, socket.create_connection(("127.0.0.1", port)) as slow:

        def status(body: bytes = large) -> int:
            return ask_http(port, COMPLETIONS, body).status

        assert status() == 400  # control: alone the body is read, but exceeds the context
        slow.sendall(head_of(COMPLETIONS, {"content-length": str(len(large))}) + large[:-1])
        wait_until(lambda: status() == 503)
        assert status(json.dumps(BASE[CompletionBody]).encode()) == 200
        slow.sendall(large[-1:])
        assert slow.recv(100).startswith(b"HTTP/1.1 400")
        assert status() == 400


# -- values ----------------------------------------------------------------------------------------------------------
NO_JSON = ['"\\ud800"', '{"\\udc00": 1}', '["\\ud83d"]', "NaN", "-Infinity", '{"a": NaN}', "9" * 5000, "[" * 500]
STRANGE = [
    "1e999", "-" + "9" * 4000, "1" + "0" * 400, "1.5", "-1", "true", '""', '"\\u0000"', '"\\ud83d\\ude00"', "[]", "{}",
    "[[]]", '[{"type": "text", "text": 1e999}]', '{"%s": 1}' % ("9" * 5000), '{"5": 1e999}', "[" * 150 + "]" * 150,
    '{"type": "json_schema", "schema": {"a": 1e999}}',
    '{"format": {"type": "json_schema", "schema": {"const": 1e999}}}',
    '[{"role": "user", "content": "x", "name": "\\u0000", "tool_calls": [{"id": "", "function": {}}]}]',
    '[{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{\\"a\\": NaN}"}}]}]',
]  # fmt: skip
# Fields without which others of a chat are not read.
CORNERS: dict[Any, dict[str, Any]] = {ChatBody: {"messages": MESSAGES, "logprobs": True, "tools": [WEATHER]}}


def events_of(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


def read_strictly(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def with_raw(body: dict[str, Any], name: str, raw: str) -> str:
    kept = json.dumps({key: value for key, value in body.items() if key != name})
    return f"{kept[:-1]}, {json.dumps(name)}: {raw}}}"


@pytest.mark.parametrize("kind", FIELDS)
def test_whatever_a_field_holds_the_answer_is_json_or_events(app: Any, kind: type):
    statuses = set()
    with TestClient(app) as client:
        for index, (name, raw) in enumerate(itertools.product(FIELDS[kind], NO_JSON + STRANGE)):
            body = {**BASE[kind], **CORNERS.get(kind, {}), "stream": index % 3 == 0}
            answer = client.post(PATHS[kind], content=with_raw(body, name, raw))
            statuses.add(answer.status_code)
            assert answer.status_code in (200, 400, 404), (name, raw[:300], answer.text)
            if answer.headers["content-type"].startswith("text/event-stream"):
                assert all(line == "[DONE]" or read_strictly(line) for line in events_of(answer.text))
            else:
                assert answer.headers["content-type"] == "application/json" and read_strictly(answer.text)
    assert {200, 400} <= statuses


def test_an_unexpected_failure_is_answered_and_logged(
    app: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(FakeClient, "fails", True)
    with TestClient(app, raise_server_exceptions=False) as client:
        whole, stream = (client.post(PATHS[ChatBody], json=BASE[ChatBody] | {"stream": each}) for each in (False, True))
        assert '"type":"error"' in client.post("/v1/responses", json={"input": "a", "stream": True}).text
    assert whole.status_code == 500 and "an unexpected failure" in caplog.text
    for text in (whole.text, [event for event in events_of(stream.text) if event != "[DONE]"][-1]):
        error = json.loads(text)["error"]
        assert error["code"] == "internal_error" and "unexpected" not in text
        assert error["message"].split()[-1] in caplog.text


# -- connections -----------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def listening(app: Any) -> Iterator[int]:
    [port] = free_ports(1)
    config = uvicorn.Config(app, port=port, http=server_module.Connection, ws="none", log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield port
    finally:
        server.should_exit = True
        thread.join()


def is_closed(connection: socket.socket, within_s: float, sending: bytes = b"") -> bool:
    """sending: bytes to send while waiting."""
    connection.settimeout(0.05)
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        with contextlib.suppress(TimeoutError):
            try:
                if not connection.recv(4096):
                    return True
            except ConnectionResetError:
                return True
        with contextlib.suppress(OSError):
            connection.sendall(sending)
    return False


def half_open(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-")
    return connection


def test_half_sent_heads_keep_nobody_out(app: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_module.Connection, "most", 8)
    with listening(app) as port, contextlib.ExitStack() as stack:
        opened = [stack.enter_context(half_open(port)) for _ in range(8)]
        assert not is_closed(opened[0], 0.2)  # control: these fit
        opened += [stack.enter_context(half_open(port)) for _ in range(8)]
        assert ask_http(port, "/v1/models").status == 200
        assert all(is_closed(connection, 5.0) for connection in opened[:8])
        assert not is_closed(opened[-1], 0.2)


def test_a_head_has_a_deadline_and_so_has_the_rest_of_an_answered_body(app: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_module, "HEAD_S", 0.5)
    with listening(app) as port:
        with half_open(port) as late, half_open(port) as dribbling:
            assert is_closed(dribbling, 5.0, sending=b"x") and is_closed(late, 5.0)
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(head_of("/nowhere", {"content-length": "1000"}))
            assert connection.recv(4096).startswith(b"HTTP/1.1 404")
            assert is_closed(connection, 5.0, sending=b"x")


BOTH = {"content-length": "5", "transfer-encoding": "chunked"}
CHUNKS = {"transfer-encoding": "chunked"}


@pytest.mark.parametrize(
    ("headers", "body", "words"),
    [
        (BOTH, b"0\r\n\r\nGET /v1/models HTTP/1.1\r\n\r\n", "both Content-Length and Transfer-Encoding"),
        (CHUNKS, b"1\r\n1\r\n" * 5000, "chunks"),
        ({"content length": "1"}, b"1", "Invalid HTTP request"),
    ],
)
def test_a_request_that_no_client_sends_is_refused_and_its_connection_closed(
    server: tuple[int, int], headers: dict[str, str], body: bytes, words: str
):
    with socket.create_connection(("127.0.0.1", server[0]), timeout=20) as connection:
        connection.sendall(head_of(COMPLETIONS, headers) + body)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(4096):
                answer += part
    head, _, text = answer.decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 400") and head.count("HTTP/1.1") == 1
    assert words in json.loads(text)["error"]["message"]


# -- browsers --------------------------------------------------------------------------------------------------------
FORM, PLAIN = {"Content-Type": "application/x-www-form-urlencoded"}, {"Content-Type": "text/plain"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (FORM, 400),  # curl -d; 400: accepted, but the fake engine lacks such tokens
        ({"origin": "http://HOST"}, 400),  # the chat page
        ({"origin": "https://chat.example"}, 400),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "http://localhost:1"}, 403),
        ({"origin": "http://evil.example:9000", "host": "evil.example:9000"}, 403),  # DNS rebinding
        (PLAIN | {"origin": "http://HOST"}, 415),
    ],
)
def test_a_web_page_of_another_origin_may_not_ask(server: tuple[int, int], headers: dict[str, str], status: int):
    headers = {name: value.replace("HOST", f"127.0.0.1:{server[0]}") for name, value in headers.items()}
    reply = ask_http(server[0], COMPLETIONS, json.dumps(BASE[CompletionBody]).encode(), headers=headers)
    assert reply.status == status and (error_of(reply)["param"] == "prompt") == (status == 400)


def test_a_page_that_is_allowed_may_read_the_answer(server: tuple[int, int]):
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    for origin, status in (("https://chat.example", 200), ("https://evil.example", 400)):
        reply = ask_http(server[0], COMPLETIONS, headers={"origin": origin, **asked}, method="OPTIONS")
        assert reply.status == status
        assert (reply.headers.get("access-control-allow-origin") == origin) == (status == 200)


def test_an_allowed_origin_is_checked_at_the_start():
    assert check_origins(["HTTPS://Chat.Example/"]) == ("https://chat.example",)
    for bad in ("chat.example", "https://chat.example/page", "file:///x", "https://"):
        with pytest.raises(ConfigError, match="allow-origin = "):
            check_origins([bad])


def test_no_path_is_redirected_to_a_host_that_the_client_names(server: tuple[int, int]):
    for path, host in (("/health/", "evil.example"), ("/nowhere", "[::")):
        reply = ask_http(server[0], path, headers={"host": host})
        assert reply.status == 404 and "location" not in reply.headers and error_of(reply)
