"""The table of each part, from its result. Pure; needs no package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Result = dict[str, Any]
Lines = list[str]


def table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Lines:
    """Markdown, columns padded so that it reads as text too; numbers to the right."""
    cells = [list(names), *([cell_text(value) for value in row] for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(names))]
    is_number = [bool(rows) and all(isinstance(row[index], int | float) for row in rows) for index in range(len(names))]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        )
        return "| " + " | ".join(padded) + " |"

    rule = (
        "|"
        + "|".join("-" * (width + 1) + (":" if right else "-") for width, right in zip(widths, is_number, strict=True))
        + "|"
    )
    return [line(cells[0]), rule, *map(line, cells[1:])]


def cell_text(value: Any) -> str:
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def number(value: float | None) -> str:
    """Three significant digits, whole numbers whole."""
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def plain(result: Result) -> Lines:
    return [f"- {name}: {value}" for name, value in result.items()]


def _device(result: Result) -> Lines:
    lines = table(["module", ""], list(result["modules"].items()))
    for name in ("properties", "kernel"):
        if name in result:
            lines.append(f"{name}: {result[name]}")
    return lines


def _peaks(result: Result) -> Lines:
    copies = table(["copied MiB", "GB/s"], [[row["mib"], row["gb_per_s"]] for row in result["copies"]])
    names = ("rows", "us", "tflops", "weight_gb_per_s")
    lines = [*copies, "", *table(names, [[row[name] for name in names] for row in result["products"]])]
    return [*lines, f"nvidia-smi right after: {_pairs(result['clocks'])}"] if result.get("clocks") else lines


def _kernels(result: Result) -> Lines:
    names = ("kernel", "dtype", "num_cases", "max_error", "is_right")
    return table(names, [[row[name] for name in names] for row in result["cases"]])


def _bandwidth(result: Result) -> Lines:
    names = ("batch", "context", "rows", "num_splits", "us", "spread", "gb_per_s", "share_of_copy")
    small = ("kernel", "rows", "us", "spread", "gb_per_s", "share_of_copy")
    return [
        f"Copy bandwidth: {number(result['copy_gb_per_s'])} GB/s. pruned_chunk_attention, bf16, 32/8 heads of 128:",
        *table(names, [[row[name] for name in names] for row in result["attention"]]),
        "",
        *table(small, [[row[name] for name in small] for row in result["small"]]),
    ]


def _sweep(result: Result) -> Lines:
    rows = [
        ["x".join(map(str, each["shape"][:3])), name, *best_of(each[name]), _first_us(each[name])]
        for each in result["shapes"]
        for name in ("launches", "splits")
    ]
    names = ["batch x context x rows", "", "fastest", "us", "times as fast", "us of the table's, or of no split"]
    return table(names, rows)


def best_of(tried: Sequence[Result]) -> tuple[str, float, float]:
    """Fastest choice, its microseconds, and how many times as fast as the first it is."""
    timed = [row for row in tried if "us" in row]
    if not timed:
        return "none ran", 0.0, 0.0
    best = min(timed, key=lambda row: row["us"])
    return best["choice"], best["us"], timed[0]["us"] / best["us"]


def _first_us(tried: Sequence[Result]) -> float:
    return next((row["us"] for row in tried if "us" in row), 0.0)


def _sms(result: Result) -> Lines:
    rows = [
        [
            split["split"],
            *(f"{split[name]['num_sms_eager']} / {len(split[name]['graph'])}" for name in ("draft", "target")),
            *(split["checks"][name] for name in ("is_disjoint", "is_draft_within_size", "is_target_within_size")),
            split["together"]["overlap_share_median"],
        ]
        for split in result["splits"]
    ]
    names = [
        "split",
        "draft SMs launched / replayed",
        "target SMs",
        "disjoint",
        "draft within",
        "target within",
        "at once",
    ]
    return [f"{result['kind']}: {result['note']}", *table(names, rows)]


def _parity(result: Result) -> Lines:
    rows = []
    for each in result["dtypes"]:
        target, draft = each.get("target", {}), each.get("draft", {})
        answers = "; ".join(
            f"{a['policy']} T={a['temperature']:g}: {a['num_equal']}/{a['num_answers']}"
            + (f" (+{a['num_near_ties']} near-ties)" if a.get("num_near_ties") else "")
            for a in each.get("answers", [])
        )
        errors = [
            model.get(name, "-")
            for model in (target, draft)
            for name in ("max_error", "num_different", "num_near_ties")
        ]
        rows.append([each["dtype"], each["stage"], *errors, answers, each.get("error", "")[:160].replace("\n", " ")])
    names = [
        "dtype",
        "stage",
        "target max error",
        "differ",
        "ties",
        "draft max error",
        "differ",
        "ties",
        "equal answers",
        "error",
    ]
    return table(names, rows)


def _latency(result: Result) -> Lines:
    names = (
        "partition", "batch", "draft_us", "verify_us", "decode_us", "together_us", "hidden_share", "overlap_of_shorter",
        "overlap_of_either", "lanes_us",
    )  # fmt: skip
    lines = [
        f"{result['pair']}: {result['menu']}. A chain of {result['draft_tokens']} tokens, a verification of "
        f"{result['verified_rows']} rows each, a plain decode step.",
        *table(names, [[row.get(name, "-") for name in names] for row in result["latency"]]),
    ]
    if result.get("floors"):
        lines += ["", "Least times by bytes and arithmetic over the measured peaks:"]
        lines += table(["batch", "verify_us", "draft_us"], [list(row.values()) for row in result["floors"]])
    if "fit_error_percent" in result:
        lines += ["", f"Fit of the cost model, mean error in percent: {_pairs(result['fit_error_percent'])}"]
    return lines


def _ladder(result: Result) -> Lines:
    lines = [
        f"Pair {result['pair']}"
        + (", synthetic: weights are random, acceptance is planted." if result["is_synthetic"] else ".")
    ]
    for name in ("planted", "overhead", "bursty"):
        if name in result:
            lines.append(f"{name}: {_pairs(result[name])}")
    names = (
        "policy", "tokens_per_s", "tokens_per_s_min", "tokens_per_s_max", "e2e_ms_p50", "e2e_ms_p99", "ttft_ms_p50",
        "tpot_ms_p50", "mean_accepted", "mean_length", "rows_trimmed", "rows_pruned", "retention", "share_serial",
        "overlap_of_either", "overlap_of_shorter", "plan_us_p50", "plan_share", "num_different",
    )  # fmt: skip
    rows = result.get("rows", [])
    for load in dict.fromkeys(row["load"] for row in rows):
        own = [row for row in rows if row["load"] == load]
        lines += ["", f"### {load}", *table(names, [[row.get(name, "-") for name in names] for row in own])]
        lines += _economics(own)
    if result.get("missing"):
        lines += ["", "Not measured:", *(f"- {text}" for text in result["missing"])]
    return lines


def _economics(rows: Sequence[Result]) -> Lines:
    predicted = [(row, row["predicted"]) for row in rows if "predicted" in row]
    if not predicted:
        return []
    names = ("round_us", "time_ratio", "tokens", "yield_ratio", "tokens_per_s", "speed_ratio")
    cells = [[row["policy"], *(each.get(name, "-") for name in names)] for row, each in predicted]
    return ["", *table(["formula, and measured over it", *names], cells)]


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {cell_text(value)}" for name, value in values.items())


SECTIONS: dict[str, Callable[[Result], Lines]] = {
    "device": _device,
    "peaks": _peaks,
    "kernels": _kernels,
    "bandwidth": _bandwidth,
    "sweep": _sweep,
    "sms": _sms,
    "parity": _parity,
    "latency": _latency,
    "ladder": _ladder,
}
