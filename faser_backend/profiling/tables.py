"""Prints the results of `faser profile`: errors of costs and of chances, and the value of exits."""

from __future__ import annotations

import os
from functools import partial

import numpy as np
from rich.console import Console
from rich.table import Table

from faser_backend.core.decision import WHOLE
from faser_backend.policy.calibration import MARGIN_KNOTS
from faser_backend.policy.cost_model import DRAFT, CostModel, OverheadCost
from faser_backend.profiling.calibration import RETENTION
from faser_backend.serving.profile_store import Calibration, Profile

LEGEND = "errors: means of fitted and of held-out calls; spread: between repeats of a call"
WIDE = 200  # columns of a table that nobody sees
BUSY_SPREAD_PERCENT = 15.0  # an idle machine repeats a call within a few percent


def print_tables(profile: Profile, costs: CostModel, *, has_exits: bool) -> None:
    """Prints all results on stdout."""
    console, calibration = table_console(), profile.calibration
    printed = partial(console.print, highlight=False, soft_wrap=True)
    console.print(error_table(profile, costs))
    printed(LEGEND)
    printed(overhead_line(profile.overhead, has_exits=has_exits))
    if max(error.spread_percent for error in profile.errors) > BUSY_SPREAD_PERCENT:
        printed("The machine was busy during the measurement: run this again when it is idle.")
    source = f"{calibration.num_fitted} draft tokens of {calibration.source}"
    printed(f"\ncalibrated on {source}; thresholds keep {RETENTION:.0%} of the accepted tokens")
    console.print(chance_table(calibration, has_model=(DRAFT, WHOLE) in profile.costs))
    if calibration.exits:
        console.print(exit_table(calibration))
    elif has_exits:
        printed("exits not calibrated: too few draft tokens were accepted or rejected")


def overhead_line(overhead: OverheadCost, *, has_exits: bool) -> str:
    line = (
        f"around the model calls: {overhead.step_us:.0f} us a step + {overhead.step_sequence_us:.1f} us a sequence "
        f"+ {overhead.step_row_us:.1f} us a row; {overhead.draft_us:.0f} us a draft call "
        f"+ {overhead.draft_sequence_us:.1f} us a sequence, and {overhead.draft_round_us:.0f} us a round of them "
        f"+ {overhead.draft_round_sequence_us:.1f} us a sequence; {overhead.trim_us:.0f} us more a trimmed draft call "
        f"+ {overhead.trim_sequence_us:.1f} us a sequence; {overhead.lanes_us:.0f} us to hand over to lanes"
    )
    if has_exits:
        line += f"; {overhead.exit_us:.0f} us an exit + {overhead.exit_row_us:.1f} us a row"
    return line


def error_table(profile: Profile, costs: CostModel) -> Table:
    """Returns a line per model and partition: two predicted calls, then mean absolute errors in percent."""
    rows = []
    for error in profile.errors:
        examples = costs.call_us(error.model, error.partition, np.array([1, 80]), np.array([1, 16]), 128)
        percents = (error.fitted_percent, error.held_out_percent, error.spread_percent)
        rows.append(
            [error.model, error.partition, *(f"{us:.0f}" for us in examples), *(f"{each:.1f}" for each in percents)]
        )
    title = "Predicted times of model calls at context 128, and the errors of predictions"
    units = ("1 row, us", "16 x 5 rows, us", "fit error %", "held-out error %", "spread %")
    return terminal_table(title, ["model", "cores", *units], rows)


def chance_table(calibration: Calibration, *, has_model: bool = True) -> Table:
    """Returns a line per bin of draft margins: predicted and observed chance that a draft token is accepted.

    has_model: False for n-grams, whose margin counts the matching tokens before a draft token.
    """
    knots = MARGIN_KNOTS.tolist()
    rows = [
        [
            f"{each.margin:g}" if has_model else str(1 + knots.index(each.margin)),
            *(f"{chance:.3f}" for chance in (each.predicted, each.observed)),
            str(each.num_tested),
        ]
        for each in calibration.reliability
    ]
    first = "margin of the draft's choice, from" if has_model else "matching tokens, from"
    return terminal_table("Chance of acceptance, held out", [first, "predicted", "observed", "tokens"], rows)


def exit_table(calibration: Calibration) -> Table:
    """Returns a line per exit: draft rows that it ends, and useful ones that it keeps, alone and after trimming."""
    rows = []
    for each in calibration.exits:
        shares = (np.mean(each.pruned_shares), each.retention, each.trimmed_pruned_share, each.trimmed_retention)
        rows.append([str(each.layer), *(f"{100 * share:.1f}" for share in shares)])
    headings = ["layer", "ends %", "keeps %", "after trimming: ends %", "keeps %"]
    return terminal_table("Exits, held out: draft rows ended, and useful ones kept", headings, rows)


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
