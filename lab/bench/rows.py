"""What calls of few rows cost on a CPU, beside what the machine could do.

    python scripts/bench_rows.py ENGINE_DIR [--rows 1,6,16] [--logits all|last] [--json FILE]

A call is one sequence's: so many rows at the end of a context. Row counts take turns with a reading of memory and with
a large product of matrices, so that all are of the same minutes. It writes {"bandwidth_gb_s", "peak_gflops",
"weight_bytes", "rows_ms": {"1": ..}} and the quartiles.

Numpy's library must run on one thread (OPENBLAS_NUM_THREADS = 1 before numpy is loaded, as the script sets it), for
threads here are callers of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numba
import numpy as np

from faser_backend.config import EngineConfig
from faser_backend.core.batch import RowBatch
from faser_backend.core.ports import ModelRunner
from faser_backend.manifest import EngineManifest, ModelEngine
from faser_backend.pipeline.model_call import run_model
from faser_backend.serving.runtimes import open_runtime
from lab.options import integers, make_parser
from lab.profiling.cases import Case, make_batch

READ_BYTES = 1 << 28  # of a thread: no cache holds them
MATRIX_SIZE = 1024


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _sum_of(words):
    total = 0
    for i in range(words.size):
        total += words[i]
    return total


class MachineLimits:
    """What a machine can do at most: bytes read from memory and float32 operations a second, on num_threads threads,
    which wait in between."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads)
        self._words = [np.ones(READ_BYTES // 8, np.int64) for _ in range(num_threads)]
        self._matrices = [np.ones((MATRIX_SIZE, MATRIX_SIZE), np.float32) for _ in range(num_threads)]
        _sum_of(self._words[0])

    def bandwidth(self) -> float:
        """Bytes a second that all threads together read."""
        return self._rate(lambda thread: _sum_of(self._words[thread]), READ_BYTES)

    def peak(self) -> float:
        """Operations a second of a large product of matrices; a multiplication and an addition are two."""
        return self._rate(lambda thread: self._matrices[thread] @ self._matrices[thread], 2 * MATRIX_SIZE**3)

    def seconds(self, work: Callable[[int], object]) -> float:
        """Of the work of all threads, each told its number."""
        began = time.perf_counter()
        list(self._threads.map(work, range(self._num_threads)))
        return time.perf_counter() - began

    def close(self) -> None:
        self._threads.shutdown()

    def _rate(self, work: Callable[[int], object], amount: int) -> float:
        return amount * self._num_threads / self.seconds(work)


class OpenModel:
    """A model on so many threads, with a filled pool for its largest case. Pages that were never written are all one
    page, which stays in the cache: attention then looks far too fast."""

    def __init__(self, engine_dir: Path, name: str, num_threads: int, cases: list[Case], stack: ExitStack) -> None:
        manifest = EngineManifest.load(engine_dir)
        self.model: ModelEngine = getattr(manifest, name)
        self._rng, self._size = np.random.default_rng(0), manifest.kv_block_size
        runtime = open_runtime(engine_dir, manifest, EngineConfig(num_threads=num_threads))
        stack.callback(runtime.close)
        self._num_blocks = max(len(case.counts) * -(-case.num_tokens // self._size) for case in cases)
        pool = runtime.open_pool(self.model, self._num_blocks)
        runtime.fill_pool(pool, self._rng.standard_normal(self.model.spec.head_dim).astype(np.float32))
        self.runner: ModelRunner = runtime.open_runner(self.model, runtime.menu.whole, pool)

    def batch(self, case: Case) -> RowBatch:
        return make_batch(case, self.model.spec.vocab_size, self._size, self._num_blocks, self._rng)

    def call_ms(self, batch: RowBatch) -> float:
        began = time.perf_counter()
        run_model(self.runner, batch)
        return 1e3 * (time.perf_counter() - began)


def main() -> None:
    parser = make_parser(__doc__, "json", "rows", "repeats", threads=len(os.sched_getaffinity(0)))
    parser.add_argument("engine_dir", type=Path)
    parser.add_argument("--context", type=int, default=128, help="tokens before the rows")
    help_text = "rows with logits: a verification's, or a prompt's"
    parser.add_argument("--logits", choices=["all", "last"], default="all", help=help_text)
    args = parser.parse_args()
    with closing(MachineLimits(args.threads)) as limits:
        time_calls(args, limits)


def time_calls(args: argparse.Namespace, limits: MachineLimits) -> None:
    counts = integers(args.rows or "1,6,16")
    cases = [Case((count,), args.context, count if args.logits == "all" else 1) for count in counts]
    manifest = EngineManifest.load(args.engine_dir)
    bytes_per_s, operations_per_s = [], []
    milliseconds: dict[int, list[float]] = {count: [] for count in counts}
    with ExitStack() as stack:
        opened = OpenModel(args.engine_dir, "target", args.threads, cases, stack)
        batches = {count: opened.batch(case) for count, case in zip(counts, cases, strict=True)}
        for batch in batches.values():
            opened.call_ms(batch)
        for _ in range(args.repeats or 30):
            bytes_per_s.append(limits.bandwidth())
            operations_per_s.append(limits.peak())
            for count, batch in batches.items():
                opened.call_ms(batch)  # weights and rows of the limits leave the caches
                milliseconds[count].append(opened.call_ms(batch))
    weight_bytes, bandwidth = manifest.target.num_weight_bytes, statistics.median(bytes_per_s)
    quartiles = {count: statistics.quantiles(times, n=4) for count, times in milliseconds.items()}
    result: dict[str, Any] = {
        "runtime": manifest.runtime,
        "weights": manifest.target.weight_format.title,
        "threads": args.threads,
        "context": args.context,
        "logits": args.logits,
        "bandwidth_gb_s": bandwidth / 1e9,
        "peak_gflops": statistics.median(operations_per_s) / 1e9,
        "weight_bytes": weight_bytes,
        "rows_ms": {str(count): middle for count, (_, middle, _) in quartiles.items()},
        "rows_ms_quartiles": {str(count): [low, high] for count, (low, _, high) in quartiles.items()},
    }
    floor_ms = 1e3 * weight_bytes / bandwidth
    print(
        f"{manifest.runtime}, weights {result['weights']}, {args.threads} threads: {weight_bytes / 1e6:.0f} MB at "
        f"{result['bandwidth_gb_s']:.1f} GB/s take {floor_ms:.2f} ms; products: {result['peak_gflops']:.0f} GFLOP/s"
    )
    for count, (low, middle, high) in quartiles.items():
        print(
            f"{count:5d} rows {middle:8.2f} ms ({low:.2f} to {high:.2f}), {middle / floor_ms:.2f}x reading the "
            f"weights, {middle / quartiles[counts[0]][1]:.2f}x the call of {counts[0]}"
        )
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
