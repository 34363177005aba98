"""The HTML report: one file without links to fetch, made of bench.json's content alone."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from threadpoolctl import threadpool_limits

from faser_backend.manifest import ModelSpec
from lab.answers import category_rows
from lab.bench.compare import groups, in_words
from lab.bench.plots import draw_all
from lab.contestants import MAX_NUM_SEQS
from lab.shapes import row_flops
from lab.tables import Column

Row = dict[str, Any]
ROOFLINE_REPEATS = 7
MATMUL_SIZE = 1024


def _columns(*fields: tuple[str, str, str | Callable[[Row], Any], str, str]) -> tuple[Column, ...]:
    """Heading, unit, key, form and meaning of each."""
    return tuple(Column(heading, key, form, unit, meaning) for heading, unit, key, form, meaning in fields)


def _share(part: str) -> Callable[[Row], float]:
    parts = ("accepted", "rejected", "pruned")
    return lambda row: 100 * row[f"row_layers_{part}"] / sum(row[f"row_layers_{name}"] for name in parts)


def _percent(key: str) -> Callable[[Row], float]:
    return lambda row: 100 * row[key]


def _range(key: str) -> Callable[[Row], str | None]:
    return lambda row: row[f"{key}_range"] and "{:.2f}-{:.2f}".format(*row[f"{key}_range"])


SPEED = _columns(
    ("throughput", "tokens/s", "tokens_per_s", "{:.0f}", "Output tokens per second of the whole run."),
    ("lowest", "tokens/s", "tokens_per_s_min", "{:.0f}", "Throughput of the slowest repeat."),
    ("highest", "tokens/s", "tokens_per_s_max", "{:.0f}", "Throughput of the fastest repeat."),
    ("of none", "x", "speedup_none", "{:.2f}", "Throughput over that of plain decoding, median of repeats."),
    ("of none", "lowest-highest", _range("speedup_none"), "{}", "The same, in the worst and the best repeat."),
    ("of fixed:4", "x", "speedup_fixed4", "{:.2f}", "Throughput over that of four draft tokens, always."),
    (
        "of best static", "x", "speedup_best_static", "{:.2f}",
        "Throughput over that of the fixed length that did best under this load, known only afterwards.",
    ),
    ("TTFT p50", "ms", "ttft_ms_p50", "{:.1f}", "Time to the first token, from when the request was due."),
    ("p99", "ms", "ttft_ms_p99", "{:.1f}", "The same, 99th percentile."),
    ("TPOT p50", "ms", "tpot_ms_p50", "{:.2f}", "Mean time per further output token of an answer."),
    ("ITL p50", "ms", "itl_ms_p50", "{:.2f}", "Gap between two responses, which may carry several tokens."),
    ("p99", "ms", "itl_ms_p99", "{:.2f}", "The same, 99th percentile."),
    ("whole p50", "ms", "e2e_ms_p50", "{:.0f}", "Time of a whole answer."),
    ("p99", "ms", "e2e_ms_p99", "{:.0f}", "The same, 99th percentile."),
    ("differ", "answers", "num_different", "{}", "Answers unlike plain decoding's."),
)  # fmt: skip
WORK = _columns(
    ("batch", "requests", "mean_batch_size", "{:.1f}", "Requests verified in a step, mean."),
    ("length", "tokens", "mean_length", "{:.2f}", "Draft tokens per request and verification, mean."),
    (
        "accepted", "tokens", "mean_accepted", "{:.2f}",
        "Draft tokens kept per verification, without the recovered or bonus token.",
    ),
    ("drafted", "tokens", "rows_drafted", "{:.0f}", "Draft tokens that reached a verification."),
    ("verified", "rows", "rows_verified", "{:.0f}", "Rows that entered the target's verifications."),
    ("trimmed", "rows", "rows_trimmed", "{:.0f}", "Rows that confidence left out before verification."),
    ("pruned", "rows", "rows_pruned", "{:.0f}", "Rows that left at an exit layer."),
    ("work accepted", "%", _share("accepted"), "{:.1f}", "Row-layers whose row gave a token."),
    ("rejected", "%", _share("rejected"), "{:.1f}", "Row-layers of rows run whole, behind a rejection."),
    ("pruned", "%", _share("pruned"), "{:.1f}", "Row-layers that pruned rows ran before they left."),
    (
        "saved by trim", "row-layers", "row_layers_saved_by_trim", "{:.0f}", "Layers that trimmed rows did not run.",
    ),
    ("by exit", "row-layers", "row_layers_saved_by_exit", "{:.0f}", "Layers that pruned rows did not run."),
    (
        "retention", "%", _percent("retention"), "{:.1f}",
        "Accepted draft tokens, of those that would have been accepted had nothing been trimmed or pruned: exact, "
        "as dropped tokens are compared with the answer.",
    ),
    ("overlap", "%", _percent("overlap_share"), "{:.1f}", "Of drafting and verifying time, both at once."),
    (
        "ahead lost", "%", lambda row: 100 * row["chains_ahead_discarded"] / row["chains_ahead"] if row["chains_ahead"]
        else None, "{:.0f}", "Chains drafted ahead that fell with the chain before them.",
    ),
    ("plan p50", "us", "plan_us_p50", "{:.0f}", "Scheduler and policy per step, what it learns included."),
    ("p99", "us", "plan_us_p99", "{:.0f}", "The same, 99th percentile."),
    ("plan", "%", _percent("plan_share"), "{:.1f}", "The same, of all time spent in steps."),
    (
        "overhead", "%", _percent("step_overhead_share"), "{:.1f}", "Time in steps in which no model call was running.",
    ),
)  # fmt: skip

CATEGORIES = _columns(
    ("answers", "", "num_answers", "{}", "Answers to prompts of the category, in a repeat."),
    ("output", "tokens", "num_tokens", "{}", "Tokens of these answers."),
    (
        "of a request", "tokens/s", "request_tokens_per_s", "{:.0f}",
        "Tokens of the answers over the time for which their requests were in flight.",
    ),
    ("of none", "x", "speedup", "{:.2f}", "The same over that of plain decoding, median of repeats."),
    (
        "emitted", "tokens", "mean_emitted", "{:.2f}",
        "Tokens per verification, the recovered or bonus token included.",
    ),
    ("TTFT p50", "ms", "ttft_ms_p50", "{:.1f}", "Time to the first token."),
    ("TPOT p50", "ms", "tpot_ms_p50", "{:.2f}", "Mean time per further output token of an answer."),
    ("whole p50", "ms", "e2e_ms_p50", "{:.0f}", "Time of a whole answer."),
)  # fmt: skip


def render(bench: dict[str, Any]) -> str:
    """bench: the content of bench.json."""
    environment = Environment(loader=PackageLoader("lab.bench", "."), autoescape=True, undefined=StrictUndefined)
    environment.filters["ticks"] = _ticks
    rows, meta = bench["rows"], bench["meta"]
    plots: dict[str, Markup | None] = {"throughput_latency": None}
    plots |= {name: Markup(svg) for name, svg in draw_all(rows).items()}
    return environment.get_template("report.html.j2").render(
        meta=meta,
        rows=rows,
        groups=groups(rows),
        words=in_words(rows),
        plots=plots,
        columns=(SPEED, WORK),
        category_columns=CATEGORIES,
        category_rows=category_rows,
        bursty=meta["bursty"],
        saturated=MAX_NUM_SEQS,
        roofline=roofline_in_words(meta["roofline"], rows),
    )


def roofline(spec: ModelSpec, weight_bytes: int) -> dict[str, float]:
    """Floors of one target call of 1 row and of R rows, without attention and KV traffic.

    They are its bytes and FLOPs over peaks that numpy measures: copying a buffer as large as the weights (so the same
    caches serve it), and a large float32 product.
    """
    source = np.ones(weight_bytes // 4, np.float32)
    sink, square = np.empty_like(source), np.ones((MATMUL_SIZE, MATMUL_SIZE), np.float32)
    bandwidth = 2 * source.nbytes / _best_s(lambda: np.copyto(sink, source))
    with threadpool_limits(len(os.sched_getaffinity(0)), user_api="blas"):  # engines keep numpy to one thread
        peak = 2.0 * MATMUL_SIZE**3 / _best_s(lambda: square @ square)
    memory_s, row_s = weight_bytes / bandwidth, row_flops(spec) / peak
    return {
        "weight_bytes": weight_bytes,
        "flops_per_row": row_flops(spec),
        "copy_gb_per_s": bandwidth / 1e9,
        "matmul_gflops": peak / 1e9,
        "floor_us_1_row": 1e6 * max(memory_s, row_s),
        "floor_us_per_row": 1e6 * row_s,
        "memory_bound_rows": memory_s / row_s,
    }


def _best_s(run: Callable[[], object]) -> float:
    times = []
    for _ in range(ROOFLINE_REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def roofline_in_words(found: dict[str, float], rows: list[Row]) -> str:
    """The floors, and how the reference's smallest verification compares with them."""
    text = (
        f"Weights {found['weight_bytes'] / 1e6:.1f} MB, {found['flops_per_row'] / 1e6:.1f} MFLOP per row. "
        f"Measured here: copying a buffer of that size {found['copy_gb_per_s']:.1f} GB/s, float32 matrix products "
        f"{found['matmul_gflops']:.0f} GFLOP/s. So one row takes at least {found['floor_us_1_row']:.0f} us, and beyond "
        "about "
        f"{found['memory_bound_rows']:.1f} rows arithmetic ({found['floor_us_per_row']:.0f} us per row) is the floor."
    )
    low = next((row for row in rows if row["policy"] == "none" and row["mean_batch_size"] == 1), None)
    if low is not None:
        text += f" Measured: a verification of one row takes {low['verify_us_p50']:.0f} us, attention included."
    return text


def _ticks(text: str) -> Markup:
    """`word` becomes code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
