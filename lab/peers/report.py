"""The page of a record: where we lose, where we win, then every load of every piece."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from lab import environment
from lab.peers.contestants import OURS, PIECES
from lab.peers.measuring import Load, Record
from lab.tables import Column, markdown_table

Row = dict[str, Any]
EVEN = 0.02  # a ratio this close to one is told among those that are even
DUEL_COLUMNS = (
    Column("law", "law"),
    Column("clients", "num_clients"),
    Column("peer", "peer"),
    Column("weights", "weights"),
    Column("its tokens/s", "theirs", "{:.0f}"),
    Column("ours, best", "mine", "{:.0f}"),
    Column("which", lambda row: f"`{row['which']}`"),
    Column("ours over it", "ratio", "{:.2f}x"),
    Column("lowest to highest", lambda row: f"{row['lowest']:.2f} to {row['highest']:.2f}"),
)
LOAD_COLUMNS = (
    Column("clients", "num_clients"),
    Column("contestant", lambda row: f"`{row['policy']}`"),
    Column("tokens/s", "tokens_per_s", "{:.0f}"),
    Column("lowest", "tokens_per_s_min", "{:.0f}"),
    Column("highest", "tokens_per_s_max", "{:.0f}"),
    Column("of the first", "ratio", "{:.2f}x"),
    Column("lowest to highest", lambda row: f"{row['lowest']:.2f} to {row['highest']:.2f}"),
    Column("ttft p50 ms", "ttft_ms_p50", "{:.0f}"),
    Column("p99", "ttft_ms_p99", "{:.0f}"),
    Column("tpot p50 ms", "tpot_ms_p50", "{:.1f}"),
    Column("mean accepted", lambda row: row["mean_accepted"] or None, "{:.2f}"),
    Column("answers that differ", lambda row: None if row["temperature"] else row["num_different"]),
)


def law(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"T = {temperature:g}"


def named(load: Load) -> str:
    return f"{law(load[0])} with {load[1]}"


def is_ours(row: Row) -> bool:
    return row["policy"].split(",")[0] == OURS


def ratios(row: Row, reference: Row) -> dict[str, float]:
    """Throughput over the reference's, repeat by repeat: median, lowest, highest."""
    pairs = zip(row["tokens_per_s_repeats"], reference["tokens_per_s_repeats"], strict=True)
    found = [mine / theirs for mine, theirs in pairs]
    return {"ratio": median(found), "lowest": min(found), "highest": max(found)}


def duels(record: Record) -> Iterator[Row]:
    """Per piece and load: the best of ours against the best of the peer's, by throughput. Worst first."""
    found = []
    for name, piece in record.pieces.items():
        for load in piece["loads"]:
            sides = [[row for row in load["rows"] if is_ours(row) is own] for own in (True, False)]
            mine, theirs = (max(side, key=lambda row: row["tokens_per_s"]) for side in sides)
            found.append(
                {"law": law(load["temperature"]), "num_clients": load["num_clients"], "peer": theirs["policy"]}
                | {"weights": load["meta"]["weights"], "theirs": theirs["tokens_per_s"], "piece": name}
                | {"mine": mine["tokens_per_s"], "which": mine["policy"], **ratios(mine, theirs)}
            )
    yield from sorted(found, key=lambda row: row["ratio"])


def page(record: Record) -> str:
    """The record in Markdown. Raises ValueError where it is empty."""
    if not record.pieces:
        raise ValueError(f"{record.path}: nothing was measured yet")
    metas = [load["meta"] for piece in record.pieces.values() for load in piece["loads"]]
    found = list(duels(record))
    losses = [row for row in found if row["ratio"] < 1 - EVEN]
    rest = [row for row in found if row["ratio"] >= 1 - EVEN]
    lines = ["# Beside other programs", "", *_head(metas), ""]
    lines += ["## Where a peer is faster", ""]
    lines += markdown_table(DUEL_COLUMNS, losses) if losses else ["At no load that was measured."]
    lines += ["", "## Where ours is as fast or faster", ""]
    lines += markdown_table(DUEL_COLUMNS, rest) if rest else ["At no load that was measured."]
    if record.missing:
        lines += ["", "## Not measured", ""]
        lines += [f"- {PIECES[name].title} (`{name}`): {why}" for name, why in record.missing.items()]
    for name in sorted(record.pieces, key=list(PIECES).index):
        lines += ["", *_piece(name, record.pieces[name]["loads"])]
    return "\n".join(lines).rstrip() + "\n"


def _head(metas: list[dict[str, Any]]) -> list[str]:
    """What a reader must know of everything."""
    first = metas[0]
    commands = dict.fromkeys(meta["command"] for meta in metas)
    counts = [meta["num_jobs"] for meta in metas]
    least = " to ".join(map(str, sorted({min(counts), max(counts)})))
    profiled = "profiled" if first["is_profiled"] else "without a profile"
    return [
        f"Remade by {', '.join(f'`{command}`' for command in commands)}.",
        *environment.as_lines(first),
        "",
        f"{first['model']}, {first['threads']} threads each. Closed loops over {first['asked']}; at least "
        f"{least} answers a load, two for each client. Contestants of a table took turns over the same "
        "requests; tokens/s are medians over repeats, ratios are taken within a repeat. Ours is measured end to end "
        f"through Triton, {profiled}; everybody is given the same token ids, and keeps no prompt from one answer to "
        "the next. The weights are the numbers of one file, in the format that is named. When sampling, answers "
        "differ by right: everybody draws other noise.",
    ]


def _piece(name: str, loads: list[dict[str, Any]]) -> list[str]:
    metas = [load["meta"] for load in loads]
    dates = list(dict.fromkeys(f"{meta['date']}, commit {meta['commit']}" for meta in metas))
    busiest = max(meta["load_average"][0] for meta in metas)
    lines = [f"## {PIECES[name].title}, {metas[-1]['weights']} weights", "", metas[-1]["note"]]
    repeats = sorted({row["repeats"] for load in loads for row in load["rows"]})
    lines.append(
        f"Repeats: {' and '.join(map(str, repeats))}; {'; '.join(dates)}; load average before it {busiest:g} at most."
    )
    measured = {named((load["temperature"], load["num_clients"])) for load in loads}  # some of them later
    left_out = dict.fromkeys(each for meta in metas for each in meta["left_out"] if each not in measured)
    if left_out:
        lines.append(f"No time was left for: {', '.join(left_out)}.")
    for temperature in dict.fromkeys(load["temperature"] for load in loads):
        rows = [
            row | ratios(row, load["rows"][0]) | {key: load[key] for key in ("temperature", "num_clients")}
            for load in loads
            if load["temperature"] == temperature
            for row in load["rows"]
        ]
        lines += ["", f"{law(temperature).capitalize()}:", "", *markdown_table(LOAD_COLUMNS, rows)]
    return lines
