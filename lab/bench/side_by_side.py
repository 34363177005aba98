"""Serving speed side by side: policies of ours, or engine directories. Beside programs of others: lab.peers.

    python scripts/bench_serving.py                             # policies, in this process and through Triton
    python -m lab.bench.side_by_side engines ENGINE_DIR...      # one model on several runtimes or formats

For each temperature and number of clients the contestants take turns over the same jobs, and the whole round is
repeated. Writes NAME.json and NAME.md; tables show medians over repeats.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from faser_backend.cli_options import print_progress
from faser_backend.config import EngineConfig
from faser_backend.manifest import EngineManifest
from faser_backend.serving.demo_engine import demo_engine_dir
from lab import drive, environment
from lab.answers import Answer, Job, category_rows, jobs_of
from lab.bench import servers
from lab.bench.measure import Served, measure
from lab.bench.servers import OverTriton
from lab.drive import InProcess
from lab.options import LOOPS, add_prompt_options, asked_prompts, integers, make_parser
from lab.peers.llama import LlamaServer, llama_version
from lab.prompts import Prompt, PromptSet
from lab.tables import Column, markdown_table, write_results

OWN_SERVERS = "own servers"
COLUMNS = (
    Column("clients", "num_clients"),
    Column("policy", lambda row: f"`{row['policy']}`"),
    Column("tokens/s", "tokens_per_s", "{:.0f}"),
    Column("lowest", "tokens_per_s_min", "{:.0f}"),
    Column("highest", "tokens_per_s_max", "{:.0f}"),
    Column("of the first", "speedup", "{:.2f}x"),
    Column("ttft p50 ms", "ttft_ms_p50", "{:.1f}"),
    Column("p99", "ttft_ms_p99", "{:.1f}"),
    Column("itl p50 ms", "itl_ms_p50", "{:.2f}"),
    Column("p99", "itl_ms_p99", "{:.2f}"),
    Column("tpot p50 ms", "tpot_ms_p50", "{:.2f}"),
    Column("mean accepted", "mean_accepted", "{:.2f}"),
    Column("answers that differ", "num_different"),
)
CATEGORY_COLUMNS = (
    Column("clients", "num_clients"),
    Column("category", "category"),
    Column("policy", lambda row: f"`{row['policy']}`"),
    Column("answers", "num_answers"),
    Column("output tokens", "num_tokens"),
    Column("tokens/s of a request", "request_tokens_per_s", "{:.0f}"),
    Column("of the first", "speedup", "{:.2f}x"),
    Column("tokens per verification", "mean_emitted", "{:.2f}"),
    Column("ttft p50 ms", "ttft_ms_p50", "{:.1f}"),
    Column("tpot p50 ms", "tpot_ms_p50", "{:.2f}"),
    Column("whole p50 ms", "e2e_ms_p50", "{:.0f}"),
)


Run = Callable[[list[Job], int], tuple[list[Answer], float]]  # jobs and clients -> an answer per job, and seconds


def measure_loads(
    contestants: Mapping[str, Run],
    place: str,
    args: argparse.Namespace,
    prompts: list[Prompt],
    *,
    alone: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Every temperature and number of clients that the command line names; prints a line per row.

    The first contestant is the reference. alone: who takes part with one client only.
    """
    rows = []
    for temperature in map(float, args.temperatures.split(",")):
        for num_clients in integers(args.clients):
            num_jobs = max(16, args.jobs_per_client * num_clients)
            jobs = jobs_of(prompts, num_jobs, args.max_tokens, temperature, args.seed)
            names = [name for name in contestants if num_clients == 1 or name not in alone]
            for name in names:  # allocations and first calls of new shapes are not measured
                contestants[name](jobs[: 2 * num_clients], num_clients)

            def serve(
                order: Sequence[str], jobs: list[Job] = jobs, num_clients: int = num_clients
            ) -> Iterable[tuple[str, Served]]:
                return ((name, contestants[name](jobs, num_clients)) for name in order)

            load = {"place": place, "temperature": temperature, "num_clients": num_clients, "num_jobs": len(jobs)}
            for row in measure(serve, names, jobs, args.repeats):
                rows.append(load | row)
                print(one_line(rows[-1]), flush=True)
    return rows


def one_line(row: dict[str, Any]) -> str:
    return (
        f"{row['place']}, T={row['temperature']:g}, {row['num_clients']:>2} clients, {row['policy']:>8}: "
        f"{row['tokens_per_s']:6.0f} tokens/s ({row['speedup']:.2f}x), ttft {row['ttft_ms_p50']:.1f} ms, "
        f"itl {row['itl_ms_p50']:.2f} ms, accepted {row['mean_accepted']:.2f}, different {row['num_different']}"
    )


def tables(meta: dict[str, Any], notes: list[str], rows: list[dict[str, Any]]) -> list[str]:
    """Lines: tables per place and temperature, under what a reader must know of the measurement."""
    lines = [
        f"Closed loop over {_asked(meta)}. Medians of {meta['repeats']} interleaved repeats, with the lowest and "
        "highest throughput. Mean accepted: drafted tokens kept per verification. Answers that differ from those of "
        "the first line are counted.",
        *notes,
    ]
    for place, temperature in dict.fromkeys((row["place"], row["temperature"]) for row in rows):
        own = [row for row in rows if (row["place"], row["temperature"]) == (place, temperature)]
        lines += [
            "",
            f"## {place[0].upper()}{place[1:]}, temperature {temperature:g}",
            "",
            *markdown_table(COLUMNS, own),
        ]
        by_category = [
            {"num_clients": count, **each}
            for count in dict.fromkeys(row["num_clients"] for row in own)
            for each in category_rows([row for row in own if row["num_clients"] == count])
        ]
        lines += ["", *markdown_table(CATEGORY_COLUMNS, by_category)] if by_category else []
    return lines


def _asked(meta: dict[str, Any]) -> str:
    """Prompts and answers, in words."""
    prompts, max_tokens = meta["prompts"], meta["max_tokens"]
    if prompts["is_chat"]:
        return (
            f"answers to {prompts['name']} as messages under the engines' chat template, ended by the model or after "
            f"{max_tokens} tokens"
        )
    return f"{max_tokens}-token completions of {prompts['name']}, no end token"


def _parser(doc: str | None, *names: str, **defaults: Any) -> argparse.ArgumentParser:
    parser = make_parser(doc, *names, *LOOPS, repeats=3, **defaults)
    add_prompt_options(parser)
    return parser


def _served(stack: ExitStack, engine_dir: Path, policies: list[str], options: list[str]) -> dict[str, Run]:
    """Policies of ours by name, through servers that the stack stops."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faser-bench-")))
    # Prompts come again in every repeat: without reuse each answer pays for its own prefill.
    over = OverTriton(engine_dir, policies, folder, ["--no-prefix-reuse", *options])
    stack.callback(over.close)
    return {policy: partial(over.run, policy) for policy in policies}


def _llama(stack: ExitStack, args: argparse.Namespace, prompts: PromptSet, target: Path) -> Run:
    """llama.cpp's own server, with room for the longest request of every client."""
    longest = max(len(prompt.token_ids) for prompt in prompts.prompts) + args.max_tokens
    num_slots = max(integers(args.clients))
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faser-bench-")))
    server = LlamaServer(
        target, num_slots=num_slots, slot_context=longest, threads=args.threads, log=folder / "llama.log"
    )
    stack.callback(server.stop)
    return server.run


def _written(
    args: argparse.Namespace, title: str, asked: PromptSet, notes: list[str], rows: list[dict[str, Any]], **more: Any
) -> None:
    meta = environment.describe(args.seed) | {"repeats": args.repeats, "max_tokens": args.max_tokens}
    meta |= {"prompts": asked.as_dict(), "serve_options": args.serve_options, **more}
    notes = [*notes, *[f"{asked.left_out}."] * bool(asked.left_out)]
    write_results(args.output / args.name, title, meta, tables(meta, notes, rows), rows)
    print(f"wrote {args.output / args.name}.json and .md")


def serving_main(argv: list[str] | None = None) -> None:
    """Serving speed, policy beside policy in one run: in this process, and through a real Triton server."""
    parser = _parser(
        serving_main.__doc__, "engine-dir", policies="none,fixed:2,fixed:4,fixed:8", clients="1,4,16",
        temperatures="0,0.8", jobs_per_client=8, max_tokens=100, name="serving",
    )  # fmt: skip
    parser.add_argument("--places", default="process,triton")
    args = parser.parse_args(argv)
    engine_dir = args.engine_dir or demo_engine_dir(print_progress)
    policies = args.policies.split(",")
    asked = asked_prompts(args, engine_dir)
    rows: list[dict[str, Any]] = []
    notes = ["Prefix reuse is off, so that each answer pays for its own prefill."]
    if "process" in args.places:
        configs = {name: EngineConfig.from_options(policy=name, enable_prefix_reuse=False) for name in policies}
        place = InProcess(engine_dir, configs)
        rows += measure_loads({name: partial(place.run, name) for name in policies}, drive.PLACE, args, asked.prompts)
        notes += ["", "Milliseconds per step in process, over all loads, by phase:", ""]
        for policy in policies:
            phases = ", ".join(f"{phase} {ms:.3f}" for phase, ms in place.overhead(policy).items())
            notes.append(f"- `{policy}`: {phases}")
        place.close()
    if "triton" in args.places:
        with ExitStack() as stack:
            contestants = _served(stack, engine_dir, policies, args.serve_options.split())
            rows += measure_loads(contestants, servers.PLACE, args, asked.prompts)
    _written(args, "Serving speed", asked, notes, rows)


def engines_main(argv: list[str] | None = None) -> None:
    """Engine directories beside one another, and llama.cpp beside them: one model on several runtimes or formats.

    Every directory is served through Triton under every policy, every GGUF file by llama.cpp's own server without a
    draft (`scripts/anchors/build_llama.sh` makes it). The first one named is the reference.
    """
    parser = _parser(
        engines_main.__doc__, policies="none", clients="1,4,16", temperatures="0", threads=2, jobs_per_client=4,
        max_tokens=64, name="engines",
    )  # fmt: skip
    parser.add_argument("engine_dirs", type=Path, nargs="+")
    parser.add_argument("--llama", type=Path, action="append", default=[], help="a GGUF file for llama.cpp")
    args = parser.parse_args(argv)
    asked = asked_prompts(args, args.engine_dirs[0])
    options = ["--num-threads", str(args.threads), *args.serve_options.split()]
    with ExitStack() as stack:
        contestants = {f"llama.cpp {path.stem}": _llama(stack, args, asked, path) for path in args.llama}
        for engine_dir in args.engine_dirs:
            ours = _served(stack, engine_dir, args.policies.split(","), options)
            contestants |= {f"{engine_dir.name} {policy}": run for policy, run in ours.items()}
        rows = measure_loads(contestants, OWN_SERVERS, args, asked.prompts)
    engines = [described(engine_dir) for engine_dir in args.engine_dirs]
    notes = [f"Through Triton, {args.threads} threads, prefix reuse off: {'; '.join(engines)}."]
    if args.llama:
        notes.append(
            f"llama.cpp ({llama_version()}) through its own HTTP server, prompt cache off, given our token ids."
        )
    _written(args, "Engines side by side", asked, notes, rows, threads=args.threads, engines=engines)


def described(engine_dir: Path) -> str:
    manifest = EngineManifest.load(engine_dir)
    return f"`{engine_dir.name}`: runtime {manifest.runtime}, weights {manifest.target.weight_format.title}"


MAINS = {"serving": serving_main, "engines": engines_main}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in MAINS:
        sys.exit(f"usage: python -m lab.bench.side_by_side {{{','.join(MAINS)}}} ...; --help after either says more")
    MAINS[sys.argv[1]](sys.argv[2:])
