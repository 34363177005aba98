"""Milliseconds of a model's matrix products alone, per weight format and number of rows, beside the machine's limits.

    python scripts/bench_rows_kernels.py [--formats fp16,int8] [--rows 1,6,128] [--repeats 20]

The shapes are SmolLM2-135M's; calls of more than 16 rows are prefill, whose head sees one row. Plain threads do equal
shares of each matrix's blocks. Cases take turns with the limits; each figure is the best of its repeats, since other
work on the machine only ever adds time.
"""

from __future__ import annotations

import os
from typing import Any

import numba
import numpy as np

from lab.bench.rows import MachineLimits
from lab.options import integers, make_parser
from plugins.row_products import FORMATS, multiply_rows, num_blocks, scratch_size, store_matrix, stored_bytes

LAYER = [(576, 960), (576, 576), (576, 3072), (1536, 576)]
HEAD = (576, 49152)
SHAPES = [*LAYER * 30, HEAD]
MOST_LOGIT_ROWS = 16


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
    parser = make_parser(__doc__, rows="1,2,4,6,8,12,16,128", threads=len(os.sched_getaffinity(0)), repeats=20)
    parser.add_argument("--formats", default="fp32,fp16,bf16,int8,int4")
    args = parser.parse_args()
    counts, formats = integers(args.rows), args.formats.split(",")
    limits = MachineLimits(args.threads)
    models = {name: Products(name, args.threads) for name in formats}
    inputs = {n: np.random.default_rng(1).standard_normal((max(counts), n), np.float32) for n in (576, 1536)}
    outputs = {n: np.zeros((max(counts), n), np.float32) for _, n in LAYER}
    outputs[HEAD[1]] = np.zeros((min(max(counts), MOST_LOGIT_ROWS), HEAD[1]), np.float32)
    cases = [(name, count) for name in formats for count in counts]
    best, bandwidth, peak = dict.fromkeys(cases, np.inf), 0.0, 0.0
    for repeat in range(args.repeats + 1):
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


if __name__ == "__main__":
    main()
