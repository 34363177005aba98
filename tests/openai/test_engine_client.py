"""The OpenAI server beside engines that load, are replaced, or take nothing more."""

import asyncio
import signal
import socket
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from faser_backend.core.errors import ErrorCode, FailedError
from faser_backend.core.request import Limits
from faser_backend.lab.abuse.clients import ask_http
from faser_backend.lab.checks.servers import free_ports
from faser_backend.openai import engine_client
from faser_backend.openai.app import Callers, make_app
from faser_backend.openai.engine_client import EngineClient
from faser_backend.openai.requests import Generation
from faser_backend.serving.engine_loop import EngineLoop
from faser_backend.triton.link import Event, FrameSocket, LinkServer, pack
from tests.support.harness import CONTEXT, VOCAB, fake_engine, request
from tests.support.processes import wait_until
from tests.support.served import FASER
from tests.triton.test_link import HANDSHAKE, MODEL


def test_an_engine_that_takes_nothing_fails_requests_in_time_and_blocks_nobody(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(engine_client, "SEND_S", 1.5)

    async def ask(client: EngineClient) -> ErrorCode:
        with pytest.raises(FailedError) as failed:
            async for _ in client.generate([Generation(request("", [1] * (1 << 20)), 8)], {}, set()):
                pass
        return failed.value.code

    async def ask_often() -> tuple[list[ErrorCode], float]:
        client = EngineClient(tmp_path / "engine.sock", [])
        while not await client.is_ready():
            await asyncio.sleep(0.01)
        asked = [asyncio.create_task(ask(client)) for _ in range(3)]
        longest_s, before_s = 0.0, time.monotonic()
        while not all(task.done() for task in asked):
            await asyncio.sleep(0.01)
            longest_s, before_s = max(longest_s, time.monotonic() - before_s), time.monotonic()
        await client.close()
        return [task.result() for task in asked], longest_s

    def greet() -> None:  # and read nothing, as after SIGSTOP
        streams.append(listener.accept()[0])
        FrameSocket(streams[0], max_received=1, max_sent=1 << 20).send(pack(Event(HANDSHAKE)))

    streams: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "engine.sock"))
        listener.listen()
        threading.Thread(target=greet, daemon=True).start()
        codes, longest_s = asyncio.run(asyncio.wait_for(ask_often(), 20))
    streams[0].close()
    assert codes == [ErrorCode.UNAVAILABLE] * 3
    assert longest_s < 1.2, "all other requests of the event loop waited"


def test_the_facts_of_the_model_are_those_of_the_engine_that_serves(tmp_path: Path):
    path, body = tmp_path / "engine.sock", {"prompt": [1] * (CONTEXT - 1), "max_tokens": 1}
    with TestClient(make_app(path, Callers(host="testserver"))) as client:

        def shown() -> Any:
            answer = client.get("/v1/models").json()
            return answer["data"][0]["max_model_len"] if "data" in answer else answer["error"]["code"]

        assert client.get("/health").status_code == 503 and shown() == "unavailable"
        answer = client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        opened: list[Any] = []
        for limit, status in ((CONTEXT, 200), (CONTEXT // 2, 400)):
            opened.append(EngineLoop(fake_engine()[0]))
            model = replace(MODEL, limits=Limits(VOCAB, limit))
            opened.append(LinkServer(opened[-1], replace(HANDSHAKE, model=model), path))
            wait_until(lambda limit=limit: shown() == limit)
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == status, answer.text
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    for each in reversed(opened):
        each.close()


def test_a_start_listens_first_and_its_interruption_has_a_status_of_its_own(engine_dir: Path):
    ports = dict(zip(("--http-port", "--grpc-port", "--metrics-port", "--openai-port"), free_ports(4), strict=True))
    given = [f"{name}={port}" for name, port in ports.items()]
    started = subprocess.Popen([FASER, "serve", "--engine-dir", engine_dir, *given], stdout=subprocess.PIPE, text=True)
    status = wait_until(lambda: ask_http(ports["--openai-port"], "/health").status, timeout_s=60)
    started.send_signal(signal.SIGINT)
    assert (started.communicate(timeout=20)[0], started.returncode, status) == ("", 130, 503)
