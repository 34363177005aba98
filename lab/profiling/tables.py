"""The tables that `faser profile` prints: how well costs are predicted, how well chances are, what exits are worth."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
from rich.table import Table

from faser_backend.core.decision import WHOLE
from faser_backend.policy.calibration import MARGIN_KNOTS
from faser_backend.policy.cost_model import DRAFT, CostModel, OverheadCost
from faser_backend.serving.profile_calibration import Calibration
from faser_backend.serving.profile_store import Profile
from lab.tables import Column, table_console, terminal_table

LEGEND = (
    "errors: mean of calls that the fit saw, and of others that it did not; spread: how far apart repeats of a call "
    "lie; first call: what the first one of a shape takes more"
)
RULES = ("trim", "exit", "cascade")  # of a Replay
BUSY_SPREAD_PERCENT = 15.0  # an idle machine repeats a call within a few percent


def print_tables(profile: Profile, costs: CostModel) -> None:
    """On stdout."""
    console = table_console()
    calibration = profile.calibration
    console.print(error_table(profile, costs))
    console.print(LEGEND, highlight=False, soft_wrap=True)
    console.print(overhead_line(profile.overhead, has_exits=bool(profile.exit_points)), highlight=False, soft_wrap=True)
    if max(error.spread_percent for error in profile.errors) > BUSY_SPREAD_PERCENT:
        console.print("The machine was busy while it was measured: run this again when it is idle.", highlight=False)
    console.print(
        f"\ncalibrated on {calibration.num_fitted} draft tokens of {calibration.source}, "
        f"thresholds for {calibration.retention:.0%} of accepted tokens kept",
        highlight=False,
        soft_wrap=True,
    )
    console.print(chance_table(calibration, has_model=(DRAFT, WHOLE) in profile.costs))
    if calibration.exits:
        console.print(exit_table(calibration))
    elif profile.exit_points:
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
    columns = [
        *(Column(name, name) for name in ("model", "cores")),
        *(Column(name, name, "{:.0f}") for name in ("1 row, us", "16 x 5 rows, us")),
        *(Column(name, name, "{:.1f}") for name in ("fit error %", "held-out error %", "spread %")),
        Column("first call +us", "first call +us", "{:.0f}"),
    ]
    rows = []
    for error in profile.errors:
        examples = costs.call_us(error.model, error.partition, np.array([1, 80]), np.array([1, 16]), 128)
        first_us = max(error.new_shape_us, 0.0)  # below: noise
        errors = (error.fitted_percent, error.held_out_percent, error.spread_percent, first_us)
        values = (error.model, error.partition, *examples, *errors)
        rows.append({column.heading: value for column, value in zip(columns, values, strict=True)})
    return terminal_table(
        "What model calls take at context 128, as predicted, and how far predictions are off", columns, rows
    )


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
    """A line per exit and draft length: percent of row-layers saved, and of useful draft rows kept."""
    names = ("layer", "AUC exit", "draft", "both", "drafted", "trim", "exit", "trim+exit")
    rows = []
    for report in calibration.exits:
        aucs = (f"{auc:.3f}" for auc in (report.margin_auc, report.draft_auc, report.both_auc))
        lead = (report.calibration.layer, *aucs)
        for length, replay in report.replays.items():
            pairs = ((getattr(replay, f"{name}_saved"), getattr(replay, f"{name}_kept")) for name in RULES)
            shown = (f"{100 * saved:.1f}/{100 * kept:.1f}" for saved, kept in pairs)
            rows.append(dict(zip(names, (*lead, length, *shown), strict=True)))
            lead = ("", "", "", "")
    title = "Exits, held out: AUC; percent of row-layers saved / useful rows kept"
    return terminal_table(title, [Column(name, name) for name in names], rows)
