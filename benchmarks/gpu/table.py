"""A results file as text: goals first, then a table per part. Pure; needs no package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.gpu.goals import judged

Result = dict[str, Any]
Lines = list[str]


def render(content: dict[str, Any]) -> str:
    """The whole report of {"meta", "parts"}; parts that failed say so."""
    parts = content["parts"]
    lines = heading(content["meta"])
    results = {name: part["result"] for name, part in parts.items()}
    goals = [[goal.name, _goal_limit(goal), _number(value), word] for goal, value, word in judged(results)]
    lines += ["", "## Goals", *table(["goal", "limit", "measured", ""], goals)]
    lines += ["", "## Parts", *table(["part", "", "s", "of s", "error"], [_part_row(*each) for each in parts.items()])]
    for name, part in parts.items():
        if part["result"]:
            lines += ["", f"## {name}: {part['title']}", *_SECTIONS.get(_kind(name), _plain)(part["result"])]
        if part["error"] and part["status"] != "skipped":
            lines += ["", f"### {name} {part['status']}", *(f"    {line}" for line in part["error"].splitlines())]
    return "\n".join(lines) + "\n"


def heading(meta: dict[str, Any]) -> Lines:
    gpu = meta.get("gpu") or {}
    versions = ", ".join(f"{name} {number}" for name, number in meta["versions"].items() if number)
    lines = [
        f"# GPU check: {meta['device']}",
        "",
        f"{meta['date']}, commit {meta['commit']}, seed {meta['seed']}, Python {meta['python']}, "
        f"{meta['num_cores']} cores. {versions}.",
    ]
    if gpu:
        lines.append("nvidia-smi at the start: " + ", ".join(f"{name} {value}" for name, value in gpu.items()) + ".")
    if meta["missing"]:
        lines.append(f"Not installed, so that parts fail: {', '.join(meta['missing'])}.")
    if meta["is_tiny"]:
        lines.append("Tiny shapes: this run checks the script, its figures say nothing.")
    return lines


def table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Lines:
    """Markdown, columns padded so that it reads as text too; numbers to the right."""
    cells = [list(names), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(names))]
    is_number = [bool(rows) and all(isinstance(row[index], int | float) for row in rows) for index in range(len(names))]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        )
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (width + 1) + (":" if right else "-") for width, right in zip(widths, is_number, strict=True)) + "|"
    return [line(cells[0]), rule, *map(line, cells[1:])]


def _cell(value: Any) -> str:
    return _number(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _number(value: float | None) -> str:
    """Three significant digits, whole numbers whole."""
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def _goal_limit(goal: Any) -> str:
    return f"{'<=' if goal.is_most else '>='} {goal.limit:g}{goal.unit}"


def _part_row(name: str, part: dict[str, Any]) -> list[Any]:
    last = part["error"].splitlines()[-1] if part["error"] else ""
    return [name, part["status"], part["seconds"], part["limit_s"], last[:100].replace("|", "/")]


def _kind(name: str) -> str:
    return "ladder" if name.startswith("ladder") else "parity" if name in ("parity", "rtx", "tensorrt") else name


def _plain(result: Result) -> Lines:
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
    return [*copies, "", *table(names, [[row[name] for name in names] for row in result["products"]])]


def _kernels(result: Result) -> Lines:
    names = ("kernel", "dtype", "num_cases", "max_error", "is_right")
    return table(names, [[row[name] for name in names] for row in result["cases"]])


def _bandwidth(result: Result) -> Lines:
    names = ("batch", "context", "rows", "num_splits", "us", "spread", "gb_per_s", "share_of_copy")
    small = ("kernel", "rows", "us", "spread", "gb_per_s", "share_of_copy")
    return [
        f"Copy bandwidth: {_number(result['copy_gb_per_s'])} GB/s. pruned_chunk_attention, bf16, 32/8 heads of 128:",
        *table(names, [[row[name] for name in names] for row in result["attention"]]),
        "",
        *table(small, [[row[name] for name in small] for row in result["small"]]),
    ]


def _sweep(result: Result) -> Lines:
    rows = [
        ["x".join(map(str, each["shape"][:3])), str(each["table"]), str(each["best"]["config"]), each["best"]["us"], each["gain"]]
        for each in result["shapes"]
    ]
    return table(["batch x context x rows", "table", "fastest", "us", "gain"], rows)


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
    names = ["split", "draft SMs launched / replayed", "target SMs", "disjoint", "draft within", "target within", "at once"]
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
        errors = [model.get(name, "-") for model in (target, draft) for name in ("max_error", "num_different", "num_near_ties")]
        rows.append([each["dtype"], each["stage"], *errors, answers, each.get("error", "")[:160].replace("\n", " ")])
    names = ["dtype", "stage", "target max error", "differ", "ties", "draft max error", "differ", "ties", "equal answers", "error"]
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
    lines = [f"Pair {result['pair']}" + (", synthetic: weights are random, acceptance is planted." if result["is_synthetic"] else ".")]
    for name in ("planted", "overhead", "bursty"):
        if name in result:
            lines.append(f"{name}: {_pairs(result[name])}")
    names = (
        "policy", "tokens_per_s", "e2e_ms_p50", "e2e_ms_p99", "ttft_ms_p50", "tpot_ms_p50", "mean_accepted", "mean_length",
        "rows_pruned", "share_serial", "overlap_of_either", "overlap_of_shorter", "plan_us_p50", "plan_share", "num_different",
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
    cells = [
        [row["policy"], each["round_us"], row["step_us_p50"], each["time_ratio"], each["tokens"], each["yield_ratio"]]
        for row, each in predicted
    ]
    names = ["formula", "round us", "measured us", "time ratio", "tokens", "yield ratio"]
    return ["", *table(names, cells)]


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_cell(value)}" for name, value in values.items())


_SECTIONS: dict[str, Callable[[Result], Lines]] = {
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
