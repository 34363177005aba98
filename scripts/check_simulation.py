#!/usr/bin/env python3
"""Simulates closed loops of the demo pair on this machine, then runs them for real: predicted beside measured.

Profiles a copy of the demo engine first, so that the cost model is of the same minutes as the runs. The texts are
others than those that the acceptance process was fitted to: same prompts, other seeds. Under two minutes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from faser_backend.config import EngineConfig
from faser_backend.serving.bench import environment
from faser_backend.serving.bench.in_process import InProcess
from faser_backend.serving.bench.workload import Job, load_jobs, summarise, take_turns
from faser_backend.serving.demo_engine import demo_engine_dir
from faser_backend.serving.profiling.profile import profile_engine
from faser_backend.serving.simulated_profile import profile_world
from faser_backend.simulation.drive import run_closed_loop
from faser_backend.simulation.engine import World, build_sim_engine
from faser_backend.simulation.trace import Trace

GOAL = 0.15  # of the measured throughput
FIRST_SEED = 10_000  # far from the seeds of the fit
FIGURES = ("tokens_per_s", "mean_accepted", "tpot_ms_p50", "ttft_ms_p50")


def options_of(policy: str) -> dict[str, Any]:
    return {"policy": policy, "enable_prefix_reuse": False, "max_num_seqs": 16, "max_queue_size": 0}


def measure(place: InProcess, policies: list[str], jobs: list[Job], num_clients: int, repeats: int) -> dict[str, Any]:
    """Medians of each policy's figures; policies take turns."""
    found: dict[str, list[dict[str, float]]] = {policy: [] for policy in policies}
    for policy in policies:  # first calls of shapes are not measured
        place.run(policy, jobs[: 2 * num_clients], num_clients)
    for policy in take_turns(policies, repeats):
        found[policy].append(summarise(*place.run(policy, jobs, num_clients)))
    return {
        policy: {name: statistics.median(row[name] for row in rows) for name in FIGURES}
        | {f"tokens_per_s_{which.__name__}": which(row["tokens_per_s"] for row in rows) for which in (min, max)}
        for policy, rows in found.items()
    }


def predict(world: World, policy: str, jobs: list[Job], tokenizer: Tokenizer, num_clients: int) -> dict[str, float]:
    lengths = np.array([len(tokenizer.encode(job.prompt).ids) for job in jobs])
    outputs = np.array([job.max_tokens for job in jobs])
    trace = Trace(np.zeros(len(jobs)), lengths, outputs, "closed loop")
    config = EngineConfig.from_options(**options_of(policy))
    rows = []
    for seed in range(8):  # texts differ, so eight sets of them
        sim = build_sim_engine(world, config, seed=seed, max_output_tokens=int(outputs.max()))
        rows.append(run_closed_loop(sim, trace, num_clients).summary())
    return {name: statistics.fmean(row[name] for row in rows) for name in FIGURES}


def markdown(meta: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    errors = [abs(row["ratio"] - 1.0) for row in rows]
    lines = ["# The simulator against real runs", "", *environment.as_lines(meta), ""]
    lines += [
        f"The demo pair in process, closed loop, {meta['max_tokens']}-token completions at temperature "
        f"{meta['temperature']:g}, no prefix reuse; medians of {meta['repeats']} interleaved repeats. Predicted: "
        "the same loop in virtual time, on costs profiled right before "
        f"({'quick' if meta['is_quick_profile'] else 'full'} profile) and the fitted acceptance process.",
        "",
        "| clients | policy | measured tokens/s | lowest - highest | predicted | ratio | accepted | predicted "
        "| tpot p50 ms | predicted |",
        "|" + "---|" * 10,
    ]
    for row in rows:
        real, sim = row["measured"], row["predicted"]
        spread = f"{real['tokens_per_s_min']:.0f} - {real['tokens_per_s_max']:.0f}"
        lines.append(
            f"| {row['num_clients']} | `{row['policy']}` | {real['tokens_per_s']:.0f} | {spread} "
            f"| {sim['tokens_per_s']:.0f} | {row['ratio']:.2f} | {real['mean_accepted']:.2f} "
            f"| {sim['mean_accepted']:.2f} | {real['tpot_ms_p50']:.2f} | {sim['tpot_ms_p50']:.2f} |"
        )
    within = sum(error <= GOAL for error in errors)
    lines += [
        "",
        f"Within {GOAL:.0%}: {within} of {len(rows)}; median error {statistics.median(errors):.1%}, "
        f"largest {max(errors):.1%}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default="none,fixed:2,fixed:4,survival")
    parser.add_argument("--clients", default="1,4,16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.8, choices=[0.0, 0.8], help="those that were fitted")
    parser.add_argument("--full-profile", action="store_true", help="over a minute more, smaller errors")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    policies = args.policies.split(",")
    demo = demo_engine_dir()
    prompts = ROOT / "models" / "demo" / "prompts.jsonl"
    meta = environment.describe(FIRST_SEED) | {
        "repeats": args.repeats,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "is_quick_profile": not args.full_profile,
    }
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="faser-check-") as folder:
        engine_dir = Path(folder) / "demo"
        shutil.copytree(demo, engine_dir)
        profile_engine(engine_dir, is_quick=not args.full_profile).save(engine_dir)
        world = profile_world(engine_dir, 16, kind="greedy" if args.temperature == 0.0 else "sampled")
        tokenizer = Tokenizer.from_file(str(engine_dir / "tokenizer.json"))
        place = InProcess(engine_dir, {policy: EngineConfig.from_options(**options_of(policy)) for policy in policies})
        for num_clients in map(int, args.clients.split(",")):
            jobs = load_jobs(
                prompts,
                max(16, 4 * num_clients),
                max_tokens=args.max_tokens,
                temperature=args.temperature,
                seed=FIRST_SEED,
                max_prompt_chars=1000,
            )
            measured = measure(place, policies, jobs, num_clients, args.repeats)
            for policy in policies:
                predicted = predict(world, policy, jobs, tokenizer, num_clients)
                ratio = predicted["tokens_per_s"] / measured[policy]["tokens_per_s"]
                rows.append(
                    {
                        "num_clients": num_clients,
                        "policy": policy,
                        "measured": measured[policy],
                        "predicted": predicted,
                        "ratio": ratio,
                    }
                )
                real = measured[policy]["tokens_per_s"]
                print(
                    f"{num_clients:>2} clients, {policy:>8}: measured {real:6.0f} tokens/s, "
                    f"predicted {predicted['tokens_per_s']:6.0f}, ratio {ratio:.2f}",
                    flush=True,
                )
        place.close()
    args.output.mkdir(parents=True, exist_ok=True)
    text = markdown(meta, rows)
    (args.output / "simulation_check.json").write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    (args.output / "simulation_check.md").write_text(text)
    print(text.splitlines()[-1])


if __name__ == "__main__":
    main()
