"""The report's pictures as SVG text, drawn from rows of bench.json alone."""

from __future__ import annotations

import io
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # files only: no window system is needed

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from lab.bench import compare
from lab.bench.compare import gain, groups
from lab.contestants import BURSTY, REFERENCE

Row = dict[str, Any]
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "faser",
}
COLOURS = {
    "none": "#6b6b6b", "fixed:1": "#b3cde8", "fixed:2": "#84b0da", "fixed:4": "#4a88c2", "fixed:8": "#1f5591",
    "goodput": "#2a9d8f", "survival": "#7aa63f", "gp-lcb": "#e09f3e",
    "faser": "#c8344b",
}  # fmt: skip
SPARE = ("#8c564b", "#e377c2", "#17becf", "#3d3d3d")


def colour_of(spec: str, others: list[str]) -> str:
    """A policy's own colour; policies that are new to the ladder share the spare ones."""
    return COLOURS.get(spec) or SPARE[others.index(spec) % len(SPARE) if spec in others else 0]


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]


def _law(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"T = {temperature:g}"


def _temperatures(rows: list[Row]) -> list[float]:
    return list(dict.fromkeys(row["temperature"] for row in rows))


def draw_all(rows: list[Row]) -> dict[str, str]:
    """SVG by name; a picture for which there is no data is left out."""
    with plt.rc_context(STYLE):
        found = {
            "gains": gains(rows),
            "throughput_latency": throughput_latency(rows),
        }
    return {name: svg for name, svg in found.items() if svg}


def _panels_by_load(loads: list[str], names: list[str], line_height: float, label: str) -> tuple[Figure, list[Axes]]:
    """A panel per load, a line per contestant in each; the first contestant on top."""
    size = (2.6 * len(loads) + 1.6, line_height * len(names) + 1.4)
    figure, grid = plt.subplots(1, len(loads), sharey=True, squeeze=False, figsize=size)
    for axes in grid[0]:
        axes.xaxis.set_major_locator(MaxNLocator(4, prune="upper"))
        axes.grid(axis="y", visible=False)
    grid[0, 0].set_yticks(range(len(names)), names)
    grid[0, 0].invert_yaxis()
    figure.supxlabel(label, fontsize=9.5)
    return figure, list(grid[0])


def _names(rows: list[Row], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))


def gains(rows: list[Row]) -> str:
    """A dot per contestant: how much better than the reference, a panel per load. Whiskers: lowest and highest
    throughput, over the reference's median."""
    names, loads, others = _names(rows, "policy"), _names(rows, "load"), _others(rows)
    figure, panels = _panels_by_load(loads, names, 0.29, f"times as fast as {REFERENCE}")
    markers = dict(zip(_temperatures(rows), "os^D", strict=False))
    for axes, load in zip(panels, loads, strict=True):
        for (name, temperature), group in groups(rows).items():
            if name == load:
                reference = next(row for row in group if row["policy"] == REFERENCE)
                shift = 0.19 if len(markers) > 1 and temperature else -0.19 if len(markers) > 1 else 0.0
                for row in group:
                    y, colour = names.index(row["policy"]) + shift, colour_of(row["spec"], others)
                    _dot(axes, row, y, reference=reference, colour=colour, marker=markers[temperature])
        axes.axvline(1.0, color="#6b6b6b", linewidth=1, linestyle="--")
        axes.set_title(f"{load} ({'whole answers' if load == BURSTY.name else 'throughput'})")
        axes.set_xlim(0.0, 1.08 * axes.get_xlim()[1])  # the best mark stays clear of the edge
        axes.set_ylim(len(names) - 0.5, -0.5)
    handles = [Line2D([], [], marker=mark, linestyle="", color="#444444", label=_law(t)) for t, mark in markers.items()]
    if len(handles) > 1:
        figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.0, 0.0), ncols=len(handles))
    figure.tight_layout()
    return _svg(figure)


def _dot(axes: Axes, row: Row, y: float, *, reference: Row, colour: str, marker: str) -> None:
    face = "white" if row["options"] else colour
    ratios = compare.gains(row, reference)
    axes.plot([min(ratios), max(ratios)], [y, y], color=colour, linewidth=1.4, solid_capstyle="butt")
    axes.plot(gain(row, reference), y, marker, markersize=5, markerfacecolor=face, markeredgecolor=colour)


def _others(rows: list[Row]) -> list[str]:
    return [spec for spec in dict.fromkeys(row["spec"] for row in rows) if spec not in COLOURS]


def throughput_latency(rows: list[Row]) -> str:
    """A line per policy through the closed loops: tokens per second against time per output token."""
    closed = [row for row in rows if row["load"] != BURSTY.name and not row["options"]]
    if not closed:
        return ""
    temperatures, others = _temperatures(closed), _others(closed)
    size = (4.6 * len(temperatures) + 1.8, 3.9)
    figure, grid = plt.subplots(1, len(temperatures), sharey=True, squeeze=False, figsize=size)
    for axes, temperature in zip(grid[0], temperatures, strict=True):
        here = [row for row in closed if row["temperature"] == temperature]
        for name in dict.fromkeys(row["policy"] for row in here):
            line = sorted((row for row in here if row["policy"] == name), key=lambda row: row["num_clients"])
            is_main = name in ("none", "faser")
            axes.plot(
                [row["tokens_per_s"] for row in line],
                [row["tpot_ms_p50"] for row in line],
                "o-",
                markersize=4.5,
                linewidth=2.4 if is_main else 1.4,
                zorder=3 if is_main else 2,
                color=colour_of(line[0]["spec"], others),
                label=name,
            )
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_title(_law(temperature))
        axes.set_xlabel("output tokens per second")
        axes.set_xlim(left=0)
    grid[0, 0].set_ylabel("time per output token, median, ms")
    counts = " / ".join(map(str, sorted({row["num_clients"] for row in closed})))
    handles, labels = grid[0, -1].get_legend_handles_labels()
    legend = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
    grid[0, -1].legend(handles, labels, title=f"points: {counts}\nin flight", alignment="left", **legend)
    figure.tight_layout()
    return _svg(figure)
