"""Compares rows of bench.json: speed-ups, the best static length, and whether answers are equal.

A closed loop is judged by tokens per second. Arrivals set the throughput of a bursty load, so it is judged by the
median time of an answer. Ratios are taken within a repeat, in which contestants rotate, and their median is shown: a
machine that is slower for a minute is slower for both. `none` runs on two engines. The ratio of these equal engines is
the spread that any other ratio must exceed.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from faser_backend.lab.contestants import AGAIN, BURSTY, FIXED_REFERENCE, REFERENCE
from faser_backend.lab.tables import Column, markdown_table

CLEAR_GAIN, CLEAR_GAIN_OF_ONE = 0.02, 0.05  # least difference that counts, with several repeats and with one

METRICS = {"speedup": ("tokens_per_s", 1), "e2e_gain": ("e2e_ms_p50", -1)}  # a gain's figure, and its power

Row = dict[str, Any]


def groups(rows: list[Row]) -> dict[tuple[str, float], list[Row]]:
    """Returns the rows grouped by load and temperature, in order."""
    found: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        found.setdefault((row["load"], row["temperature"]), []).append(row)
    return found


def metric_of(row: Row) -> str:
    """Returns the metric by which the row's load is judged."""
    return "e2e_gain" if row["load"] == BURSTY.name else "speedup"


def gains(row: Row, reference: Row, metric: str = "") -> list[float]:
    """Returns the gain of `row` over `reference` for each repeat, in a metric or in that of its load."""
    key, power = METRICS[metric or metric_of(row)]
    pairs = zip(row[f"{key}_repeats"], reference[f"{key}_repeats"], strict=True)
    return [(mine / others) ** power for mine, others in pairs]


def gain(row: Row, reference: Row) -> float:
    return median(gains(row, reference))


def aa_difference(row: Row) -> float:
    """Returns the largest difference of equal engines from 1 in any repeat; 0.0 if it was not measured."""
    spread = row.get("aa_spread")
    return max(1 - spread["least"], spread["most"] - 1) if spread else 0.0


def is_beyond_spread(row: Row, ratio: float) -> bool:
    """Returns whether a ratio of the row's differs from 1 by more than equal engines did, and by a least amount."""
    least = CLEAR_GAIN if len(row["tokens_per_s_repeats"]) > 1 else CLEAR_GAIN_OF_ONE
    return abs(ratio - 1) > max(least, aa_difference(row))


def best_static(group: list[Row]) -> Row | None:
    """Returns the best fixed length under this load, which is known only afterwards."""
    static = [row for row in group if row["spec"].startswith("fixed:") and not row["options"]]
    return max(static, key=lambda row: gain(row, static[0]), default=None)


def add_comparisons(rows: list[Row]) -> None:
    """Writes ratios and the spread of equal engines into the rows, and takes out those of the second reference."""
    for group in groups(rows).values():
        by_name, static = {row["policy"]: row for row in group}, best_static(group)
        references = {"none": by_name.get(REFERENCE), "fixed4": by_name.get(FIXED_REFERENCE), "best_static": static}
        equal = gains(by_name[AGAIN.name], by_name[REFERENCE]) if AGAIN.name in by_name else None
        for row in group:
            row["is_best_static"] = row is static
            row["aa_spread"] = equal and {"least": min(equal), "median": median(equal), "most": max(equal)}
            for name, reference in references.items():
                for key in METRICS:
                    found = None if reference is None else gains(row, reference, key)
                    row[f"{key}_{name}"] = found and median(found)
                    row[f"{key}_{name}_range"] = found and [min(found), max(found)]
    rows[:] = [row for row in rows if row["policy"] != AGAIN.name]


def ratio_of(row: Row, reference: str) -> str | None:
    """Returns the row's ratio in the metric of its load, marked if equal engines differ as much. reference: `none`,
    `fixed4` or `best_static`."""
    ratio = row[f"{metric_of(row)}_{reference}"]
    if ratio is None:
        return None
    return f"{ratio:.2f}" + ("" if ratio == 1.0 or is_beyond_spread(row, ratio) else " (within spread)")


def equal_engines(row: Row) -> str | None:
    return row["aa_spread"] and "{least:.2f}-{most:.2f}".format(**row["aa_spread"])


def table(rows: list[Row]) -> list[str]:
    """Returns the lines of a short table of all loads, for a terminal."""
    columns = (
        Column("load", _load_of),
        Column("policy", "policy"),
        Column("tokens/s", "tokens_per_s", "{:.0f}"),
        Column("of none", lambda row: ratio_of(row, "none")),
        Column("equal engines", equal_engines),
        Column("drafted", "rows_drafted"),
        Column("accepted", "rows_accepted"),
        Column("plan, mean us", "plan_us_mean", "{:.0f}"),
    )
    return markdown_table(columns, rows)


def spread_warning(rows: list[Row]) -> list[str]:
    """Returns a warning if equal engines differ by more than the least difference that counts."""
    found = {_load_of(row): aa_difference(row) for row in rows}
    wide = [f"{difference:.0%} ({load})" for load, difference in found.items() if difference > CLEAR_GAIN]
    if not wide:
        return []
    return [f"Equal engines differ by {', '.join(wide)}: the machine is busy, differences below that say nothing."]


def answers_compared(rows: list[Row]) -> str:
    """Returns how many answers differ from those of the reference, in words."""
    different = sum(row["num_different"] for row in rows)
    compared = sum(row["num_jobs"] for row in rows if row["policy"] != REFERENCE)
    if not different:
        return f"All {compared} answers compared equal those of {REFERENCE}, token by token."
    return (
        f"{different} of {compared} answers differ from those of {REFERENCE}. scripts/check_equality.py distinguishes "
        "errors from nearly equal scores, which another shape of a call may swap."
    )


def _load_of(row: Row) -> str:
    sampling = "greedy" if row["temperature"] == 0 else f"T = {row['temperature']:g}"
    return f"{row['load']} load, {sampling}"
