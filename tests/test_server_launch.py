"""Starting and ending the real server: `faser serve` in unary mode, its drain, and what stops a start."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton

from faser_backend.core.errors import SHUTTING_DOWN, ConfigError
from faser_backend.serving.processes import PARENT_POLL_S
from faser_backend.serving.server import LaunchOptions, TritonServer, check_ports
from lab.bench.servers import free_ports
from tests.serving_pair import build_pair
from tests.triton_clients import inputs_of, post, wait_for_free_blocks

PROMPT = "def größe(x):\n"
LATE = {
    "inputs": [
        {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["x"]},
        {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [1]},
    ]
}


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory) -> Path:
    return build_pair(tmp_path_factory.mktemp("launch"))


def test_faser_serve_unary(engine_dir: Path):
    """One server for all that a unary deployment shows; its drain comes last."""
    http, grpc, metrics = free_ports(3)
    faser = str(Path(sys.executable).with_name("faser"))
    ports = ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    command = [faser, "serve", "--engine-dir", str(engine_dir), *ports, "--no-decoupled", "--num-threads", "1"]
    command += ["--stop-requests", "off"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline().startswith("ready: ")
        body = {"text_input": PROMPT, "max_tokens": 30, "end_id": -1}
        status, answer = post(http, "/v2/models/ensemble/generate", body)
        assert status == 200 and json.loads(answer)["text_output"].startswith(PROMPT)
        status, answer = post(http, "/v2/models/ensemble/generate", {**body, "stream": True})
        assert status == 400 and "Streaming is only supported if model is deployed using decoupled mode." in answer
        with triton.InferenceServerClient(f"127.0.0.1:{grpc}") as client:
            check_unary_cancellation(client, metrics)
            check_foreign_stop(client)
            drained = [start_unary(client) for _ in range(4)]
            time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            while (told := post(http, "/v2/models/ensemble/infer", LATE))[0] == 200:
                pass
            assert told[0] == 503 and SHUTTING_DOWN in told[1]
            assert [error for _, error in (received.get(timeout=40) for _, received in drained)] == [None] * 4
        assert process.wait(40) == 0
    finally:
        process.kill()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", grpc)) != 0, "the server is still there"


def start_unary(client: triton.InferenceServerClient, request_id: str = "") -> tuple[Any, queue.Queue]:
    received: queue.Queue = queue.Queue()
    inputs = inputs_of(text_input=PROMPT, max_tokens=480, end_id=-1)

    def note(result: Any, error: Any) -> None:
        received.put((result, error))

    return client.async_infer("ensemble", inputs, note, request_id=request_id), received


def check_foreign_stop(client: triton.InferenceServerClient) -> None:
    """With --stop-requests off; test_server.py shows what they do otherwise."""
    received = start_unary(client, "1")[1]
    with pytest.raises(triton.InferenceServerException, match="stop = True: stop requests are off"):
        client.infer("ensemble", inputs_of(text_input=PROMPT, max_tokens=4, stop=True), request_id="1")
    result, error = received.get(timeout=40)
    assert error is None and len(result.as_numpy("text_output")[0]) > 400


def check_unary_cancellation(client: triton.InferenceServerClient, metrics_port: int) -> None:
    call, received = start_unary(client)
    time.sleep(0.02)
    call.cancel()
    assert "CANCELLED" in str(received.get(timeout=10)[1].status())
    wait_for_free_blocks(metrics_port)


def test_port_in_use_is_told_before_anything_starts():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"grpc-port: port {port} in use"):
            check_ports("127.0.0.1", {"http-port": free_ports(1)[0], "grpc-port": port})
    with pytest.raises(ConfigError, match="grpc-port = 8000: is the same as http-port"):
        check_ports("127.0.0.1", {"http-port": 8000, "grpc-port": 8000})


def test_broken_engine_directory_fails_the_start_with_its_reason(engine_dir: Path, tmp_path: Path):
    broken = tmp_path / "engine"
    broken.mkdir()
    (broken / "manifest.json").write_text((engine_dir / "manifest.json").read_text())
    options = LaunchOptions(*free_ports(3), parameters={"engine_dir": str(broken)})
    with TritonServer(options) as server, pytest.raises(ConfigError, match="missing"):
        server.wait_ready()


def test_killing_the_server_leaves_no_process_behind(engine_dir: Path):
    http, grpc, metrics = free_ports(3)
    faser = str(Path(sys.executable).with_name("faser"))
    ports = ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    command = [faser, "serve", "--engine-dir", str(engine_dir), *ports, "--num-threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline().startswith("ready: ")
        family = descendants(process.pid)
        assert len(family) >= 5, "a server and a process for each Python model"
        time.sleep(3 * PARENT_POLL_S)
        for pid in family[1:]:
            os.kill(pid, signal.SIGSTOP)  # as if its interpreter never came to its turn
    finally:
        process.kill()
        process.wait()
    assert still_running(family, 2.0) == []


def still_running(pids: list[int], timeout_s: float) -> list[int]:
    """Those that have not ended by then."""
    deadline = time.monotonic() + timeout_s
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def test_a_process_ends_with_the_thread_that_started_it_and_another_does_not():
    """Why the processes of models wait before they call `die_with_parent`. The control never calls it."""
    code = "import sys, time; from faser_backend.serving.processes import die_with_parent\n"
    pids: list[int] = []

    def start(call: str) -> None:
        pids.append(subprocess.Popen([sys.executable, "-c", f"{code}{call}\ntime.sleep(60)"]).pid)
        time.sleep(1.5)

    thread = threading.Thread(target=lambda: [start("die_with_parent()"), start("")])
    thread.start()
    thread.join()
    try:
        assert still_running(pids, 2.0) == pids[1:]
    finally:
        os.kill(pids[1], signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """All processes below pid (Linux)."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return children + [below for child in children for below in descendants(child)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
