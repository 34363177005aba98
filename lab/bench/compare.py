"""Rows beside each other: speed-ups, the best static length, and the ladder in plain words.

A closed loop is judged by its tokens per second. In a bursty load the arrivals set the throughput,
so it is judged by the median time of a whole answer. Ratios are taken within a repeat, in which everyone had a turn,
and their median is told: a machine that is slower for a minute is slower for both.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from lab.contestants import BURSTY, FIXED_REFERENCE, REFERENCE, WHOLE

CLEAR_GAIN, CLEAR_GAIN_OF_ONE = 0.02, 0.05  # in the median of several repeats, in a single one

Row = dict[str, Any]
BUSY_SPREAD = 0.15  # between the slowest and the fastest repeat, of the median throughput


def groups(rows: list[Row]) -> dict[tuple[str, float], list[Row]]:
    """Rows of the same load and temperature, in order."""
    found: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        found.setdefault((row["load"], row["temperature"]), []).append(row)
    return found


def gains(row: Row, reference: Row) -> list[float]:
    """By what factor `row` does better than `reference` in the measure of its load, in each repeat."""
    return latency_gains(row, reference) if row["load"] == BURSTY.name else speedups(row, reference)


def gain(row: Row, reference: Row) -> float:
    return median(gains(row, reference))


def speedups(row: Row, reference: Row) -> list[float]:
    """Throughput over the reference's, in each repeat."""
    pairs = zip(row["tokens_per_s_repeats"], reference["tokens_per_s_repeats"], strict=True)
    return [mine / others for mine, others in pairs]


def latency_gains(row: Row, reference: Row) -> list[float]:
    """The reference's median time of an answer over the row's, in each repeat."""
    pairs = zip(row["e2e_ms_p50_repeats"], reference["e2e_ms_p50_repeats"], strict=True)
    return [others / mine for mine, others in pairs]


def is_clear(row: Row, reference: Row) -> bool:
    """Whether all repeats agree on which of the two does better, and by more than a little."""
    ratios = gains(row, reference)
    least = CLEAR_GAIN if len(ratios) > 1 else CLEAR_GAIN_OF_ONE
    return (min(ratios) > 1.0 or max(ratios) < 1.0) and abs(median(ratios) - 1.0) > least


def add_comparisons(rows: list[Row]) -> None:
    """Writes speed-ups into the rows, and marks the best static length of each load."""
    for group in groups(rows).values():
        by_name = {row["policy"]: row for row in group}
        static = best_static(group)
        references = {"none": by_name.get(REFERENCE), "fixed4": by_name.get(FIXED_REFERENCE), "best_static": static}
        for row in group:
            row["is_best_static"] = row is static
            for name, reference in references.items():
                for key, ratios in (("speedup", speedups), ("e2e_gain", latency_gains)):
                    found = None if reference is None else ratios(row, reference)
                    row[f"{key}_{name}"] = None if found is None else median(found)
                    row[f"{key}_{name}_range"] = None if found is None else [min(found), max(found)]


def spread_warning(rows: list[Row]) -> list[str]:
    """What to tell where repeats of the same thing differed much, as they do on a busy machine."""
    spreads = [
        (row["tokens_per_s_max"] - row["tokens_per_s_min"]) / row["tokens_per_s"]
        for row in rows
        if row["load"] != BURSTY.name and row["repeats"] > 1
    ]
    if not spreads or median(spreads) < BUSY_SPREAD:
        return []
    return [
        f"Repeats of the same run differed by {median(spreads):.0%} (median): the machine was busy, or the runs too "
        "short. Repeat this when the machine is idle, without --quick, before believing small differences."
    ]


def best_static(group: list[Row]) -> Row | None:
    """The fixed length that did best under this load: what a perfect choice made in advance gives."""
    static = [row for row in group if row["spec"].startswith("fixed:") and not row["options"]]
    return max(static, key=lambda row: gain(row, static[0]), default=None)


def in_words(rows: list[Row]) -> list[str]:
    """The ladder in sentences, made of its numbers alone."""
    sentences = []
    for (load, temperature), group in groups(rows).items():
        parts = [_winner(group), _whole(group), *_mechanisms(group)]
        law = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        sentences.append(f"{load.capitalize()} load, {law}: {' '.join(filter(None, parts))}")
    different = sum(row["num_different"] for row in rows)
    compared = sum(row["num_jobs"] for row in rows if row["policy"] != REFERENCE)
    sentences.append(
        f"All {compared} answers compared are the same, token by token, whatever decoded them."
        if different == 0
        else f"{different} of {compared} answers differ from those of `{REFERENCE}`. Float rounding depends on "
        "the shape of a call and may swap two nearly equal scores; "
        "scripts/check_equality.py tells such near-ties from errors."
    )
    return sentences


def _winner(group: list[Row]) -> str:
    ladder = [row for row in group if not row["options"]]
    reference = next(row for row in ladder if row["policy"] == REFERENCE)
    ranked = sorted(ladder, key=lambda row: gain(row, reference), reverse=True)
    best = ranked[0]
    if best is reference:
        return f"no policy beats `{REFERENCE}`: speculation does not pay here."
    shown = f"{best['tokens_per_s']:.0f} tokens/s"
    if best["load"] == BURSTY.name:
        shown = f"{best['e2e_ms_p50']:.0f} ms for a whole answer (median)"
    text = f"`{best['policy']}` leads with {shown}, {gain(best, reference):.2f}x of `{REFERENCE}`"
    close = [f"`{row['policy']}`" for row in ranked[1:] if row is not reference and not is_clear(best, row)]
    slower = [f"`{row['policy']}`" for row in ladder if gain(row, reference) < 1 and is_clear(row, reference)]
    text += f" (within the spread of it: {', '.join(close)})" if close else ""
    return text + (f"; slower than `{REFERENCE}`: {', '.join(slower)}." if slower else ".")


def _whole(group: list[Row]) -> str:
    """`faser` against the reference, the usual length and the best one."""
    by_name, static = {row["policy"]: row for row in group}, best_static(group)
    if WHOLE not in by_name:
        return ""
    references = {f"`{name}`": by_name[name] for name in (REFERENCE, FIXED_REFERENCE) if name in by_name}
    if static is not None and static["policy"] != FIXED_REFERENCE:
        references[f"the best static length (`{static['policy']}`)"] = static
    told = []
    for name, reference in references.items():
        ratios = gains(by_name[WHOLE], reference)
        spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
        told.append(f"{median(ratios):.2f}x{spread} of {name}")
    return f"`{WHOLE}` is at {', '.join(told)}."


MECHANISMS = {
    ("early_exit", "off"): "Early exit",
    ("early_exit", "on"): "Early exit, forced,",
    ("draft", "ngram"): "Drafting by n-grams",
    ("draft", "model+ngram"): "Drafting by model and n-grams",
    ("pipeline", "serial"): "The pipeline",
    ("pipeline", "run_ahead"): "Running ahead",
    ("pipeline", "ping_pong"): "Ping-pong",
}


def _mechanisms(group: list[Row]) -> list[str]:
    """What each ablation says of the mechanism that it takes out or forces."""
    by_name = {row["policy"]: row for row in group}
    told = []
    for row in group:
        plain = by_name.get(row["spec"])
        if not row["options"] or plain is None:
            continue
        (field, value), *_ = row["options"].items()
        takes_out = value in ("off", "serial")
        if not takes_out and not _took_effect(row, field, value):
            told.append(f"`{row['policy']}` was asked for, but nothing of it came to run.")
        elif takes_out and not _took_effect(plain, field, "auto"):
            told.append(f"{MECHANISMS[field, value]} was never chosen by `{row['spec']}`.")
        else:
            change = gain(plain, row) if takes_out else gain(row, plain)
            verdict = "makes no clear difference" if not is_clear(row, plain) else "pays" if change > 1 else "costs"
            told.append(f"{MECHANISMS[field, value]} {verdict} on `{row['spec']}` ({change:.2f}x).")
    return told


def _took_effect(row: Row, field: str, value: str) -> bool:
    """Whether the mechanism ran at all."""
    if field == "early_exit":
        return row["rows_pruned"] > 0
    if field == "draft":
        return row["rows_drafted"] > 0
    return row["share_serial"] < 1 if value == "auto" else row[f"share_{value}"] > 0
