#!/usr/bin/env python3
"""Serving speed, policy beside policy in one run: in this process, and through a real Triton server.

For each place, temperature and number of clients, the policies take turns over the same jobs, and
the whole round is repeated. Writes NAME.json and NAME.md; the table shows medians over repeats.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import environment, in_process, servers  # noqa: E402
from benchmarks.in_process import InProcess  # noqa: E402
from benchmarks.servers import OverTriton  # noqa: E402
from benchmarks.workload import Job, count_different, load_jobs, merge_repeats, summarise  # noqa: E402

COLUMNS = (
    ("tokens/s", "tokens_per_s", "{:.0f}"),
    ("lowest", "tokens_per_s_min", "{:.0f}"),
    ("highest", "tokens_per_s_max", "{:.0f}"),
    ("of the first", "speedup", "{:.2f}x"),
    ("ttft p50 ms", "ttft_ms_p50", "{:.1f}"),
    ("p99", "ttft_ms_p99", "{:.1f}"),
    ("itl p50 ms", "itl_ms_p50", "{:.2f}"),
    ("p99", "itl_ms_p99", "{:.2f}"),
    ("tpot p50 ms", "tpot_ms_p50", "{:.2f}"),
    ("mean accepted", "mean_accepted", "{:.2f}"),
    ("answers that differ", "num_different", "{}"),
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serving speed, policy beside policy in one run.")
    parser.add_argument("--engine-dir", type=Path, help="default: the demo pair, built here")
    parser.add_argument("--prompts", type=Path, default=ROOT / "models" / "demo" / "prompts.jsonl")
    parser.add_argument("--policies", default="none,fixed:2,fixed:4,fixed:8", help="the first is the reference")
    parser.add_argument("--clients", default="1,4,16")
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--places", default="process,triton")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--jobs-per-client", type=int, default=8, help="jobs of a loop, at least 16 in all")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--max-prompt-chars", type=int, default=1000, help="longer prompts are left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve-options", default="", help="more options for `faser serve`, separated by blanks")
    parser.add_argument("--name", default="serving")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args()


def demo_engines() -> Path:
    """Builds the demo pair's engines below build/, unless they are there."""
    output = ROOT / "build" / "bench_engines"
    if not (output / "manifest.json").exists():
        pair = ROOT / "models" / "demo"
        faser = Path(sys.executable).with_name("faser")
        options = ["--target", str(pair / "target"), "--draft", str(pair / "draft"), "--output", str(output)]
        subprocess.run([str(faser), "build", *options], check=True)
    return output


def measure(place: Any, name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All loads of one place, see `measure_load`."""
    rows = []
    for temperature in map(float, args.temperatures.split(",")):
        for num_clients in map(int, args.clients.split(",")):
            jobs = load_jobs(
                args.prompts,
                max(16, args.jobs_per_client * num_clients),
                max_tokens=args.max_tokens,
                temperature=temperature,
                seed=args.seed,
                max_prompt_chars=args.max_prompt_chars,
            )
            load = {"place": name, "temperature": temperature, "num_clients": num_clients, "num_jobs": len(jobs)}
            for row in measure_load(place, jobs, num_clients, args):
                rows.append(load | row)
                print(one_line(rows[-1]), flush=True)
    return rows


def measure_load(place: Any, jobs: list[Job], num_clients: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per policy. Within a repeat the policies run in turn, each repeat from another one on."""
    policies = args.policies.split(",")
    figures: dict[str, list[dict[str, float]]] = {policy: [] for policy in policies}
    answers = {}
    for policy in policies:  # allocations and first calls of new shapes are not measured
        place.run(policy, jobs[: 2 * num_clients], num_clients)
    for repeat in range(args.repeats):
        first = repeat % len(policies)
        for policy in policies[first:] + policies[:first]:
            answers[policy], seconds = place.run(policy, jobs, num_clients)
            figures[policy].append(summarise(answers[policy], seconds))
    rows = [{"policy": policy} | merge_repeats(figures[policy]) for policy in policies]
    for row in rows:
        row["speedup"] = row["tokens_per_s"] / rows[0]["tokens_per_s"]
        row["num_different"] = count_different(answers[row["policy"]], answers[policies[0]])
    return rows


def one_line(row: dict[str, Any]) -> str:
    return (
        f"{row['place']}, T={row['temperature']:g}, {row['num_clients']:>2} clients, {row['policy']:>8}: "
        f"{row['tokens_per_s']:6.0f} tokens/s ({row['speedup']:.2f}x), ttft {row['ttft_ms_p50']:.1f} ms, "
        f"itl {row['itl_ms_p50']:.2f} ms, accepted {row['mean_accepted']:.2f}, different {row['num_different']}"
    )


def markdown(meta: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    lines = ["# Serving speed", "", *environment.as_lines(meta), ""]
    lines += [
        f"Closed loop over {meta['max_tokens']}-token completions of held-out prompts, no end token, prefix reuse off. "
        f"Medians of {meta['repeats']} interleaved repeats, with the lowest and highest throughput. Mean accepted: "
        "drafted tokens kept per verification. Answers that differ from those of the first policy are counted.",
        "",
    ]
    keys = dict.fromkeys((row["place"], row["temperature"]) for row in rows)
    for place, temperature in keys:
        lines += [f"## {place[0].upper()}{place[1:]}, temperature {temperature:g}", ""]
        lines += ["| clients | policy | " + " | ".join(title for title, _, _ in COLUMNS) + " |"]
        lines += ["|" + "---|" * (2 + len(COLUMNS))]
        for row in rows:
            if (row["place"], row["temperature"]) == (place, temperature):
                cells = [form.format(row[key]) for _, key, form in COLUMNS]
                lines.append(f"| {row['num_clients']} | `{row['policy']}` | " + " | ".join(cells) + " |")
        lines.append("")
    if meta["step_ms"]:
        lines += ["## Milliseconds per step in process, by phase", ""]
        lines += [
            f"- `{policy}`: " + ", ".join(f"{phase} {ms:.3f}" for phase, ms in phases.items())
            for policy, phases in meta["step_ms"].items()
        ]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    args = parse_args()
    engine_dir = args.engine_dir or demo_engines()
    policies = args.policies.split(",")
    meta = environment.describe(args.seed) | {
        "engines": engine_dir.name,
        "repeats": args.repeats,
        "max_tokens": args.max_tokens,
        "step_ms": {},
    }
    rows: list[dict[str, Any]] = []
    if "process" in args.places:
        place = InProcess(engine_dir, policies)
        rows += measure(place, in_process.PLACE, args)
        meta["step_ms"] = {policy: place.overhead(policy) for policy in policies}
        place.close()
    if "triton" in args.places:
        with tempfile.TemporaryDirectory(prefix="faser-bench-") as logs:
            over = OverTriton(engine_dir, policies, Path(logs), args.serve_options.split())
            try:
                rows += measure(over, servers.PLACE, args)
            finally:
                over.close()
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / f"{args.name}.json").write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    (args.output / f"{args.name}.md").write_text(markdown(meta, rows))
    print(f"wrote {args.output / args.name}.json and .md")


if __name__ == "__main__":
    main()
