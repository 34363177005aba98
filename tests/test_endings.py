"""How `faser serve` ends: a drain takes as long as answers take, and nobody is left to a process that has died."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from faser_backend.core.errors import SHUTTING_DOWN
from faser_backend.serving.processes import arguments, children, is_running
from lab.bench.servers import free_ports
from tests.serving_pair import build_pair
from tests.strict_clients import one, stream_grpc, text
from tests.triton_clients import inputs_of

NUM_TOKENS, NUM_STREAMS = 2000, 4
SLOW_S = 3.0  # for which the engine hardly runs: longer than Triton waits by itself before it unloads


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory) -> Path:
    return build_pair(tmp_path_factory.mktemp("endings"), max_context=2048)


class Serving:
    """A server, its model processes by name, and streams that are under way."""

    def __init__(self, process: subprocess.Popen, grpc_port: int) -> None:
        self.process, self.grpc_port = process, grpc_port
        (server,) = children(process.pid)
        self.group = [server, *children(server)]
        self.models = {Path(arguments(pid)[1]).parts[-3]: pid for pid in self.group[1:]}
        self.received: queue.Queue = queue.Queue()

    def start_streams(self, client: triton.InferenceServerClient) -> None:
        """All of them have begun to answer when it returns."""
        client.start_stream(lambda result, error: self.received.put((result, error)))
        for number in range(NUM_STREAMS):
            inputs = inputs_of(text_input="def f(x):\n", max_tokens=NUM_TOKENS, end_id=-1, stream=True)
            client.async_stream_infer("ensemble", inputs, request_id=str(number), enable_empty_final_response=True)
        begun: set[str] = set()
        while len(begun) < NUM_STREAMS:
            result, error = self.received.get(timeout=20)
            assert error is None, error
            begun.add(result.get_response().id)


@contextmanager
def serving(engine_dir: Path, *options: str) -> Iterator[Serving]:
    http, grpc, metrics = free_ports(3)
    ports = ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    faser = str(Path(sys.executable).with_name("faser"))
    command = [faser, "serve", "--engine-dir", str(engine_dir), *ports, "--num-threads", "1", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline().startswith("ready: ")
        yield Serving(process, grpc)
    finally:
        for pid in children(process.pid):
            os.killpg(pid, signal.SIGKILL)
        process.kill()
        process.communicate()


def slow_down(pid: int, seconds: float) -> None:
    """Lets the process run for a small part of the time. (One that stands still is ended by Triton.)"""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.1)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.002)


def test_a_drain_waits_for_answers_and_a_second_signal_for_nothing(engine_dir: Path):
    with serving(engine_dir) as served, triton.InferenceServerClient(f"127.0.0.1:{served.grpc_port}") as client:
        served.start_streams(client)
        served.process.send_signal(signal.SIGTERM)
        slow_down(served.models["tensorrt_llm"], SLOW_S)
        late = {"text_input": text("x"), "max_tokens": one(2), "stream": one(True, bool)}
        with pytest.raises(InferenceServerException, match=SHUTTING_DOWN):
            stream_grpc(served.grpc_port, "ensemble", late)
        num_ended = 0
        while num_ended < NUM_STREAMS:
            result, error = served.received.get(timeout=40)
            assert error is None, error
            num_ended += result.get_response().parameters["triton_final_response"].bool_param
        client.stop_stream()
        assert served.process.wait(40) == 0
    with serving(engine_dir) as served, triton.InferenceServerClient(f"127.0.0.1:{served.grpc_port}") as client:
        served.start_streams(client)
        os.kill(served.models["tensorrt_llm"], signal.SIGSTOP)  # it will never answer
        served.process.send_signal(signal.SIGTERM)
        time.sleep(1.0)
        assert served.process.poll() is None
        served.process.send_signal(signal.SIGINT)
        served.process.wait(15)
        assert [pid for pid in served.group if is_running(pid)] == []


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble", "preprocessing"])
def test_a_model_whose_process_dies_ends_the_server(engine_dir: Path, model: str):
    with serving(engine_dir) as served, triton.InferenceServerClient(f"127.0.0.1:{served.grpc_port}") as client:
        served.start_streams(client)
        os.kill(served.models["tensorrt_llm"], signal.SIGSTOP)  # the answers stay under way
        os.kill(served.models[model], signal.SIGKILL)
        while served.received.get(timeout=20)[1] is None:
            pass  # what had been sent before; then the error
        assert served.process.wait(20) == 1
        assert f"the process of model '{model}' is gone" in served.process.stderr.read()
        assert [pid for pid in served.group if is_running(pid)] == []


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble", "tritonserver"])
def test_a_process_that_stands_still_is_killed_and_its_requests_are_answered(engine_dir: Path, model: str):
    with (
        serving(engine_dir, "--hang-timeout", "2") as served,
        triton.InferenceServerClient(f"127.0.0.1:{served.grpc_port}") as client,
    ):
        served.start_streams(client)
        os.kill(served.models.get(model, served.group[0]), signal.SIGSTOP)
        while served.received.get(timeout=20)[1] is None:
            pass  # what had been sent before; then the error
        assert served.process.wait(20) == 1
        told = served.process.stderr.read()
        assert "has made no progress for" in told and "it is killed" in told, told
        assert [pid for pid in served.group if is_running(pid)] == []


def test_without_a_limit_its_requests_wait(engine_dir: Path):
    """The control."""
    with (
        serving(engine_dir, "--hang-timeout", "0") as served,
        triton.InferenceServerClient(f"127.0.0.1:{served.grpc_port}") as client,
    ):
        served.start_streams(client)
        os.kill(served.models["tensorrt_llm"], signal.SIGSTOP)
        time.sleep(4.0)
        while not served.received.empty():
            result, error = served.received.get()
            assert error is None and not result.get_response().parameters["triton_final_response"].bool_param
        assert client.is_server_ready() and served.process.poll() is None
        os.killpg(served.group[0], signal.SIGKILL)  # the client waits for its answers when it closes
