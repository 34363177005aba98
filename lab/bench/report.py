"""Renders the content of bench.json as an HTML report: one file that fetches nothing."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from statistics import median
from typing import Any

import numba
import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure
from threadpoolctl import threadpool_limits

from faser_backend.lab.answers import category_rows
from faser_backend.lab.bench.compare import equal_engines, gain, gains, groups, headline, metric_of, ratio_of
from faser_backend.lab.contestants import BURSTY, MAX_NUM_SEQS, REFERENCE
from faser_backend.lab.shapes import row_flops
from faser_backend.lab.tables import Column
from faser_backend.manifest import ModelEngine

Row = dict[str, Any]
READ_BYTES = 1 << 28  # per thread, more than caches hold
MATRIX_SIZE = 1024
ROOFLINE_REPEATS = 5
INK, GRID = "#222222", "#e4e4e4"  # become colours of the page, which has a dark scheme
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "faser",
}
COLOURS = {
    "none": "#6b6b6b", "fixed:1": "#b3cde8", "fixed:2": "#84b0da", "fixed:4": "#4a88c2", "fixed:8": "#1f5591",
    "survival": "#7aa63f", "gp-lcb": "#e09f3e", "faser": "#c8344b",
}  # fmt: skip
OTHER_COLOUR = "#8c564b"


def _share(part: str) -> Callable[[Row], float]:
    parts = ("accepted", "rejected", "pruned")
    return lambda row: row[f"row_layers_{part}"] / sum(row[f"row_layers_{name}"] for name in parts)


def _range(row: Row) -> str | None:
    return "{:.2f}-{:.2f}".format(*row[f"{metric_of(row)}_none_range"])


def _ratio(reference: str) -> Callable[[Row], str | None]:
    return partial(ratio_of, reference=reference)


def _ahead_lost(row: Row) -> float | None:
    return row["chains_ahead_discarded"] / row["chains_ahead"] if row["chains_ahead"] else None


def _columns(*columns: tuple[Any, ...]) -> tuple[Column, ...]:
    return tuple(Column(*column) for column in columns)


RATIO = "of throughput; of bursts, of median answer times (median of repeats)"
# Heading, key, form, unit and meaning of each.
GAINS = _columns(
    ("throughput", "tokens_per_s", "{:.0f}", "tokens/s", "Output tokens per second of the whole run."),
    ("of none", _ratio("none"), "{}", "x", f"Gain over plain decoding, {RATIO}."),
    ("of none", _range, "{}", "lowest-highest", "The same, in the worst and the best repeat."),
    ("equal engines", equal_engines, "{}", "lowest-highest", "A second engine of none over the first, by repeat."),
    ("of fixed:4", _ratio("fixed4"), "{}", "x", f"Gain over four draft tokens, always, {RATIO}."),
    ("of best static", _ratio("best_static"), "{}", "x", "Gain over the best fixed length, known afterwards."),
    ("differ", "num_different", "{}", "answers", "Answers that differ from those of plain decoding."),
)
LATENCIES = _columns(
    ("TTFT p50", "ttft_ms_p50", "{:.1f}", "ms", "Time to the first token, from when the request was due."),
    ("p99", "ttft_ms_p99", "{:.1f}", "ms", "The same, 99th percentile."),
    ("TPOT p50", "tpot_ms_p50", "{:.2f}", "ms", "Mean time per further output token of an answer."),
    ("ITL p50", "itl_ms_p50", "{:.2f}", "ms", "Gap between two responses, which may carry several tokens."),
    ("p99", "itl_ms_p99", "{:.2f}", "ms", "The same, 99th percentile."),
    ("whole p50", "e2e_ms_p50", "{:.0f}", "ms", "Time of a whole answer."),
    ("p99", "e2e_ms_p99", "{:.0f}", "ms", "The same, 99th percentile."),
)
DRAFTS = _columns(
    ("batch", "mean_batch_size", "{:.1f}", "requests", "Requests verified in a step, mean."),
    ("length", "mean_length", "{:.2f}", "tokens", "Draft tokens per request and verification, mean."),
    ("accepted", "mean_accepted", "{:.2f}", "tokens", "Draft tokens accepted per verification, no bonus token."),
    ("drafted", "rows_drafted", "{:.0f}", "tokens", "Draft tokens that reached a verification."),
    ("of these accepted", "rows_accepted", "{:.0f}", "tokens", "Draft tokens that were accepted."),
    ("verified", "rows_verified", "{:.0f}", "rows", "Rows that entered the target's verifications."),
    ("trimmed", "rows_trimmed", "{:.0f}", "rows", "Rows left out before verification, for low confidence."),
    ("pruned", "rows_pruned", "{:.0f}", "rows", "Rows that left at an exit layer."),
)
WORK = _columns(
    ("work accepted", _share("accepted"), "{:.1%}", "", "Row-layers whose row gave a token."),
    ("rejected", _share("rejected"), "{:.1%}", "", "Row-layers of rows behind a rejection that ran all layers."),
    ("pruned", _share("pruned"), "{:.1%}", "", "Row-layers that pruned rows ran before they left."),
    ("retention", "retention", "{:.1%}", "", "Share of acceptable draft tokens that trim and exit kept."),
    ("overlap", "overlap_share", "{:.1%}", "", "Share of model time in which both models ran."),
    ("ahead lost", _ahead_lost, "{:.0%}", "", "Chains drafted ahead whose preceding chain was rejected."),
    ("plan mean", "plan_us_mean", "{:.0f}", "us", "Scheduler and policy per step, learning included."),
    ("p99", "plan_us_p99", "{:.0f}", "us", "The same, 99th percentile."),
    ("plan", "plan_share", "{:.1%}", "", "The same, of all time spent in steps."),
    ("overhead", "step_overhead_share", "{:.1%}", "", "Time in steps without a model call running."),
)
CATEGORIES = _columns(
    ("answers", "num_answers", "{}", "", "Answers to prompts of the category, in a repeat."),
    ("output", "num_tokens", "{}", "tokens", "Tokens of these answers."),
    ("of a request", "request_tokens_per_s", "{:.0f}", "tokens/s", "Their tokens over the time of their requests."),
    ("of none", "speedup", "{:.2f}", "x", "The same over that of plain decoding, median of repeats."),
    ("emitted", "mean_emitted", "{:.2f}", "tokens", "Tokens per verification, bonus token included."),
    ("TTFT p50", "ttft_ms_p50", "{:.1f}", "ms", "Time to the first token."),
    ("TPOT p50", "tpot_ms_p50", "{:.2f}", "ms", "Mean time per further output token of an answer."),
    ("whole p50", "e2e_ms_p50", "{:.0f}", "ms", "Time of a whole answer."),
)


def render(bench: dict[str, Any]) -> str:
    """Returns the report as HTML. bench: the content of bench.json."""
    environment = Environment(
        loader=PackageLoader("faser_backend.lab.bench", "."), autoescape=True, undefined=StrictUndefined
    )
    rows, meta = bench["rows"], bench["meta"]
    with rc_context(STYLE):
        gains_plot = _svg(draw_gains(rows))
    return environment.get_template("report.html.j2").render(
        meta=meta,
        rows=rows,
        groups=groups(rows),
        headline=headline(rows),
        gains_plot=gains_plot,
        columns=(GAINS, LATENCIES, DRAFTS, WORK),
        category_columns=CATEGORIES,
        category_rows=category_rows,
        bursty=meta["bursty"],
        saturated=MAX_NUM_SEQS,
        roofline=meta["roofline"] and roofline_in_words(meta["roofline"], rows),
    )


def _svg(figure: Figure) -> Markup:
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None}, transparent=True)
    drawn = text.getvalue().replace(INK, "currentColor").replace(GRID, "var(--line)")
    return Markup(drawn[drawn.index("<svg") :])


def _distinct(rows: list[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _temperature(value: float) -> str:
    return "greedy" if value == 0 else f"T = {value:g}"


def draw_gains(rows: list[Row]) -> Figure:
    """Draws a panel per load, with a mark per contestant: its gain over the reference, from the worst to the best
    repeat. Hollow marks are ablations."""
    names, loads, temperatures = (_distinct(rows, key) for key in ("policy", "load", "temperature"))
    size = (2.1 * len(loads) + 1.4, 0.29 * len(names) + 1.4)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(1, len(loads), sharey=True, squeeze=False)
    for (load, temperature), group in groups(rows).items():
        axes, index = grid[0, loads.index(load)], temperatures.index(temperature)
        reference = next(row for row in group if row["policy"] == REFERENCE)
        for row in group:
            ratios, colour = gains(row, reference), COLOURS.get(row["spec"], OTHER_COLOUR)
            middle = gain(row, reference)
            axes.errorbar(
                middle,
                names.index(row["policy"]) + 0.3 * (index - (len(temperatures) - 1) / 2),
                xerr=[[middle - min(ratios)], [max(ratios) - middle]],
                fmt="os^D"[index % 4],
                markersize=5,
                color=colour,
                markerfacecolor="none" if row["options"] else colour,
            )
        axes.axvline(1.0, color="#6b6b6b", linewidth=1, linestyle="--")
        axes.set_title(f"{load} ({'whole answers' if load == BURSTY.name else 'throughput'})")
        axes.set_xlim(0.0, 1.06 * axes.dataLim.x1)  # marks are drawn whole
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(axis="y", visible=False)
    grid[0, 0].set_yticks(range(len(names)), names)
    grid[0, 0].set_ylim(len(names) - 0.5, -0.5)
    marks = ", ".join(map(": ".join, zip(("circles", "squares"), map(_temperature, temperatures), strict=False)))
    figure.supxlabel(f"times as fast as {REFERENCE} ({marks})", fontsize=9.5)
    return figure


def roofline(target: ModelEngine) -> dict[str, float]:
    """Returns the least times of a target call, attention left out: bytes and operations over the machine's limits."""
    weight_bytes, flops, num_threads = target.num_weight_bytes, row_flops(target.spec), len(os.sched_getaffinity(0))
    with closing(MachineLimits(num_threads, weight_bytes // num_threads)) as limits:  # cached as weights are
        bandwidth = median(limits.bandwidth() for _ in range(ROOFLINE_REPEATS))
        peak = median(limits.peak() for _ in range(ROOFLINE_REPEATS))
    memory_s, row_s = weight_bytes / bandwidth, flops / peak
    return {
        "weight_bytes": weight_bytes,
        "flops_per_row": flops,
        "read_gb_per_s": bandwidth / 1e9,
        "matmul_gflops": peak / 1e9,
        "floor_us_1_row": 1e6 * max(memory_s, row_s),
        "floor_us_per_row": 1e6 * row_s,
        "memory_bound_rows": memory_s / row_s,
    }


def roofline_in_words(found: dict[str, float], rows: list[Row]) -> str:
    """Returns the floors in words, with the reference's verification of one row beside them."""
    text = (
        f"Weights {found['weight_bytes'] / 1e6:.1f} MB, {found['flops_per_row'] / 1e6:.1f} MFLOP per row. Measured "
        f"here: memory is read at {found['read_gb_per_s']:.1f} GB/s, float32 matrix products run at "
        f"{found['matmul_gflops']:.0f} GFLOP/s. So one row takes at least {found['floor_us_1_row']:.0f} us, and beyond "
        f"about {found['memory_bound_rows']:.1f} rows arithmetic ({found['floor_us_per_row']:.0f} us per row) is the "
        "floor."
    )
    low = next((row for row in rows if row["policy"] == REFERENCE and row["mean_batch_size"] == 1), None)
    if low is not None:
        text += f" Measured: a verification of one row takes {low['verify_us_p50']:.0f} us, attention included."
    return text


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _sum_of(words):
    total = 0
    for i in range(words.size):
        total += words[i]
    return total


class MachineLimits:
    """Measures the limits of the machine on num_threads threads: memory bandwidth and float32 operations per second."""

    def __init__(self, num_threads: int, read_bytes: int = READ_BYTES) -> None:
        """read_bytes: read repeatedly by each thread, partly from caches."""
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads)
        self._words = [np.ones(max(read_bytes // 8, 1), np.int64) for _ in range(num_threads)]
        self._matrices = [np.ones((MATRIX_SIZE, MATRIX_SIZE), np.float32) for _ in range(num_threads)]
        self.bandwidth()  # compiles, and reads once

    def bandwidth(self) -> float:
        """Returns bytes per second that all threads together read."""
        return self._rate(lambda thread: _sum_of(self._words[thread]), self._words[0].nbytes)

    def peak(self) -> float:
        """Returns operations per second of a large matrix product; a multiply-add is two."""
        with threadpool_limits(1, user_api="blas"):  # threads here are callers of their own
            return self._rate(lambda thread: self._matrices[thread] @ self._matrices[thread], 2 * MATRIX_SIZE**3)

    def close(self) -> None:
        self._threads.shutdown()

    def _rate(self, work: Callable[[int], object], amount: int) -> float:
        began = time.perf_counter()
        list(self._threads.map(work, range(self._num_threads)))
        return amount * self._num_threads / (time.perf_counter() - began)
