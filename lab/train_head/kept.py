"""What a verification keeps of a draft, through the engine, by category of prompts.

    python -m lab.train_head.kept ENGINE_DIR --prompts question.jsonl [--drafts model,ngram,model+ngram]

Counts, not times: tokens do not depend on what else the machine does. Prompts go through the chat template.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from faser_backend.config import EngineConfig
from faser_backend.manifest import EngineManifest
from lab.answers import Answer, jobs_of
from lab.drive import InProcess
from lab.prompts import PromptLimits, load_prompt_set

NUM_CLIENTS = 16


def kept(answers: Sequence[Answer]) -> dict[str, float]:
    """Draft tokens kept per verification and of all; every verification emits one token more, the prompt the first."""
    tokens, accepted, drafted = (
        sum(getattr(a, f"num_{name}") for a in answers) for name in ("tokens", "accepted", "drafted")
    )
    num_verifications = tokens - accepted - len(answers)
    kept_each = accepted / max(num_verifications, 1)
    return {"answers": len(answers), "kept": kept_each, "share": accepted / max(drafted, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine_dir", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--drafts", default="model,ngram")
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--policy", default="fixed:4")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-prompt-tokens", type=int)
    parser.add_argument("--num-prompts", type=int, help="so many alone, categories in turn")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    limits = PromptLimits(args.max_tokens, max_prompt_tokens=args.max_prompt_tokens)
    asked = load_prompt_set(args.prompts, args.engine_dir, EngineManifest.load(args.engine_dir), limits, is_chat=True)
    prompts, rows = asked.prompts[: args.num_prompts], []
    for draft in args.drafts.split(","):
        config = EngineConfig.from_options(
            policy=args.policy, draft=draft, max_num_seqs=NUM_CLIENTS, max_queue_size=0, num_threads=args.num_threads
        )
        with closing(InProcess(args.engine_dir, {draft: config})) as place:
            for temperature in map(float, args.temperatures.split(",")):
                jobs = jobs_of(prompts, len(prompts), args.max_tokens, temperature, 0)
                groups: dict[str, list[Answer]] = {}
                for job, answer in zip(jobs, place.run(draft, jobs, NUM_CLIENTS)[0], strict=True):
                    for name in ("all", job.category):
                        groups.setdefault(name, []).append(answer)
                for name, answers in groups.items():
                    row = {"draft": draft, "temperature": temperature, "category": name, **kept(answers)}
                    rows.append(row)
                    counts = f"{row['answers']} answers, {row['share']:.0%} of the draft"
                    print(f"{draft}, T = {temperature:g}, {name}: {row['kept']:.2f} kept ({counts})", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
