"""This server beside other people's programs: one model's weights, the same token ids, turns taken.

    bash scripts/peers/install.sh
    python -m lab.peers --prompts question.jsonl --chat                  # every peer that is installed
    python -m lab.peers --prompts question.jsonl --chat --only llama --clients 16 --budget-s 300
    python -m lab.peers --report                                         # page and picture of what was measured

Measures SmolLM2-135M-Instruct, another GGUF file, or the demo pair. Writes the record NAME.json, in which a load that
is measured again takes its old one's place, and from it the page NAME.md and the picture NAME_light.png, NAME_dark.png.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from faser_backend.core.errors import FaserError
from faser_backend.serving.profile_store import PROFILE_FILE
from lab import environment
from lab.interrupts import terminable
from lab.options import add_prompt_options, asked_prompts, integers, make_parser
from lab.peers.contestants import LLAMA_NGRAMS, PIECES, Setting
from lab.peers.files import ModelFiles, demo_files, model_files, profile, smollm2
from lab.peers.measuring import Measuring, Record, Sizing
from lab.peers.picture import draw
from lab.peers.report import named, page
from lab.prompts import PromptSet, read_prompts

DEMO_NAME = "demo"
LLAMA = ("llama", "llama-int8")
NOT_BY_DEFAULT = ("llama-modes",)  # what it finds is named with --llama-ngrams


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Ends the program with one line that names an option which cannot be."""
    parser = make_parser(
        __doc__, "seed", "output", clients="1,4,16", temperatures="0,0.8", threads=2, repeats=3, max_tokens=64,
        name="peers",
    )  # fmt: skip
    add_prompt_options(parser)
    parser.add_argument("--only", help=f"pieces, separated by commas: {', '.join(PIECES)}; default: all that decide")
    parser.add_argument("--target", default="", help=f"a GGUF file, or {DEMO_NAME}; default: SmolLM2")
    parser.add_argument("--head", type=Path, help="an EAGLE-3 head of the target, for ours")
    parser.add_argument("--jobs", type=int, default=16, help="answers of a load at least, two for each client")
    parser.add_argument("--budget-s", type=float, help="of a piece; loads that would begin later are left out, by name")
    parser.add_argument(
        "--profile-s", type=float, default=90.0, help="of `faser profile`, for engines without a profile; 0: never"
    )
    parser.add_argument("--llama-ngrams", default="simple", help=f"llama.cpp's mode: {', '.join(LLAMA_NGRAMS)}")
    parser.add_argument("--report", action="store_true", help="measure nothing: write page and picture of the record")
    args = parser.parse_args(argv)
    args.only = args.only.split(",") if args.only else [name for name in PIECES if name not in NOT_BY_DEFAULT]
    unknown = [name for name in args.only if name not in PIECES]
    if unknown:
        raise SystemExit(f"error: --only = {','.join(unknown)!r}: unknown; known are {', '.join(PIECES)}")
    if args.llama_ngrams not in LLAMA_NGRAMS:
        raise SystemExit(f"error: --llama-ngrams = {args.llama_ngrams!r}: must be one of {', '.join(LLAMA_NGRAMS)}")
    for name in ("repeats", "jobs", "max_tokens", "threads"):
        if getattr(args, name) < 1:
            raise SystemExit(f"error: --{name.replace('_', '-')} = {getattr(args, name)}: must be at least 1")
    return args


def measure(args: argparse.Namespace, record: Record) -> None:
    """Every piece that was asked for, into the record. Raises FaserError, or RuntimeError naming a peer that fails."""
    files = _files(args)
    asked = asked_prompts(args, next(iter(files.engines.values())))
    longest = max(len(prompt.token_ids) for prompt in asked.prompts) + args.max_tokens
    loads = tuple((float(text), count) for text in args.temperatures.split(",") for count in integers(args.clients))
    sizing = Sizing(loads, args.repeats, args.jobs, args.max_tokens, args.seed, args.budget_s)
    measuring = Measuring(record, sizing, asked.prompts)
    for name in args.only:
        piece = PIECES[name]
        weights = _weights(piece.weights, files)
        why = piece.missing() if weights else f"{files.name} has no {piece.weights} weights"
        if why:
            print(f"{name}: {why}")
            if name not in record.pieces:
                record.missing[name] = why
                record.write()
            continue
        num_slots = max(integers(args.clients))
        setting = Setting(files, weights, Path(), args.threads, num_slots, longest, args.llama_ngrams)
        for engine_dir in (files.engines[weights], files.heads.get(weights)):
            if engine_dir is not None and args.profile_s:
                profile(engine_dir, args.profile_s)
        meta = environment.describe(args.seed) | _circumstances(args, asked, files, weights)
        meta |= {"note": piece.note(), "left_out": []}
        if name in LLAMA:
            meta["note"] += f" n-grams: its mode `{args.llama_ngrams}`."
        left_out = measuring.piece(name, piece, setting, meta)
        meta["left_out"] += map(named, left_out)
        record.write()
        if left_out:
            print(f"{name}: no time was left for {', '.join(meta['left_out'])}")


def _weights(wanted: str, files: ModelFiles) -> str:
    """The format of a piece; the model's only one in place of fp16; "" where there is none."""
    if wanted in files.engines:
        return wanted
    return next(iter(files.engines)) if wanted == "fp16" else ""


def _files(args: argparse.Namespace) -> ModelFiles:
    if args.target == DEMO_NAME:
        return demo_files()
    return model_files(Path(args.target) if args.target else smollm2(), args.head)


def _circumstances(args: argparse.Namespace, asked: PromptSet, files: ModelFiles, weights: str) -> dict[str, Any]:
    """What a reader must know of a load, beside the machine."""
    told = f"{args.max_tokens}-token completions of {asked.name}, no end token"
    if asked.is_chat:
        told = f"answers to {asked.name} as messages, ended by the model or after {args.max_tokens} tokens"
    return {
        "command": environment.command_line(),
        "asked": told,
        "model": files.name,
        "weights": weights,
        "threads": args.threads,
        "num_jobs": args.jobs,
        "is_profiled": (files.engines[weights] / PROFILE_FILE).exists(),
    }


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 130 where it was interrupted, with what was measured until then written."""
    args = parse(argv)
    status = 0
    try:
        if args.prompts is not None and not args.report:
            read_prompts(args.prompts)  # a bad file is told before anything is built
        record = Record.load(args.output / f"{args.name}.json")
        if not args.report:
            try:
                with terminable():
                    measure(args, record)
            except KeyboardInterrupt:
                print("interrupted", file=sys.stderr)
                status = 130
        text = page(record)
    except (FaserError, RuntimeError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    stem = args.output / args.name
    stem.with_name(f"{stem.name}.md").write_text(text)
    pictures = draw(record, stem)
    print(f"wrote {', '.join(str(path) for path in (record.path, stem.with_name(f'{stem.name}.md'), *pictures))}")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
