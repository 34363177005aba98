"""What hostile clients of the OpenAI server get, and that others notice nothing of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import uvicorn

from faser_backend.core.errors import ConfigError
from faser_backend.core.request import RequestOutput
from faser_backend.serving.demo_engine import demo_engine_dir
from faser_backend.serving.openai import app as app_module
from faser_backend.serving.openai import bodies, connections
from faser_backend.serving.openai.callers import Callers, check_origins
from faser_backend.serving.openai.fields import ChatBody, CompletionBody, ResponsesBody
from faser_backend.serving.openai.server import OpenAIOptions, describe
from lab.abuse.clients import fetch
from lab.abuse.openai_attacks import BODIES, COMPLETIONS, head_of, send_body
from lab.bench.servers import free_ports
from tests.chat_templates import HERMES
from tests.openai_cases import BASE, FIELDS, MESSAGES, PATHS, WEATHER

JSON = {"content-type": "application/json"}


class FakeClient:
    """In place of Triton: three tokens, the last logits of which are no numbers; fails after the first if told to."""

    fails = False

    def __init__(self, *_: Any) -> None: ...
    def carrying(self, _: dict[str, str]) -> FakeClient:
        return self

    async def is_ready(self) -> bool:
        return True

    async def close(self) -> None: ...

    async def generate(self, wanted: Any) -> AsyncIterator[tuple[RequestOutput, list[bool]]]:
        for token_id in (70, 71, 72):
            logits = np.full((1, 2048), np.nan, np.float32) if wanted.num_top else None
            yield RequestOutput("", [token_id], [float("-inf")], generation_logits=logits), [False]
            if FakeClient.fails:
                raise LookupError("nobody foresaw this")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> OpenAIOptions:
    template = tmp_path_factory.mktemp("openai") / "template.jinja"
    template.write_text(HERMES)
    return OpenAIOptions(demo_engine_dir(), "127.0.0.1:1", free_ports(1)[0], chat_template_file=template)


@pytest.fixture(scope="module")
def app(options: OpenAIOptions) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app_module, "TokenClient", FakeClient)
        yield app_module.make_app(describe(options), options.triton_url, Callers())


@pytest.fixture(scope="module")
def server(options: OpenAIOptions) -> Iterator[tuple[int, int]]:
    """Port and process of an OpenAI server; what it asks of Triton finds nobody."""
    given = ["--engine-dir", options.engine_dir, "--triton", options.triton_url, "--port", options.port]
    given += ["--chat-template", options.chat_template_file, "--allow-origin", "https://chat.example"]
    command = [sys.executable, "-m", "faser_backend.cli", "openai", *map(str, given)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline().startswith("OpenAI's API")
        yield options.port, process.pid
    finally:
        process.kill()
        process.communicate()


# -- bodies ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name",
    ["ids, then a text", "objects as prompts", "bad parts", "arguments", "logit_bias, many keys", "just enough ids"],
)
def test_a_large_body_costs_others_little(server: tuple[int, int], name: str):
    seen = send_body(*server, name)
    assert seen.status in (400, 413, 503) and "error" in json.loads(seen.message)
    assert seen.growth_mb < 100 and seen.processor_s < 3  # were up to 4,400 and 57, for everybody


def test_bodies_on_their_way_are_limited_together(app: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bodies, "MAX_HELD_BYTES", 100_000)
    large = json.dumps({"prompt": "x" * 60_000}).encode()
    with listening(app) as port, socket.create_connection(("127.0.0.1", port)) as slow:
        assert (
            fetch(port, COMPLETIONS, large)[0] == 400
        )  # the control: alone there is room for it, but not in the context
        slow.sendall(head_of(COMPLETIONS, {"content-length": str(len(large))}) + large[:-1])
        deadline_s = time.monotonic() + 10
        while (status := fetch(port, COMPLETIONS, large)[0]) != 503:
            assert status == 400 and time.monotonic() < deadline_s
        assert fetch(port, COMPLETIONS, json.dumps(BASE[CompletionBody]).encode())[0] == 200
        slow.sendall(large[-1:])
        assert slow.recv(100).startswith(b"HTTP/1.1 400")
        assert fetch(port, COMPLETIONS, large)[0] == 400


def test_what_stands_in_texts_is_not_counted(server: tuple[int, int]):
    status, _, text = fetch(server[0], COMPLETIONS, BODIES["a text of commas"].content())
    assert status == 400 and json.loads(text)["error"]["message"].startswith("prompt length = ")


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
CORNERS: dict[Any, dict[str, Any]] = {  # what it takes for a field to be looked at
    CompletionBody: {},
    ChatBody: {"messages": MESSAGES, "logprobs": True, "tools": [WEATHER]},
    ResponsesBody: {},
}


def read_strictly(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def call(app: Any, asked: list[tuple[str, str]]) -> list[tuple[int, str, str]]:
    """Status, media type and text of the answer to every (path, body)."""

    async def one(path: str, body: str) -> tuple[int, str, str]:
        sent: list[dict[str, Any]] = []
        incoming = [{"type": "http.request", "body": body.encode(), "more_body": False}]

        async def receive() -> dict[str, Any]:
            if not incoming:
                await asyncio.Event().wait()
            return incoming.pop()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
        with contextlib.suppress(LookupError):
            await app(scope, receive, send)
        start, *bodies = sent
        assert not bodies[-1].get("more_body", False)
        kind = dict(start["headers"])[b"content-type"].decode().partition(";")[0]
        return start["status"], kind, b"".join(message["body"] for message in bodies).decode()

    async def run() -> list[tuple[int, str, str]]:
        async with app.router.lifespan_context(app):
            return [await one(path, body) for path, body in asked]

    return asyncio.run(run())


def with_raw(body: dict[str, Any], name: str, raw: str) -> str:
    kept = json.dumps({key: value for key, value in body.items() if key != name})
    return f"{kept[:-1]}, {json.dumps(name)}: {raw}}}"


@pytest.mark.parametrize("kind", FIELDS)
def test_whatever_a_field_holds_the_answer_is_json_or_events(app: Any, kind: type):
    body = {**BASE[kind], **CORNERS[kind]}
    asked = [
        (PATHS[kind], with_raw(body | {"stream": bool(index % 2)}, name, raw))
        for name in FIELDS[kind]
        for index, raw in enumerate(NO_JSON + STRANGE)
    ]
    statuses = set()
    for (_, sent), (status, media, text) in zip(asked, call(app, asked), strict=True):
        statuses.add(status)
        assert status in (200, 400, 404), (sent[:300], text)
        if media == "text/event-stream":
            lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
            assert lines and all(line == "[DONE]" or read_strictly(line) for line in lines)
        else:
            assert media == "application/json" and read_strictly(text)
    assert {200, 400} <= statuses


def test_a_failure_that_nobody_foresaw_is_told_and_logged(
    app: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(FakeClient, "fails", True)
    body = BASE[ChatBody]
    asked = [(PATHS[ChatBody], json.dumps({**body, "stream": is_streamed})) for is_streamed in (False, True)]
    (status, media, whole), (_, stream_media, stream) = call(app, asked)
    assert (status, media, stream_media) == (500, "application/json", "text/event-stream")
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
    for text in (whole, events[-1]):
        error = json.loads(text)["error"]
        assert error["code"] == "internal_error" and "nobody foresaw" not in text
        assert error["message"].split()[-1] in caplog.text
    assert "nobody foresaw this" in caplog.text


# -- connections -----------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def listening(app: Any) -> Iterator[int]:
    [port] = free_ports(1)
    config = uvicorn.Config(app, port=port, http=connections.Connection, ws="none", log_level="critical")
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


def is_closed(connection: socket.socket, within_s: float) -> bool:
    connection.settimeout(within_s)
    with contextlib.suppress(ConnectionResetError):
        try:
            while connection.recv(4096):
                pass
        except TimeoutError:
            return False
    return True


def half_open(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-")
    return connection


def test_half_sent_heads_keep_nobody_out(app: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections.Connection, "most", 8)
    with listening(app) as port, contextlib.ExitStack() as stack:
        opened = [stack.enter_context(half_open(port)) for _ in range(8)]
        assert not is_closed(opened[0], 0.2)  # the control: there is room for these
        opened += [stack.enter_context(half_open(port)) for _ in range(8)]
        assert fetch(port, "/v1/models", None)[0] == 200
        assert all(is_closed(connection, 5.0) for connection in opened[:8])
        assert not is_closed(opened[-1], 0.2)


def test_a_head_has_a_deadline_and_so_has_the_rest_of_an_answered_body(app: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "HEAD_S", 0.5)
    with listening(app) as port:
        with half_open(port) as late, half_open(port) as dribbling:
            for _ in range(20):
                with contextlib.suppress(OSError):
                    dribbling.sendall(b"x")
                time.sleep(0.05)
            assert is_closed(late, 5.0) and is_closed(dribbling, 5.0)
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(head_of("/nowhere", {"content-length": "1000"}))
            assert connection.recv(4096).startswith(b"HTTP/1.1 404")
            with contextlib.suppress(OSError):
                for _ in range(20):
                    connection.sendall(b"x")
                    time.sleep(0.05)
            assert is_closed(connection, 1.0)


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
FORM, PLAIN = {"content-type": "application/x-www-form-urlencoded"}, {"content-type": "text/plain"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (FORM, 503),  # curl -d; 503: all is well but that nobody generates here
        (JSON | {"host": "server.lan"}, 503),  # a client that knows us by another name
        (JSON | {"origin": "http://HOST"}, 503),  # the chat page
        (JSON | {"origin": "https://chat.example"}, 503),
        (JSON | {"origin": "https://evil.example"}, 403),
        (JSON | {"origin": "null"}, 403),
        (JSON | {"origin": "http://localhost:1"}, 403),
        (JSON | {"origin": "http://evil.example:9000", "host": "evil.example:9000"}, 403),  # DNS rebinding
        (JSON | {"user-agent": "Mozilla/5.0", "host": "evil.example"}, 403),
        (JSON | {"sec-fetch-site": "cross-site"}, 403),
        (PLAIN | {"origin": "http://HOST"}, 415),
        (FORM | {"user-agent": "Mozilla/5.0"}, 415),
    ],
)
def test_a_web_page_of_another_origin_may_not_ask(server: tuple[int, int], headers: dict[str, str], status: int):
    headers = {name: value.replace("HOST", f"127.0.0.1:{server[0]}") for name, value in headers.items()}
    found, _, text = fetch(server[0], COMPLETIONS, json.dumps(BASE[CompletionBody]).encode(), headers)
    assert found == status and "error" in json.loads(text)


def test_a_page_that_is_allowed_may_read_the_answer(server: tuple[int, int]):
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    for origin, status in (("https://chat.example", 200), ("https://evil.example", 400)):
        found, headers, _ = fetch(server[0], COMPLETIONS, None, {"origin": origin, **asked}, "OPTIONS")
        assert found == status and (headers.get("access-control-allow-origin") == origin) == (status == 200)


def test_an_allowed_origin_is_checked_at_the_start():
    assert check_origins(["HTTPS://Chat.Example/"]) == ("https://chat.example",)
    for bad in ("chat.example", "https://chat.example/page", "file:///x", "https://"):
        with pytest.raises(ConfigError, match="allow-origin = "):
            check_origins([bad])


def test_no_path_is_redirected_to_a_host_that_the_client_names(server: tuple[int, int]):
    for path, host in (("/health/", "evil.example"), ("/nowhere", "[::")):
        status, headers, text = fetch(server[0], path, None, {"host": host})
        assert status == 404 and "location" not in headers and "error" in json.loads(text)
