"""A running `faser serve` on free loopback ports, for the duration of a test."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faser_backend.lab.checks.servers import free_ports
from faser_backend.serving.parameters import ServeOptions
from faser_backend.serving.processes import arguments, children

FASER = Path(sys.executable).with_name("faser")


def on_free_ports(**options: Any) -> ServeOptions:
    return ServeOptions(**dict(zip(("http_port", "grpc_port", "metrics_port"), free_ports(3), strict=True)), **options)


@dataclass(frozen=True)
class Served:
    """A running server's process and ports, and its ready line."""

    process: subprocess.Popen[str]
    http_port: int
    grpc_port: int
    metrics_port: int
    ready: str

    @property
    def triton(self) -> int:
        """Returns Triton's process, the parent of the models'."""
        return next(pid for pid in children(self.process.pid) if arguments(pid)[0].endswith("tritonserver"))

    def models(self) -> dict[int, str]:
        """Returns the running model processes and their models."""
        started = {pid: arguments(pid) for pid in children(self.triton)}
        return {pid: Path(command[1]).parts[-3] for pid, command in started.items() if command}  # some have just ended


@contextmanager
def serve(*options: object, log: Path | None = None) -> Iterator[Served]:
    """Runs `faser serve OPTIONS`, asserts that it becomes ready, and ends it. log: receives its stderr."""
    http, grpc, metrics = free_ports(3)
    ports = ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    command = [str(FASER), "serve", *map(str, options), *ports]
    stderr = subprocess.PIPE if log is None else log.open("w")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready.startswith("ready: "), process.stderr.read() if process.stderr else log
        yield Served(process, http, grpc, metrics, ready)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):  # a second signal ends at once
            process.send_signal(number)
        try:
            process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
