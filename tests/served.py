"""`faser serve` as a user starts it, on free ports of the loopback, for a test's time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.bench.servers import free_ports

FASER = Path(sys.executable).with_name("faser")


@dataclass(frozen=True)
class Served:
    """A running server's ports, and the line with which it said that it is ready."""

    http_port: int
    grpc_port: int
    metrics_port: int
    ready: str


@contextmanager
def serve(*options: object) -> Iterator[Served]:
    """Runs `faser serve OPTIONS`; asserts that it gets ready, and ends it."""
    http, grpc, metrics = free_ports(3)
    ports = ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    command = [str(FASER), "serve", *map(str, options), *ports]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        ready = process.stdout.readline()
        assert ready.startswith("ready: "), process.stderr.read()
        yield Served(http, grpc, metrics, ready)
    finally:
        process.terminate()
        time.sleep(0.2)
        process.terminate()  # a second signal ends at once
        try:
            process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
