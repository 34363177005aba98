"""Ways in which a stored profile may be wrong, and what the refusal of each names."""

from __future__ import annotations

from typing import Any

from faser_backend.policy.cost_model import TARGET


def drop_costs(fields: dict[str, Any]) -> None:
    del fields["costs"]


def falling_curve(fields: dict[str, Any]) -> None:
    fields["costs"][0]["segments"][0]["rows"]["values_us"][0] = 1e12


def not_a_number(fields: dict[str, Any]) -> None:
    fields["overhead"]["step_us"] = float("nan")


def too_few_segments(fields: dict[str, Any]) -> None:
    fields["costs"][0]["segments"].pop()


def no_draft(fields: dict[str, Any]) -> None:
    fields["costs"] = [entry for entry in fields["costs"] if entry["model"] == TARGET]


def wrong_types(fields: dict[str, Any]) -> None:
    fields["costs"][0]["segments"] = [[1.0, 2.0]]


def files_that_are_no_table(fields: dict[str, Any]) -> None:
    fields["fingerprint"]["files"] = ["target.0.onnx"]


def other_format(fields: dict[str, Any]) -> None:
    fields["format_version"] = 99


def before_calibration(fields: dict[str, Any]) -> None:
    fields["format_version"] = 1
    del fields["calibration"]


def before_kinds(fields: dict[str, Any]) -> None:
    fields["format_version"] = 3
    all_kinds_together(fields)


def all_kinds_together(fields: dict[str, Any]) -> None:
    margins = fields["calibration"]["margins"]
    del margins["sampled"]
    margins |= margins.pop("greedy")


def no_sampled_requests(fields: dict[str, Any]) -> None:
    del fields["calibration"]["margins"]["sampled"]


def more_accepted_than_tested(fields: dict[str, Any]) -> None:
    fields["calibration"]["margins"]["greedy"]["accepted"][2] = 1e9


def more_accepted_of_sampled_requests(fields: dict[str, Any]) -> None:
    fields["calibration"]["margins"]["sampled"]["accepted"][2] = 1e9


def too_few_bins(fields: dict[str, Any]) -> None:
    for counts in fields["calibration"]["margins"]["sampled"].values():
        counts.pop()


def other_bins(fields: dict[str, Any]) -> None:
    fields["calibration"]["margins"]["knots"][1] = 0.3


def threshold_above_one(fields: dict[str, Any]) -> None:
    fields["calibration"]["exits"][0]["calibration"]["threshold"] = 1.5


def infinite_weight(fields: dict[str, Any]) -> None:
    fields["calibration"]["exits"][0]["calibration"]["bias"] = float("inf")


def exit_of_another_cut(fields: dict[str, Any]) -> None:
    fields["calibration"]["exits"][0]["calibration"]["layer"] = 2


DAMAGES = [
    (drop_costs, "malformed"),
    (falling_curve, "never fall"),
    (not_a_number, "non-negative"),
    (too_few_segments, "segments"),
    (no_draft, "draft on the whole machine"),
    (wrong_types, "malformed"),
    (files_that_are_no_table, "malformed"),
    (other_format, "format_version = 99"),
    (before_calibration, "format_version = 1: this version reads 4"),
    (before_kinds, "format_version = 3: this version reads 4"),
    (all_kinds_together, "malformed"),
    (no_sampled_requests, "malformed"),
    (more_accepted_than_tested, "between 0 and those tested"),
    (more_accepted_of_sampled_requests, "between 0 and those tested"),
    (too_few_bins, "margins need 14 bins"),
    (other_bins, "other bins"),
    (threshold_above_one, r"must lie in \[0, 1\]"),
    (infinite_weight, "finite"),
    (exit_of_another_cut, "no exit at layer 2"),
]
