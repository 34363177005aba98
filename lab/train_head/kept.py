"""What a verification keeps of a draft, through the engine, by category of prompts.

    python -m lab.train_head.kept ENGINE_DIR --prompts question.jsonl [--drafts model,ngram,model+ngram]

Counts, not times: tokens do not depend on what else the machine does. Prompts go through the chat template.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import numpy as np

from faser_backend.config import EngineConfig
from faser_backend.core.request import Request, RequestStats, SamplingParams
from faser_backend.manifest import EngineManifest
from faser_backend.serving.compose import build_engine
from lab.prompts import Prompt, PromptLimits, load_prompt_set

ALL = "all"
# Spec-Bench counts these as one of its six kinds.
MT_BENCH = frozenset(["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"])


def measure(
    engine_dir: Path, prompts: list[Prompt], config: EngineConfig, temperatures: list[float], max_tokens: int
) -> dict[float, dict[str, dict[str, float]]]:
    """By temperature and category: answers, verifications, and draft tokens kept per verification."""
    end_ids = EngineManifest.load(engine_dir).end_ids
    engine = build_engine(engine_dir, config)
    found = {}
    try:
        for temperature in temperatures:
            kind_of: dict[str, str] = {}
            for index, prompt in enumerate(prompts):
                kind_of[name := f"{temperature}-{index}"] = kind(prompt.category)
                engine.submit(
                    Request(
                        name,
                        np.array(prompt.token_ids, np.int64),
                        max_tokens,
                        SamplingParams(temperature=temperature, seed=index),
                        end_ids,
                    )
                )
            stats: dict[str, list[RequestStats]] = defaultdict(list)
            while engine.has_work:
                for output in engine.step():
                    if output.stats is not None:
                        for name in (kind_of[output.request_id], ALL):
                            stats[name].append(output.stats)
            found[temperature] = {name: _summary(of_kind) for name, of_kind in stats.items()}
    finally:
        engine.close()
    return found


def kind(category: str) -> str:
    return "mt_bench" if category in MT_BENCH else category


def _summary(stats: list[RequestStats]) -> dict[str, float]:
    num_steps = sum(s.num_steps for s in stats)
    kept, drafted = sum(s.num_accepted for s in stats), sum(s.num_drafted for s in stats)
    return {
        "answers": len(stats),
        "verifications": num_steps,
        "kept": kept / max(num_steps, 1),
        "share": kept / max(drafted, 1),
    }


def some_of_each(prompts: list[Prompt], most: int | None) -> list[Prompt]:
    """The first prompts of each category, all where most is None."""
    seen: dict[str, int] = defaultdict(int)
    chosen = []
    for prompt in prompts:
        seen[prompt.category] += 1
        if most is None or seen[prompt.category] <= most:
            chosen.append(prompt)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine_dir", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--drafts", default="model,ngram")
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--policy", default="fixed:4")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-prompt-tokens", type=int)
    parser.add_argument("--per-category", type=int, help="this many prompts of each category alone")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    limits = PromptLimits(args.max_tokens, max_prompt_tokens=args.max_prompt_tokens)
    asked = load_prompt_set(args.prompts, args.engine_dir, EngineManifest.load(args.engine_dir), limits, is_chat=True)
    prompts, results = some_of_each(asked.prompts, args.per_category), {}
    for draft in args.drafts.split(","):
        config = EngineConfig.from_options(
            policy=args.policy, draft=draft, max_num_seqs=16, max_queue_size=0, num_threads=args.num_threads
        )
        results[draft] = measure(
            args.engine_dir, prompts, config, list(map(float, args.temperatures.split(","))), args.max_tokens
        )
        for temperature, by_kind in results[draft].items():
            for name, row in sorted(by_kind.items()):
                counts = (
                    f"{row['answers']} answers, {row['verifications']} verifications, {row['share']:.0%} of the draft"
                )
                print(f"{draft}, T = {temperature:g}, {name}: {row['kept']:.2f} kept ({counts})", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
