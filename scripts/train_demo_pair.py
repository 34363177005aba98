#!/usr/bin/env python3
"""Trains the demo pair: a Llama target and a draft that imitates it, on the standard library's sources.

Needs torch, tokenizers, safetensors, numpy and, to check the export, transformers. Every stage can be
run alone and goes on where it was cut off; delete the build folder to begin again.
    python scripts/train_demo_pair.py                  # all stages, about 100 minutes on one core
    python scripts/train_demo_pair.py --stage target
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from demo_pair import corpus, distill, evaluate, export, sampling, training
from demo_pair.model import DRAFT_SHAPE, TARGET_SHAPE

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("tokenizer", "target", "sample", "annotate", "draft", "evaluate", "export")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=STAGES, action="append", help="may be repeated; default: all, in order")
    parser.add_argument("--build-dir", type=Path, default=ROOT / "build" / "demo_pair")
    parser.add_argument("--models-dir", type=Path, default=ROOT / "models" / "demo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--target-steps", type=int, default=1500)
    parser.add_argument("--target-decay-steps", type=int, default=1700, help="run that the rate is laid out for")
    parser.add_argument("--target-long-steps", type=int, default=200, help="last steps, at 1024 tokens of context")
    parser.add_argument("--sample-batches", type=int, default=14)
    parser.add_argument("--sample-batch-size", type=int, default=128)
    parser.add_argument("--text-rows", type=int, default=1280, help="corpus windows of 1024 tokens for the draft")
    parser.add_argument("--warm-steps", type=int, default=400)
    parser.add_argument("--draft-steps", type=int, default=2800)
    parser.add_argument("--refine-steps", type=int, default=2000)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    build, seed = args.build_dir, args.seed
    target_plan = training.TrainPlan(args.target_steps, args.target_decay_steps, args.target_long_steps)
    warm_plan = training.TrainPlan(num_steps=args.warm_steps, tokens_per_step=4096)
    draft_plan = distill.DistillPlan(num_steps=args.draft_steps)
    refine_plan = distill.DistillPlan(args.refine_steps, muon_lr=0.004, tv_from=0.3, tv_weight=2.0)
    run = {
        "target": asdict(target_plan),
        "sample": {"num_tokens": args.sample_batches * args.sample_batch_size * sampling.SAMPLE_LEN},
        "annotate": {"num_text_tokens": args.text_rows * distill.TEXT_LEN},
        "draft_warm": asdict(warm_plan),
        "draft": asdict(draft_plan),
        "draft_refined": asdict(refine_plan),
    }

    def train_draft() -> None:
        training.train_on_text(DRAFT_SHAPE, warm_plan, build, "draft_warm", seed)
        distill.distill_draft(draft_plan, build, "draft_warm", "draft", seed)
        distill.distill_draft(refine_plan, build, "draft", "draft_refined", seed + 1)

    stages: dict[str, Callable[[], None]] = {
        "tokenizer": lambda: corpus.prepare(build, seed),
        "target": lambda: training.train_on_text(TARGET_SHAPE, target_plan, build, "target", seed),
        "sample": lambda: sampling.sample_target(build, args.sample_batches, args.sample_batch_size, seed),
        "annotate": lambda: distill.annotate_all(build, args.text_rows, seed),
        "draft": train_draft,
        "evaluate": lambda: evaluate.evaluate(build, seed),
        "export": lambda: export.export(build, args.models_dir, run),
    }
    for name in args.stage or STAGES:
        print(f"== {name}", flush=True)
        stages[name]()


if __name__ == "__main__":
    main()
