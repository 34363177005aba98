"""`scripts/faults.py`: what breaks around a server, what its clients see, and how long it takes until all is well.

Kills and halts of processes, stops by strangers, signals, schemas without end, taken ports, cold starts at once, builds
that die, full or read-only disks, little shared memory, damaged engines. Exits with 1 where a promise was broken. Disks
and shared memory are mounts in a namespace of the server's own, which needs root; without it those rows say so.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import re
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
from lab.abuse.schemas import attack
from lab.abuse.served import DOOR, Ports, Served, end_servers_on_sigterm, kill_leftovers, report, wait_until
from lab.bench.servers import START_TIMEOUT_S, free_ports

DRAIN_S = 66.0  # what `faser serve` gives answers in flight, and Triton to end
REFUSE_S, HANG_S, ATTACK_S = 60.0, 2, 15.0  # for a server that cannot start to say so; --hang-timeout; of schemas
KILLED = (
    "tensorrt_llm", "ensemble", "tensorrt_llm_bls", "preprocessing", "postprocessing", "tritonserver", DOOR,
    "faser serve",
)  # fmt: skip
HALTED = ("tensorrt_llm", "ensemble", "preprocessing", "tritonserver", DOOR)  # by SIGSTOP
DRAINING = (DOOR, "faser serve")  # without which the server still answers what is in flight, and then ends
PROGRESS = re.compile(r"[ \d.]+ s  ")  # seconds, and what `faser serve` does then
Fault = Callable[["Bench"], Outcome]


class Bench:
    """A folder to break things in, the demo pair's engines, and the answer that they give."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.engine_dir, self.num_starts = folder, demo_engine_dir(), 0
        with self.server() as served:
            served.wait_ready()
            self.expected = self.answer(served)

    @contextlib.contextmanager
    def server(
        self,
        *options: object,
        ports: Ports | None = None,
        before: Sequence[str] = (),
        engine_dir: Path | None = None,
        cache: Path | None = None,
    ) -> Iterator[Served]:
        """A server that is on its way, ended with the block. cache: of its own, where it builds or finds the demo pair;
        without it, it is given engines."""
        self.num_starts += 1
        given = ["--num-threads", 1, *options]
        if cache is None:
            given += ["--engine-dir", engine_dir or self.engine_dir]
        else:
            before = [*before, "env", f"XDG_CACHE_HOME={cache}"]
        served = Served(given, self.folder / f"log-{self.num_starts}", ports=ports, before=before)
        try:
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

    def recover(self, outcome: Outcome, ports: Ports | None = None, cache: Path | None = None) -> Outcome:
        """A new server, on the ports or with the cache of one that has ended."""
        start_s = time.monotonic()
        with self.server(ports=ports, cache=cache) as served:
            served.wait_ready()
            self.judge(served, outcome)
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
    lines = [line for line in log.splitlines() if not PROGRESS.match(line)]
    outcome.saw = f"no server; {lines[-1][:200]!r}" if lines else "no server, no word"
    outcome.broken += ["status 0"] if status == 0 else []
    if len(lines) != 1:
        outcome.broken.append(f"{len(lines)} lines in place of one error")
    elif not lines[0].startswith("error: "):
        outcome.broken.append(f"no error but {lines[0][:100]!r}")
    outcome.broken += [f"does not name {word!r}" for word in words if word not in log]
    outcome.broken += [f"left behind: {name}" for name in served.end()]
    return outcome


# -- a server that runs ----------------------------------------------------------------------------------------------
def kill(bench: Bench, name: str, number: signal.Signals) -> Outcome:
    with bench.server("--openai-port", free_ports(1)[0], "--hang-timeout", HANG_S) as served:
        served.wait_ready()
        # The OpenAI server starts once Triton is ready.
        wait_until(lambda: "ready: " in served.log_tail(), START_TIMEOUT_S)
        outcome = kill_process(served, name, DRAIN_S if name in DRAINING else END_S, number=number)
    return bench.recover(outcome, served.ports)


def foreign_stop(bench: Bench) -> Outcome:
    with bench.server("--stop-requests", "off") as served:
        served.wait_ready()
        return stop_as_a_stranger(served)


def hostile_schemas(bench: Bench) -> Outcome:
    with bench.server() as served:
        served.wait_ready()
        return attack(served, ATTACK_S)


def terminate(bench: Bench) -> Outcome:
    outcome = Outcome("SIGTERM with answers in flight")
    with bench.server() as served:
        served.wait_ready()
        flight, processes = Flight(served), served.processes()
        served.process.send_signal(signal.SIGTERM)
        ended_s = wait_for_end(served, processes, outcome, DRAIN_S)
        late_s = ended_s - flight.land(outcome, should_end=True)
        outcome.broken += [f"ended {late_s:.0f} s after the last answer"] if late_s > END_S else []
        outcome.broken += [f"status {served.process.returncode}"] if served.process.returncode else []
    return bench.recover(outcome, served.ports)


def port_in_use(bench: Bench) -> Outcome:
    with bench.server() as served:
        served.wait_ready()
        with bench.server(ports=served.ports) as second:
            outcome = refused(second, Outcome("port in use"), str(served.ports.http))
        bench.judge(served, outcome)
    return outcome


# -- cold starts -----------------------------------------------------------------------------------------------------
def folders(cache: Path) -> list[Path]:
    return [path for path in (cache / "faser").iterdir() if path.is_dir()]


def two_cold_starts(bench: Bench) -> Outcome:
    outcome, cache, start_s = Outcome("two cold starts on one cache"), bench.folder / "two", time.monotonic()
    with bench.server(cache=cache) as one, bench.server(cache=cache) as other:
        for served in (one, other):
            served.wait_ready()
            bench.judge(served, outcome)
        outcome.recovery_s = time.monotonic() - start_s
    if len(folders(cache)) != 1:
        outcome.broken.append(f"{len(folders(cache))} folders in the cache")
    outcome.saw, outcome.then = "right answers of both", "one builds, the other waits for it"
    return outcome


def kill_during_build(bench: Bench) -> Outcome:
    outcome, cache = Outcome("kill -9 of `faser serve` while it builds"), bench.folder / "killed"
    with bench.server(cache=cache) as served:
        wait_until(lambda: any((cache / "faser").glob("*/*")), REFUSE_S)
        processes = served.processes()
        served.process.kill()
        served.process.wait()
        num_files = len(list((cache / "faser").glob("*/*")))
        outcome.broken += [f"left behind: {name}" for name in kill_leftovers(processes)]
    outcome.then = f"killed with {num_files} files of the engines written"
    bench.recover(outcome, cache=cache)
    outcome.saw = f"no server; afterwards {len(folders(cache))} folders in the cache"
    if len(folders(cache)) != 1:
        outcome.broken.append("what the killed build wrote stays")
    return outcome


# -- disks and shared memory -----------------------------------------------------------------------------------------
def may_mount() -> bool:
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    with contextlib.suppress(OSError):
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0
    return False


def mounted(options: str, place: Path) -> list[str]:
    """Words that run a command in a mount namespace of its own, with a tmpfs at this place."""
    return ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o {options} tmpfs {place} && exec "$@"', "sh"]


def needs_mount(fault: Fault, name: str) -> Fault:
    return lambda bench: fault(bench) if may_mount() else Outcome(name, "not tried: this user may not mount")


def full_cache(bench: Bench) -> Outcome:
    (disk := bench.folder / "full").mkdir()
    with bench.server(cache=disk, before=mounted("size=2m", disk)) as served:
        return refused(served, Outcome("full disk at the build of the engines (a tmpfs of 2 MiB)"))


def full_temporary(bench: Bench) -> Outcome:
    """The disk of logs and launch files fills up while the server runs."""
    outcome = Outcome("full disk under the log (a tmpfs of 8 MiB, filled once ready)", "right answers", "runs on")
    (disk := bench.folder / "temporary").mkdir()
    with bench.server(before=[*mounted("size=8m", disk), "env", f"TMPDIR={disk}"]) as served:
        served.wait_ready()
        inside = Path(f"/proc/{served.process.pid}/root{disk}")
        with contextlib.suppress(OSError), (inside / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(2**16))
        bench.judge(served, outcome)
        processes = served.processes()
        served.process.send_signal(signal.SIGTERM)
        wait_for_end(served, processes, outcome, DRAIN_S)
    return outcome


def small_shared_memory(bench: Bench) -> Outcome:
    outcome, start_s = Outcome("/dev/shm of 64m", "right answers", "runs"), time.monotonic()
    with bench.server(before=mounted("size=64m", Path("/dev/shm"))) as served:
        served.wait_ready()
        bench.judge(served, outcome)
        outcome.recovery_s = time.monotonic() - start_s
    return outcome


def too_small_shared_memory(bench: Bench) -> Outcome:
    with bench.server(before=mounted("size=2m", Path("/dev/shm"))) as served:
        return refused(served, Outcome("/dev/shm of 2m"), "shm")


def read_only(bench: Bench) -> Outcome:
    """The cache may not be written to: a read-only mount, or a folder without that permission."""
    (disk := bench.folder / "read-only").mkdir(mode=0o555)
    if may_mount():
        with bench.server(cache=disk, before=mounted("ro", disk)) as served:
            return refused(served, Outcome("cache on a read-only mount"))
    with bench.server(cache=disk) as served:
        return refused(served, Outcome("cache without permission to write"), disk.name)


# -- damaged engines -------------------------------------------------------------------------------------------------
def damaged(bench: Bench, what: str, name: str, harm: Callable[[Path], object]) -> Outcome:
    copy = bench.folder / f"damaged {what}"
    shutil.copytree(bench.engine_dir, copy)
    harm(copy / name)
    with bench.server(engine_dir=copy) as served:
        return refused(served, Outcome(f"engine directory: {what}"), name)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # one bit in the middle
    path.write_bytes(content)


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "bit": ("a bit of the target flipped", "target.safetensors", flip),
    "half weights": ("half of the draft", "draft.safetensors", halve),
    "half manifest": ("half of the manifest", "manifest.json", halve),
    "tokenizer": ("no tokenizer", "tokenizer.json", Path.unlink),
}
FAULTS: dict[str, Fault] = {
    **{f"kill {name}": functools.partial(kill, name=name, number=signal.SIGKILL) for name in KILLED},
    **{f"halt {name}": functools.partial(kill, name=name, number=signal.SIGSTOP) for name in HALTED},
    "stop": foreign_stop,
    "sigterm": terminate,
    "schemas": hostile_schemas,
    "port": port_in_use,
    "cold starts": two_cold_starts,
    "kill build": kill_during_build,
    "full cache": needs_mount(full_cache, "full disk at the build of the engines"),
    "full tmp": needs_mount(full_temporary, "full disk under the log"),
    "read-only": read_only,
    "shm 64m": needs_mount(small_shared_memory, "/dev/shm of 64m"),
    "shm 2m": needs_mount(too_small_shared_memory, "/dev/shm of 2m"),
    **{key: lambda bench, harmed=harmed: damaged(bench, *harmed) for key, harmed in DAMAGE.items()},
}


def tried(name: str, bench: Bench) -> Outcome:
    print(name, file=sys.stderr)
    try:
        return FAULTS[name](bench)
    except Exception as error:  # the other faults are still worth trying
        reason = f"{type(error).__name__}: {environment.without_places(str(error))[-500:]}"
        return Outcome(name, broken=[" ".join(reason.split())])


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
                outcomes.append(tried(name, bench))
    finally:  # also where it was interrupted
        status = report(
            [each.row() for each in outcomes], [f"{each.fault}: {line}" for each in outcomes for line in each.broken]
        )
    return status
