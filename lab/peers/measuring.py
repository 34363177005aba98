"""Measures pieces load by load, in turns, and keeps what was measured: the record.

The record is a JSON file. A load that is measured again takes the place of what the record has of it, so a comparison
can be made in parts, each within a budget of time.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lab.answers import Job, jobs_of
from lab.bench.measure import Served, measure
from lab.peers.contestants import Piece, Run, Setting, contestants
from lab.prompts import Prompt

WARM_TOKENS = 16
KEPT = (
    "policy", "tokens_per_s", "tokens_per_s_min", "tokens_per_s_max", "tokens_per_s_repeats", "ttft_ms_p50",
    "ttft_ms_p99", "itl_ms_p50", "tpot_ms_p50", "mean_accepted", "num_different", "repeats",
)  # fmt: skip
Load = tuple[float, int]  # temperature, clients


@dataclass(frozen=True, slots=True)
class Sizing:
    """How much is measured."""

    loads: tuple[Load, ...]
    repeats: int
    num_jobs: int  # at least, and two for each client
    max_tokens: int
    seed: int
    budget_s: float | None = None  # of a piece, its start included; loads that would begin later are left out

    def num_jobs_of(self, num_clients: int) -> int:
        return max(self.num_jobs, 2 * num_clients if num_clients > 1 else 0)


@dataclass(slots=True)
class Record:
    """What was measured, by piece; each load with the circumstances under which it was."""

    path: Path
    pieces: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # pieces that could not be measured, and why

    @classmethod
    def load(cls, path: Path) -> Record:
        """Raises ValueError where the file is no record."""
        if not path.exists():
            return cls(path)
        found = json.loads(path.read_text())
        if not isinstance(found, dict) or not {"pieces", "missing"} <= set(found):
            raise ValueError(f"{path}: no record of lab.peers; name another with --name")
        return cls(path, found["pieces"], found["missing"])

    def add(self, piece: str, load: Load, meta: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Writes a load, in place of an earlier measurement of it."""
        temperature, num_clients = load
        found = self.pieces.setdefault(piece, {"loads": []})
        others = [each for each in found["loads"] if (each["temperature"], each["num_clients"]) != load]
        kept = [{name: row[name] for name in KEPT} for row in rows]
        own = {"temperature": temperature, "num_clients": num_clients, "meta": meta, "rows": kept}
        found["loads"] = sorted([*others, own], key=lambda each: (each["temperature"], each["num_clients"]))
        self.missing.pop(piece, None)
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"pieces": self.pieces, "missing": self.missing}, indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class Measuring:
    """Pieces under one sizing, with the same prompts, into a record."""

    record: Record
    sizing: Sizing
    prompts: Sequence[Prompt]

    def piece(self, name: str, piece: Piece, setting: Setting, meta: dict[str, Any]) -> list[Load]:
        """Starts the contestants of a piece and measures its loads. Returns those for which there was no time.

        setting: its folder is replaced by one that is removed afterwards. Raises RuntimeError where a peer fails.
        """
        begin, budget_s, left_out = time.monotonic(), self.sizing.budget_s, []
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faser-peers-")))
            runs = contestants(stack, piece, replace(setting, folder=folder))
            for load in self.sizing.loads:
                present = {who: run for who, run in runs.items() if load[1] == 1 or who not in piece.alone}
                if len(present) == len(_ours(present)):
                    continue  # nobody to be beside
                if budget_s is not None and time.monotonic() - begin > budget_s:
                    left_out.append(load)
                else:
                    self.record.add(name, load, meta, measure_load(present, load, self.sizing, self.prompts))
        return left_out


def _ours(runs: Mapping[str, Run]) -> list[str]:
    return [who for who in runs if who.startswith("ours")]


def measure_load(
    runs: Mapping[str, Run], load: Load, sizing: Sizing, prompts: Sequence[Prompt]
) -> list[dict[str, Any]]:
    """A row per contestant, the first one the reference; prints a line for each."""
    temperature, num_clients = load
    jobs = jobs_of(prompts, sizing.num_jobs_of(num_clients), sizing.max_tokens, temperature, sizing.seed)
    warm = [replace(job, max_tokens=min(WARM_TOKENS, job.max_tokens)) for job in jobs[: max(2, num_clients)]]
    for run in runs.values():  # allocations and first calls of new shapes are not measured
        run(warm, num_clients)

    def serve(order: Sequence[str], jobs: list[Job] = jobs) -> Iterable[tuple[str, Served]]:
        return ((who, runs[who](jobs, num_clients)) for who in order)

    rows = measure(serve, list(runs), jobs, sizing.repeats)
    for row in rows:
        print(
            f"T={temperature:g}, {num_clients:>2} clients, {row['policy']:>32}: {row['tokens_per_s']:6.1f} tokens/s "
            f"({row['speedup']:.2f}x), ttft {row['ttft_ms_p50']:.0f} ms, different {row['num_different']}",
            flush=True, file=sys.stderr,
        )  # fmt: skip
    return rows
