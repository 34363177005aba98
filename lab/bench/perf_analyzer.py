"""What scripts/perf_analyzer.sh gives NVIDIA's perf_analyzer, and a table of the moments that it exports.

python -m lab.bench.perf_analyzer inputs FOLDER
python -m lab.bench.perf_analyzer table FOLDER
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from lab import environment
from lab.options import make_parser
from lab.prompts import DEMO_PROMPTS, read_prompts
from lab.tables import Column, markdown_table, write_results

MAX_PROMPT_CHARS = 1000
COLUMNS = (
    Column("in flight", "num_clients"),
    Column("requests", "num_requests"),
    Column("tokens/s", "tokens_per_s", "{:.0f}"),
    Column("ttft p50 ms", "ttft_ms_p50", "{:.1f}"),
    Column("p99", "ttft_ms_p99", "{:.1f}"),
    Column("tpot p50 ms", "tpot_ms_p50", "{:.2f}"),
    Column("whole p50 ms", "e2e_ms_p50", "{:.0f}"),
)

Requests = list[tuple[int, list[int]]]  # when each was sent and answered, in ns


def make_inputs(max_tokens: int) -> dict[str, Any]:
    """perf_analyzer's --input-data: a held-out prompt each, greedy; end_id -1 is no token, so lengths are fixed."""
    fixed = {"max_tokens": [max_tokens], "end_id": [-1], "stream": [True], "exclude_input_in_output": [True]}
    prompts = [prompt.text for prompt in read_prompts(DEMO_PROMPTS) if len(prompt.text) <= MAX_PROMPT_CHARS]
    return {"data": [{"text_input": [prompt], **fixed} for prompt in prompts]}


def timed_requests(text: str) -> tuple[float, Requests]:
    """The measured seconds of a profile, and the requests that ended inside the measured windows.

    perf_analyzer does not escape the answers that it exports, so a profile may not be JSON; numbers are taken by name.
    """
    windows = re.search(r'"window_boundaries":\[([\d,]+)\]', text)
    if windows is None:
        raise ValueError("perf_analyzer's profile has no window_boundaries")
    low, *_, high = sorted(map(int, windows[1].split(",")))
    found = re.findall(r'"timestamp":(\d+),.*?"response_timestamps":\[([\d,]+)\]', text, re.DOTALL)
    requests = [(int(start), [int(moment) for moment in moments.split(",")]) for start, moments in found]
    return (high - low) / 1e9, [(start, moments) for start, moments in requests if low <= moments[-1] <= high]


def row_of(path: Path, max_tokens: int) -> dict[str, Any]:
    """path: profile-CLIENTS.json. perf_analyzer ends at the first failed request: where it reports, none failed."""
    seconds, requests = timed_requests(path.read_text(encoding="utf-8", errors="replace"))
    moments = [(m[0] - start, m[-1] - m[0], m[-1] - start) for start, m in requests]
    first, rest, whole = (np.array(values) / 1e6 for values in zip(*moments, strict=True))
    return {
        "num_clients": int(path.stem.rpartition("-")[2]),
        "num_requests": len(requests),
        "tokens_per_s": len(requests) * max_tokens / seconds,
        "ttft_ms_p50": float(np.percentile(first, 50)),
        "ttft_ms_p99": float(np.percentile(first, 99)),
        "tpot_ms_p50": float(np.percentile(rest, 50)) / (max_tokens - 1),
        "e2e_ms_p50": float(np.percentile(whole, 50)),
    }


def main() -> None:
    parser = make_parser(__doc__, "output", "seed", max_tokens=100, name="perf_analyzer")
    parser.add_argument("action", choices=["inputs", "table"])
    parser.add_argument("folder", type=Path, help="where inputs are written, or profiles lie")
    args = parser.parse_args()
    if args.action == "inputs":
        (args.folder / "perf_analyzer.json").write_text(json.dumps(make_inputs(args.max_tokens)))
        return
    rows = [row_of(path, args.max_tokens) for path in args.folder.glob("profile-*.json")]
    rows.sort(key=lambda row: row["num_clients"])
    note = f"By `bash scripts/perf_analyzer.sh`: greedy {args.max_tokens}-token completions of held-out prompts."
    lines = [note, "", *markdown_table(COLUMNS, rows)]
    print(write_results(args.output / args.name, "perf_analyzer", environment.describe(args.seed), lines, rows))


if __name__ == "__main__":
    main()
