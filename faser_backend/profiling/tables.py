"""The tables that `faser profile` prints: how well costs are predicted, how well chances are, what exits are worth."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
from rich.table import Table

from faser_backend.core.decision import WHOLE
from faser_backend.lab.tables import Column, table_console, terminal_table
from faser_backend.policy.calibration import MARGIN_KNOTS
from faser_backend.policy.cost_model import DRAFT, CostModel, OverheadCost
from faser_backend.profiling.calibration import RETENTION
from faser_backend.serving.profile_store import Calibration, Profile

LEGEND = "errors: mean of calls that the fit saw, and of others that it did not; spread: between repeats of a call"
BUSY_SPREAD_PERCENT = 15.0  # an idle machine repeats a call within a few percent


def print_tables(profile: Profile, costs: CostModel, *, has_exits: bool) -> None:
    """On stdout."""
    console = table_console()
    calibration = profile.calibration
    console.print(error_table(profile, costs))
    console.print(LEGEND, highlight=False, soft_wrap=True)
    console.print(overhead_line(profile.overhead, has_exits=has_exits), highlight=False, soft_wrap=True)
    if max(error.spread_percent for error in profile.errors) > BUSY_SPREAD_PERCENT:
        console.print("The machine was busy while it was measured: run this again when it is idle.", highlight=False)
    console.print(
        f"\ncalibrated on {calibration.num_fitted} draft tokens of {calibration.source}, "
        f"thresholds for {RETENTION:.0%} of accepted tokens kept",
        highlight=False,
        soft_wrap=True,
    )
    console.print(chance_table(calibration, has_model=(DRAFT, WHOLE) in profile.costs))
    if calibration.exits:
        console.print(exit_table(calibration))
    elif has_exits:
        console.print("exits not calibrated: too few draft tokens were accepted, or too few rejected", highlight=False)


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
    """A line per model and partition: two predicted calls, then mean absolute errors in percent."""
    columns = (
        Column("model", "model"),
        Column("cores", "partition"),
        Column("1 row, us", "one_us", "{:.0f}"),
        Column("16 x 5 rows, us", "many_us", "{:.0f}"),
        Column("fit error %", "fitted_percent", "{:.1f}"),
        Column("held-out error %", "held_out_percent", "{:.1f}"),
        Column("spread %", "spread_percent", "{:.1f}"),
    )
    rows = []
    for error in profile.errors:
        examples = costs.call_us(error.model, error.partition, np.array([1, 80]), np.array([1, 16]), 128)
        rows.append(asdict(error) | dict(zip(("one_us", "many_us"), examples, strict=True)))
    title = "What model calls take at context 128, as predicted, and how far predictions are off"
    return terminal_table(title, columns, rows)


def chance_table(calibration: Calibration, *, has_model: bool = True) -> Table:
    """A line per bin of draft margins: predicted and observed chance that a draft token is accepted.

    has_model: n-grams have, in place of a margin, the number of tokens before a draft token that agree.
    """
    knots = MARGIN_KNOTS.tolist()
    columns = (
        Column("lead of the draft's choice, from", "margin", "{:g}")
        if has_model
        else Column("tokens that agree, from", lambda row: 1 + knots.index(row["margin"]), "{:d}"),
        Column("predicted", "predicted", "{:.3f}"),
        Column("observed", "observed", "{:.3f}"),
        Column("tokens", "num_tested"),
    )
    return terminal_table("Chance of acceptance, held out", columns, map(asdict, calibration.reliability))


def exit_table(calibration: Calibration) -> Table:
    """A line per exit: draft rows that it ends and useful ones that it keeps, alone and behind trimming."""
    columns = (
        Column("layer", "layer"),
        Column("ends %", lambda row: 100 * np.mean(row["pruned_shares"]), "{:.1f}"),
        Column("keeps %", lambda row: 100 * row["retention"], "{:.1f}"),
        Column("trimmed before: ends %", lambda row: 100 * row["trimmed_pruned_share"], "{:.1f}"),
        Column("keeps %", lambda row: 100 * row["trimmed_retention"], "{:.1f}"),
    )
    return terminal_table(
        "Exits, held out: draft rows ended, and useful ones kept", columns, map(asdict, calibration.exits)
    )
