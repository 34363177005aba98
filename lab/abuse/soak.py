"""`scripts/soak.py --minutes N`: mixed traffic over gRPC and HTTP, with clients that leave, make mistakes and overflow.

A quiet server first answers every job by itself; afterwards each answer is compared with that. The traffic pauses now
and then, so that what is still held then can be counted. Exits with 1 and a line per broken promise.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from faser_backend.serving.processes import is_running
from lab.abuse.clients import GrpcClient
from lab.abuse.served import Served, Usage, end_servers_on_sigterm, serving, usage
from lab.abuse.traffic import ACTIONS, Client, ask_alone
from lab.tables import Column, markdown_table

NUM_CLIENTS = 8
QUEUE_SIZE = 8  # small, so that it overflows
# Blocks for one context of the demo pair: what twelve sequences need together is more, so that some are preempted.
SERVE_OPTIONS = (
    *("--num-threads", 1, "--max-num-seqs", 12, "--max-queue-size", QUEUE_SIZE, "--num-kv-blocks", 64),
    *("--policy", "fixed:4"),
)
QUIET_S = 60.0  # within which what clients left behind has come to its end
WARM_UP = 0.25  # of the samples, that slopes leave out: buffers and pools still grow to their size
MAX_GROWTH = Usage(threads=8, handles=16, resident_mib=48.0)  # of a process, over all samples but those
MAX_SHOWN = 20  # broken promises in words; the rest are counted


@dataclass
class Sample:
    """What the server held while nobody asked for anything."""

    minutes: float  # since the traffic began
    blocks: float
    processes: dict[str, Usage]


@dataclass
class Soak:
    """What a run came to."""

    num_done: Counter[str] = field(default_factory=Counter)  # by action and outcome
    broken: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    num_preemptions: int = 0


def soak(served: Served, seconds: float, num_pauses: int, seed: int, *, leaves_late: bool = False) -> Soak:
    """Traffic for so many seconds in all, with pauses in which samples are taken. leaves_late: of Client."""
    result, lock, start_s = Soak(), threading.Lock(), time.monotonic()
    alone = GrpcClient(served.url)
    expected = ask_alone(alone)
    before = served.processes()
    clients = [
        Client(served, expected, np.random.default_rng([seed, number]), number, leaves_late=leaves_late)
        for number in range(NUM_CLIENTS)
    ]

    def work(client: Client, until_s: float) -> None:
        while time.monotonic() < until_s and served.process.poll() is None:
            done, broken = client.act()
            with lock:
                result.num_done.update(done)
                result.broken += broken

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        for _ in range(num_pauses):
            until_s = time.monotonic() + seconds / num_pauses
            for done in [pool.submit(work, client, until_s) for client in clients]:
                done.result()
            result.broken += look(served, before, result.samples, start_s)
            minutes, num_done = (time.monotonic() - start_s) / 60, result.num_done.total()
            print(f"minute {minutes:.1f}: {num_done} answers, {len(result.broken)} broken promises", file=sys.stderr)
            if result.broken and not served.is_ready():
                break
    if served.is_ready():
        again = ask_alone(alone)
        result.broken += [f"afterwards, alone: job {i} has another answer" for i in changed(expected, again)]
        result.num_preemptions = served.num_preemptions
    for client in clients:
        client.close()
    alone.close()
    result.broken += growth(result.samples)
    result.broken += [f"{name}: never happened" for name in ACTIONS if not any(name in key for key in result.num_done)]
    return result


def changed(expected: Sequence[str], again: Sequence[str]) -> list[int]:
    return [i for i, (one, other) in enumerate(zip(expected, again, strict=True)) if one != other]


def look(served: Served, before: Mapping[str, int], samples: list[Sample], start_s: float) -> list[str]:
    """Takes a sample of the quiet server. Returns broken promises."""
    gone = [name for name, pid in before.items() if not is_running(pid)]
    if gone or not served.is_ready():
        return [f"gone or not ready: {', '.join(gone) or 'the server'}; its log ends with:\n{served.last_words()}"]
    blocks = served.blocks_in_use_when_quiet(QUIET_S)
    found = {name: usage(pid) for name, pid in served.processes().items()}
    held = {name: value for name, value in found.items() if value is not None}
    samples.append(Sample((time.monotonic() - start_s) / 60, blocks, held))
    return [f"{blocks:.0f} KV blocks are in use and nobody asks for anything"] if blocks else []


def kept(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Those after the warm-up."""
    return samples[int(len(samples) * WARM_UP) :]


def slope(minutes: Sequence[float], values: Sequence[float]) -> float:
    """Of the least-squares line, per minute."""
    return float(np.polyfit(minutes, values, 1)[0]) if len(values) > 1 else 0.0


def slopes(samples: Sequence[Sample]) -> dict[str, Usage]:
    """What each process that was there all the time gained per minute."""
    names = (
        [name for name in samples[0].processes if all(name in each.processes for each in samples)] if samples else []
    )
    minutes = [each.minutes for each in samples]
    return {
        name: Usage(*(slope(minutes, [each.processes[name][i] for each in samples]) for i in range(len(Usage._fields))))
        for name in names
    }


def growth(samples: Sequence[Sample]) -> list[str]:
    """Broken promises: a process gained more than noise, and went on gaining: not in one step, as a buffer does that
    has grown to the largest request."""
    samples = kept(samples)
    parts = np.array_split(np.arange(len(samples)), max(1, min(3, len(samples) // 2)))
    found = [slopes([samples[i] for i in part]) for part in (np.arange(len(samples)), *parts)]
    span = samples[-1].minutes - samples[0].minutes if samples else 0.0
    broken = []
    for name in found[0]:
        for i, what in enumerate(Usage._fields):
            gained = span * min(each[name][i] for each in found)
            if gained > MAX_GROWTH[i]:
                broken.append(f"{name}: {what} grew steadily, by {gained:.1f} at least; the limit is {MAX_GROWTH[i]:g}")
    return broken


def report(result: Soak) -> list[str]:
    """Tables in Markdown."""
    samples = kept(result.samples)
    if not samples:
        return ["no sample: the server did not live through the first round"]
    blocks = max(each.blocks for each in result.samples)
    outcomes = [{"what": what, "num": num} for what, num in sorted(result.num_done.items())]
    rows = []
    for name, per_minute in slopes(samples).items():
        first, last = samples[0].processes[name], samples[-1].processes[name]
        row = {"process": name}
        for what, gained, one, other in zip(Usage._fields, per_minute, first, last, strict=True):
            row |= {what: f"{one:.0f} -> {other:.0f}", f"{what} per minute": f"{round(gained, 2) + 0.0:+.2f}"}
        rows.append(row)
    headings = [each for what in Usage._fields for each in (what, f"{what} per minute")]
    span = f"minutes {samples[0].minutes:.1f} to {samples[-1].minutes:.1f}, {len(samples)} samples"
    return [
        *markdown_table([Column("request, and what became of it", "what"), Column("times", "num")], outcomes),
        "",
        f"Preemptions: {result.num_preemptions}.",
        f"KV blocks in use at the {len(result.samples)} pauses: at most {blocks:.0f}, "
        f"{slope([s.minutes for s in samples], [s.blocks for s in samples]):+.2f} per minute. Processes, {span}:",
        "",
        *markdown_table(["process", *headings], rows),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--known-leak", action="store_true", help="leave as Triton 2.51 keeps connections open for")
    args = parser.parse_args(arguments)
    end_servers_on_sigterm()
    if not 0 < args.minutes <= 24 * 60:
        parser.error(f"--minutes {args.minutes}: must lie in (0, 1440]")
    seconds = args.minutes * 60
    with (
        tempfile.TemporaryDirectory(prefix="faser-soak-") as folder,
        serving(SERVE_OPTIONS, Path(folder) / "log") as served,
    ):
        result = soak(
            served, seconds, num_pauses=max(5, int(seconds / 20)), seed=args.seed, leaves_late=args.known_leak
        )
    print("\n".join(report(result)), flush=True)
    for line in result.broken[:MAX_SHOWN]:
        print(f"broken promise: {line}", file=sys.stderr)
    if len(result.broken) > MAX_SHOWN:
        print(f"and {len(result.broken) - MAX_SHOWN} more", file=sys.stderr)
    return int(bool(result.broken))
