"""A simulation's rows: figures against the fixed length and the oracle, every assumption."""

from __future__ import annotations

from typing import Any

from lab.contestants import FIXED_REFERENCE, ORACLE
from lab.tables import Column, markdown_table

LEAST_HEADROOM = 0.01  # of the reference's time, below which a share of it means nothing
COLUMNS = (
    Column("policy", "policy"),
    Column("tok/s", "tokens_per_s", "{:.0f}"),
    Column("x", "speedup", "{:.2f}"),
    Column("e2e mean s", "e2e_s_mean", "{:.2f}"),
    Column("change", "e2e_change", "{:+.0%}"),
    Column("of oracle's headroom", "headroom_share", "{:.0%}"),
    Column("ttft p50 ms", "ttft_ms_p50", "{:.0f}"),
    Column("tpot p50 ms", "tpot_ms_p50", "{:.1f}"),
    Column("kept", "mean_accepted", "{:.2f}"),
    Column("pruned", "pruned_share", "{:.1%}"),
    Column("overlap", "overlap_share", "{:.0%}"),
    Column("mean batch", "mean_batch_size", "{:.0f}"),
)
NOTES = (
    "x and change: throughput and mean end-to-end latency against `fixed:4`, the fixed length that stands for VSD. Of "
    "oracle's headroom: the share of the time that the oracle saves over `fixed:4` that a policy saves too. Kept: "
    "draft tokens per request and verification; pruned: of the draft rows that entered a verification; overlap: of the "
    "time of drafting and verifying, both ran."
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


def by_load(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows by the load in words, "" where there is one alone."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row.get("load", ""), []).append(row)
    return found


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
        lines += ["", *([f"## {load}", ""] if load else []), *markdown_table(COLUMNS, group)]
    lines += ["", NOTES]
    lines += ["", "## Assumptions", "", *(f"- {line}" for line in meta["assumptions"])]
    lines += [f"- Not simulated: {line}" for line in meta["missing"]]
    return "\n".join(lines) + "\n"
