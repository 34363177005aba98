"""Compares rows of bench.json: speed-ups, the best static length, and the ladder in words.

A closed loop is judged by tokens per second. Arrivals set the throughput of a bursty load, so it is judged by the
median time of an answer. Ratios are taken within a repeat, in which contestants rotate, and their median is shown: a
machine that is slower for a minute is slower for both. `none` runs on two engines. The ratio of these equal engines is
the spread that any other ratio must exceed.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from faser_backend.lab.contestants import AGAIN, BURSTY, FIXED_REFERENCE, REFERENCE, WHOLE
from faser_backend.lab.tables import Column, markdown_table

CLEAR_GAIN, CLEAR_GAIN_OF_ONE = 0.02, 0.05  # least difference that counts, with several repeats and with one
BUSY_NOISE = 0.1  # beyond it the report says that the machine was busy

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


def noise(row: Row) -> float:
    """Returns the relative difference up to which a ratio of the row's says nothing: at least that of equal engines."""
    least = CLEAR_GAIN if len(row["tokens_per_s_repeats"]) > 1 else CLEAR_GAIN_OF_ONE
    spread = row.get("aa_spread") or {"least": 1.0, "most": 1.0}
    return max(least, 1 / spread["least"] - 1, spread["most"] - 1)


def is_beyond_noise(row: Row, ratio: float) -> bool:
    return max(ratio, 1 / ratio) - 1 > noise(row)


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
    """Returns the row's ratio in the metric of its load, marked (~1) if it is noise. reference: `none`, `fixed4` or
    `best_static`."""
    ratio = row[f"{metric_of(row)}_{reference}"]
    if ratio is None:
        return None
    return f"{ratio:.2f}" + ("" if ratio == 1.0 or is_beyond_noise(row, ratio) else " (~1)")


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


def headline(rows: list[Row]) -> list[str]:
    """Returns in three sentences what the ladder means for this machine."""
    names = [row["policy"] for row in rows if not row["options"]]
    mine = [row for row in rows if row["policy"] == (WHOLE if WHOLE in names else names[-1])]
    different = sum(row["num_different"] for row in rows)
    compared = sum(row["num_jobs"] for row in rows if row["policy"] != REFERENCE)
    answers = f"{different} of {compared} answers differ from" if different else f"all {compared} answers equal"
    each = [f"{noise(row):.0%} under {_load_of(row)}" for row in mine]
    busy = " of a busy machine" if max(map(noise, mine)) > BUSY_NOISE else ""
    return [
        *_standing(mine, "none", "plain decoding"),
        *_standing(mine, "best_static", "the best fixed length, known only afterwards"),
        f"Differences up to {', '.join(each)} are noise{busy}; {answers} those of plain decoding.",
    ]


def _standing(rows: list[Row], reference: str, name: str) -> list[str]:
    """Returns a sentence that compares one policy's rows with a reference, if there is one."""
    loads: dict[str, list[str]] = {"ahead": [], "level": [], "behind": []}
    for row in rows:
        ratio = row[f"{metric_of(row)}_{reference}"]
        if ratio is not None and row["policy"] != REFERENCE:
            verdict = "level" if not is_beyond_noise(row, ratio) else "ahead" if ratio > 1 else "behind"
            loads[verdict].append(f"{_load_of(row)} ({ratio:.2f}x)")
    found = [f"{verdict} under {', '.join(under)}" for verdict, under in loads.items() if under]
    return [f"Against {name}, {rows[0]['policy']} is {'; '.join(found)}."] if found else []


def _load_of(row: Row) -> str:
    return f"{'greedy ' if row['temperature'] == 0 else ''}{row['load']} load"
