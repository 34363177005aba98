"""Counts of captured graphs, and of calls that could not be captured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class GraphCounts:
    """Totals of one runtime. Counted where graphs are captured, on one thread at a time."""

    num_graphs: int = 0
    num_failed_captures: int = 0
