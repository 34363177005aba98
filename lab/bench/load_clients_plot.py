"""Throughput and latency over load, as perf_analyzer's CSV files have them."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

LATENCIES = {"p50 latency": "p50", "p95 latency": "p95", "p99 latency": "p99"}
AXES = {"concurrency": "requests in flight", "request_rate": "requests/s sent"}


def plot_sweeps(reports: Mapping[str, Path], columns: Mapping[str, str], path: Path, max_tokens: int) -> None:
    """Draws tokens/s above and whole latencies below, a column per sweep.

    reports: sweep -> CSV file. columns: sweep -> its first column, the load. max_tokens: of every answer.
    """
    figure = Figure(figsize=(4.2 * len(reports), 5), layout="constrained")
    axes = figure.subplots(2, len(reports), squeeze=False, sharex="col", sharey="row")
    for index, (sweep, report) in enumerate(reports.items()):
        lines = list(csv.DictReader(report.read_text().splitlines()))
        lines.sort(key=lambda line: float(line[columns[sweep]]))
        loads = [float(line[columns[sweep]]) for line in lines]
        upper, lower = axes[:, index]
        upper.plot(loads, [float(line["Inferences/Second"]) * max_tokens for line in lines], "o-")
        for column, label in LATENCIES.items():
            lower.plot(loads, [float(line[column]) / 1e3 for line in lines], "o-", label=label)
        lower.set_xlabel(AXES[sweep])
    for axis in axes.flat:  # after all lines are drawn: rows share their limits
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
    axes[0, 0].set_ylabel("output tokens/s")
    axes[1, 0].set_ylabel("whole request, ms")
    axes[1, 0].legend()
    figure.suptitle("perf_analyzer, streaming gRPC on ensemble")
    figure.savefig(path, dpi=90)
