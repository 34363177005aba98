"""Times of calls of few rows on a CPU, beside what the machine could do.

    python scripts/bench_rows.py ENGINE_DIR [--rows 1,6,16] [--prompts 128,512] [--json FILE]

A call is one sequence's: so many rows after CONTEXT tokens, with logits of all. Row counts take turns with a reading of
memory and with a large product of matrices, so that all are of the same minutes. Prompts are read in calls of
PROMPT_ROWS, as a server reads them. FILE gets the medians: {"weights_ms": .., "rows_ms": {"1": ..}, "prompt_ms": {..}}.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from contextlib import closing
from pathlib import Path

import numpy as np

from faser_backend.lab.bench.report import MachineLimits
from faser_backend.lab.checks.options import counts, engine, make_parser
from faser_backend.lab.checks.target import OpenTarget

CONTEXT = 128  # tokens before the rows
PROMPT_ROWS = 256  # of a call; in larger ones, results leave the caches between a layer's products


def main() -> None:
    parser = make_parser(__doc__, repeats=30, threads=len(os.sched_getaffinity(0)))
    parser.add_argument("engine_dir", type=engine)
    parser.add_argument("--rows", type=counts, default="1,6,16", help="of a call, separated by commas")
    parser.add_argument("--prompts", type=counts, default="", help="tokens of whole prompts, separated by commas")
    parser.add_argument("--json", type=Path, help="write the medians there")
    args = parser.parse_args()
    rates: list[tuple[float, float]] = []
    times: dict[int, list[float]] = {count: [] for count in args.rows}
    prompt_times: dict[int, list[float]] = {count: [] for count in args.prompts}
    longest = max(CONTEXT + max(times), *prompt_times, 0)
    with (
        closing(MachineLimits(args.threads)) as limits,
        closing(OpenTarget(args.engine_dir, longest, num_threads=args.threads, is_filled=True)) as target,
    ):
        model, rng = target.manifest.target, np.random.default_rng(0)
        tokens = {count: rng.integers(model.spec.vocab_size, size=count) for count in {*times, *prompt_times}}

        def call_ms(count: int, context: int, num_logits: int, most_rows: int) -> float:
            began = time.perf_counter()
            for first in range(0, count, most_rows):
                target.logits(tokens[count][first : first + most_rows], context + first, num_logits)
            return 1e3 * (time.perf_counter() - began)

        calls = [(count, CONTEXT, count, count) for count in times]
        for call in calls:
            call_ms(*call)
        for _ in range(args.repeats):
            rates.append((limits.bandwidth(), limits.peak()))
            for call in calls:
                call_ms(*call)  # weights and rows of the limits leave the caches
                times[call[0]].append(call_ms(*call))
            for count, found in prompt_times.items():
                found.append(call_ms(count, 0, 1, PROMPT_ROWS))
    bandwidth, peak = map(statistics.median, zip(*rates, strict=True))
    quartiles = {count: np.percentile(found, (25, 50, 75)) for count, found in times.items()}
    floor_ms = 1e3 * model.num_weight_bytes / bandwidth
    print(
        f"{target.manifest.runtime}, weights {model.weight_format.title}, {args.threads} threads: "
        f"{model.num_weight_bytes / 1e6:.0f} MB at {bandwidth / 1e9:.1f} GB/s take {floor_ms:.2f} ms; products: "
        f"{peak / 1e9:.0f} GFLOP/s"
    )
    for count, (low, middle, high) in quartiles.items():
        print(
            f"{count:5d} rows {middle:8.2f} ms ({low:.2f} to {high:.2f}), {middle / floor_ms:.2f}x reading the "
            f"weights, {middle / quartiles[args.rows[0]][1]:.2f}x the call of {args.rows[0]}"
        )
    prompt_ms = {count: statistics.median(found) for count, found in prompt_times.items()}
    for count, middle in prompt_ms.items():
        print(f"a prompt of {count} tokens {middle:8.2f} ms")
    if args.json:
        rows_ms = {count: middle for count, (_, middle, _) in quartiles.items()}
        args.json.write_text(json.dumps({"weights_ms": floor_ms, "rows_ms": rows_ms, "prompt_ms": prompt_ms}) + "\n")
