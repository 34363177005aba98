"""A real `faser serve` under abuse: started, inspected through /proc, judged and ended; and a script's report."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from faser_backend.lab.checks.servers import START_TIMEOUT_S, Server
from faser_backend.lab.tables import markdown_table
from faser_backend.serving.processes import arguments, children, is_running

OPENAI = "the OpenAI server"
MAX_SHOWN = 20  # broken promises in words; the rest are counted
_STUB = "triton_python_backend_stub"
BLOCKS, REQUESTS = "nv_trt_llm_kv_cache_block_metrics", "nv_trt_llm_request_metrics"  # families of gauges
SPECULATION = "nv_trt_llm_speculative_decoding_metrics"


class Usage(NamedTuple):
    """The threads, handles and memory of one process."""

    threads: float
    handles: float
    resident_mib: float


def memory_mib(pid: int, line: str = "VmRSS") -> float:
    """Reads VmRSS, or VmHWM: the peak since 5 was written to `clear_refs`. Raises OSError or StopIteration after its
    end."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(each.split()[1]) for each in lines if each.startswith(line)) / 1024


def usage(pid: int) -> Usage | None:
    """Returns a process's usage, or None after its end."""
    try:
        num_threads, num_handles = (len(os.listdir(f"/proc/{pid}/{kind}")) for kind in ("task", "fd"))
        return Usage(num_threads, num_handles, memory_mib(pid))
    except (OSError, StopIteration):
        return None


def process_name(pid: int) -> str:
    """Returns the model of a model's process, otherwise the program and its first word."""
    words = arguments(pid)
    if words and words[0].endswith(_STUB):
        return Path(words[1]).parts[-3]
    if "openai" in words:
        return OPENAI
    names = [Path(word).name for word in words if not word.startswith("-") and not Path(word).name.startswith("python")]
    return " ".join(names[:2]) if names[:1] == ["faser"] else "".join(names[:1]) or "?"


class Served(Server):
    """A running `faser serve OPTIONS`, inspected from outside."""

    def processes(self) -> dict[str, int]:
        """Returns every process of the server by name, `faser serve` first."""
        found, below = {"faser serve": self.process.pid}, children(self.process.pid)
        while below:
            found |= {process_name(pid): pid for pid in below}
            below = [child for pid in below for child in children(pid)]
        return found

    def last_words(self) -> str:
        """Returns the last lines of the log, without Triton's tables."""
        return "\n".join([line for line in self.log_tail().splitlines() if line and line[0] not in "|+ "][-8:])

    def wait_for(self, words: str) -> None:
        """Waits until the log holds these words."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while words not in self.log_tail() and time.monotonic() < deadline_s:
            time.sleep(0.02)

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(self.health, timeout=5):
            return True
        return False

    def blocks_in_use_when_quiet(self, timeout_s: float) -> float:
        """Waits until no request is active and no KV block in use. Returns the blocks still in use."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            num_used = metric(self.ports[2], BLOCKS, "used")
            if (not num_used and not metric(self.ports[2], REQUESTS, "active")) or time.monotonic() > deadline_s:
                return num_used
            time.sleep(0.1)

    def end(self) -> list[str]:
        """Stops the server. Returns the names of processes that outlived it and were killed."""
        known = self.processes() if self.process.poll() is None else {}
        self.stop()
        return kill_leftovers(known)


def metric(port: int, family: str, value: str) -> float:
    """Returns the metric of `family` with a label of this value. Raises LookupError."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        for line in response.read().decode().splitlines():
            if line.startswith(f"{family}{{") and f'="{value}"' in line:
                return float(line.rsplit(" ", 1)[1])
    raise LookupError(f"{family} has no {value}")


def kill_leftovers(processes: Mapping[str, int], wait_s: float = 3.0) -> list[str]:
    """Kills processes of an ended server that still run after wait_s. Returns their names."""
    deadline_s = time.monotonic() + wait_s
    while any(map(is_running, processes.values())) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    left = {name: pid for name, pid in processes.items() if is_running(pid)}
    for pid in left.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return list(left)


@contextlib.contextmanager
def serving(*options: object) -> Iterator[Served]:
    """Yields a ready server and ends it after the block. Raises RuntimeError if it does not start."""
    with tempfile.TemporaryDirectory(prefix="faser-abuse-") as folder:
        served = Served([*map(str, options)], Path(folder) / "log")
        try:
            served.wait_ready()
            yield served
        finally:
            served.end()


def end_servers_on_sigterm() -> None:
    """Turns SIGTERM into an interrupt, so that context managers end the servers."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def note(broken: list[str], found: Iterable[str]) -> None:
    """Adds broken promises to the list, and prints a line of each on stderr at once."""
    for line in found:
        broken.append(line)
        if len(broken) <= MAX_SHOWN:
            print(f"broken promise: {line}", file=sys.stderr, flush=True)


def report(rows: Sequence[Mapping[str, Any]], num_broken: int) -> int:
    """Prints a table, and the number of broken promises on stderr. Returns the script's exit status."""
    print("\n".join(markdown_table(list(rows[0]), rows) if rows else []), flush=True)
    print(f"{num_broken} broken promises", file=sys.stderr)
    return int(num_broken > 0)
