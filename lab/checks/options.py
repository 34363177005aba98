"""The one command line of the measuring scripts: options that several of them share, each with its own defaults."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from faser_backend.core.errors import FaserError
from faser_backend.lab.places import RESULTS
from faser_backend.lab.prompts import PromptLimits, PromptSet, load_prompt_set
from faser_backend.manifest import EngineManifest


def count(text: str) -> int:
    """Reads a number of at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number}: must be at least 1")
    return number


def existing(text: str) -> Path:
    """Reads the path of a file or directory that is there."""
    if not (path := Path(text)).exists():
        raise argparse.ArgumentTypeError(f"{text!r}: no such file or directory")
    return path


def engine(text: str) -> Path:
    """Reads the path of an engine directory."""
    try:
        EngineManifest.load(path := Path(text))
    except FaserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",") if text]


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


SHARED: dict[str, dict[str, Any]] = {
    "engine-dir": {"type": engine, "help": "default: the demo pair, built here"},
    "policies": {"help": "separated by commas; the first is the reference"},
    "clients": {"type": counts, "help": "requests in flight, separated by commas"},
    "temperatures": {"type": numbers, "help": "separated by commas"},
    "jobs": {"type": count, "help": "answers of a load at least, two for each client"},
    "threads": {"type": count, "help": "threads of each engine, server or call"},
    "repeats": {"type": count},
    "max-tokens": {"type": count, "help": "tokens of an answer"},
    "seed": {"type": int, "default": 0},
    "serve-options": {"default": "", "help": "more options for `faser serve`, separated by spaces"},
    "name": {"help": "stem of the files"},
    "output": {"type": Path, "default": RESULTS},
}


def make_parser(doc: str | None, *names: str, **defaults: Any) -> argparse.ArgumentParser:
    """Returns a parser of these shared options, and of those with a default here (max_tokens for --max-tokens)."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in dict.fromkeys([*names, *(name.replace("_", "-") for name in defaults)]):
        options = dict(SHARED[name])
        if name.replace("-", "_") in defaults:
            options["default"] = defaults[name.replace("-", "_")]
        parser.add_argument(f"--{name}", **options)
    return parser


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `asked_prompts` reads."""
    help_text = (
        'JSON lines with "prompt", "text" or "turns" (Spec-Bench: the first is asked) and perhaps "category"; '
        ".txt: lines of text; default: the demo pair's held-out prompts. Categories are asked in turn"
    )
    parser.add_argument("--prompts", type=Path, help=help_text)
    help_text = "apply the engines' chat template to each prompt; the model ends answers"
    parser.add_argument("--chat", action="store_true", help=help_text)
    help_text = "leave out longer prompts, and those that do not fit the context"
    parser.add_argument("--max-prompt-chars", type=int, help=help_text)


def asked_prompts(args: argparse.Namespace, engine_dir: Path) -> PromptSet:
    """Returns the prompts that the command line names. Ends the program with one line if they are unusable."""
    limits = PromptLimits(args.max_tokens, max_prompt_chars=args.max_prompt_chars)
    try:
        manifest = EngineManifest.load(engine_dir)
        prompts = load_prompt_set(args.prompts, engine_dir, manifest, limits, is_chat=args.chat)
    except FaserError as error:
        raise SystemExit(f"error: {error}") from None
    if prompts.left_out:
        print(prompts.left_out, file=sys.stderr)
    return prompts
