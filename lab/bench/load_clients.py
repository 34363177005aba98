"""What load clients of others are given, and tables of what they report.

`python -m lab.bench.load_clients inputs|table FOLDER`: called by scripts/load_clients.sh and
scripts/perf_analyzer.sh. Figures are the clients' own; only perf_analyzer, which knows nothing of tokens, has its times
per token made of the moments that it exports.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lab import environment
from lab.options import make_parser
from lab.prompts import DEMO_PROMPTS, read_prompts
from lab.tables import Column, markdown_table

META_FILE = "meta.json"
MAX_PROMPT_CHARS = 1000
SWEEPS = {"concurrency": "Concurrency", "request_rate": "Request Rate"}  # -> the first column of perf_analyzer's CSV
UNITS = {"concurrency": "in flight", "request_rate": "requests/s"}
AIPERF_SUMMARY = "profile_export_aiperf.json"
# Of aiperf's template endpoint; -1 is no token, so that lengths are fixed.
AIPERF_TEMPLATE = (
    '{"text_input": {{ text|tojson }}, "max_tokens": {{ max_tokens|tojson }}, "stream": {{ stream|tojson }}, '
    '"end_id": -1}\n'
)
COLUMNS = (
    Column("client", "tool"),
    Column("load", "load"),
    Column("requests", "num_requests"),
    Column("errors", "num_errors"),
    Column("output tokens/s", "tokens_per_s", "{:.0f}"),
    Column("ttft p50 ms", "ttft_ms_p50", "{:.1f}"),
    Column("p99", "ttft_ms_p99", "{:.1f}"),
    Column("tpot p50 ms", "tpot_ms_p50", "{:.2f}"),
    Column("whole p50 ms", "e2e_ms_p50", "{:.0f}"),
)

Row = dict[str, Any]  # a client under a load: by the keys of COLUMNS, as it reports it
Requests = list[tuple[int, list[int]]]  # when each was sent and answered, in ns


def make_inputs(max_tokens: int) -> dict[str, Any]:
    """perf_analyzer's --input-data: a held-out prompt each, greedy; end_id -1 is no token, so lengths are fixed."""
    fixed = {"max_tokens": [max_tokens], "end_id": [-1], "stream": [True], "exclude_input_in_output": [True]}
    prompts = [prompt.text for prompt in read_prompts(DEMO_PROMPTS) if len(prompt.text) <= MAX_PROMPT_CHARS]
    return {"data": [{"text_input": [prompt], **fixed} for prompt in prompts]}


def write_inputs(folder: Path, max_tokens: int) -> None:
    """Writes the held-out prompts in the format of each client, and where and when all began."""
    (folder / META_FILE).write_text(json.dumps(environment.describe(seed=0)))
    inputs = make_inputs(max_tokens)
    prompts = [entry["text_input"][0] for entry in inputs["data"]]
    (folder / "perf_analyzer.json").write_text(json.dumps(inputs))
    (folder / "aiperf_template.json").write_text(AIPERF_TEMPLATE)
    write_lines(folder / "aiperf.jsonl", ({"text": prompt, "output_length": max_tokens} for prompt in prompts))
    # sglang wants an answer to each, whose length it would ask for if it were not given another.
    turns = ([{"content": prompt}, {"content": prompt}] for prompt in prompts)
    write_lines(folder / "sglang.jsonl", ({"conversations": both} for both in turns))


def write_lines(path: Path, values: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def timed_requests(text: str) -> tuple[float, Requests]:
    """The measured seconds of one experiment of a profile, and the requests that ended inside the measured windows.

    perf_analyzer does not escape the answers that it exports, so a profile may not be JSON; numbers are taken by name.
    """
    windows = re.search(r'"window_boundaries":\[([\d,]+)\]', text)
    if windows is None:
        raise ValueError("perf_analyzer's profile has no window_boundaries")
    low, *_, high = sorted(map(int, windows[1].split(",")))
    found = re.findall(r'"timestamp":(\d+),.*?"response_timestamps":\[([\d,]+)\]', text, re.DOTALL)
    requests = [(int(start), [int(moment) for moment in moments.split(",")]) for start, moments in found]
    return (high - low) / 1e9, [(start, moments) for start, moments in requests if low <= moments[-1] <= high]


def row_of(tool: str, load: str, requests: Requests, tokens_per_s: float, max_tokens: int) -> Row:
    """Of perf_analyzer, which ends at the first failed request: where it reports, none failed."""
    first, rest, whole = (
        np.array(values) / 1e6
        for values in zip(*((m[0] - start, m[-1] - m[0], m[-1] - start) for start, m in requests), strict=True)
    )
    return {
        "tool": tool,
        "load": load,
        "num_requests": len(requests),
        "num_errors": 0,
        "tokens_per_s": tokens_per_s,
        "ttft_ms_p50": float(np.percentile(first, 50)),
        "ttft_ms_p99": float(np.percentile(first, 99)),
        "tpot_ms_p50": float(np.percentile(rest, 50)) / (max_tokens - 1),
        "e2e_ms_p50": float(np.percentile(whole, 50)),
    }


def read_perf_analyzer(folder: Path, max_tokens: int) -> Iterator[Row]:
    """A row per load of each sweep, or of each profile-CONCURRENCY.json."""
    for path in sorted(folder.glob("profile-*.json"), key=lambda path: int(path.stem.rpartition("-")[2])):
        seconds, requests = timed_requests(path.read_text(encoding="utf-8", errors="replace"))
        load = f"{path.stem.rpartition('-')[2]} {UNITS['concurrency']}"
        yield row_of("perf_analyzer", load, requests, len(requests) * max_tokens / seconds, max_tokens)
    for sweep, column in SWEEPS.items():
        report = folder / f"perf_analyzer-{sweep}.csv"
        if not report.is_file():
            continue
        profile = report.with_suffix(".json").read_text(encoding="utf-8", errors="replace")
        experiments = profile.split('{"experiment":{"mode":')[1:]
        loads = [line for line in csv.DictReader(report.read_text().splitlines()) if line[column]]
        if len(loads) != len(experiments):
            raise ValueError(f"{report.name} has {len(loads)} loads, its profile {len(experiments)}")
        for load, experiment in zip(sorted(loads, key=lambda line: float(line[column])), experiments, strict=True):
            shown, speed = f"{float(load[column]):g} {UNITS[sweep]}", float(load["Inferences/Second"]) * max_tokens
            row = row_of("perf_analyzer", shown, timed_requests(experiment)[1], speed, max_tokens)
            yield row | {"e2e_ms_p50": float(load["p50 latency"]) / 1e3}


# Where aiperf and sglang.bench_serving report the figures of a row.
AIPERF = {
    "tokens_per_s": ("output_token_throughput", "avg"), "ttft_ms_p50": ("time_to_first_token", "p50"),
    "ttft_ms_p99": ("time_to_first_token", "p99"), "tpot_ms_p50": ("inter_token_latency", "p50"),
    "e2e_ms_p50": ("request_latency", "p50"),
}  # fmt: skip
SGLANG = {
    "num_requests": "completed", "tokens_per_s": "output_throughput", "ttft_ms_p50": "median_ttft_ms",
    "ttft_ms_p99": "p99_ttft_ms", "tpot_ms_p50": "median_tpot_ms", "e2e_ms_p50": "median_e2e_latency_ms",
}  # fmt: skip


def read_aiperf(summary: Path) -> Row:
    """summary: in a folder named aiperf-SWEEP-VALUE."""
    _, sweep, value = summary.parent.name.split("-")
    fields = json.loads(summary.read_text())
    counts = {"num_requests": "request_count", "num_errors": "error_request_count"}
    return {
        "tool": "aiperf",
        "load": f"{value} {UNITS[sweep]}",
        **{name: round((fields.get(key) or {"avg": 0})["avg"]) for name, key in counts.items()},
        **{name: fields[key][part] for name, (key, part) in AIPERF.items()},
    }


def read_sglang(line: str, tool: str) -> Row:
    """line: of the file that --output-file and --output-details write, one per call."""
    fields = json.loads(line)
    in_flight, rate = fields["max_concurrency"], fields["request_rate"]
    load = f"{in_flight} {UNITS['concurrency']}" if in_flight else f"{rate:g} {UNITS['request_rate']}"
    return {
        "tool": tool,
        "load": load + (f", {fields['dataset_name']}" if fields["dataset_name"] != "custom" else ""),
        "num_errors": sum(bool(error) for error in fields["errors"]),
        **{name: fields[key] for name, key in SGLANG.items()},
    }


def read_guidellm(report: Path) -> Row:
    """report: JSON of one concurrency, named guidellm-CONCURRENCY. Of requests, those that ended in time."""
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    metrics, totals = benchmark["metrics"], benchmark["metrics"]["request_totals"]

    def percentile(name: str, which: str) -> float:
        return metrics[name]["successful"]["percentiles"][which]

    return {
        "tool": "guidellm",
        "load": f"{report.stem.rpartition('-')[2]} {UNITS['concurrency']}",
        "num_requests": totals["successful"],
        "num_errors": totals["errored"],
        "tokens_per_s": metrics["output_tokens_per_second"]["successful"]["mean"],
        "ttft_ms_p50": percentile("time_to_first_token_ms", "p50"),
        "ttft_ms_p99": percentile("time_to_first_token_ms", "p99"),
        "tpot_ms_p50": percentile("inter_token_latency_ms", "p50"),
        "e2e_ms_p50": 1e3 * percentile("request_latency", "p50"),
    }


def read_rows(folder: Path, max_tokens: int) -> list[Row]:
    """Everything that clients left in folder, in the order of their names and loads."""
    summaries = folder.glob(f"aiperf-*/{AIPERF_SUMMARY}")
    sglang = {tool: folder / f"{tool}-results.jsonl" for tool in ("sglang", "sglang_openai")}
    lines = [(line, tool) for tool, path in sglang.items() if path.is_file() for line in path.read_text().splitlines()]
    guidellm = sorted(folder.glob("guidellm-*.json"), key=lambda path: int(path.stem.rpartition("-")[2]))
    return [
        *read_perf_analyzer(folder, max_tokens),
        *map(read_aiperf, sorted(summaries, key=lambda path: path.stat().st_mtime_ns)),
        *(read_sglang(line, tool) for line, tool in lines),
        *map(read_guidellm, guidellm),
    ]


def write_report(stem: Path, folder: Path, max_tokens: int, command: str, versions: list[str]) -> None:
    """STEM.md, and STEM.png of perf_analyzer's sweeps."""
    meta = json.loads((folder / META_FILE).read_text())
    commands = folder / "commands.txt"
    lines = [
        "# Load clients of others",
        "",
        f"Remade by `{command}`" + (f": {', '.join(versions)}." if versions else "."),
        *environment.as_lines(meta),
        "",
        f"`faser serve` with the demo pair, unmodified clients on the same machine; greedy completions of {max_tokens} "
        "tokens to held-out prompts, which repeat, so that their prefixes are reused. Figures as each client reports "
        "them, but for perf_analyzer, which counts no tokens: its tokens/s are its inferences/s times the tokens asked "
        "for, its ttft and tpot are made of the moments that it exports, and it ends at the first error. aiperf counts "
        "tokens by tokenising the text again. sglang_openai and guidellm ask OpenAI's API; guidellm sends texts of its "
        "own and samples. tpot: time per output token after the first response. n in flight: the next request is sent "
        "when one has ended; n requests/s: at random moments, n a second on average.",
        "",
        *markdown_table(COLUMNS, read_rows(folder, max_tokens)),
    ]
    if commands.is_file():
        called = commands.read_text().splitlines()
        lines += ["", "What was called (of each client and kind of load the first):", "```", *called, "```"]
    stem.parent.mkdir(parents=True, exist_ok=True)
    reports = {sweep: folder / f"perf_analyzer-{sweep}.csv" for sweep in SWEEPS}
    reports = {sweep: path for sweep, path in reports.items() if path.is_file()}
    if reports:
        plot_sweeps(reports, stem.with_suffix(".png"), max_tokens)
        lines += ["", f"![perf_analyzer's sweeps]({stem.name}.png)"]
    text = "\n".join(lines) + "\n"
    stem.with_suffix(".md").write_text(text)
    print(text)


def plot_sweeps(reports: Mapping[str, Path], path: Path, max_tokens: int) -> None:
    """Draws tokens/s above and whole latencies below, a column per sweep. reports: sweep -> its CSV file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(reports), 5), layout="constrained")
    axes = figure.subplots(2, len(reports), squeeze=False, sharex="col", sharey="row")
    for (upper, lower), (sweep, report) in zip(axes.T, reports.items(), strict=True):
        lines = list(csv.DictReader(report.read_text().splitlines()))
        lines.sort(key=lambda line: float(line[SWEEPS[sweep]]))
        loads = [float(line[SWEEPS[sweep]]) for line in lines]
        upper.plot(loads, [float(line["Inferences/Second"]) * max_tokens for line in lines], "o-")
        for label in ("p50", "p95", "p99"):
            lower.plot(loads, [float(line[f"{label} latency"]) / 1e3 for line in lines], "o-", label=label)
        lower.set_xlabel(UNITS[sweep])
    for axis in axes.flat:  # after all lines are drawn: rows share their limits
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
    axes[0, 0].set_ylabel("output tokens/s")
    axes[1, 0].set_ylabel("whole request, ms")
    axes[1, 0].legend()
    figure.suptitle("perf_analyzer, streaming gRPC on ensemble")
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = make_parser(__doc__, "output", max_tokens=64, name="load_clients")
    parser.add_argument("action", choices=["inputs", "table"])
    parser.add_argument("folder", type=Path, help="where inputs are written, or results lie")
    parser.add_argument("--command", default="")
    parser.add_argument("--versions", nargs="+", default=[])
    args = parser.parse_args()
    if args.action == "inputs":
        write_inputs(args.folder, args.max_tokens)
    else:
        write_report(args.output / args.name, args.folder, args.max_tokens, args.command, args.versions)


if __name__ == "__main__":
    main()
