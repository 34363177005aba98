"""perf_analyzer's input file, and a table made of the profiles that it exports.

`python -m lab.bench.perf_analyzer_report inputs|table`: called by scripts/perf_analyzer.sh.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench import environment
from lab.places import DEMO, RESULTS

PROMPTS = DEMO / "prompts.jsonl"


def make_inputs(max_tokens: int, max_prompt_chars: int = 1000) -> dict[str, Any]:
    """--input-data: one entry per held-out prompt, greedy; end_id -1 is no token, so lengths are fixed."""
    lines = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    return {
        "data": [
            {
                "text_input": [prompt],
                "max_tokens": [max_tokens],
                "end_id": [-1],
                "stream": [True],
                "exclude_input_in_output": [True],
            }
            for prompt in lines
            if len(prompt) <= max_prompt_chars
        ]
    }


def numbers_of(name: str, text: str) -> list[int]:
    """The numbers of a JSON array by the name of its field."""
    found = re.search(rf'"{name}":\[([\d,]+)\]', text)
    if found is None:
        raise ValueError(f"perf_analyzer's profile has no {name}")
    return [int(number) for number in found[1].split(",")]


def timed_requests(text: str) -> tuple[float, list[tuple[int, list[int]]]]:
    """The measured seconds of one experiment of a profile, and its requests: when each was sent and answered, in ns.

    Counts the requests that ended inside the measured windows.
    """
    # perf_analyzer does not escape the answers that it exports, so a profile is not always JSON; the
    # numbers are taken by name.
    low, *_, high = sorted(numbers_of("window_boundaries", text))
    found = re.findall(r'"timestamp":(\d+),.*?"response_timestamps":\[([\d,]+)\]', text, re.DOTALL)
    requests = [(int(start), [int(moment) for moment in moments.split(",")]) for start, moments in found]
    return (high - low) / 1e9, [(start, moments) for start, moments in requests if low <= moments[-1] <= high]


def summarise_profile(path: Path, max_tokens: int) -> dict[str, Any]:
    """Figures of one exported profile of one experiment, profile-CONCURRENCY.json."""
    num_seconds, requests = timed_requests(path.read_text(encoding="utf-8", errors="replace"))
    first = np.array([times[0] - start for start, times in requests]) / 1e6
    gaps = np.concatenate([np.diff(times) for _, times in requests]) / 1e6
    total = np.array([times[-1] - start for start, times in requests]) / 1e6
    return {
        "concurrency": int(path.stem.rpartition("-")[2]),
        "num_requests": len(requests),
        "tokens_per_s": len(requests) * max_tokens / num_seconds,
        "responses_per_s": sum(len(times) for _, times in requests) / num_seconds,
        "ttft_ms_p50": float(np.percentile(first, 50)),
        "ttft_ms_p99": float(np.percentile(first, 99)),
        "itl_ms_p50": float(np.percentile(gaps, 50)),
        "itl_ms_p99": float(np.percentile(gaps, 99)),
        "e2e_ms_p50": float(np.percentile(total, 50)),
    }


def write_table(name: str, rows: list[dict[str, Any]], max_tokens: int, serve_options: str) -> None:
    meta = environment.describe(seed=0) | {"serve_options": serve_options, "max_tokens": max_tokens}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    server = f"`faser serve {serve_options}`".replace(" `", "`")
    lines = [
        "# perf_analyzer on `ensemble`",
        "",
        *environment.as_lines(meta),
        "",
        f"{server}; `perf_analyzer -m ensemble -i grpc --async --streaming`, greedy {max_tokens}-token completions of "
        "held-out prompts, no end token, prompts repeated and their prefixes reused. "
        "itl: gap between two responses, which may carry several tokens.",
        "",
        "| in flight | requests | tokens/s | responses/s | ttft p50 ms | p99 | itl p50 ms | p99 | whole p50 ms |",
        "|" + "---|" * 9,
    ]
    lines += [
        f"| {r['concurrency']} | {r['num_requests']} | {r['tokens_per_s']:.0f} | {r['responses_per_s']:.0f} "
        f"| {r['ttft_ms_p50']:.1f} | {r['ttft_ms_p99']:.1f} | {r['itl_ms_p50']:.2f} | {r['itl_ms_p99']:.2f} "
        f"| {r['e2e_ms_p50']:.0f} |"
        for r in rows
    ]
    text = "\n".join(lines) + "\n"
    (RESULTS / f"{name}.md").write_text(text)
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Inputs for perf_analyzer, and a table of its profiles.")
    parser.add_argument("action", choices=["inputs", "table"])
    parser.add_argument("--profiles", nargs="+", type=Path, default=[])
    parser.add_argument("--name", default="perf_analyzer")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--serve-options", default="")
    args = parser.parse_args()
    if args.action == "inputs":
        print(json.dumps(make_inputs(args.max_tokens)))
        return
    rows = sorted((summarise_profile(p, args.max_tokens) for p in args.profiles), key=lambda r: r["concurrency"])
    write_table(args.name, rows, args.max_tokens, args.serve_options)


if __name__ == "__main__":
    main()
