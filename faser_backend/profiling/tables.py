"""Prints the results of `faser profile`: times of calls, and the value of exits."""

from __future__ import annotations

import os
from functools import partial

import numpy as np
from rich.console import Console
from rich.table import Table

from faser_backend.policy.cost_model import CostModel
from faser_backend.profiling.calibration import RETENTION
from faser_backend.serving.profile_store import Profile

WIDE = 200  # columns of a table that nobody sees
BUSY_SPREAD = 0.15  # an idle machine repeats a call within a few percent


def print_tables(profile: Profile, costs: CostModel, *, has_exits: bool) -> None:
    console, calibration = table_console(), profile.calibration
    printed = partial(console.print, highlight=False, soft_wrap=True)
    console.print(call_table(costs))
    outside_us = costs.overhead.step(1, 1)
    printed(f"spread between repeats of a call: {profile.spread:.1%}; a step takes {outside_us:.0f} us outside calls")
    if profile.spread > BUSY_SPREAD:
        printed("The machine was busy during the measurement: run this again when it is idle.")
    source = f"{calibration.num_fitted} draft tokens of {calibration.source}"
    printed(f"calibrated on {source}; thresholds keep {RETENTION:.0%} of the accepted tokens")
    for each in calibration.exits:  # held out: draft rows that it ends, and useful ones that it keeps
        ended = f"{np.mean(each.pruned_shares):.1%} of the draft rows, {each.trimmed_pruned_share:.1%} after trimming"
        kept = f"{each.retention:.1%} and {each.trimmed_retention:.1%} of the useful ones"
        printed(f"exit after layer {each.layer}: ends {ended}; keeps {kept}")
    if has_exits and not calibration.exits:
        printed("exits not calibrated: too few draft tokens were accepted or rejected")


def call_table(costs: CostModel) -> Table:
    """Returns a line per model and partition: two predicted calls."""
    rows = []
    for model, partition in costs.segments:
        examples = costs.call_us(model, partition, np.array([1, 80]), np.array([1, 16]), 128)
        rows.append([model, partition, *(f"{us:.0f}" for us in examples)])
    title = "Predicted call times, context 128"
    return terminal_table(title, ["model", "cores", "1 row, us", "16 x 5 rows, us"], rows)


def table_console() -> Console:
    """Returns rich's console on stdout; in a pipe or a file it is wide enough for whole tables."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=WIDE)


def terminal_table(title: str, headings: list[str], rows: list[list[str]]) -> Table:
    """Returns a table with the first column to the left and figures to the right."""
    table = Table(title=title, box=None, pad_edge=False, title_justify="left", title_style="")
    for index, heading in enumerate(headings):
        width = max(map(len, heading.split()))
        table.add_column(heading, justify="right" if index else "left", no_wrap=not index, min_width=width)
    for row in rows:
        table.add_row(*row)
    return table
