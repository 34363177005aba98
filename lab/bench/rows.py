"""What calls of few rows cost on a CPU, beside what the machine could do.

    python scripts/bench_rows.py ENGINE_DIR [--rows 1,6,16] [--logits all|last] [--json FILE]
    python scripts/bench_rows.py --products [--formats fp16,int8] [--rows 1,6,128]

A call is one sequence's: so many rows at the end of a context. Row counts take turns with a reading of memory and with
a large product of matrices, so that all are of the same minutes. It writes {"bandwidth_gb_s", "peak_gflops",
"weight_bytes", "rows_ms": {"1": ..}} and the quartiles. --products times the matrix products alone, with the shapes of
SmolLM2-135M: plain threads do equal shares of each matrix's blocks, each figure is the best of its repeats, since other
work on the machine only ever adds time, and calls of more than 16 rows are prefill, whose head sees one row.

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
from plugins.row_products import FORMATS, multiply_rows, num_blocks, scratch_size, store_matrix, stored_bytes

READ_BYTES = 1 << 28  # of a thread: no cache holds them
MATRIX_SIZE = 1024
LAYER = [(576, 960), (576, 576), (576, 3072), (1536, 576)]  # inputs and outputs of SmolLM2-135M's matrices
HEAD = (576, 49152)
SHAPES = [*LAYER * 30, HEAD]
MOST_LOGIT_ROWS = 16


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


class Products:
    """All matrices of the model in one array, and the compiled product of their format."""

    def __init__(self, weight_format: str, num_threads: int):
        code = FORMATS.index(weight_format)

        @numba.njit(nogil=True)
        def multiply(y, x, weights, offset, num_inputs, num_outputs, first, last, num_rows, scratch):  # noqa: PLR0917
            multiply_rows(
                code, y, x, weights, offset, num_inputs, num_outputs, first, last, num_rows, False, scratch
            )  # fmt: skip

        sizes = [-(-stored_bytes(shape[0], shape[1], weight_format) // 64) * 64 for shape in SHAPES]
        self._offsets = np.concatenate([[0], np.cumsum(sizes)])
        self.weights = np.zeros(self._offsets[-1], np.uint8)
        rng = np.random.default_rng(0)
        stored = {s: store_matrix(rng.standard_normal(s, np.float32), weight_format) for s in (*LAYER, HEAD)}
        for offset, shape in zip(self._offsets, SHAPES, strict=False):
            self.weights[offset : offset + len(stored[shape])] = stored[shape]
        self._multiply: Any = multiply
        self._num_threads = num_threads
        self._scratch = [np.empty(scratch_size(1536), np.float32) for _ in range(num_threads)]

    def share(self, thread: int, num_rows: int, inputs: dict, outputs: dict) -> None:
        for offset, (num_inputs, num_outputs) in zip(self._offsets, SHAPES, strict=False):
            blocks = [num_blocks(num_outputs) * i // self._num_threads for i in (thread, thread + 1)]
            rows = 1 if num_outputs == HEAD[1] and num_rows > MOST_LOGIT_ROWS else num_rows
            y, x = outputs[num_outputs], inputs[num_inputs]
            self._multiply(
                y, x, self.weights, offset, num_inputs, num_outputs, *blocks, rows, self._scratch[thread]
            )  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__, "json", "rows", "repeats", threads=len(os.sched_getaffinity(0)))
    parser.add_argument("engine_dir", type=Path, nargs="?")
    parser.add_argument("--context", type=int, default=128, help="tokens before the rows")
    help_text = "rows with logits: a verification's, or a prompt's"
    parser.add_argument("--logits", choices=["all", "last"], default="all", help=help_text)
    parser.add_argument("--products", action="store_true", help="matrix products alone, of no engine")
    parser.add_argument("--formats", default="fp32,fp16,bf16,int8,int4", help="of --products")
    args = parser.parse_args()
    if args.products == (args.engine_dir is not None):
        parser.error("give either an engine directory or --products")
    with closing(MachineLimits(args.threads)) as limits:
        (time_products if args.products else time_calls)(args, limits)


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


def time_products(args: argparse.Namespace, limits: MachineLimits) -> None:
    counts, formats = integers(args.rows or "1,2,4,6,8,12,16,128"), args.formats.split(",")
    models = {name: Products(name, args.threads) for name in formats}
    inputs = {n: np.random.default_rng(1).standard_normal((max(counts), n), np.float32) for n in (576, 1536)}
    outputs = {n: np.zeros((max(counts), n), np.float32) for _, n in LAYER}
    outputs[HEAD[1]] = np.zeros((min(max(counts), MOST_LOGIT_ROWS), HEAD[1]), np.float32)
    cases = [(name, count) for name in formats for count in counts]
    best, bandwidth, peak = dict.fromkeys(cases, np.inf), 0.0, 0.0
    for repeat in range((args.repeats or 20) + 1):
        bandwidth, peak = max(bandwidth, limits.bandwidth()), max(peak, limits.peak())
        for name, count in cases:
            taken = limits.seconds(
                lambda i, n=name, c=count: models[n].share(i, c, inputs, outputs)
            )  # fmt: skip
            if repeat:  # the first compiles
                best[name, count] = min(best[name, count], taken)
    print(f"{args.threads} threads: memory {bandwidth / 1e9:.1f} GB/s, a large product {peak / 1e9:.0f} GFLOP/s")
    for name, count in cases:
        taken, floor = best[name, count], models[name].weights.size / bandwidth
        operations = 2 * sum(
            k * n * (1 if n == HEAD[1] and count > MOST_LOGIT_ROWS else count) for k, n in SHAPES
        )  # fmt: skip
        print(
            f"{name} {count:4d} rows {1e3 * taken:8.2f} ms, {taken / floor:6.2f}x reading the weights, "
            f"{taken / best[name, counts[0]]:6.2f}x {counts[0]} row, {operations / taken / peak:5.2f} of the product"
        )
