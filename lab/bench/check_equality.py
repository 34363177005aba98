"""Equality of tokens over all held-out prompts: every policy, mode and exit against plain decoding.

    python scripts/check_equality.py [--engine-dir DIR] [--num-prompts N] [--max-tokens N] [--ways TEXT]

Greedy and at temperature 1 with seeds; alone, and in continuous batches of 1-16 with random arrivals,
cancellations and forced preemptions. Early exit needs an engine with calibrated exits (`faser profile`).
Differences are counted and explained (lab/bench/equality.py).
Writes benchmarks/results/equality.{json,md}; exits with 1 if a difference is not a near-tie.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from faser_backend.config import EngineConfig
from faser_backend.core.request import Request, SamplingParams
from faser_backend.manifest import EngineManifest
from faser_backend.serving.compose import build_engine
from faser_backend.serving.demo_engine import demo_engine_dir
from faser_backend.serving.profile_store import load_knowledge
from faser_backend.serving.runtimes import open_runtime
from lab.bench import environment
from lab.bench.equality import Comparison, Reference, StepCounts, Way, run_alone, run_mixed, ways
from lab.bench.workload import load_jobs
from lab.places import DEMO, RESULTS

SEED = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-dir", type=Path, default=None)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--ways", default="", help="only ways whose name contains this")
    args = parser.parse_args()
    engine_dir = args.engine_dir or demo_engine_dir()
    has_exits = bool(load_knowledge(engine_dir, EngineManifest.load(engine_dir)).exits)
    if not has_exits:
        print(f"{engine_dir} has no calibrated exits: early exit is left out", file=sys.stderr)
    chosen = [way for way in ways(has_exits=has_exits) if args.ways in way.name]
    results = []
    for temperature in (0.0, 1.0):
        requests = make_requests(engine_dir, args.num_prompts, args.max_tokens, temperature)
        results += check(engine_dir, requests, f"T={temperature:g}", chosen)
    write(args.output, results, args)
    return 1 if any(result.unexplained for result in results) else 0


def make_requests(engine_dir: Path, num_prompts: int, max_tokens: int, temperature: float) -> list[Request]:
    prompts = DEMO / "prompts.jsonl"
    jobs = load_jobs(
        prompts, num_prompts, max_tokens=max_tokens, temperature=temperature, seed=SEED, max_prompt_chars=10**6
    )
    tokenizer = Tokenizer.from_file(str(engine_dir / "tokenizer.json"))
    return [
        Request(
            f"p{index}",
            np.array(tokenizer.encode(job.prompt).ids, np.int64),
            job.max_tokens,
            SamplingParams(temperature=job.temperature, seed=job.seed),
        )
        for index, job in enumerate(jobs)
    ]


def check(engine_dir: Path, requests: list[Request], label: str, chosen: list[Way]) -> list[Comparison]:
    """Every way alone, mixed, and mixed on a pool so small that it must preempt."""
    manifest = EngineManifest.load(engine_dir)
    size = manifest.kv_block_size
    one_context = -(-manifest.target.spec.max_context // size)
    # Room for about two requests: more than one context, far less than 16 of these requests need.
    longest = max(-(-(r.prompt_ids.size + r.max_tokens) // size) for r in requests)
    small_pool = max(one_context, 2 * longest + 2)
    runtime = open_runtime(engine_dir, manifest, EngineConfig())
    pool = runtime.open_pool(manifest.target, one_context)
    runner = runtime.open_runner(manifest.target, runtime.menu.whole, pool)
    plain = build_engine(engine_dir, EngineConfig(policy="none", enable_prefix_reuse=False))
    expected = run_alone(plain, tqdm(requests, f"{label} reference", leave=False))
    plain.close()
    reference = Reference(requests, expected, runner, size)
    results = []
    for way in chosen:
        for name, num_blocks in (("", None), (", preempting", small_pool)):
            config = EngineConfig.from_options(max_num_seqs=16, num_kv_blocks=num_blocks, **way.options)
            results += check_engine(engine_dir, config, reference, requests, f"{label} {way.name}", pool=name)
    runner.close()
    return results


def check_engine(
    engine_dir: Path, config: EngineConfig, reference: Reference, requests: list[Request], label: str, *, pool: str
) -> list[Comparison]:
    """One engine: each request alone (where the pool is large), then in batches of 1, 4 and 16."""
    engine = build_engine(engine_dir, config)
    counts, results = StepCounts(engine), []

    def add(name: str, tokens: dict[str, list[int]], cancelled: set[str]) -> None:
        result = reference.compare(name, tokens, cancelled)
        result.num_preemptions = engine.metrics().num_preemptions
        counts.take(result)
        results.append(result)

    if config.policy != "none" and not pool:
        add(f"{label} alone", run_alone(engine, tqdm(requests, f"{label} alone", leave=False)), set())
    for concurrency in tqdm((1, 4, 16), f"{label} mixed{pool}", leave=False):
        drawn = run_mixed(engine, requests, seed=concurrency, max_concurrency=concurrency, cancelled_share=0.15)
        add(f"{label} mixed{pool} <= {concurrency}", *drawn)
    metrics = engine.metrics()
    assert metrics.num_free_blocks == metrics.num_blocks, "blocks leaked"
    engine.close()
    return results


def write(output: Path, results: list[Comparison], args: argparse.Namespace) -> None:
    meta = environment.describe(SEED) | {"num_prompts": args.num_prompts, "max_tokens": args.max_tokens}
    output.mkdir(parents=True, exist_ok=True)
    rows = [asdict(result) for result in results]
    (output / "equality.json").write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    lines = ["# Equality with plain decoding", "", *environment.as_lines(meta), ""]
    lines += [f"{args.num_prompts} held-out prompts x {args.max_tokens} tokens.", ""]
    columns = [
        "way",
        "answers",
        "cancelled",
        "preemptions so far",
        "overlapped steps",
        "pruned rows",
        "tokens compared",
        "near-ties",
        "largest margin",
        "unexplained",
    ]
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [
        f"| {r.name} | {r.num_answers} | {r.num_cancelled} | {r.num_preemptions} | {r.overlapped_share:.0%} "
        f"| {r.num_pruned} | {r.num_tokens} "
        f"| {r.num_near_ties} | {r.largest_margin:.1e} | {len(r.unexplained)} |"
        for r in results
    ]
    (output / "equality.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines[-len(results) - 2 :]))
    for result in results:
        for line in result.unexplained:
            print(f"UNEXPLAINED {result.name}: {line}")


if __name__ == "__main__":
    sys.exit(main())
