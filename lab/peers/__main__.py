"""Compares this server with other programs: one model's weights, the same token ids, alternating runs.

    bash scripts/peers/install.sh
    python -m lab.peers --prompts question.jsonl --chat                  # every peer that is installed
    python -m lab.peers --prompts question.jsonl --chat --only llama,openvino --clients 16

Measures SmolLM2-135M-Instruct or another GGUF file, one piece (a peer with ours beside it) after another. Writes
NAME.json, NAME.md and the picture, as faser_backend.lab.checks.compare does; a bar of ours is the median over pieces.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from faser_backend.core.errors import FaserError
from faser_backend.lab.checks.compare import measure_loads, one_after_the_other, write
from faser_backend.lab.checks.options import add_prompt_options, asked_prompts, existing, make_parser
from faser_backend.lab.peers.files import ModelFiles, model_files, smollm2
from faser_backend.lab.peers.programs import PIECES, Setting, ours, started
from faser_backend.lab.prompts import PromptSet
from faser_backend.serving.processes import terminable
from faser_backend.text.prompts import read_prompts


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the options. A wrong one ends the program with one line that names it."""
    parser = make_parser(
        __doc__, "seed", "output", clients="1,4,16", temperatures="0", jobs=16, threads=2, repeats=3, max_tokens=64,
        name="peers",
    )  # fmt: skip
    add_prompt_options(parser)
    parser.add_argument("--only", default=",".join(PIECES), help="Measure only these pieces, separated by commas.")
    parser.add_argument("--target", type=existing, help="Measure this GGUF file (default: SmolLM2).")
    parser.add_argument("--head", type=existing, help="Draft with this EAGLE-3 head in ours.")
    args = parser.parse_args(argv)
    args.only = args.only.split(",")
    unknown = [name for name in args.only if name not in PIECES]
    if unknown:
        raise SystemExit(f"error: --only = {','.join(unknown)!r}: unknown; known are {', '.join(PIECES)}")
    return args


def measure_piece(
    name: str, args: argparse.Namespace, files: ModelFiles, asked: PromptSet, notes: list[str]
) -> Iterator[dict[str, Any]]:
    """Yields rows, load by load. Adds a note for the page: the reason if the piece cannot be measured here."""
    piece = PIECES[name]
    why = piece.missing() if piece.weights in files.engines else f"{files.name} has no {piece.weights} weights"
    notes.append(f"- `{name}` was not measured: {why}" if why else f"- `{name}`: {piece.described()}")
    if why:
        return
    longest = max(len(prompt.token_ids) for prompt in asked.prompts) + args.max_tokens
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faser-peers-")))
        setting = Setting(files, piece.weights, folder, args.threads, max(args.clients), longest)
        peers = started(stack, setting, piece.start, piece.modes)
        runs = ours(stack, setting) | peers
        yield from measure_loads(one_after_the_other(runs), list(runs), asked.prompts, args, name)


def main(argv: list[str] | None = None) -> None:
    """Measures piece by piece. After an interrupt or a failure, the files hold the loads measured before."""
    args = parse(argv)
    notes = [
        f"{args.threads} threads each; all are given the same token ids; ours by its OpenAI port; prefix reuse is off. "
        "Ours stores 16-bit weights as bf16 and multiplies in bf16."
    ]
    rows: list[dict[str, Any]] = []
    try:
        if args.prompts is not None:
            read_prompts(args.prompts)  # reports a bad file before anything is built
        files = model_files(args.target or smollm2(), args.head)
        asked = asked_prompts(args, next(iter(files.engines.values())))
        for name in args.only:
            try:
                with terminable():
                    rows += measure_piece(name, args, files, asked, notes)
            finally:  # also after an interrupt or a failure
                if rows:
                    write(args, f"{files.name} beside other programs", asked, notes, rows, joins_places=True)
                else:
                    print(notes[-1])
    except (FaserError, RuntimeError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
