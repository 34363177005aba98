"""A real `faser serve` to be abused, a client that behaves well beside the abuse, and the report of broken promises.

Knows the command line of the product, its metrics, and what the kernel says of its processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from faser_backend.serving.processes import arguments, children, is_running
from lab.abuse.clients import REFUSAL, GrpcClient
from lab.bench.servers import ServerProcess, free_ports
from lab.tables import markdown_table

PAUSE_S = 0.02  # of a well-behaved client, between an answer and its next request
POLL_S = 0.05
MAX_SHOWN = 20  # broken promises in words; the rest are counted
FASER = Path(sys.executable).with_name("faser")
DOOR = "the OpenAI front end"
_STUB = "triton_python_backend_stub"
_BLOCKS, _REQUESTS = "nv_trt_llm_kv_cache_block_metrics", "nv_trt_llm_request_metrics"


def process_name(pid: int) -> str:
    """The model of a model's process, else the program and its first word."""
    words = arguments(pid)
    if words and words[0].endswith(_STUB):
        return Path(words[1]).parts[-3]
    if "openai" in words:
        return DOOR
    names = [Path(word).name for word in words if not word.startswith("-") and not Path(word).name.startswith("python")]
    return " ".join(names[:2]) if names[:1] == ["faser"] else "".join(names[:1]) or "?"


class Ports(NamedTuple):
    http: int
    grpc: int
    metrics: int


class Served(ServerProcess):
    """`faser serve OPTIONS` on loopback ports; `before` are the words of a command that becomes the server."""

    def __init__(
        self, options: Sequence[object], log: Path, *, ports: Ports | None = None, before: Sequence[str] = ()
    ) -> None:
        self.ports = ports or Ports(*free_ports(3))
        self.url = f"127.0.0.1:{self.ports.grpc}"
        given = [word for name, port in self.ports._asdict().items() for word in (f"--{name}-port", port)]
        command = [*before, str(FASER), "serve", *map(str, (*given, *options))]
        super().__init__(command, f"http://127.0.0.1:{self.ports.http}/v2/health/ready", log)

    def last_words(self) -> str:
        """The last lines of the log, without Triton's tables."""
        return "\n".join([line for line in self.log_tail().splitlines() if line and line[0] not in "|+ "][-8:])

    def processes(self) -> dict[str, int]:
        """Every process of the server by name, `faser serve` first."""
        found, below = {"faser serve": self.process.pid}, children(self.process.pid)
        while below:
            found |= {process_name(pid): pid for pid in below}
            below = [child for pid in below for child in children(pid)]
        return found

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.health, timeout=5):
                return True
        except OSError:
            return False

    def metric(self, family: str, value: str) -> float:
        """The gauge of `family` whose label holds `value`. Raises LookupError."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports.metrics}/metrics", timeout=10) as response:
            for line in response.read().decode().splitlines():
                if line.startswith(f"{family}{{") and f'="{value}"' in line:
                    return float(line.rsplit(" ", 1)[1])
        raise LookupError(f"{family} has no {value}")

    def held_blocks(self, within_s: float) -> list[str]:
        """Waits until no request is active and no KV block in use. Returns what is wrong otherwise."""
        if wait_until(lambda: not self.metric(_BLOCKS, "used") and not self.metric(_REQUESTS, "active"), within_s):
            return []
        return [f"{self.metric(_BLOCKS, 'used'):.0f} KV blocks are in use and nobody asks for anything"]

    def end(self) -> list[str]:
        """Stops the server. Returns the names of processes that outlived it, which are then killed."""
        known = self.processes() if self.process.poll() is None else {}
        self.stop()
        return kill_leftovers(known)


def wait_until(is_so: Callable[[], bool], within_s: float) -> bool:
    """Asks until it is so, or the time is over. Returns whether it is."""
    deadline_s = time.monotonic() + within_s
    while not (result := is_so()) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return result


def kill_leftovers(processes: Mapping[str, int], wait_s: float = 3.0) -> list[str]:
    """Names of those of a server that has ended which still run wait_s later; they are killed."""
    wait_until(lambda: not any(map(is_running, processes.values())), wait_s)
    left = {name: pid for name, pid in processes.items() if is_running(pid)}
    for pid in left.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return list(left)


@contextlib.contextmanager
def serving(*options: object) -> Iterator[Served]:
    """A server that is ready; ended with the block. Raises RuntimeError where it does not come up."""
    with tempfile.TemporaryDirectory(prefix="faser-abuse-") as folder:
        served = Served(options, Path(folder) / "log")
        try:
            served.wait_ready()
            yield served
        finally:
            served.end()


class Bystander:
    """A client that asks for the same answer again and again, one request at a time, for the time of a block.

    ask: returns what is wrong with the answer, or None. `waits` in seconds.
    """

    def __init__(self, ask: Callable[[], str | None]) -> None:
        self.waits: list[float] = []
        self.wrong: list[str] = []
        self._ask, self._is_over, self._thread = ask, threading.Event(), threading.Thread(target=self._run)

    def once(self) -> None:
        start_s = time.monotonic()
        wrong = self._ask()
        self.waits.append(time.monotonic() - start_s)
        self.wrong += [f"a well-behaved client: {wrong}"] if wrong else []

    def _run(self) -> None:
        while True:
            self.once()
            if self._is_over.wait(PAUSE_S):
                return

    def __enter__(self) -> Bystander:
        self._thread.start()
        time.sleep(5 * PAUSE_S)
        return self

    def __exit__(self, *exception: object) -> None:
        time.sleep(5 * PAUSE_S)
        self._is_over.set()
        self._thread.join()


def same_answer(client: GrpcClient, request: Any) -> Callable[[], str | None]:
    """For a Bystander: asks for what is answered now. That the queue is full is an answer, too."""
    expected = client.ask(request).text
    if not expected:
        raise RuntimeError("no answer to compare with")

    def ask() -> str | None:
        reply = client.ask(request)
        is_refused = len(reply.errors) == 1 and REFUSAL in reply.errors[0]
        if is_refused or (reply.text == expected and not reply.errors and reply.num_finals == 1):
            return None
        return f"{reply.num_finals} ends, errors {reply.errors}, {reply.text!r} in place of {expected!r}"

    return ask


def end_servers_on_sigterm() -> None:
    """A script that is told to end leaves no server behind: its context managers are left as with Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def report(rows: Sequence[Mapping[str, Any]], broken: Sequence[str]) -> int:
    """Prints the table and the broken promises. Returns the status of the script."""
    if rows:
        print("\n".join(markdown_table(list(rows[0]), rows)), flush=True)
    for line in broken[:MAX_SHOWN]:
        print(f"broken promise: {line}", file=sys.stderr)
    if len(broken) > MAX_SHOWN:
        print(f"and {len(broken) - MAX_SHOWN} more", file=sys.stderr)
    return int(bool(broken))
