"""A simulation's rows: figures against the fixed length and the oracle, the paper's own numbers, every assumption."""

from __future__ import annotations

from typing import Any

from lab.contestants import FIXED_REFERENCE, ORACLE
from lab.tables import Column, markdown_table

LEAST_HEADROOM = 0.01  # of the reference's time, below which a share of it means nothing
POLICY = Column("policy", lambda row: f"`{row['policy']}`")
COLUMNS = (
    Column("tok/s", "tokens_per_s", "{:.0f}"),
    Column("x", "speedup", "{:.2f}"),
    Column("e2e mean s", "e2e_s_mean", "{:.2f}"),
    Column("change", "e2e_change", "{:+.0%}"),
    Column("of oracle's headroom", "headroom_share", "{:.0%}"),
    Column("p50", lambda row: row["e2e_ms_p50"] / 1e3, "{:.2f}"),
    Column("p99", lambda row: row["e2e_ms_p99"] / 1e3, "{:.1f}"),
    Column("ttft p50 ms", "ttft_ms_p50", "{:.0f}"),
    Column("p99", "ttft_ms_p99", "{:.0f}"),
    Column("tpot p50 ms", "tpot_ms_p50", "{:.1f}"),
    Column("p99", "tpot_ms_p99", "{:.1f}"),
    Column("drafted", "mean_length", "{:.2f}"),
    Column("kept", "mean_accepted", "{:.2f}"),
    Column("row-layers/token", "row_layers_per_token", "{:.0f}"),
    Column("pruned", "pruned_share", "{:.1%}"),
    Column("overlap", "overlap_share", "{:.0%}"),
    Column("mean batch", "mean_batch_size", "{:.0f}"),
    Column("128+", lambda row: row["batch_shares"]["128+"], "{:.0%}"),
)
SHOWN = [column for column in COLUMNS if column.heading in (
    "tok/s", "x", "e2e mean s", "change", "of oracle's headroom", "tpot p50 ms", "kept", "pruned", "overlap"
)]  # fmt: skip

# FASER, arXiv 2604.20503, ablation against VSD: throughput, latency.
PAPER = (
    ("adaptive drafter", "gp-lcb", "1.35x", "-19 %"),
    ("early exit", "fixed:4 (exits on)", "1.22x", "-26 %"),
    ("all three", "faser", "1.60x", "-61 %"),
)
NOTES = (
    "x and change: throughput and mean end-to-end latency against `fixed:4`, the fixed length that stands for VSD. Of "
    "oracle's headroom: how much of the mean end-to-end time that the oracle saves over `fixed:4` a policy saves; the "
    "oracle drafts exactly tokens that will be accepted, as many as earn most tokens per time in each step. e2e: "
    "arrival to last token, waiting included; drafted and kept: per request and verification; pruned: of the draft "
    "rows that entered a verification; overlap: of the time of drafting and verifying, both ran; mean batch and "
    "128+: over verifications."
)


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one load with what tables show beside the plain figures; ratios only where the reference took part."""
    by_name = {row["policy"]: row for row in rows}
    reference, oracle = by_name.get(FIXED_REFERENCE), by_name.get(ORACLE)
    found = []
    for row in rows:
        more: dict[str, Any] = {"e2e_s_mean": row["e2e_ms_mean"] / 1e3}
        if reference is not None:
            more["speedup"] = row["tokens_per_s"] / reference["tokens_per_s"]
            more["e2e_change"] = row["e2e_ms_mean"] / reference["e2e_ms_mean"] - 1.0
            headroom = 0.0 if oracle is None else reference["e2e_ms_mean"] - oracle["e2e_ms_mean"]
            if headroom > LEAST_HEADROOM * reference["e2e_ms_mean"]:
                more["headroom_share"] = (reference["e2e_ms_mean"] - row["e2e_ms_mean"]) / headroom
        found.append(row | more)
    return found


def best_static(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Of the fixed lengths, the one of most throughput; of equals (within 0.5 %) the one of least latency."""
    fixed = [row for row in rows if row["policy"].startswith("fixed:") and "(" not in row["policy"]]
    most = max((row["tokens_per_s"] for row in fixed), default=0.0)
    chosen = [row for row in fixed if row["tokens_per_s"] >= 0.995 * most]
    return min(chosen, key=lambda row: row["e2e_ms_mean"], default=None)


def by_load(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows by the load in words, "" where there is one alone."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row.get("load", ""), []).append(row)
    return found


def best_in_words(rows: list[dict[str, Any]]) -> str:
    best = best_static(rows)
    return "" if best is None else f"Best static length: `{best['policy']}`, {best['tokens_per_s']:.0f} tokens/s."


def markdown(meta: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """rows: as `compared` gives them."""
    lines = [
        f"# Simulation: {meta['world']}",
        "",
        f"{meta['num_requests']} requests of {meta['trace']}: {meta['arrivals']}. Seed {meta['seed']}, commit "
        f"{meta['commit']}. Remade by `{meta['command']}`.",
        f"Prompts of {meta['mean_prompt_tokens']:.0f} and outputs of {meta['mean_output_tokens']:.0f} tokens on "
        f"average. Up to {meta['max_num_seqs']} requests at once, {meta['max_prefill_tokens']} prompt tokens per step.",
    ]
    if meta["capacity"]:
        lines.append(
            f"Loads are shares of {meta['capacity']['requests_per_s']:.2f} requests/s, which "
            f"`{meta['capacity']['policy']}` answers when all of them wait, more than any other fixed length."
        )
    for load, group in by_load(rows).items():
        lines += ["", *([f"## {load}", ""] if load else []), *markdown_table([POLICY, *COLUMNS], group)]
        lines += ["", best_in_words(group)]
    lines += ["", NOTES]
    lines += _beside_the_paper(rows) if meta["is_papers"] and not meta["capacity"] else []
    lines += ["", "## Assumptions", "", *(f"- {line}" for line in meta["assumptions"])]
    lines += [f"- Not simulated: {line}" for line in meta["missing"]]
    return "\n".join(lines) + "\n"


def _beside_the_paper(rows: list[dict[str, Any]]) -> list[str]:
    """Its ablation and ours, each against its own VSD."""
    by_name = {row["policy"]: row for row in rows if "speedup" in row}
    columns = ("mechanism", "here", "throughput", "latency", "paper's throughput", "its latency")
    told = []
    for mechanism, name, throughput, latency in PAPER:
        row = by_name.get(name)
        ours = ("-", "-") if row is None else (f"{row['speedup']:.2f}x", f"{row['e2e_change']:+.0%}")
        told.append(dict(zip(columns, (mechanism, f"`{name}`", *ours, throughput, latency), strict=True)))
    return ["", "## Beside the paper", "", *markdown_table(columns, told)]
