"""Starts and ends of a server: failed starts, drains that wait for answers, processes that die."""

import os
import queue
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from faser_backend.core.errors import SHUTTING_DOWN, ConfigError
from faser_backend.lab.abuse.served import REQUESTS, metric
from faser_backend.lab.checks.servers import free_ports
from faser_backend.serving.processes import PARENT_POLL_S, children, is_running
from faser_backend.triton.server import TritonServer, check_ports, claim_ports
from tests.support.clients import (
    Arrays,
    arrays_of,
    infer_grpc,
    inputs_of,
    one,
    post,
    stream_grpc,
    text,
    text_request,
    wait_for_free_blocks,
)
from tests.support.processes import still_running, wait_until
from tests.support.served import Served, on_free_ports, serve
from tests.support.serving_pair import build_pair

PROMPT = "def f(x):\n"
NUM_TOKENS, NUM_STREAMS = 4000, 4  # for seconds: a client of a busy machine still finds them in progress
SLOW_S = 3.0  # for which the engine hardly runs: longer than Triton waits by itself before it unloads
LIMIT_S = 2  # of silence, after which a process is killed


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory) -> Path:
    return build_pair(tmp_path_factory.mktemp("endings"), max_context=4096)


class Clients:
    """Streams in progress at a server."""

    def __init__(self, served: Served) -> None:
        self.process, self.grpc_port = served.process, served.grpc_port
        self.group = [served.triton, *children(served.triton)]
        self.pids = {model: pid for pid, model in served.models().items()} | {"tritonserver": served.triton}
        self.client = triton.InferenceServerClient(f"127.0.0.1:{served.grpc_port}")
        self.received: queue.Queue = queue.Queue()
        self.client.start_stream(lambda result, error: self.received.put((result, error)))
        for number in range(NUM_STREAMS):
            inputs = inputs_of(arrays_of(text_input=PROMPT, max_tokens=NUM_TOKENS, end_id=-1, stream=True))
            self.client.async_stream_infer("ensemble", inputs, request_id=str(number), enable_empty_final_response=True)
        begun: set[str] = set()
        while len(begun) < NUM_STREAMS:
            result, error = self.received.get(timeout=20)
            assert error is None, error
            begun.add(result.get_response().id)

    def stop(self, name: str, number: int = signal.SIGSTOP) -> None:
        os.kill(self.pids[name], number)

    def wait_for_the_error(self) -> str:
        """Returns the server's output after its processes have ended and answered the streams in progress."""
        while self.received.get(timeout=20)[1] is None:
            pass  # what had been sent before
        assert self.process.wait(20) == 1 and self.process.stderr is not None
        assert [pid for pid in self.group if is_running(pid)] == []
        return self.process.stderr.read()


@contextmanager
def streaming(engine_dir: Path, *options: object) -> Iterator[Clients]:
    with serve("--engine-dir", engine_dir, "--num-threads", 1, *options) as served:
        clients = Clients(served)
        try:
            yield clients
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):  # the streams' client waits for its answers
                served.process.send_signal(number)
            clients.client.close()


def ask_again_and_again(grpc_port: int, arrays: Arrays) -> None:
    """Sends requests until the server refuses one: before its drain begins it answers."""
    while True:
        stream_grpc(grpc_port, "ensemble", arrays)


# -- drains -----------------------------------------------------------------------------------------------------------


def test_a_drain_waits_for_answers(engine_dir: Path):
    with streaming(engine_dir) as clients:
        clients.process.send_signal(signal.SIGTERM)
        late = {"text_input": text("x"), "max_tokens": one(2), "stream": one(True, bool)}
        with pytest.raises(InferenceServerException, match=SHUTTING_DOWN):
            ask_again_and_again(clients.grpc_port, late)
        deadline = time.monotonic() + SLOW_S
        while time.monotonic() < deadline:  # (One that stands still is ended by Triton.)
            clients.stop("tensorrt_llm")
            time.sleep(0.1)
            clients.stop("tensorrt_llm", signal.SIGCONT)
            time.sleep(0.002)
        num_ended = 0
        while num_ended < NUM_STREAMS:
            result, error = clients.received.get(timeout=40)
            assert error is None, error
            num_ended += result.get_response().parameters["triton_final_response"].bool_param
        clients.client.stop_stream()
        assert clients.process.wait(40) == 0
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", clients.grpc_port)) != 0, "the server is still there"


def test_a_second_signal_waits_for_nothing_and_without_a_limit_requests_wait(engine_dir: Path):
    with streaming(engine_dir, "--hang-timeout", 0) as clients:
        clients.stop("tensorrt_llm")  # it will never answer
        time.sleep(1.5 * LIMIT_S)  # the control of the tests of hung processes
        received = [clients.received.get() for _ in range(clients.received.qsize())]
        ended = [result.get_response().parameters["triton_final_response"].bool_param for result, _ in received]
        assert sum(ended) < NUM_STREAMS and not any(error for _, error in received)
        assert clients.client.is_server_ready() and clients.process.poll() is None
        clients.process.send_signal(signal.SIGTERM)
        time.sleep(1.0)
        assert clients.process.poll() is None
        clients.process.send_signal(signal.SIGINT)
        clients.process.wait(15)
        assert [pid for pid in clients.group if is_running(pid)] == []


def test_a_unary_server_cancels_refuses_foreign_stops_and_drains(engine_dir: Path):
    with serve("--engine-dir", engine_dir, "--num-threads", 1, "--no-decoupled", "--stop-requests", "off") as served:
        client = triton.InferenceServerClient(f"127.0.0.1:{served.grpc_port}")
        call, received = start_unary(client)
        time.sleep(0.02)
        call.cancel()
        assert "CANCELLED" in str(received.get(timeout=10)[1].status())
        wait_for_free_blocks(served.metrics_port)
        received = start_unary(client, "1")[1]
        with pytest.raises(InferenceServerException, match="stop = True: --stop-requests is off"):
            infer_grpc(served.grpc_port, "ensemble", text_request(stop=one(True, bool)), request_id="1")
        result, error = received.get(timeout=40)
        assert error is None and len(result.as_numpy("text_output")[0]) > 400
        drained = [start_unary(client, max_tokens=3000)[1] for _ in range(4)]
        wait_until(lambda: metric(served.metrics_port, REQUESTS, "active") == 4)
        served.process.send_signal(signal.SIGTERM)
        body = {"text_input": "x", "max_tokens": 1}
        while (told := post(served.http_port, "/v2/models/ensemble/generate", body))[0] == 200:
            pass
        assert SHUTTING_DOWN in told[1]
        assert [received.get(timeout=40)[1] for received in drained] == [None] * 4
        assert served.process.wait(40) == 0


def start_unary(client: Any, request_id: str = "", max_tokens: int = 480) -> tuple[Any, queue.Queue]:
    received: queue.Queue = queue.Queue()
    inputs = inputs_of(arrays_of(text_input=PROMPT, max_tokens=max_tokens, end_id=-1))
    call = client.async_infer(
        "ensemble", inputs, lambda result, error: received.put((result, error)), request_id=request_id
    )
    return call, received


# -- processes that die or hang ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tensorrt_llm", "preprocessing"])
def test_a_model_whose_process_dies_ends_the_server(engine_dir: Path, name: str):
    with streaming(engine_dir) as clients:
        clients.stop(name, signal.SIGSEGV)
        assert f"error: the process of model '{name}' ended by SIGSEGV; the" in clients.wait_for_the_error()


@pytest.mark.parametrize("name", ["ensemble", "tritonserver"])
def test_a_process_that_stands_still_is_killed_and_its_requests_are_answered(engine_dir: Path, name: str):
    with streaming(engine_dir, "--hang-timeout", LIMIT_S) as clients:
        clients.stop(name)
        said = clients.wait_for_the_error()
        assert "has made no progress for" in said and "it is killed" in said, said


def test_killing_the_server_leaves_no_process_behind(engine_dir: Path):
    with serve("--engine-dir", engine_dir, "--num-threads", 1) as served:
        family = [served.triton, *served.models()]
        assert len(family) >= 5, "a server and a process for each Python model"
        time.sleep(3 * PARENT_POLL_S)
        for pid in family[1:]:
            os.kill(pid, signal.SIGSTOP)
        served.process.kill()
        served.process.wait()
        assert still_running(family, 2.0) == []


# -- starts -----------------------------------------------------------------------------------------------------------


def test_port_in_use_is_told_before_anything_starts():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"grpc-port: port {port} in use"):
            check_ports("127.0.0.1", {"http-port": free_ports(1)[0], "grpc-port": port})
    with pytest.raises(ConfigError, match="grpc-port = 8000: is the same as http-port"):
        check_ports("127.0.0.1", {"http-port": 8000, "grpc-port": 8000})
    options = on_free_ports()
    with claim_ports(options.host, {"http-port": options.http_port}), pytest.raises(ConfigError, match="another faser"):
        TritonServer(options)  # while nobody listens yet


def test_broken_engine_directory_fails_the_start_with_its_reason(engine_dir: Path, tmp_path: Path):
    broken = tmp_path / "engine"
    broken.mkdir()
    (broken / "manifest.json").write_text((engine_dir / "manifest.json").read_text())
    server = TritonServer(on_free_ports(), {"engine_dir": str(broken)})
    with server, pytest.raises(ConfigError, match="missing"):
        server.wait_ready()
