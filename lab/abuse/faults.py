"""`scripts/faults.py`: breaks things around a server, and shows what clients see and how long recovery takes.

Covers killed and halted processes, endless schemas, full or read-only disks, and little shared memory; tests cover the
rest. Exits with 1 if a promise is broken. Disks and shared memory are mounts in a namespace of the server's own, which
needs root; without it those rows say so.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from faser_backend.lab import environment
from faser_backend.lab.abuse.cases import PROMPT, SCHEMAS, Case
from faser_backend.lab.abuse.clients import GrpcClient, Reply, make_request
from faser_backend.lab.abuse.fuzz import END_S, fuzz
from faser_backend.lab.abuse.served import OPENAI, Served, end_servers_on_sigterm, kill_leftovers, report
from faser_backend.lab.checks.options import make_parser
from faser_backend.lab.checks.servers import free_ports
from faser_backend.serving.model_source import demo_engine_dir
from faser_backend.serving.processes import is_running

NUM_STREAMS, BEGIN_S = 4, 30.0  # answers in flight when a fault happens
DRAIN_S = 66.0  # the drain time of `faser serve` and Triton's exit time
REFUSE_S, POLL_S, HANG_S = 60.0, 0.02, 2  # for a server that cannot start to say so; between polls; --hang-timeout
NUM_SCHEMAS, MAX_WAIT_S = 60, 2.0  # for 16 tokens beside requests with schemas, five times what an idle machine takes
GUIDE = "guided_decoding_guide"
REQUEST_ID = "1"  # the first id of many clients
LONG = {"text_input": PROMPT, "max_tokens": 900, "end_id": -1, "exclude_input_in_output": True, "stream": True}
MODELS = ("tensorrt_llm", "ensemble", "tensorrt_llm_bls", "preprocessing", "postprocessing")
KILLED = (*MODELS, "tritonserver", OPENAI, "faser serve")
HALTED = ("tensorrt_llm", "ensemble", "preprocessing", "tritonserver", OPENAI)  # by SIGSTOP
DRAINING = (OPENAI, "faser serve")  # without these the server answers requests in flight, then ends
COLUMNS = [
    "fault",
    "what clients saw",
    "what became of the server",
    "a new start answers as before after",
    "as promised",
]


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
    return client.ask(make_request("ensemble", LONG, request_id=REQUEST_ID), on_first=on_first)


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

    def land(self, outcome: Outcome, *, should_end: bool) -> float:
        """Waits for every stream and judges it. Returns the seconds until the last one ended.

        should_end: with the whole answer; otherwise with an error.
        """
        moments, replies = zip(*(stream.result() for stream in self._streams), strict=True)
        self._pool.shutdown()
        self._client.close()
        last_s = max(moments) - self._start_s
        num_whole = sum(reply.text == self.expected and not reply.errors for reply in replies)
        errors = sorted({error for reply in replies for error in reply.errors})
        outcome.saw = f"{num_whole} of {NUM_STREAMS} streams whole, {NUM_STREAMS - num_whole} ended by an error"
        outcome.saw += f", the last after {last_s:.1f} s" + "".join(f"; {error!r}" for error in errors[:1])
        if should_end and num_whole != NUM_STREAMS:
            outcome.broken.append("answers in flight were lost")
        if not should_end and last_s > END_S and num_whole != NUM_STREAMS:
            outcome.broken.append(f"a client learned of it after {last_s:.1f} s only")
        for reply in replies:
            if not self.expected.startswith(reply.text):
                outcome.broken.append("tokens that no undisturbed run has")
            if not reply.errors and reply.text != self.expected:
                outcome.broken.append("an answer that ends early without an error")
            if reply.num_finals > 1:
                outcome.broken.append(f"an answer with {reply.num_finals} ends")
        return last_s


def wait_for_end(served: Served, processes: Mapping[str, int], outcome: Outcome, within_s: float) -> float:
    """Checks how the server ended: `faser serve` by itself, with no process left. Returns the seconds it took."""
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
    return seconds


def kill_process(served: Served, name: str, outcome: Outcome, number: signal.Signals = signal.SIGKILL) -> None:
    """Sends a signal to one process of a server with answers in flight, and waits for the server's end."""
    flight, processes = Flight(served), served.processes()
    os.kill(processes[name], number)
    wait_for_end(served, processes, outcome, DRAIN_S if name in DRAINING else END_S)
    flight.land(outcome, should_end=False)
    if served.process.returncode == 0:
        outcome.broken.append("status 0: a supervisor would not restart it")


def attack_with_schemas(served: Served, outcome: Outcome, num: int = NUM_SCHEMAS) -> None:
    """Sends hostile schemas. Each gets an answer or an error that names its field; a neighbour waits at most
    MAX_WAIT_S."""
    schemas = [json.dumps(schema) for schema in SCHEMAS.values()]

    def make(number: int) -> Case:
        guide = {"guided_decoding_guide_type": "json_schema", GUIDE: schemas[number % len(schemas)]}
        request = make_request("ensemble", {"text_input": "x = ", "max_tokens": 24, **guide})
        return Case(list(SCHEMAS)[number % len(schemas)], request)

    found = fuzz(served, "inflight_batcher", make, range(num))
    outcome.saw = (
        f"{len(found.waits)} right answers beside {num} requests with schemas, of which {num - found.num_answered} got "
        f"an error; the longest wait {max(found.waits) * 1e3:.0f} ms, {max(found.usual) * 1e3:.0f} ms without"
    )
    outcome.then = "runs on" if served.is_ready() else "is not ready"
    outcome.broken += found.broken
    outcome.broken += [f"an error without its field: {error}" for error in found.errors if GUIDE not in error]
    outcome.broken += ["no schema was answered with an error"] if not found.errors else []
    outcome.broken += ["a neighbour waited too long"] if max(found.waits) > MAX_WAIT_S else []


# -- faults ----------------------------------------------------------------------------------------------------------
class Bench:
    """A temporary folder, the demo pair's engines and their expected answer.

    servers: ends the servers that a fault started.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.engine_dir, self.num_starts = folder, demo_engine_dir(), 0
        with contextlib.ExitStack() as self.servers:
            self.expected = self.answer(self.start())

    def launch(
        self, *options: object, cache: str = "", temporary: str = "", tmpfs: str = "", ports: Sequence[int] = ()
    ) -> Served:
        """Starts a server without waiting. cache, temporary: folders of its own; in the cache it builds or finds the
        demo pair. tmpfs: options of a mount over them, or over /dev/shm, in a namespace of the server's own."""
        at, before, given = Path("/dev/shm"), [], ["--num-threads", 1, "--engine-dir", self.engine_dir, *options]
        if cache or temporary:
            at = self.folder / (cache or temporary)
            at.mkdir(exist_ok=True)
            before = ["env", f"{'XDG_CACHE_HOME' if cache else 'TMPDIR'}={at}"]
        if tmpfs:
            before = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o {tmpfs} tmpfs {at} && exec "$@"', "sh", *before]
        self.num_starts += 1
        log = self.folder / f"log-{self.num_starts}"
        served = Served([*map(str, given[: 2 if cache else None])], log, ports=ports, before=before)
        self.servers.callback(served.end)
        return served

    def start(self, *options: object, **where: Any) -> Served:
        """Starts a server and waits until it is ready; arguments as in `launch`."""
        served = self.launch(*options, **where)
        served.wait_ready()
        return served

    def answer(self, served: Served) -> str:
        client = GrpcClient(served.url)
        reply = ask_long(client)
        client.close()
        return reply.text if not reply.errors else f"errors {reply.errors}"

    def judge(self, served: Served, outcome: Outcome) -> None:
        if self.answer(served) != self.expected:
            outcome.broken.append("another answer than before")

    def recover(self, outcome: Outcome, **where: Any) -> None:
        """Measures how long a new server takes to answer."""
        start_s = time.monotonic()
        self.judge(self.start(**where), outcome)
        outcome.recovery_s = time.monotonic() - start_s


def refused(served: Served, outcome: Outcome, *words: str) -> None:
    """Checks that a server which cannot start ends soon, with one log line that holds these words."""
    start_s, status = time.monotonic(), None
    with contextlib.suppress(subprocess.TimeoutExpired):
        status = served.process.wait(REFUSE_S)
    outcome.then = f"status {status} after {time.monotonic() - start_s:.1f} s"
    log = environment.without_paths(served.log_tail()).strip()
    lines = [line for line in log.splitlines() if not re.match(r" *[0-9.]+ s  ", line)]  # progress of the start
    outcome.saw = f"no server; {lines[-1][:200]!r}" if lines else "no server, no word"
    outcome.broken += [f"status {status}"] if not status else []
    if len(lines) != 1:
        outcome.broken.append(f"{len(lines)} lines in place of one error")
    elif not lines[0].startswith("error: "):
        outcome.broken.append(f"no error but {lines[0][:100]!r}")
    outcome.broken += [f"does not name {word!r}" for word in words if word not in log]
    outcome.broken += [f"left behind: {name}" for name in served.end()]


Run = Callable[[Bench, Outcome], None]


def kill(name: str, number: signal.Signals) -> Run:
    def run(bench: Bench, outcome: Outcome) -> None:
        served = bench.start("--openai-port", free_ports(1)[0], "--hang-timeout", HANG_S)
        served.wait_for("ready: ")  # the OpenAI server starts after Triton
        kill_process(served, name, outcome, number)
        bench.recover(outcome, ports=served.ports)

    return run


def end_by_signal(served: Served, outcome: Outcome) -> float:
    processes = served.processes()
    served.process.send_signal(signal.SIGTERM)
    ended_s = wait_for_end(served, processes, outcome, DRAIN_S)
    outcome.broken += [f"status {served.process.returncode}"] if served.process.returncode else []
    return ended_s


def full_temporary(bench: Bench, outcome: Outcome) -> None:
    """Fills the disk of logs and launch files while the server runs."""
    served = bench.start(temporary="full-tmp", tmpfs="size=8m")
    inside = Path(f"/proc/{served.process.pid}/root{bench.folder}/full-tmp")
    with contextlib.suppress(OSError), (inside / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(2**16))
    bench.judge(served, outcome)
    outcome.saw = "right answers"
    end_by_signal(served, outcome)


def enough_shared_memory(bench: Bench, outcome: Outcome) -> None:
    bench.recover(outcome, tmpfs="size=64m")
    outcome.saw, outcome.then = "right answers", "runs"


def may_mount() -> bool:
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    with contextlib.suppress(OSError):
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0
    return False


class Fault(NamedTuple):
    title: str
    run: Run
    needs_mount: bool = False


FAULTS: dict[str, Fault] = {
    **{f"kill {name}": Fault(f"kill -9 of {name}", kill(name, signal.SIGKILL)) for name in KILLED},
    **{f"halt {name}": Fault(f"SIGSTOP of {name}", kill(name, signal.SIGSTOP)) for name in HALTED},
    "schemas": Fault("JSON schemas without end", lambda bench, outcome: attack_with_schemas(bench.start(), outcome)),
    "full cache": Fault(
        "full disk at the build of the engines (a tmpfs of 2 MiB)",
        lambda bench, outcome: refused(bench.launch(cache="full", tmpfs="size=2m"), outcome),
        needs_mount=True,
    ),
    "full tmp": Fault("full disk under the log (8 MiB, filled once ready)", full_temporary, needs_mount=True),
    "read-only": Fault(
        "cache on a read-only mount",
        lambda bench, outcome: refused(bench.launch(cache="read-only", tmpfs="ro"), outcome),
        needs_mount=True,
    ),
    "shm 64m": Fault("/dev/shm of 64m", enough_shared_memory, needs_mount=True),
    "shm 2m": Fault(
        "/dev/shm of 2m",
        lambda bench, outcome: refused(bench.launch(tmpfs="size=2m"), outcome, "shm"),
        needs_mount=True,
    ),
}


def tried(name: str, bench: Bench) -> Outcome:
    fault = FAULTS[name]
    outcome = Outcome(fault.title)
    if fault.needs_mount and not may_mount():
        outcome.saw = "not tried: this user may not mount"
        return outcome
    try:
        with contextlib.ExitStack() as bench.servers:
            fault.run(bench, outcome)
    except Exception as error:  # the other faults still run
        reason = f"{type(error).__name__}: {environment.without_paths(str(error))[-500:]}"
        outcome.broken.append(" ".join(reason.split()))
    return outcome


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS), metavar="FAULT")
    args = parser.parse_args(arguments)
    end_servers_on_sigterm()
    outcomes: list[Outcome] = []
    try:
        with tempfile.TemporaryDirectory(prefix="faser-faults-") as folder:
            bench = Bench(Path(folder))
            for name in args.only:
                print(name, file=sys.stderr)
                outcomes.append(tried(name, bench))
    finally:  # also after an interrupt
        broken = [f"{outcome.fault}: {line}" for outcome in outcomes for line in outcome.broken]
        status = report([outcome.row() for outcome in outcomes], broken)
    return status
