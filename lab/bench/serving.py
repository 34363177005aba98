"""Serving speed, policy beside policy in one run: in this process, and through a real Triton server.

For each place, temperature and number of clients, the policies take turns over the same jobs, and
the whole round is repeated. Writes NAME.json and NAME.md; the table shows medians over repeats.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from faser_backend.config import EngineConfig
from faser_backend.serving.demo_engine import demo_engine_dir
from lab.bench import environment, in_process, servers
from lab.bench.in_process import InProcess
from lab.bench.servers import OverTriton
from lab.bench.side_by_side import add_prompt_options, asked_prompts, markdown, measure_loads
from lab.places import RESULTS

NO_REUSE = "--no-prefix-reuse"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serving speed, policy beside policy in one run.")
    parser.add_argument("--engine-dir", type=Path, help="default: the demo pair, built here")
    add_prompt_options(parser)
    parser.add_argument("--policies", default="none,fixed:2,fixed:4,fixed:8", help="the first is the reference")
    parser.add_argument("--clients", default="1,4,16")
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--places", default="process,triton")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--jobs-per-client", type=int, default=8, help="jobs of a loop, at least 16 in all")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve-options", default="", help="more options for `faser serve`, separated by blanks")
    parser.add_argument("--name", default="serving")
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args()


def print_progress(what: str, steps_done: int, steps_total: int) -> None:
    print(f"[{steps_done}/{steps_total}] {what}", file=sys.stderr)


def phase_notes(step_ms: dict[str, dict[str, float]]) -> list[str]:
    """Where the steps in process went, policy by policy."""
    if not step_ms:
        return []
    lines = ["", "Milliseconds per step in process, over all loads, by phase:", ""]
    for policy, phases in step_ms.items():
        lines.append(f"- `{policy}`: " + ", ".join(f"{phase} {ms:.3f}" for phase, ms in phases.items()))
    return lines


def main() -> None:
    args = parse_args()
    engine_dir = args.engine_dir or demo_engine_dir(print_progress)
    policies = args.policies.split(",")
    asked = asked_prompts(args, engine_dir)
    meta = environment.describe(args.seed) | {"repeats": args.repeats, "max_tokens": args.max_tokens}
    meta["prompts"] = asked.as_dict()
    step_ms: dict[str, dict[str, float]] = {}
    rows: list[dict[str, Any]] = []
    if "process" in args.places:
        # Prompts come again in every repeat: without reuse each answer pays for its own prefill.
        configs = {name: EngineConfig.from_options(policy=name, enable_prefix_reuse=False) for name in policies}
        place = InProcess(engine_dir, configs)
        rows += measure_loads(place, in_process.PLACE, args, asked.prompts, lambda _: policies)
        step_ms = {policy: place.overhead(policy) for policy in policies}
        place.close()
    if "triton" in args.places:
        with tempfile.TemporaryDirectory(prefix="faser-bench-") as logs:
            over = OverTriton(engine_dir, policies, Path(logs), [NO_REUSE, *args.serve_options.split()])
            try:
                rows += measure_loads(over, servers.PLACE, args, asked.prompts, lambda _: policies)
            finally:
                over.close()
    meta["step_ms"] = step_ms
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / f"{args.name}.json").write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    notes = ["Prefix reuse is off, so that each answer pays for its own prefill."]
    notes += [f"{asked.left_out}."] * bool(asked.left_out) + phase_notes(step_ms)
    (args.output / f"{args.name}.md").write_text(markdown("Serving speed", meta, notes, rows))
    print(f"wrote {args.output / args.name}.json and .md")


if __name__ == "__main__":
    main()
