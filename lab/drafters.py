"""Who drafts best, and how: chains, trees and n-grams in closed loops of this process, in turns.

    python -m lab.drafters ENGINE_DIR --prompts question.jsonl --chat --clients 1,4,16
    python -m lab.drafters ENGINE_DIR --prompts question.jsonl --policies "none,fixed:2,tree:5,faser (model+ngram)"

The first contestant is the reference: ratios are taken within a repeat, answers compared with its answers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from faser_backend.config import EngineConfig
from faser_backend.core.errors import ConfigError, FaserError
from faser_backend.manifest import EngineManifest
from lab import environment
from lab.answers import jobs_of
from lab.bench.measure import measure
from lab.contestants import split_names
from lab.drive import ClosedLoop, InProcess
from lab.options import add_prompt_options, asked_prompts, integers, make_parser
from lab.prompts import interleaved
from lab.tables import Column, markdown_table, write_results

POLICIES = (
    "none,fixed:1,fixed:2,fixed:3,fixed:4,tree:3,tree:5,tree:8,fixed:4 (ngram),faser (ngram),faser,faser (model+ngram)"
)
DRAFTS = {"(ngram)": "ngram", "(model+ngram)": "model+ngram"}
FEWEST_JOBS = 12
COLUMNS = (
    Column("T", "temperature", "{:g}"),
    Column("clients", "clients"),
    Column("contestant", lambda row: f"`{row['policy']}`"),
    Column("tokens/s", "tokens_per_s", "{:.0f}"),
    Column("over the first", lambda row: _median(row["ratios"]), "{:.2f}x"),
    Column("lowest to highest", lambda row: f"{min(row['ratios']):.2f} to {max(row['ratios']):.2f}"),
    Column("kept", "mean_accepted", "{:.2f}", meaning="draft tokens per verification"),
    Column("of what was drafted", "acceptance_rate", "{:.2f}"),
    Column("other answers", "num_different"),
)


def config_of(name: str, max_num_seqs: int, num_threads: int | None) -> EngineConfig:
    """Of a contestant: a policy, and perhaps who drafts, as DRAFTS has it."""
    policy, _, who = name.partition(" ")
    if who and who not in DRAFTS:
        raise ConfigError(f"--policies = {name!r}: {who!r} must be one of {', '.join(DRAFTS)}, or nothing")
    # Prompts come again in every repeat: without reuse each answer pays for its own prefill.
    return EngineConfig.from_options(
        policy=policy, draft=DRAFTS[who] if who else "auto", max_num_seqs=max_num_seqs, max_queue_size=0,
        enable_prefix_reuse=False, num_threads=num_threads,
    )  # fmt: skip


def run(place: InProcess, names: list[str], prompts: list, args: Any) -> list[dict[str, Any]]:
    rows = []
    for temperature in map(float, args.temperatures.split(",")):
        for clients in integers(args.clients):
            jobs = jobs_of(prompts, max(FEWEST_JOBS, 2 * clients), args.max_tokens, temperature, args.seed)
            found = measure(
                lambda order, jobs=jobs, clients=clients: place.serve_in_turns(
                    order, jobs, ClosedLoop(clients)
                ).items(),
                names,
                jobs,
                args.repeats,
            )
            first = found[0]["tokens_per_s_repeats"]
            for row in found:
                row |= {"temperature": temperature, "clients": clients}
                row["ratios"] = [own / other for own, other in zip(row["tokens_per_s_repeats"], first, strict=True)]
                print(" | ".join(column.show(row) for column in COLUMNS), file=sys.stderr, flush=True)
            rows += found
    return rows


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def main() -> None:
    parser = make_parser(
        __doc__, "seed", "output", policies=POLICIES, clients="1,4,16", temperatures="0,0.8", threads=None, repeats=2,
        max_tokens=64, name="drafters",
    )  # fmt: skip
    parser.add_argument("engine_dir", type=Path)
    add_prompt_options(parser)
    args = parser.parse_args()
    names = split_names(args.policies)
    asked = asked_prompts(args, args.engine_dir)
    manifest = EngineManifest.load(args.engine_dir)
    configs = {name: config_of(name, max(integers(args.clients)), args.threads) for name in names}
    meta = environment.describe(args.seed) | {"repeats": args.repeats, "prompts": asked.as_dict()}
    place = InProcess(args.engine_dir, configs)
    try:
        rows = run(place, names, interleaved(asked.prompts), args)
    finally:
        place.close()
    note = (
        f"{args.engine_dir.name}, runtime {manifest.runtime}; at least {FEWEST_JOBS} answers of up to {args.max_tokens}"
        f" tokens a load, two for each client, categories in turn; contestants take turns of 0.1 s; medians of "
        f"{args.repeats} repeats."
    )
    lines = [note, "", *markdown_table(COLUMNS, rows)]
    print(write_results(args.output / args.name, "Drafters side by side", meta, lines, rows))


if __name__ == "__main__":
    try:
        main()
    except FaserError as error:
        sys.exit(f"error: {error}")
