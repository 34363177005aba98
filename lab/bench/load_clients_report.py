"""What load clients are given, and one table and one plot of what they report.

`python -m lab.bench.load_clients_report inputs|table`: called by scripts/load_clients.sh. Figures are the clients'
own; only perf_analyzer, which knows nothing of tokens, has its times per token made of the moments that it exports.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench import environment
from lab.bench.load_clients_plot import plot_sweeps
from lab.bench.perf_analyzer_report import make_inputs, timed_requests
from lab.places import RESULTS

META_FILE = "meta.json"
SWEEPS = {"concurrency": "Concurrency", "request_rate": "Request Rate"}  # -> the first column of perf_analyzer's CSV
UNITS = {"concurrency": "in flight", "request_rate": "requests/s"}
AIPERF_SUMMARY = "profile_export_aiperf.json"
# Of aiperf's template endpoint; -1 is no token, so that lengths are fixed.
AIPERF_TEMPLATE = (
    '{"text_input": {{ text|tojson }}, "max_tokens": {{ max_tokens|tojson }}, "stream": {{ stream|tojson }}, '
    '"end_id": -1}\n'
)


@dataclass(frozen=True, slots=True)
class Row:
    """A client under a load, as it reports it."""

    tool: str
    load: str
    num_requests: int
    num_errors: int
    tokens_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    tpot_ms_p50: float
    e2e_ms_p50: float

    def as_line(self) -> str:
        return (
            f"| {self.tool} | {self.load} | {self.num_requests} | {self.num_errors} | {self.tokens_per_s:.0f} "
            f"| {self.ttft_ms_p50:.1f} | {self.ttft_ms_p99:.1f} | {self.tpot_ms_p50:.2f} | {self.e2e_ms_p50:.0f} |"
        )


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


def write_lines(path: Path, values: Iterator[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def read_perf_analyzer(folder: Path, max_tokens: int) -> Iterator[Row]:
    """A row per load of each sweep. perf_analyzer ends at the first failed request: where it reports, none failed."""
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
            _, requests = timed_requests(experiment)
            first = np.array([moments[0] - start for start, moments in requests]) / 1e6
            rest = np.array([moments[-1] - moments[0] for _, moments in requests]) / 1e6
            yield Row(
                "perf_analyzer",
                f"{float(load[column]):g} {UNITS[sweep]}",
                num_requests=len(requests),
                num_errors=0,
                tokens_per_s=float(load["Inferences/Second"]) * max_tokens,
                ttft_ms_p50=float(np.percentile(first, 50)),
                ttft_ms_p99=float(np.percentile(first, 99)),
                tpot_ms_p50=float(np.percentile(rest, 50)) / (max_tokens - 1),
                e2e_ms_p50=float(load["p50 latency"]) / 1e3,
            )


def read_aiperf(summary: Path) -> Row:
    """summary: in a folder named aiperf-SWEEP-VALUE."""
    _, sweep, value = summary.parent.name.split("-")
    fields = json.loads(summary.read_text())
    return Row(
        "aiperf",
        f"{value} {UNITS[sweep]}",
        num_requests=round(fields["request_count"]["avg"]),
        num_errors=round((fields.get("error_request_count") or {"avg": 0})["avg"]),
        tokens_per_s=fields["output_token_throughput"]["avg"],
        ttft_ms_p50=fields["time_to_first_token"]["p50"],
        ttft_ms_p99=fields["time_to_first_token"]["p99"],
        tpot_ms_p50=fields["inter_token_latency"]["p50"],
        e2e_ms_p50=fields["request_latency"]["p50"],
    )


def read_sglang(line: str) -> Row:
    """line: of the file that --output-file and --output-details write, one per call."""
    fields = json.loads(line)
    in_flight, rate = fields["max_concurrency"], fields["request_rate"]
    load = f"{in_flight} {UNITS['concurrency']}" if in_flight else f"{rate:g} {UNITS['request_rate']}"
    return Row(
        "sglang",
        load + (f", {fields['dataset_name']}" if fields["dataset_name"] != "custom" else ""),
        num_requests=fields["completed"],
        num_errors=sum(bool(error) for error in fields["errors"]),
        tokens_per_s=fields["output_throughput"],
        ttft_ms_p50=fields["median_ttft_ms"],
        ttft_ms_p99=fields["p99_ttft_ms"],
        tpot_ms_p50=fields["median_tpot_ms"],
        e2e_ms_p50=fields["median_e2e_latency_ms"],
    )


def read_rows(folder: Path, max_tokens: int) -> list[Row]:
    """Everything that clients left in folder, in the order of their names and loads."""
    summaries = folder.glob(f"aiperf-*/{AIPERF_SUMMARY}")
    sglang = folder / "sglang-results.jsonl"
    return [
        *read_perf_analyzer(folder, max_tokens),
        *map(read_aiperf, sorted(summaries, key=lambda path: path.stat().st_mtime_ns)),
        *map(read_sglang, sglang.read_text().splitlines() if sglang.is_file() else ()),
    ]


def write_report(folder: Path, output: Path, max_tokens: int, command: str, versions: list[str]) -> None:
    """load_clients.md, and of perf_analyzer its CSV files and their plot."""
    rows = read_rows(folder, max_tokens)
    meta = json.loads((folder / META_FILE).read_text())
    commands = (folder / "commands.txt").read_text().splitlines()
    output.mkdir(parents=True, exist_ok=True)
    lines = [
        "# Load clients of others",
        "",
        *environment.as_lines(meta),
        f"`{command}`: {', '.join(versions)}.",
        "",
        f"`faser serve` with the demo pair, unmodified clients on the same machine; greedy completions of {max_tokens} "
        "tokens to held-out prompts, which repeat, so that their prefixes are reused. Figures as each client reports "
        "them, but for perf_analyzer, which counts no tokens: its tokens/s are its inferences/s times the tokens asked "
        "for, its ttft and tpot are made of the moments that it exports, and it ends at the first error. aiperf counts "
        "tokens by tokenising the text again. tpot: time per output token after the first response. n in flight: the "
        "next request is sent when one has ended; n requests/s: at random moments, n a second on average.",
        "",
        "| client | load | requests | errors | output tokens/s | ttft p50 ms | p99 | tpot p50 ms | whole p50 ms |",
        "|" + "---|" * 9,
        *(row.as_line() for row in rows),
        "",
        "What was called (of each client and kind of load the first):",
        "```",
        *commands,
        "```",
    ]
    reports = {sweep: folder / f"perf_analyzer-{sweep}.csv" for sweep in SWEEPS}
    reports = {sweep: path for sweep, path in reports.items() if path.is_file()}
    for sweep, path in reports.items():
        shutil.copyfile(path, output / f"load_clients_{sweep}.csv")
    if reports:
        plot_sweeps(reports, SWEEPS, output / "load_clients.png", max_tokens)
        lines += ["", "![perf_analyzer's sweeps](load_clients.png)"]
    text = "\n".join(lines) + "\n"
    (output / "load_clients.md").write_text(text)
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Inputs for load clients, and a table of what they report.")
    parser.add_argument("action", choices=["inputs", "table"])
    parser.add_argument("folder", type=Path, help="where inputs are written, or results lie")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--command", default="")
    parser.add_argument("--versions", nargs="+", default=[])
    args = parser.parse_args()
    if args.action == "inputs":
        write_inputs(args.folder, args.max_tokens)
    else:
        write_report(args.folder, args.output, args.max_tokens, args.command, args.versions)


if __name__ == "__main__":
    main()
