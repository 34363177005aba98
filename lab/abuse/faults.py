"""`scripts/faults.py`: breaks things around a server, and shows what clients see and how long recovery takes.

Covers killed and halted processes; tests cover the rest. Exits with 1 if a promise is broken.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from faser_backend.lab import environment
from faser_backend.lab.abuse.cases import PROMPT
from faser_backend.lab.abuse.clients import GrpcClient, Reply
from faser_backend.lab.abuse.fuzz import END_S
from faser_backend.lab.abuse.served import OPENAI, Served, end_servers_on_sigterm, kill_leftovers, note, report
from faser_backend.lab.bench.wire import tensor_request
from faser_backend.lab.checks.options import make_parser
from faser_backend.lab.checks.servers import free_ports
from faser_backend.serving.model_source import demo_engine_dir
from faser_backend.serving.processes import is_running

NUM_STREAMS, BEGIN_S = 4, 30.0  # answers in flight when a fault happens
DRAIN_S = 66.0  # the drain time of `faser serve` and Triton's exit time
POLL_S, HANG_S = 0.02, 2  # between polls; --hang-timeout
REQUEST_ID = "1"  # the first id of many clients
LONG = {"text_input": PROMPT, "max_tokens": 900, "end_id": -1, "exclude_input_in_output": True, "stream": True}
MODELS = ("tensorrt_llm", "ensemble", "tensorrt_llm_bls", "preprocessing", "postprocessing")
KILLED = (*MODELS, "tritonserver", OPENAI, "faser serve")
HALTED = ("tensorrt_llm", "ensemble", "preprocessing", "tritonserver", OPENAI)  # by SIGSTOP
DRAINING = (OPENAI, "faser serve")  # without these the server answers requests in flight, then ends
COLUMNS = (
    "fault", "what clients saw", "what became of the server", "a new start answers as before after", "as promised"
)  # fmt: skip


@dataclass
class Outcome:
    """A row of the table."""

    fault: str
    saw: str = ""  # observed by clients
    then: str = ""  # state of the server
    recovery_s: float | None = None  # from a new server's start to its first right answer
    broken: list[str] = field(default_factory=list)

    def row(self) -> dict[str, str]:
        recovery = "" if self.recovery_s is None else f"{self.recovery_s:.1f} s"
        kept = "no: " + "; ".join(self.broken) if self.broken else "yes"
        return dict(zip(COLUMNS, (self.fault, self.saw, self.then, recovery, kept), strict=True))


# -- answers under way -----------------------------------------------------------------------------------------------
def ask_long(client: GrpcClient, on_first: Callable[[], object] = lambda: None) -> Reply:
    return client.ask(tensor_request("ensemble", LONG, request_id=REQUEST_ID), on_first=on_first)


class Flight:
    """NUM_STREAMS long answers, all of which have begun once it is constructed."""

    def __init__(self, served: Served) -> None:
        self._client, begun = GrpcClient(served.url), threading.Semaphore(0)
        self.expected = ask_long(self._client).text
        self._pool = ThreadPoolExecutor(NUM_STREAMS)
        self._streams: list[Future[tuple[float, Reply]]] = [
            self._pool.submit(self._stream, begun.release) for _ in range(NUM_STREAMS)
        ]
        if not all(begun.acquire(timeout=BEGIN_S) for _ in self._streams):
            raise RuntimeError(f"{NUM_STREAMS} streams did not begin within {BEGIN_S:.0f} s")
        self._start_s = time.monotonic()

    def _stream(self, on_first: Callable[[], object]) -> tuple[float, Reply]:
        reply = ask_long(self._client, on_first)
        return time.monotonic(), reply

    def land(self, outcome: Outcome) -> None:
        """Waits for every stream and judges it: it ends with an error, or had ended before."""
        moments, replies = zip(*(stream.result() for stream in self._streams), strict=True)
        self._pool.shutdown()
        self._client.close()
        last_s = max(moments) - self._start_s
        num_whole = sum(reply.text == self.expected and not reply.errors for reply in replies)
        errors = sorted({error for reply in replies for error in reply.errors})
        outcome.saw = f"{num_whole} of {NUM_STREAMS} streams whole, {NUM_STREAMS - num_whole} ended by an error"
        outcome.saw += f", the last after {last_s:.1f} s" + "".join(f"; {error!r}" for error in errors[:1])
        if last_s > END_S and num_whole != NUM_STREAMS:
            outcome.broken.append(f"a client learned of it after {last_s:.1f} s only")
        for reply in replies:
            if not self.expected.startswith(reply.text):
                outcome.broken.append("tokens that no undisturbed run has")
            if not reply.errors and reply.text != self.expected:
                outcome.broken.append("an answer that ends early without an error")
            if reply.num_finals > 1:
                outcome.broken.append(f"an answer with {reply.num_finals} ends")


def wait_for_end(served: Served, processes: Mapping[str, int], outcome: Outcome, within_s: float) -> None:
    """Checks how the server ended: `faser serve` by itself, with no process left."""
    start_s = time.monotonic()
    while time.monotonic() - start_s < within_s and (
        served.process.poll() is None or any(map(is_running, processes.values()))
    ):
        time.sleep(POLL_S)
    seconds, status = time.monotonic() - start_s, served.process.poll()
    if status is None:
        outcome.broken.append(f"`faser serve` did not end within {within_s:.0f} s")
        served.stop()
    outcome.broken += [f"left behind: {name}" for name in kill_leftovers(processes, 0.0)]
    outcome.then = f"ended with status {status} and all its processes after {seconds:.1f} s"


def kill_process(served: Served, name: str, outcome: Outcome, number: signal.Signals = signal.SIGKILL) -> None:
    """Sends a signal to one process of a server with answers in flight, and waits for the server's end."""
    flight, processes = Flight(served), served.processes()
    os.kill(processes[name], number)
    wait_for_end(served, processes, outcome, DRAIN_S if name in DRAINING else END_S)
    flight.land(outcome)
    if served.process.returncode == 0:
        outcome.broken.append("status 0: a supervisor would not restart it")


# -- faults ----------------------------------------------------------------------------------------------------------
class Bench:
    """A temporary folder, the demo pair's engines and their expected answer.

    servers: ends the servers that a fault started.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.engine_dir, self.num_starts = folder, demo_engine_dir(), 0
        with contextlib.ExitStack() as self.servers:
            self.expected = self.answer(self.start())

    def start(self, *options: object, ports: Sequence[int] = ()) -> Served:
        """Starts a server and waits until it is ready."""
        given = ["--num-threads", 1, "--engine-dir", self.engine_dir, *options]
        self.num_starts += 1
        served = Served([*map(str, given)], self.folder / f"log-{self.num_starts}", ports=ports)
        self.servers.callback(served.end)
        served.wait_ready()
        return served

    def answer(self, served: Served) -> str:
        client = GrpcClient(served.url)
        reply = ask_long(client)
        client.close()
        return reply.text if not reply.errors else f"errors {reply.errors}"

    def recover(self, outcome: Outcome, ports: Sequence[int]) -> None:
        """Measures how long a new server takes to answer."""
        start_s = time.monotonic()
        if self.answer(self.start(ports=ports)) != self.expected:
            outcome.broken.append("another answer than before")
        outcome.recovery_s = time.monotonic() - start_s


FAULTS: dict[str, tuple[str, str, signal.Signals]] = {  # title, process and signal
    **{f"kill {name}": (f"kill -9 of {name}", name, signal.SIGKILL) for name in KILLED},
    **{f"halt {name}": (f"SIGSTOP of {name}", name, signal.SIGSTOP) for name in HALTED},
}


def tried(name: str, bench: Bench) -> Outcome:
    title, process, number = FAULTS[name]
    outcome = Outcome(title)
    try:
        with contextlib.ExitStack() as bench.servers:
            served = bench.start("--openai-port", free_ports(1)[0], "--hang-timeout", HANG_S)
            served.wait_for("ready: ")  # the OpenAI server starts after Triton
            kill_process(served, process, outcome, number)
            bench.recover(outcome, served.ports)
    except Exception as error:  # the other faults still run
        reason = f"{type(error).__name__}: {environment.without_paths(str(error))[-500:]}"
        outcome.broken.append(" ".join(reason.split()))
    return outcome


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS), metavar="FAULT")
    args = parser.parse_args(arguments)
    end_servers_on_sigterm()
    outcomes, broken = list[Outcome](), list[str]()
    try:
        with tempfile.TemporaryDirectory(prefix="faser-faults-") as folder:
            bench = Bench(Path(folder))
            for name in args.only:
                print(name, file=sys.stderr)
                outcomes.append(tried(name, bench))
                note(broken, [f"{outcomes[-1].fault}: {line}" for line in outcomes[-1].broken])
    finally:  # also after an interrupt
        status = report([outcome.row() for outcome in outcomes], len(broken))
    return status
