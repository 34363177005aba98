"""The tables that `faser profile` prints: how well costs are predicted, how well chances are, what exits are worth."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
from rich.console import Console
from rich.table import Table

from faser_backend.policy.cost_model import CostModel, OverheadCost
from faser_backend.serving.profile_calibration import Calibration
from faser_backend.serving.profile_store import Profile
from lab.tables import Column, terminal_table

RULES = ("trim", "exit", "cascade")  # of a Replay
BUSY_SPREAD_PERCENT = 15.0  # an idle machine repeats a call within a few percent


def print_tables(profile: Profile, costs: CostModel) -> None:
    """On stdout."""
    console = Console()
    calibration = profile.calibration
    console.print(error_table(profile, costs))
    console.print(overhead_line(profile.overhead, has_exits=bool(profile.exit_points)), highlight=False, soft_wrap=True)
    if max(error.spread_percent for error in profile.errors) > BUSY_SPREAD_PERCENT:
        console.print("The machine was busy while it was measured: run this again when it is idle.", highlight=False)
    console.print(
        f"\ncalibrated on {calibration.num_fitted} draft tokens of {calibration.source}, "
        f"thresholds for {calibration.retention:.0%} of accepted tokens kept",
        highlight=False,
        soft_wrap=True,
    )
    console.print(chance_table(calibration))
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
        *(Column(name, name, "{:.0f}") for name in ("1 row us", "16x5 us")),
        *(Column(name, name, "{:.1f}") for name in ("fit %", "held out %", "spread %")),
        Column("new shape us", "new shape us", "{:.0f}"),
    ]
    rows = []
    for error in profile.errors:
        examples = costs.call_us(error.model, error.partition, np.array([1, 80]), np.array([1, 16]), 128)
        errors = (error.fitted_percent, error.held_out_percent, error.spread_percent, error.new_shape_us)
        values = (error.model, error.partition, *examples, *errors)
        rows.append({column.heading: value for column, value in zip(columns, values, strict=True)})
    return terminal_table("Predicted calls at context 128, and mean errors of predictions", columns, rows)


def chance_table(calibration: Calibration) -> Table:
    """A line per bin of draft margins: predicted and observed chance that a draft token is accepted."""
    columns = (
        Column("margin from", "margin", "{:g}"),
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
