"""The tables that `faser profile` prints: how well costs are predicted, how well chances are, what exits are worth."""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.table import Table

from faser_backend.policy.cost_model import CostModel, OverheadCost
from faser_backend.serving.profile_calibration import Calibration
from faser_backend.serving.profile_store import Profile

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
    table = _table("Predicted calls at context 128, and mean errors of predictions")
    table.add_column("model", no_wrap=True)
    table.add_column("cores", no_wrap=True)
    for name in ("1 row us", "16x5 us", "fit %", "held out %", "spread %", "new shape us"):
        table.add_column(name, justify="right")
    for error in profile.errors:
        examples = costs.call_us(error.model, error.partition, np.array([1, 80]), np.array([1, 16]), 128)
        table.add_row(
            error.model,
            error.partition,
            *(f"{us:.0f}" for us in examples),
            f"{error.fitted_percent:.1f}",
            f"{error.held_out_percent:.1f}",
            f"{error.spread_percent:.1f}",
            f"{error.new_shape_us:.0f}",
        )
    return table


def chance_table(calibration: Calibration) -> Table:
    """A line per bin of draft margins: predicted and observed chance that a draft token is accepted."""
    table = _table("Chance of acceptance, held out")
    for name in ("margin from", "predicted", "observed", "tokens"):
        table.add_column(name, justify="right")
    for each in calibration.reliability:
        table.add_row(f"{each.margin:g}", f"{each.predicted:.3f}", f"{each.observed:.3f}", str(each.num_tested))
    return table


def exit_table(calibration: Calibration) -> Table:
    """A line per exit and draft length: percent of row-layers saved, and of useful draft rows kept."""
    table = _table("Exits, held out: AUC; percent of row-layers saved / useful rows kept")
    for name in ("layer", "AUC exit", "draft", "both", "drafted", "trim", "exit", "trim+exit"):
        table.add_column(name, justify="right", no_wrap=True)
    for report in calibration.exits:
        scores = (f"{auc:.3f}" for auc in (report.margin_auc, report.draft_auc, report.both_auc))
        lead = (str(report.calibration.layer), *scores)
        for length, replay in report.replays.items():
            pairs = (
                (replay.trim_saved, replay.trim_kept),
                (replay.exit_saved, replay.exit_kept),
                (replay.cascade_saved, replay.cascade_kept),
            )
            table.add_row(*lead, str(length), *(f"{100 * saved:.1f}/{100 * kept:.1f}" for saved, kept in pairs))
            lead = ("", "", "", "")
    return table


def _table(title: str) -> Table:
    return Table(title=title, box=None, pad_edge=False, title_justify="left", title_style="")
