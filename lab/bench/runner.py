"""Milliseconds per model call of an engine directory, how much of it is attention, and how much Python around both.

    python scripts/bench_runner.py ENGINE_DIR [--threads 1,2] [--repeats 40]

Prints, for target and draft, the 20th percentile over repeats (other work on the machine only ever
adds time): the whole call, the attention of all its layers, and what is neither attention nor ONNX Runtime.
Calls of different thread counts are interleaved, so that noise hits all alike. Keys and values have the engine's
kv_cache_dtype.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from faser_backend.core.batch import RowBatch
from faser_backend.device.call_shapes import CallShape
from faser_backend.device.host_attention import HostAttention
from faser_backend.device.kv_pool import KvPool
from faser_backend.device.onnx_runtime import OrtRunner
from faser_backend.device.partition import CorePartition, core_partitions
from faser_backend.manifest import EngineManifest, ModelEngine


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
    Case(64, 1, 170),
    Case(64, 5, 170),
    Case(128, 1, 170),
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


def filled_pool(model: ModelEngine, manifest: EngineManifest) -> KvPool:
    """Blocks for the largest case, in the engine's dtype.

    Pages that were never written are all one page, which stays in the cache: attention then looks far too fast.
    """
    size = manifest.kv_block_size
    num_blocks = max(case.num_sequences * -(-(case.context + case.num_rows) // size) for case in CASES)
    pool = KvPool(model.spec, num_blocks, size, dtype=manifest.kv_cache_dtype)
    rng = np.random.default_rng(1)
    for layer in range(model.spec.num_layers):
        for part in (pool.keys(layer), pool.values(layer)):
            part[:] = rng.standard_normal(part.shape, np.float32)
    return pool


def run_model(runner: OrtRunner, batch: RowBatch) -> None:
    hidden = None
    for segment in range(runner.num_segments):
        hidden = runner.run_segment(segment, batch, hidden)


class Stopwatch:
    """Adds up the time that one method of a class takes, whoever calls it."""

    def __init__(self, owner: type, method: str) -> None:
        self.seconds = 0.0
        run: Callable[..., None] = getattr(owner, method)

        def timed(*args: Any, **options: Any) -> None:
            start = time.perf_counter()
            run(*args, **options)
            self.seconds += time.perf_counter() - start

        setattr(owner, method, timed)


class Stopwatches(NamedTuple):
    """Of the two that share a call's time, with what is left over."""

    sessions: Stopwatch
    attention: Stopwatch


def bench_model(name: str, runners: dict[str, OrtRunner], repeats: int, watches: Stopwatches) -> None:
    """Prints a line per case; runners take turns. Runners are named for their column."""
    header = "".join(f"{f'{column} ms':>18}{'attention us':>14}{'rest us':>10}" for column in runners)
    print(f"{name:22}{header}")
    rng = np.random.default_rng(0)
    for case in CASES:
        runner = next(iter(runners.values()))
        if case.context + case.num_rows > runner.spec.max_context:
            continue
        batch = make_batch(case, runner.vocab_size, runner.pool.kv_block_size, rng)
        samples: dict[str, list[tuple[float, float, float]]] = {column: [] for column in runners}
        for repeat in range(repeats + 1):
            for column, runner in runners.items():
                timed = time_calls(runner, batch, 3, watches)
                samples[column] += timed if repeat else []  # the first round warms up
        row = ""
        for of_runner in samples.values():
            whole, attention, rest = np.percentile(np.array(of_runner), 20, axis=0)
            row += f"{whole * 1e3:18.3f}{attention * 1e6:14.1f}{rest * 1e6:10.1f}"
        print(f"{case!s:22}{row}", flush=True)


def time_calls(
    runner: OrtRunner, batch: RowBatch, num_calls: int, watches: Stopwatches
) -> list[tuple[float, float, float]]:
    """Of each call: seconds, seconds of attention, and seconds outside both attention and sessions."""
    samples = []
    for _ in range(num_calls):
        watches.sessions.seconds = watches.attention.seconds = 0.0
        start = time.perf_counter()
        run_model(runner, batch)
        whole = time.perf_counter() - start
        samples.append((whole, watches.attention.seconds, whole - watches.sessions.seconds - watches.attention.seconds))
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
    if manifest.runtime != "onnxruntime":
        parser.error(f"runtime = {manifest.runtime!r}: watches the parts of 'onnxruntime'; bench_rows.py takes any")
    watches = Stopwatches(Stopwatch(CallShape, "run_part"), Stopwatch(HostAttention, "run"))
    print(f"keys and values in {manifest.kv_cache_dtype}")
    cores = core_partitions().whole.cores
    for name, model in (("target", manifest.target), ("draft", manifest.draft)):
        if model is None:
            continue
        runners, pool = {}, filled_pool(model, manifest)  # columns take turns, so that one pool serves them all
        for count in threads:
            partition = CorePartition("bench", cores[:count])
            for can_spin in (False, True)[: 1 + (count > 1)]:
                column = f"{count} thread{'s' if count > 1 else ''}{' spin' if can_spin else ''}"
                runners[column] = OrtRunner(
                    model,
                    options.engine_dir,
                    pool.num_blocks,
                    pool.kv_block_size,
                    partition,
                    can_spin=can_spin,
                    pool=pool,
                )
        bench_model(name, runners, options.repeats, watches)


if __name__ == "__main__":
    main()
