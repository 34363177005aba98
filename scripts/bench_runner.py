"""Milliseconds per model call of an engine directory, and how much of it is Python around ONNX Runtime.

    python scripts/bench_runner.py ENGINE_DIR [--threads 1,2] [--repeats 40]

Prints, for target and draft, the 20th percentile over repeats (other work on the machine only ever
adds time): the whole call, and the part outside the session. Calls of different thread counts are
interleaved, so that noise hits all alike.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from faser_backend.core.batch import RowBatch
from faser_backend.device.call_shapes import CallShape
from faser_backend.device.onnx_runtime import OrtRunner
from faser_backend.device.partition import CorePartition, core_partitions
from faser_backend.manifest import EngineManifest


class Case(NamedTuple):
    """A call: sequences x rows of each, on `context` tokens in the pool."""

    num_sequences: int
    num_rows: int
    context: int
    wants_logits: bool = True

    def __str__(self) -> str:
        kind = "" if self.wants_logits else " prefill"
        return f"{self.num_sequences}x{self.num_rows} @{self.context}{kind}"


CASES = [
    Case(1, 1, 128),
    Case(1, 2, 128),
    Case(1, 5, 128),
    Case(4, 5, 128),
    Case(16, 1, 128),
    Case(16, 5, 128),
    Case(1, 128, 0, wants_logits=False),
    Case(1, 256, 128, wants_logits=False),
]


def make_batch(case: Case, vocab_size: int, block_size: int, rng: np.random.Generator) -> RowBatch:
    """A batch of the case with a shuffled block table."""
    num_rows = case.num_sequences * case.num_rows
    blocks_each = -(-(case.context + case.num_rows) // block_size)
    blocks = rng.permutation(case.num_sequences * blocks_each).reshape(case.num_sequences, blocks_each)
    return RowBatch(
        token_ids=rng.integers(0, vocab_size, num_rows),
        cu_rows=np.arange(case.num_sequences + 1) * case.num_rows,
        context_lens=np.full(case.num_sequences, case.context),
        block_tables=blocks,
        logit_rows=np.arange(num_rows if case.wants_logits else 0),
    )


def run_model(runner: OrtRunner, batch: RowBatch) -> None:
    hidden = None
    for segment in range(runner.num_segments):
        hidden = runner.run_segment(segment, batch, hidden)


class SessionTimer:
    """Adds up the time spent inside ONNX Runtime by timing CallShape.execute."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._run: Callable[[CallShape], None] = CallShape.execute
        timer = self
        CallShape.execute = lambda shape: timer._timed(shape)  # noqa: PLW0108  a bound method would not get the shape

    def _timed(self, shape: CallShape) -> None:
        start = time.perf_counter()
        self._run(shape)
        self.seconds += time.perf_counter() - start


def bench_model(name: str, runners: dict[str, OrtRunner], repeats: int, timer: SessionTimer) -> None:
    """Prints a line per case; runners take turns. Runners are named for their column."""
    header = "".join(f"{f'{column} ms':>18}{'outside us':>12}" for column in runners)
    print(f"{name:22}{header}")
    rng = np.random.default_rng(0)
    for case in CASES:
        runner = next(iter(runners.values()))
        if case.context + case.num_rows > runner.spec.max_context:
            continue
        batch = make_batch(case, runner.vocab_size, runner.pool.kv_block_size, rng)
        samples: dict[str, list[tuple[float, float]]] = {column: [] for column in runners}
        for repeat in range(repeats + 1):
            for column, runner in runners.items():
                timed = time_calls(runner, batch, 3, timer)
                samples[column] += timed if repeat else []  # the first round warms up
        row = ""
        for of_runner in samples.values():
            whole, outside = np.percentile(np.array(of_runner), 20, axis=0)
            row += f"{whole * 1e3:18.3f}{outside * 1e6:12.1f}"
        print(f"{case!s:22}{row}", flush=True)


def time_calls(runner: OrtRunner, batch: RowBatch, num_calls: int, timer: SessionTimer) -> list[tuple[float, float]]:
    """(seconds, seconds outside the session) of each call."""
    samples = []
    for _ in range(num_calls):
        timer.seconds = 0.0
        start = time.perf_counter()
        run_model(runner, batch)
        whole = time.perf_counter() - start
        samples.append((whole, whole - timer.seconds))
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine_dir", type=Path)
    parser.add_argument("--threads", default="1,2", help="thread counts to compare, e.g. 1,2")
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    num_cores = core_partitions().whole.size
    threads = [count for count in map(int, options.threads.split(",")) if 1 <= count <= num_cores]
    if not threads:
        parser.error(f"--threads {options.threads}: must lie in [1, {num_cores}]")
    manifest = EngineManifest.load(options.engine_dir)
    timer, block_size = SessionTimer(), manifest.kv_block_size
    num_blocks = max(c.num_sequences * -(-(c.context + c.num_rows) // block_size) for c in CASES)
    cores = core_partitions().whole.cores
    for name, model in (("target", manifest.target), ("draft", manifest.draft)):
        runners = {}
        for count in threads:
            partition = CorePartition("bench", cores[:count])
            for can_spin in (False, True)[: 1 + (count > 1)]:
                column = f"{count} thread{'s' if count > 1 else ''}{' spin' if can_spin else ''}"
                runners[column] = OrtRunner(
                    model, options.engine_dir, num_blocks, block_size, partition, can_spin=can_spin
                )
        bench_model(name, runners, options.repeats, timer)


if __name__ == "__main__":
    main()
