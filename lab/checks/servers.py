"""Real servers and the load client: started, awaited and stopped.

Knows the `faser serve` command line and nothing of what is behind it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from faser_backend.core.errors import FaserError
from faser_backend.lab.answers import Answer, Job
from faser_backend.lab.places import ROOT
from faser_backend.triton.server import claim_ports

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0
FIRST_PORT, NUM_PORTS = 10_000, 22_000
_NUMBERS = itertools.count(997 * os.getpid())  # processes that start servers at the same time begin far from each other


def free_ports(count: int) -> list[int]:
    """Returns ports below those that Linux gives to clients: nothing takes one before its server has started."""
    host, ports = "127.0.0.1", []
    while len(ports) < count:
        port = FIRST_PORT + next(_NUMBERS) % NUM_PORTS
        with suppress(OSError, FaserError), claim_ports(host, {"": port}), socket.create_server((host, port)):
            ports.append(port)
    return ports


class ServerProcess:
    """A server in a process of its own, ready when `health` answers. options: more of Popen's."""

    def __init__(self, command: list[str], health: str, log: Path, **options: Any) -> None:
        self.health, self._log = health, log
        with log.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, **options)

    def log_tail(self) -> str:
        return self._log.read_text()[-4000:]

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Raises RuntimeError with the log's end if it does not come up."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended at once:\n{self.log_tail()}")
            try:
                with urllib.request.urlopen(self.health, timeout=1):
                    return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"not ready within {timeout_s:.0f} s:\n{self.log_tail()}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Server(ServerProcess):
    """`faser serve` on loopback ports for HTTP, gRPC and metrics."""

    def __init__(self, options: list[str], log: Path, *, ports: Sequence[int] = ()) -> None:
        self.ports = http, grpc, metrics = ports or free_ports(3)
        self.url = f"127.0.0.1:{grpc}"
        given = ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
        command = [sys.executable, "-m", "faser_backend.cli", "serve", *given, *options]
        super().__init__(command, f"http://127.0.0.1:{http}/v2/health/ready", log)


Run = Callable[[list[Job], int], tuple[list[Answer], float]]  # jobs and clients -> an answer per job, and seconds


class LoadClient:
    """faser_backend.lab.bench.wire in a process of its own, which the stack ends."""

    def __init__(self, stack: ExitStack) -> None:
        # Linux shares cores between sessions first: in one with other busy programs the client
        # could wait 100 ms for its turn, which would be charged to the server.
        self._process = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn"), os.setsid))

    def run(self, url: str, jobs: list[Job], num_clients: int) -> tuple[list[Answer], float]:
        """Runs num_clients streams until all jobs are answered. Returns answers and seconds."""
        return self._process.submit(_run_jobs, url, jobs, num_clients).result()


def _run_jobs(url: str, jobs: list[Job], num_clients: int) -> tuple[list[Answer], float]:
    os.environ["GRPC_VERBOSITY"] = "ERROR"
    from faser_backend.lab.bench.wire import run_jobs  # gRPC reads the environment when it is loaded

    return asyncio.run(run_jobs(url, jobs, num_clients))


def serve_all(stack: ExitStack, client: LoadClient, options: Mapping[str, list[str]], log_dir: Path) -> dict[str, Run]:
    """`faser serve` with these options for each name, all up, so that repeats can take turns; the stack stops them."""
    runs: dict[str, Run] = {}
    for index, (name, own) in enumerate(options.items()):
        server = Server(own, log_dir / f"server-{index}.log")
        stack.callback(server.stop)
        server.wait_ready()
        runs[name] = partial(client.run, server.url)
    return runs
