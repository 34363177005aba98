"""What calls of few rows cost, beside what the machine could do: `bench_rows.py ENGINE_DIR --json FILE`.

A call is one sequence's: so many rows at the end of a context. Row counts take turns with a reading of memory and with
a large product of matrices, so that all are of the same minutes. Prints a table and writes
{"bandwidth_gb_s", "peak_gflops", "weight_bytes", "rows_ms": {"1": ..}} and the spreads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import numpy as np

from faser_backend.config import EngineConfig
from faser_backend.core.batch import RowBatch
from faser_backend.core.ports import ModelRunner
from faser_backend.manifest import EngineManifest
from faser_backend.pipeline.model_call import run_model
from faser_backend.serving.runtimes import open_runtime
from lab.bench.machine_limits import MachineLimits


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine_dir", type=Path)
    parser.add_argument("--rows", default="1,6,16")
    parser.add_argument("--threads", type=int, help="default: all cores of this process")
    parser.add_argument("--context", type=int, default=128, help="tokens before the rows")
    parser.add_argument(
        "--logits", choices=["all", "last"], default="all", help="rows with logits: a verification's, or a prompt's"
    )
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def sequence_rows(num_rows: int, context: int, block_size: int, vocab_size: int, logits: str) -> RowBatch:
    """Rows of random tokens behind a context whose keys and values are whatever the pool holds."""
    num_blocks = -(-(context + num_rows) // block_size)
    return RowBatch(
        token_ids=np.random.default_rng(0).integers(vocab_size, size=num_rows),
        cu_rows=np.array([0, num_rows]),
        context_lens=np.array([context]),
        block_tables=np.arange(num_blocks)[None],
        logit_rows=np.arange(num_rows) if logits == "all" else np.array([num_rows - 1]),
    )


def call_ms(runner: ModelRunner, rows: RowBatch) -> float:
    began = time.perf_counter()
    run_model(runner, rows)
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    args = parse_args()
    manifest = EngineManifest.load(args.engine_dir)
    num_threads = args.threads or len(os.sched_getaffinity(0))
    runtime = open_runtime(args.engine_dir, manifest, EngineConfig(num_threads=num_threads))
    counts = [int(count) for count in args.rows.split(",")]
    num_blocks = -(-(args.context + max(counts)) // manifest.kv_block_size)
    runner = runtime.open_runner(manifest.target, runtime.menu.whole, runtime.open_pool(manifest.target, num_blocks))
    vocab_size = manifest.target.spec.vocab_size
    batches = {n: sequence_rows(n, args.context, manifest.kv_block_size, vocab_size, args.logits) for n in counts}
    limits = MachineLimits(num_threads)
    bytes_per_s, operations_per_s = [], []
    milliseconds: dict[int, list[float]] = {count: [] for count in counts}
    for batch in batches.values():
        call_ms(runner, batch)
    for _ in range(args.repeats):
        bytes_per_s.append(limits.bandwidth())
        operations_per_s.append(limits.peak())
        for count, batch in batches.items():
            call_ms(runner, batch)  # weights and rows of the limits leave the caches
            milliseconds[count].append(call_ms(runner, batch))
    limits.close()
    weight_bytes = manifest.target.num_weight_bytes
    result = {
        "runtime": manifest.runtime,
        "weights": manifest.target.weight_format.title,
        "threads": num_threads,
        "context": args.context,
        "logits": args.logits,
        "bandwidth_gb_s": statistics.median(bytes_per_s) / 1e9,
        "peak_gflops": statistics.median(operations_per_s) / 1e9,
        "weight_bytes": weight_bytes,
        "rows_ms": {str(count): statistics.median(times) for count, times in milliseconds.items()},
        "rows_ms_quartiles": {
            str(count): statistics.quantiles(times, n=4)[::2] for count, times in milliseconds.items()
        },
    }
    floor_ms = 1e3 * weight_bytes / statistics.median(bytes_per_s)
    print(
        f"{manifest.runtime}, weights {result['weights']}, {num_threads} threads: {weight_bytes / 1e6:.0f} MB at "
        f"{result['bandwidth_gb_s']:.1f} GB/s take {floor_ms:.2f} ms; products: {result['peak_gflops']:.0f} GFLOP/s"
    )
    base_ms = statistics.median(milliseconds[counts[0]])
    for count, times in milliseconds.items():
        first, median, last = statistics.quantiles(times, n=4)
        print(
            f"{count:5d} rows {median:8.2f} ms ({first:.2f} to {last:.2f}), {median / floor_ms:.2f}x reading the "
            f"weights, {median / base_ms:.2f}x the call of {counts[0]}"
        )
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
