"""A simulation's rows in Markdown: figures against the fixed length, the paper's own numbers, every assumption."""

from __future__ import annotations

from typing import Any, NamedTuple

REFERENCE = "fixed:4"  # stands for VSD, vLLM's fixed length


class Column(NamedTuple):
    heading: str
    key: str
    form: str


COLUMNS = (
    Column("tok/s", "tokens_per_s", "{:.0f}"),
    Column("x", "speedup", "{:.2f}"),
    Column("e2e mean s", "e2e_s_mean", "{:.2f}"),
    Column("change", "e2e_change", "{:+.0%}"),
    Column("p50", "e2e_s_p50", "{:.2f}"),
    Column("p99", "e2e_s_p99", "{:.1f}"),
    Column("ttft p50 ms", "ttft_ms_p50", "{:.0f}"),
    Column("p99", "ttft_ms_p99", "{:.0f}"),
    Column("tpot p50 ms", "tpot_ms_p50", "{:.1f}"),
    Column("p99", "tpot_ms_p99", "{:.1f}"),
    Column("drafted", "mean_drafted", "{:.2f}"),
    Column("kept", "mean_accepted", "{:.2f}"),
    Column("row-layers/token", "row_layers_per_token", "{:.0f}"),
    Column("pruned", "pruned_share", "{:.1%}"),
    Column("overlap", "overlap_share", "{:.0%}"),
    Column("mean batch", "mean_batch", "{:.0f}"),
    Column("128+", "share_128", "{:.0%}"),
)

# FASER, arXiv 2604.20503, ablation against VSD: throughput, latency.
PAPER = (
    ("adaptive drafter", "gp-lcb", "1.35x", "-19 %"),
    ("early exit", "fixed:4 (exits on)", "1.22x", "-26 %"),
    ("all three", "faser", "1.60x", "-61 %"),
)
NOTES = (
    "x and change: throughput and mean end-to-end latency against `fixed:4`, the fixed length that stands for VSD. "
    "e2e: arrival to last token, waiting included; drafted and kept: per request and verification; pruned: of the "
    "draft rows that entered a verification; overlap: of the time of steps, both phases ran; mean batch and 128+: "
    "over verifications."
)


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with what tables show beside the plain figures; speed-ups only where the reference took part."""
    reference = next((row for row in rows if row["policy"] == REFERENCE), None)
    found = []
    for row in rows:
        more = {f"e2e_s_{which}": row[f"e2e_ms_{which}"] / 1e3 for which in ("mean", "p50", "p99")}
        more["share_128"] = row["batch_shares"]["128+"]
        if reference is not None:
            more["speedup"] = row["tokens_per_s"] / reference["tokens_per_s"]
            more["e2e_change"] = row["e2e_ms_mean"] / reference["e2e_ms_mean"] - 1.0
        found.append(row | more)
    return found


def cells(row: dict[str, Any]) -> list[str]:
    return [column.form.format(row[column.key]) if column.key in row else "" for column in COLUMNS]


def best_static(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Of the fixed lengths, the one of most throughput; of equals (within 0.5 %) the one of least latency."""
    fixed = [row for row in rows if row["policy"].startswith("fixed:") and "(" not in row["policy"]]
    if not fixed:
        return None
    most = max(row["tokens_per_s"] for row in fixed)
    return min((row for row in fixed if row["tokens_per_s"] >= 0.995 * most), key=lambda row: row["e2e_ms_mean"])


def markdown(meta: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """rows: as `compared` gives them."""
    lines = [
        f"# Simulation: {meta['world']}",
        "",
        f"{meta['num_requests']} requests of {meta['trace']}: {meta['arrivals']}. Seed {meta['seed']}, commit "
        f"{meta['commit']}, `{meta['command']}`.",
        f"Prompts of {meta['mean_prompt_tokens']:.0f} and outputs of {meta['mean_output_tokens']:.0f} tokens on "
        f"average. Up to {meta['max_num_seqs']} requests at once, {meta['max_prefill_tokens']} prompt tokens per step.",
        "",
        "| policy | " + " | ".join(column.heading for column in COLUMNS) + " |",
        "|" + "---|" * (len(COLUMNS) + 1),
        *(f"| `{row['policy']}` | " + " | ".join(cells(row)) + " |" for row in rows),
        "",
        NOTES,
    ]
    best = best_static(rows)
    if best is not None:
        lines.append(f"Best static length: `{best['policy']}`, {best['tokens_per_s']:.0f} tokens/s.")
    lines += _beside_the_paper(rows) if meta["is_papers"] else []
    lines += ["", "## Assumptions", "", *(f"- {line}" for line in meta["assumptions"])]
    lines += [f"- Not simulated: {line}" for line in meta["missing"]]
    return "\n".join(lines) + "\n"


def _beside_the_paper(rows: list[dict[str, Any]]) -> list[str]:
    """Its ablation and ours, each against its own VSD."""
    by_name = {row["policy"]: row for row in rows if "speedup" in row}
    lines = ["", "## Beside the paper", ""]
    lines += ["| mechanism | here | throughput | latency | paper's throughput | its latency |", "|" + "---|" * 6]
    for mechanism, name, throughput, latency in PAPER:
        row = by_name.get(name)
        ours = "- | -" if row is None else f"{row['speedup']:.2f}x | {row['e2e_change']:+.0%}"
        lines.append(f"| {mechanism} | `{name}` | {ours} | {throughput} | {latency} |")
    return lines
