"""Rows beside each other: speed-ups, the best static length, and the ladder in plain words.

A closed loop is judged by its tokens per second. In a bursty load the arrivals set the throughput, so it is judged by
the median time of a whole answer. Ratios are taken within a repeat, in which everyone had a turn, and their median is
shown: a machine that is slower for a minute is slower for both.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from faser_backend.lab.contestants import BURSTY, FIXED_REFERENCE, REFERENCE, WHOLE

CLEAR_GAIN, CLEAR_GAIN_OF_ONE = 0.02, 0.05  # in the median of several repeats, in a single one
BUSY_SPREAD = 0.15  # between the slowest and the fastest repeat, of the median throughput

Row = dict[str, Any]


def groups(rows: list[Row]) -> dict[tuple[str, float], list[Row]]:
    """Returns the rows grouped by load and temperature, in order."""
    found: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        found.setdefault((row["load"], row["temperature"]), []).append(row)
    return found


def speedups(row: Row, reference: Row) -> list[float]:
    """Returns throughput relative to the reference, for each repeat."""
    pairs = zip(row["tokens_per_s_repeats"], reference["tokens_per_s_repeats"], strict=True)
    return [mine / others for mine, others in pairs]


def latency_gains(row: Row, reference: Row) -> list[float]:
    """The reference's median time of an answer over the row's, in each repeat."""
    pairs = zip(row["e2e_ms_p50_repeats"], reference["e2e_ms_p50_repeats"], strict=True)
    return [others / mine for mine, others in pairs]


def gains(row: Row, reference: Row) -> list[float]:
    """Returns the gain of `row` over `reference` in the metric of its load, for each repeat."""
    return (latency_gains if row["load"] == BURSTY.name else speedups)(row, reference)


def gain(row: Row, reference: Row) -> float:
    return median(gains(row, reference))


def is_clear(row: Row, reference: Row) -> bool:
    """Returns whether all repeats agree which of the two is better, by a clear margin."""
    ratios = gains(row, reference)
    least = CLEAR_GAIN if len(ratios) > 1 else CLEAR_GAIN_OF_ONE
    return (min(ratios) > 1.0 or max(ratios) < 1.0) and abs(median(ratios) - 1.0) > least


def best_static(group: list[Row]) -> Row | None:
    """The fixed length that did best under this load: what a perfect choice made in advance gives."""
    static = [row for row in group if row["spec"].startswith("fixed:") and not row["options"]]
    return max(static, key=lambda row: gain(row, static[0]), default=None)


def add_comparisons(rows: list[Row]) -> None:
    """Writes speed-ups into the rows, and marks the best static length of each load."""
    for group in groups(rows).values():
        by_name, static = {row["policy"]: row for row in group}, best_static(group)
        references = {"none": by_name.get(REFERENCE), "fixed4": by_name.get(FIXED_REFERENCE), "best_static": static}
        for row in group:
            row["is_best_static"] = row is static
            for name, reference in references.items():
                for key, ratios in (("speedup", speedups), ("e2e_gain", latency_gains)):
                    found = None if reference is None else ratios(row, reference)
                    row[f"{key}_{name}"] = None if found is None else median(found)
                    row[f"{key}_{name}_range"] = None if found is None else [min(found), max(found)]


def spread_warning(rows: list[Row]) -> list[str]:
    """A warning where repeats of the same thing differed much, as they do on a busy machine."""
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


def in_words(rows: list[Row]) -> list[str]:
    """The ladder in sentences, made of its numbers alone."""
    sentences = []
    for (load, temperature), group in groups(rows).items():
        sampling = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        sentences.append(f"{load.capitalize()} load, {sampling}: {' '.join([_leader(group), *_others(group)])}")
    different = sum(row["num_different"] for row in rows)
    compared = sum(row["num_jobs"] for row in rows if row["policy"] != REFERENCE)
    sentences.append(
        f"All {compared} answers compared are the same, token by token, whatever decoded them."
        if different == 0
        else f"{different} of {compared} answers differ from those of `{REFERENCE}`: scripts/check_equality.py tells "
        "nearly equal scores, which another shape of a call may swap, from errors."
    )
    return sentences


def _leader(group: list[Row]) -> str:
    ladder = [row for row in group if not row["options"]]
    reference = next(row for row in ladder if row["policy"] == REFERENCE)
    best = max(ladder, key=lambda row: gain(row, reference))
    if best is reference:
        return f"no policy beats `{REFERENCE}`: speculation does not pay here."
    close = [f"`{row['policy']}`" for row in ladder if row not in (best, reference) and not is_clear(best, row)]
    within = f" (within the spread of it: {', '.join(close)})" if close else ""
    return f"`{best['policy']}` leads with {gain(best, reference):.2f}x of `{REFERENCE}`{within}."


def _others(group: list[Row]) -> list[str]:
    """`faser` against the reference, the usual length and the best one; then every ablation against its policy."""
    by_name, static = {row["policy"]: row for row in group}, best_static(group)
    whole, told = by_name.get(WHOLE), []
    if whole is not None:
        references = {f"`{name}`": by_name[name] for name in (REFERENCE, FIXED_REFERENCE) if name in by_name}
        if static is not None and static["policy"] != FIXED_REFERENCE:
            references[f"the best static length (`{static['policy']}`)"] = static
        for name, reference in references.items():
            ratios = gains(whole, reference)
            spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
            told.append(f"{median(ratios):.2f}x{spread} of {name}")
        told = [f"`{WHOLE}` is at {', '.join(told)}."]
    for row in group:
        if row["options"] and (plain := by_name.get(row["spec"])) is not None:
            ratio = gain(row, plain)
            verdict = "makes no clear difference" if not is_clear(row, plain) else "pays" if ratio > 1 else "costs"
            told.append(f"`{row['policy']}` {verdict} ({ratio:.2f}x of `{row['spec']}`).")
    return told
