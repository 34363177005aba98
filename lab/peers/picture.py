"""The record's picture: tokens/s at each number of clients, greedy, a bar for each contestant; light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # files only: no window system is needed

import matplotlib.pyplot as plt

from lab.peers.measuring import Record
from lab.peers.report import is_ours

PIECES = ("llama", "openvino", "vllm")  # of which bars are drawn: those that take every number of clients
SHADES = {
    "light": {"text": "#1f2328", "grid": "#e4e4e4", "face": "#ffffff"},
    "dark": {"text": "#e6edf3", "grid": "#30363d", "face": "#0d1117"},
}
OURS, PEERS = (
    ("#c8344b", "#e8788a", "#f0a8b3", "#8c1f30"),
    ("#1f5591", "#6ba3d6", "#2a9d8f", "#8fd0c6", "#8e6bbd", "#c3aee0", "#b08900", "#e0c46c"),
)
Bars = dict[str, dict[int, dict[str, Any]]]  # contestant -> clients -> row


def bars(record: Record) -> Bars:
    """Greedy rows of the pieces that are drawn; ours as measured beside the first of them, and first."""
    found: Bars = {}
    for name, load in _loads(record):
        for row in load["rows"]:
            if not is_ours(row) or name == next(iter(_drawn(record))):
                found.setdefault(row["policy"], {})[load["num_clients"]] = row
    return dict(sorted(found.items(), key=lambda item: not is_ours({"policy": item[0]})))


def _drawn(record: Record) -> list[str]:
    return [name for name in PIECES if name in record.pieces]


def _loads(record: Record) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in _drawn(record):
        for load in record.pieces[name]["loads"]:
            if load["temperature"] == 0:
                yield name, load


def draw(record: Record, stem: Path) -> list[Path]:
    """Writes STEM_light.png and STEM_dark.png. Returns their paths; none where no greedy load was measured."""
    found = bars(record)
    if not found:
        return []
    return [_draw(found, stem.with_name(f"{stem.name}_{shade}.png"), **colours) for shade, colours in SHADES.items()]


def _draw(found: Bars, path: Path, *, text: str, grid: str, face: str) -> Path:
    clients = sorted({count for rows in found.values() for count in rows})
    own, others = iter(OURS * len(found)), iter(PEERS * len(found))
    width = 0.86 / len(found)
    coloured = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")
    style: dict[Any, Any] = {"font.size": 9.5, **dict.fromkeys(coloured, text)}
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(9.0, 3.6), facecolor=face)
        axes.set_facecolor(face)
        for index, (name, rows) in enumerate(found.items()):
            places = [clients.index(count) + (index - (len(found) - 1) / 2) * width for count in rows]
            heights = [row["tokens_per_s"] for row in rows.values()]
            colour = next(own) if is_ours({"policy": name}) else next(others)
            drawn = axes.bar(places, heights, width * 0.94, color=colour, label=name)
            axes.bar_label(drawn, fmt="%.0f", fontsize=7, color=text, padding=1)
        axes.set_xticks(range(len(clients)), [f"{count} client{'s' * (count > 1)}" for count in clients])
        axes.set_ylabel("output tokens/s")
        axes.grid(axis="y", color=grid)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(grid)
        axes.tick_params(length=0)
        axes.legend(frameon=False, fontsize=8.5, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, labelcolor=text)
        figure.tight_layout()
        figure.savefig(path, dpi=150, facecolor=face, metadata={"Software": None})
        plt.close(figure)
    return path
