"""Contestants beside each other: loads times turns give one table and one picture.

    python -m lab.checks.compare ENGINE_DIR --policies "none,fixed:4,faser (model+ngram)" --clients 1,4,16
    python -m lab.checks.compare ENGINE_DIR OTHER_DIR --places triton      # one model on several runtimes or formats
    python -m lab.checks.compare --places process,triton                   # the demo pair, in process and served
    python -m lab.checks.compare ENGINE_DIR --places triton --url 127.0.0.1:8001

A contestant is a policy on an engine directory, with who drafts in brackets, in this process or behind a Triton server
of its own; or a text model of a server that is running. Engines in this process take turns of 0.1 s, servers a load
each. The first contestant is the reference: ratios are taken within a repeat, answers are compared with its answers.
Writes NAME.json, NAME.md and NAME_light.png, NAME_dark.png. Other people's programs: faser_backend.lab.peers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import ConfigError, FaserError
from faser_backend.lab import environment
from faser_backend.lab.answers import Job, jobs_of
from faser_backend.lab.bench.measure import Served, measure
from faser_backend.lab.checks.options import add_prompt_options, asked_prompts, make_parser
from faser_backend.lab.checks.servers import LoadClient, Run, serve_all
from faser_backend.lab.contestants import split_names
from faser_backend.lab.drive import ClosedLoop, InProcess
from faser_backend.lab.tables import Column, markdown_table, write_results
from faser_backend.manifest import EngineManifest
from faser_backend.serving.model_source import demo_engine_dir
from faser_backend.serving.processes import terminable
from faser_backend.text.prompts import Prompt

DRAFTS = {"(ngram)": "ngram", "(model+ngram)": "model+ngram"}
PLACES = ("process", "triton")
WARM_TOKENS = 16
COLUMNS = (
    Column("where", "place"), Column("T", "temperature", "{:g}"), Column("clients", "num_clients"),
    Column("contestant", lambda row: f"`{row['policy']}`"), Column("tokens/s", "tokens_per_s", "{:.0f}"),
    Column("over the first", lambda row: median(row["ratios"]), "{:.2f}x"),
    Column("lowest to highest", lambda row: f"{min(row['ratios']):.2f} to {max(row['ratios']):.2f}"),
    Column("ttft p50 ms", "ttft_ms_p50", "{:.1f}"), Column("p99", "ttft_ms_p99", "{:.1f}"),
    Column("itl p50 ms", "itl_ms_p50", "{:.2f}"), Column("tpot p50 ms", "tpot_ms_p50", "{:.2f}"),
    Column("kept", "mean_accepted", "{:.2f}"), Column("of what was drafted", "acceptance_rate", "{:.2f}"),
    Column("other answers", "num_different"),
)  # fmt: skip
SHADES = {"light": "default", "dark": "dark_background"}  # styles of matplotlib
COLOURS = ("#c8344b", "#e8788a", "#1f5591", "#6ba3d6", "#2a9d8f", "#8fd0c6", "#96b", "#c3aee0", "#b80", "#ec6", "#888")

Row = dict[str, Any]
Field = Callable[[Sequence[str], list[Job], int], Iterable[tuple[str, Served]]]  # answers jobs of n clients, in order


def one_after_the_other(runs: Mapping[str, Run]) -> Field:
    return lambda order, jobs, clients: ((name, runs[name](jobs, clients)) for name in order)


def in_turns(place: InProcess) -> Field:
    return lambda order, jobs, clients: place.serve_in_turns(order, jobs, ClosedLoop(clients)).items()


def measure_loads(
    serve: Field, names: Sequence[str], prompts: list[Prompt], args: argparse.Namespace, place: str
) -> Iterator[Row]:
    """Measures every temperature and number of clients that the command line names; a line per row on stderr."""
    for temperature in args.temperatures:
        for clients in args.clients:
            jobs = jobs_of(prompts, max(args.jobs, 2 * clients), args.max_tokens, temperature, args.seed)
            warm = [replace(job, max_tokens=min(WARM_TOKENS, job.max_tokens)) for job in jobs[: max(2, clients)]]
            list(serve(names, warm, clients))  # allocations and first calls of new shapes are not measured
            found = measure(lambda order, load=(jobs, clients): serve(order, *load), names, jobs, args.repeats)
            first = found[0]["tokens_per_s_repeats"]
            for row in found:
                row |= {"place": place, "temperature": temperature, "num_clients": clients, "num_jobs": len(jobs)}
                row["ratios"] = [own / other for own, other in zip(row["tokens_per_s_repeats"], first, strict=True)]
                print(" | ".join(column.show(row) for column in COLUMNS), file=sys.stderr, flush=True)
            yield from found


def config_of(name: str, **options: Any) -> EngineConfig:
    """Configuration of a contestant: a policy, and perhaps who drafts, as DRAFTS has it. Raises ConfigError."""
    policy, _, who = name.partition(" ")
    if who and who not in DRAFTS:
        raise ConfigError(f"--policies = {name!r}: {who!r} must be one of {', '.join(DRAFTS)}, or nothing")
    # Prompts come again in every repeat: without reuse each answer pays for its own prefill.
    return EngineConfig.from_options(
        policy=policy, draft=DRAFTS[who] if who else "auto", max_queue_size=0, enable_prefix_reuse=False, **options
    )


def contestants(engine_dirs: Sequence[Path], policies: Sequence[str]) -> dict[str, tuple[Path, str]]:
    """Returns engine directory and policy by name; names contain the directory if there are several."""
    has_twins = len({each.name for each in engine_dirs}) < len(engine_dirs)
    prefix = {each: f"{each if has_twins else each.name} " * (len(engine_dirs) > 1) for each in engine_dirs}
    return {prefix[each] + policy: (each, policy) for each in engine_dirs for policy in policies}


def measure_process(
    named: Mapping[str, tuple[Path, str]], prompts: list[Prompt], args: argparse.Namespace
) -> Iterator[Row]:
    most = max(args.clients)
    with closing(InProcess(args.engine_dirs[0])) as place:
        for name, (directory, policy) in named.items():
            place.open(name, config_of(policy, max_num_seqs=most, num_threads=args.threads), directory)
        yield from measure_loads(in_turns(place), list(named), prompts, args, "process")


def measure_servers(
    named: Mapping[str, tuple[Path, str]], prompts: list[Prompt], args: argparse.Namespace
) -> Iterator[Row]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faser-compare-")))
        most = max(EngineConfig().max_num_seqs, *args.clients)
        common = ["--no-prefix-reuse", "--max-num-seqs", str(most)]
        common += [] if args.threads is None else ["--num-threads", str(args.threads)]
        options = {}
        for name, (directory, policy) in named.items():
            config = config_of(policy)
            own = ["--engine-dir", str(directory), "--policy", config.policy, "--draft", config.draft]
            options[name] = [*own, *common, *args.serve_options.split()]
        client = LoadClient(stack)
        runs = serve_all(stack, client, options, folder)
        runs |= {url: lambda jobs, clients, url=url: client.run(url, jobs, clients) for url in args.url}
        yield from measure_loads(one_after_the_other(runs), list(runs), prompts, args, "Triton")


def draw(rows: Sequence[Row], stem: Path, *, joins_places: bool = False) -> list[Path]:
    """Draws tokens/s at the lowest temperature by clients, a bar per contestant and place. Returns the paths.

    joins_places: a bar per contestant, with the median over all.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    least = min(row["temperature"] for row in rows)
    found: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        if row["temperature"] == least:
            name = row["policy"] if joins_places else f"{row['policy']}, {row['place']}"
            found.setdefault(name, {}).setdefault(row["num_clients"], []).append(row["tokens_per_s"])
    bars = {name: {count: median(of) for count, of in each.items()} for name, each in found.items()}
    clients = sorted({count for heights in bars.values() for count in heights})
    width = 0.86 / len(bars)
    paths = []
    for shade, sheet in SHADES.items():
        with style.context([sheet, {"font.size": 9.5, "axes.axisbelow": True}]):
            axes = (figure := Figure(figsize=(9.0, 3.6))).subplots()
            for index, (name, heights) in enumerate(bars.items()):
                positions = [clients.index(count) + (index - (len(bars) - 1) / 2) * width for count in heights]
                colour = COLOURS[index % len(COLOURS)]
                drawn = axes.bar(positions, list(heights.values()), width * 0.94, color=colour, label=name)
                axes.bar_label(drawn, fmt="%.0f", fontsize=6, padding=1)
            axes.set_xticks(range(len(clients)), [f"{count} client{'s' * (count > 1)}" for count in clients])
            axes.set_ylabel("output tokens/s")
            axes.grid(axis="y", alpha=0.25)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.legend(frameon=False, fontsize=8.5, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4)
            paths.append(stem.with_name(f"{stem.name}_{shade}.png"))
            figure.savefig(paths[-1], dpi=150, transparent=True, bbox_inches="tight", metadata={"Software": None})
    return paths


def write(
    args: argparse.Namespace, title: str, asked: Any, notes: list[str], rows: list[Row], *, joins_places: bool = False
) -> None:
    """Writes the files of these rows, and prints the table. asked: the PromptSet. joins_places: see draw."""
    meta = environment.describe(args.seed) | {"repeats": args.repeats, "prompts": asked.as_dict()}
    kind = "messages under the chat template" if asked.is_chat else "completions, no end token"
    lines = [
        f"{asked.name} as {kind}, answers of up to {args.max_tokens} tokens, at least {args.jobs} a load and two for "
        f"each client, categories in turn; medians of {args.repeats} repeats. Kept: draft tokens per verification.",
        *notes,
        *[f"{asked.left_out}."] * bool(asked.left_out),
        "",
        *markdown_table(COLUMNS, rows),
    ]
    print(write_results(args.output / args.name, title, meta, lines, rows))
    draw(rows, args.output / args.name, joins_places=joins_places)


def described(engine_dir: Path) -> str:
    manifest = EngineManifest.load(engine_dir)
    return f"`{engine_dir.name}`: runtime {manifest.runtime}, weights {manifest.target.weight_format.title}"


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(
        __doc__, "seed", "output", "serve-options", policies="none,fixed:1,fixed:2,fixed:4,faser", clients="1,4,16",
        temperatures="0,0.8", jobs=12, threads=None, repeats=2, max_tokens=64, name="compare",
    )  # fmt: skip
    parser.add_argument("engine_dirs", type=Path, nargs="*", help="default: the demo pair, built here")
    parser.add_argument("--places", default="process", help=f"of {','.join(PLACES)}")
    parser.add_argument("--url", action="append", default=[], help="HOST:PORT of a server's gRPC; takes part in triton")
    add_prompt_options(parser)
    args = parser.parse_args(argv)
    args.engine_dirs = args.engine_dirs or [demo_engine_dir()]
    unknown = set(args.places.split(",")) - set(PLACES)
    if unknown:
        raise ConfigError(f"--places = {args.places!r}: must be of {', '.join(PLACES)}")
    asked = asked_prompts(args, args.engine_dirs[0])
    named = contestants(args.engine_dirs, split_names(args.policies))
    rows: list[Row] = []
    notes = [f"Prefix reuse is off. {'; '.join(map(described, args.engine_dirs))}."]
    try:
        with terminable():
            if "process" in args.places:
                rows += measure_process(named, asked.prompts, args)
            if "triton" in args.places:
                rows += measure_servers(named, asked.prompts, args)
    finally:  # also after an interrupt or a failure
        if rows:
            write(args, "Side by side", asked, notes, rows)


if __name__ == "__main__":
    try:
        main()
    except FaserError as error:
        sys.exit(f"error: {error}")
