"""`scripts/faults.py`: what breaks around a server, what its clients see, and how long it takes until all is well.

Kills and halts of processes, stops by strangers, signals, schemas without end, taken ports, cold starts at once, builds
that die, full or read-only disks, little shared memory, damaged engines. Exits with 1 where a promise was broken. Disks
and shared memory are mounts in a namespace of the server's own, which needs root; without it those rows say so.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from faser_backend.serving.demo_engine import demo_engine_dir
from lab import environment
from lab.abuse.clients import GrpcClient
from lab.abuse.flight import END_S, Flight, Outcome, ask_long, kill_process, stop_as_a_stranger, wait_for_end
from lab.abuse.schemas import hostile_schemas
from lab.abuse.served import DOOR, Ports, Served, end_servers_on_sigterm, kill_leftovers, wait_for_line
from lab.bench.servers import free_ports
from lab.tables import Column, markdown_table

DRAIN_S = 66.0  # what `faser serve` gives answers in flight, and Triton to end
REFUSE_S, POLL_S, HANG_S = 60.0, 0.02, 2  # for a server that cannot start to say so; between looks; --hang-timeout
KILLED = (
    "tensorrt_llm", "ensemble", "tensorrt_llm_bls", "preprocessing", "postprocessing", "tritonserver", DOOR,
    "faser serve",
)  # fmt: skip
HALTED = ("tensorrt_llm", "ensemble", "preprocessing", "tritonserver", DOOR)  # by SIGSTOP
DRAINING = (DOOR, "faser serve")  # without which the server still answers what is in flight, and then ends
COLUMNS = (
    Column("fault", "fault"),
    Column("what clients saw", "saw"),
    Column("what became of the server", "then"),
    Column("a new start answers as before after", "recovery"),
    Column("as promised", "kept"),
)
Fault = Callable[["Bench"], Outcome]


class Bench:
    """A folder to break things in, the demo pair's engines, and the answer that they give."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.engine_dir, self.num_starts = folder, demo_engine_dir(), 0
        with self.ready() as served:
            self.expected = self.answer(served)

    def start(
        self, *options: object, ports: Ports | None = None, before: Sequence[str] = (), engine_dir: Path | None = None
    ) -> Served:
        """A server that is on its way."""
        self.num_starts += 1
        given = ["--num-threads", 1, "--engine-dir", engine_dir or self.engine_dir, *options]
        return Served(given, self.folder / f"log-{self.num_starts}", ports=ports, before=before)

    def start_cold(self, cache: Path, before: Sequence[str] = ()) -> Served:
        """A server that builds the demo pair, or finds it, in a cache of its own."""
        self.num_starts += 1
        before = [*before, "env", f"XDG_CACHE_HOME={cache}"]
        return Served(["--num-threads", 1], self.folder / f"log-{self.num_starts}", before=before)

    @contextlib.contextmanager
    def ready(self, *options: object, ports: Ports | None = None) -> Iterator[Served]:
        served = self.start(*options, ports=ports)
        try:
            served.wait_ready()
            yield served
        finally:
            served.end()

    def answer(self, served: Served) -> str:
        client = GrpcClient(served.url)
        reply = ask_long(client)
        client.close()
        return reply.text if not reply.errors else f"errors {reply.errors}"

    def judge(self, served: Served, outcome: Outcome) -> None:
        if self.answer(served) != self.expected:
            outcome.broken.append("another answer than before")

    def recover(self, outcome: Outcome, served: Served) -> Outcome:
        """A new server on the ports of the one that has ended."""
        start_s = time.monotonic()
        with self.ready(ports=served.ports) as again:
            self.judge(again, outcome)
            outcome.recovery_s = time.monotonic() - start_s
        return outcome


def refused(served: Served, outcome: Outcome, *words: str) -> Outcome:
    """Judges a server that should not start: it ends soon, and says why in one line that holds these words."""
    start_s = time.monotonic()
    try:
        status = served.process.wait(REFUSE_S)
    except subprocess.TimeoutExpired:
        status = None
        outcome.broken.append(f"still there after {REFUSE_S:.0f} s")
    outcome.then = f"status {status} after {time.monotonic() - start_s:.1f} s"
    log = environment.without_places(served.log_tail()).strip()
    lines = [line for line in log.splitlines() if not line.startswith("starting ")]
    outcome.saw = f"no server; {lines[-1][:200]!r}" if lines else "no server, no word"
    outcome.broken += ["status 0"] if status == 0 else []
    if len(lines) != 1:
        outcome.broken.append(f"{len(lines)} lines in place of one error")
    elif not lines[0].startswith("error: "):
        outcome.broken.append(f"no error but {lines[0][:100]!r}")
    outcome.broken += [f"does not name {word!r}" for word in words if word not in log]
    outcome.broken += [f"left behind: {name}" for name in served.end()]
    return outcome


def kill(name: str, number: signal.Signals = signal.SIGKILL) -> Fault:
    def run(bench: Bench) -> Outcome:
        served = bench.start("--openai-port", free_ports(1)[0], "--hang-timeout", HANG_S)
        try:
            served.wait_ready()
            wait_for_line(served, "ready: ")  # the OpenAI server starts once Triton is ready
            outcome = kill_process(served, name, DRAIN_S if name in DRAINING else END_S, number=number)
        finally:
            served.end()
        return bench.recover(outcome, served)

    return run


def foreign_stop(bench: Bench) -> Outcome:
    with bench.ready("--stop-requests", "off") as served:
        return stop_as_a_stranger(served)


def terminate(bench: Bench) -> Outcome:
    outcome = Outcome("SIGTERM with answers in flight")
    served = bench.start()
    try:
        served.wait_ready()
        flight, processes = Flight(served), served.processes()
        served.process.send_signal(signal.SIGTERM)
        ended_s = wait_for_end(served, processes, outcome, DRAIN_S)
        late_s = ended_s - flight.land(outcome, should_end=True)
        outcome.broken += [f"ended {late_s:.0f} s after the last answer"] if late_s > END_S else []
        outcome.broken += [f"status {served.process.returncode}"] if served.process.returncode else []
    finally:
        served.end()
    return bench.recover(outcome, served)


def port_in_use(bench: Bench) -> Outcome:
    with bench.ready() as served:
        outcome = refused(bench.start(ports=served.ports), Outcome("port in use"), str(served.ports.http))
        bench.judge(served, outcome)
    return outcome


def two_cold_starts(bench: Bench) -> Outcome:
    outcome, cache, start_s = Outcome("two cold starts on one cache"), bench.folder / "two", time.monotonic()
    both = [bench.start_cold(cache) for _ in range(2)]
    try:
        for served in both:
            served.wait_ready()
            bench.judge(served, outcome)
        outcome.recovery_s = time.monotonic() - start_s
    finally:
        for served in both:
            served.end()
    built = sorted(path.name for path in (cache / "faser").iterdir() if path.is_dir())
    if len(built) != 1:
        outcome.broken.append(f"{len(built)} folders in the cache")
    outcome.saw, outcome.then = "right answers of both", "one builds, the other waits for it"
    return outcome


def kill_during_build(bench: Bench) -> Outcome:
    outcome, cache = Outcome("kill -9 of `faser serve` while it builds"), bench.folder / "killed"
    served = bench.start_cold(cache)
    deadline_s = time.monotonic() + REFUSE_S
    while not any((cache / "faser").glob("*/*")) and time.monotonic() < deadline_s:
        time.sleep(POLL_S / 10)
    processes = served.processes()
    served.process.kill()
    served.process.wait()
    found = sorted(path.name for path in (cache / "faser").glob("*/*"))
    outcome.broken += [f"left behind: {name}" for name in kill_leftovers(processes)]
    outcome.then = f"killed with {len(found)} files of the engines written"
    start_s = time.monotonic()
    again = bench.start_cold(cache)
    try:
        again.wait_ready()
        bench.judge(again, outcome)
        outcome.recovery_s = time.monotonic() - start_s
    finally:
        again.end()
    left = [path for path in (cache / "faser").iterdir() if path.is_dir()]
    outcome.saw = f"no server; afterwards {len(left)} folders in the cache"
    if len(left) != 1:
        outcome.broken.append("what the killed build wrote stays")
    return outcome


def may_mount() -> bool:
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    with contextlib.suppress(OSError):
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0
    return False


def mounted(*commands: str) -> list[str]:
    """Words that run a command in a mount namespace of its own, after these shell commands."""
    return ["unshare", "-m", "sh", "-c", " && ".join([*commands, 'exec "$@"']), "sh"]


def needs_mount(fault: Fault, name: str) -> Fault:
    def run(bench: Bench) -> Outcome:
        return fault(bench) if may_mount() else Outcome(name, "not tried: this user may not mount")

    return run


def full_cache(bench: Bench) -> Outcome:
    disk = bench.folder / "full"
    disk.mkdir()
    served = bench.start_cold(disk, mounted(f"mount -t tmpfs -o size=2m tmpfs {disk}"))
    return refused(served, Outcome("full disk at the build of the engines (a tmpfs of 2 MiB)"))


def full_temporary(bench: Bench) -> Outcome:
    """The disk of logs and launch files fills up while the server runs."""
    outcome, disk = Outcome("full disk under the log (a tmpfs of 8 MiB, filled once ready)"), bench.folder / "temporary"
    disk.mkdir()
    served = bench.start(before=[*mounted(f"mount -t tmpfs -o size=8m tmpfs {disk}"), "env", f"TMPDIR={disk}"])
    try:
        served.wait_ready()
        inside = Path(f"/proc/{served.process.pid}/root{disk}")
        with contextlib.suppress(OSError), (inside / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(2**16))
        bench.judge(served, outcome)
        outcome.saw, outcome.then = "right answers", "runs on"
        processes = served.processes()
        served.process.send_signal(signal.SIGTERM)
        wait_for_end(served, processes, outcome, DRAIN_S)
    finally:
        served.end()
    return outcome


def small_shared_memory(size: str, *, should_start: bool) -> Fault:
    def run(bench: Bench) -> Outcome:
        outcome = Outcome(f"/dev/shm of {size}")
        served = bench.start(before=mounted(f"mount -t tmpfs -o size={size} tmpfs /dev/shm"))
        if not should_start:
            return refused(served, outcome, "shm")
        start_s = time.monotonic()
        try:
            served.wait_ready()
            bench.judge(served, outcome)
            outcome.saw, outcome.then = "right answers", "runs"
            outcome.recovery_s = time.monotonic() - start_s
        finally:
            served.end()
        return outcome

    return run


def read_only(bench: Bench) -> Outcome:
    """The cache may not be written to: a read-only mount, or a folder without that permission."""
    disk = bench.folder / "read-only"
    disk.mkdir(mode=0o555)
    if not may_mount():
        outcome = Outcome("cache without permission to write")
        return refused(bench.start_cold(disk), outcome, disk.name)
    outcome = Outcome("cache on a read-only mount")
    before = mounted(f"mount -t tmpfs -o ro tmpfs {disk}")
    return refused(bench.start_cold(disk, before), outcome)


def damaged(what: str, name: str, harm: Callable[[Path], object]) -> Fault:
    def run(bench: Bench) -> Outcome:
        copy = bench.folder / f"damaged {what}"
        shutil.copytree(bench.engine_dir, copy)
        harm(copy / name)
        outcome = refused(bench.start(engine_dir=copy), Outcome(f"engine directory: {what}"), name)
        shutil.rmtree(copy)
        return outcome

    return run


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # one bit in the middle
    path.write_bytes(content)


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


FAULTS: dict[str, Fault] = {
    **{f"kill {name}": kill(name) for name in KILLED},
    **{f"halt {name}": kill(name, signal.SIGSTOP) for name in HALTED},
    "stop": foreign_stop,
    "sigterm": terminate,
    "schemas": hostile_schemas,
    "port": port_in_use,
    "cold starts": two_cold_starts,
    "kill build": kill_during_build,
    "full cache": needs_mount(full_cache, "full disk at the build of the engines"),
    "full tmp": needs_mount(full_temporary, "full disk under the log"),
    "read-only": read_only,
    "shm 64m": needs_mount(small_shared_memory("64m", should_start=True), "/dev/shm of 64m"),
    "shm 2m": needs_mount(small_shared_memory("2m", should_start=False), "/dev/shm of 2m"),
    "bit": damaged("a bit of the target flipped", "target.safetensors", flip),
    "half weights": damaged("half of the draft", "draft.safetensors", halve),
    "half manifest": damaged("half of the manifest", "manifest.json", halve),
    "tokenizer": damaged("no tokenizer", "tokenizer.json", Path.unlink),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    finally:  # also where it was interrupted
        print("\n".join(markdown_table(COLUMNS, [outcome.row() for outcome in outcomes])))
    return int(any(outcome.broken for outcome in outcomes))


def tried(name: str, bench: Bench) -> Outcome:
    try:
        return FAULTS[name](bench)
    except Exception as error:  # the other faults are still worth trying
        reason = f"{type(error).__name__}: {environment.without_places(str(error))[-500:]}"
        return Outcome(name, broken=[" ".join(reason.split())])
