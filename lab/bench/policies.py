"""What scheduler and policy cost per step: every registered policy at batch 1, 8 and 32, without models.

The real scheduler, policy and trimming run as the pipeline runs them; what models would contribute (tokens,
margins, times) is drawn from a seed. Writes NAME.json and NAME.md; the table shows microseconds per step.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from faser_backend.policy.registry import parse_policy, policy_usages
from lab.bench import environment
from lab.bench.policy_steps import PARTS, SyntheticEngine, example_knowledge
from lab.places import RESULTS

EXAMPLES = {"fixed": "fixed:4", "schedule": "schedule:4:4,8:2,32:1"}  # of policies that take an argument


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What scheduler and policy cost per step, without models.")
    parser.add_argument("--policies", help="default: every registered policy, separated by blanks")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--steps", type=int, default=1000, help="steps that are counted")
    parser.add_argument("--warmup", type=int, default=100, help="steps before them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="policies")
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args()


def registered_policies() -> list[str]:
    """Every registered policy, with an example of its argument where it takes one."""
    usages = policy_usages()
    missing = [usage for name, usage in usages.items() if ":" in usage and name not in EXAMPLES]
    if missing:
        raise SystemExit(f"EXAMPLES of {Path(__file__).name} lacks an argument for {', '.join(missing)}")
    return [EXAMPLES.get(name, name) for name in usages]


def measure(policy: str, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """One row: medians per part, median and 99th percentile of their sum, in microseconds."""
    knowledge = example_knowledge()
    engine = SyntheticEngine(parse_policy(policy, lambda: knowledge), knowledge.costs, batch, args.seed)
    for _ in range(args.warmup + args.steps):
        engine.step()
    engine.scheduler.check_integrity()
    spent_us = np.array(engine.watch.steps[args.warmup :]) / 1e3  # [steps, parts]
    total = spent_us.sum(axis=1)
    row: dict[str, Any] = {"policy": policy, "batch": batch, "mean_drafted": round(engine.mean_drafted, 2)}
    row |= {f"{part}_us_p50": us for part, us in zip(PARTS, np.median(spent_us, axis=0).round(1), strict=True)}
    return row | {"total_us_p50": np.median(total).round(1), "total_us_p99": np.percentile(total, 99).round(1)}


def markdown(meta: dict[str, object], rows: list[dict[str, Any]]) -> str:
    lines = [
        "# What scheduler and policy cost per step",
        "",
        *environment.as_lines(meta),
        "",
        f"Microseconds per step over {meta['num_steps']} steps, without models; medians but for the last column. "
        "`schedule` is the scheduler without the policy's `decide`; `trim` and `exit` are what a step decides between "
        "model calls; `drafted` is the mean number of draft tokens per request and step that the policy ended with.",
        "",
        "| policy | batch | drafted | schedule | decide | trim | exit | observe | all, p50 | all, p99 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name, batch, drafted, *times = row.values()
        lines.append(f"| `{name}` | {batch} | {drafted} | " + " | ".join(f"{us:.0f}" for us in times) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    args = parse_args()
    policies = args.policies.split() if args.policies else registered_policies()
    meta = environment.describe(args.seed) | {"num_steps": args.steps, "warmup": args.warmup}
    rows = [measure(policy, int(batch), args) for policy in policies for batch in args.batches.split(",")]
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / f"{args.name}.json").write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    table = markdown(meta, rows)
    (args.output / f"{args.name}.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
