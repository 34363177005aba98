"""Contestants take turns over the same jobs; their figures become rows and a table.

Knows nothing of what a contestant is: a policy of ours, or a peer. `run` answers jobs, see `Place`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from faser_backend.core.errors import FaserError
from faser_backend.manifest import EngineManifest
from lab.bench import environment
from lab.bench.categories import (
    Categories,
    add_category_speedups,
    category_rows,
    merge_categories,
    summarise_categories,
)
from lab.bench.prompt_files import Prompt
from lab.bench.prompt_sets import PromptLimits, PromptSet, load_prompt_set
from lab.bench.turns import turn_orders
from lab.bench.workload import (
    Job,
    Trace,
    count_different,
    jobs_of,
    merge_repeats,
    summarise,
)

COLUMNS = (
    ("tokens/s", "tokens_per_s", "{:.0f}"),
    ("lowest", "tokens_per_s_min", "{:.0f}"),
    ("highest", "tokens_per_s_max", "{:.0f}"),
    ("of the first", "speedup", "{:.2f}x"),
    ("ttft p50 ms", "ttft_ms_p50", "{:.1f}"),
    ("p99", "ttft_ms_p99", "{:.1f}"),
    ("itl p50 ms", "itl_ms_p50", "{:.2f}"),
    ("p99", "itl_ms_p99", "{:.2f}"),
    ("tpot p50 ms", "tpot_ms_p50", "{:.2f}"),
    ("mean accepted", "mean_accepted", "{:.2f}"),
    ("answers that differ", "num_different", "{}"),
)
CATEGORY_COLUMNS = (
    ("answers", "num_answers", "{}"),
    ("output tokens", "num_tokens", "{}"),
    ("tokens/s of a request", "request_tokens_per_s", "{:.0f}"),
    ("of the first", "speedup", "{:.2f}x"),
    ("tokens per verification", "mean_emitted", "{:.2f}"),
    ("ttft p50 ms", "ttft_ms_p50", "{:.1f}"),
    ("tpot p50 ms", "tpot_ms_p50", "{:.2f}"),
    ("whole p50 ms", "e2e_ms_p50", "{:.0f}"),
)


class Place(Protocol):
    """Where contestants run: this process, servers, or other people's programs."""

    def run(self, policy: str, jobs: list[Job], num_clients: int) -> tuple[list[Trace], float]:
        """Answers all jobs, num_clients at a time. Returns a trace per job, and seconds."""
        ...


def measure_load(
    place: Place, policies: list[str], jobs: list[Job], num_clients: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """One row per policy. Within a repeat the policies run in turn, each repeat from another one on."""
    figures: dict[str, list[dict[str, float]]] = {policy: [] for policy in policies}
    categories: dict[str, list[Categories]] = {policy: [] for policy in policies}
    answers = {}
    for policy in policies:  # allocations and first calls of new shapes are not measured
        place.run(policy, jobs[: 2 * num_clients], num_clients)
    for order in turn_orders(policies, repeats):
        for policy in order:
            answers[policy], seconds = place.run(policy, jobs, num_clients)
            figures[policy].append(summarise(answers[policy], seconds))
            categories[policy].append(summarise_categories(jobs, answers[policy]))
    reference = None
    first = merge_categories(categories[policies[0]])
    for policy in policies:
        row: dict[str, Any] = {"policy": policy, **merge_repeats(figures[policy])}
        reference = reference or row["tokens_per_s"]
        row["speedup"] = row["tokens_per_s"] / reference
        row["num_different"] = count_different(answers[policy], answers[policies[0]])
        row["categories"] = merge_categories(categories[policy])
        add_category_speedups(row["categories"], first)
        yield row


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """What `asked_prompts` reads."""
    help_text = (
        'JSON lines with "prompt", "text" or "turns" (Spec-Bench: the first is asked) and perhaps "category"; '
        ".txt: lines of text; default: the demo pair's held-out prompts. Categories are asked in turn"
    )
    parser.add_argument("--prompts", type=Path, help=help_text)
    help_text = "prompts are messages, to which the engines' chat template is applied; answers end where the model ends"
    parser.add_argument("--chat", action="store_true", help=help_text)
    help_text = "longer prompts are left out and counted, as are those that the engines' context cannot hold"
    parser.add_argument("--max-prompt-chars", type=int, help=help_text)


def asked_prompts(args: argparse.Namespace, engine_dir: Path) -> PromptSet:
    """The prompts that the command line names. Ends the program with one line where they cannot be asked."""
    limits = PromptLimits(args.max_tokens, max_prompt_chars=args.max_prompt_chars)
    try:
        manifest = EngineManifest.load(engine_dir)
        prompts = load_prompt_set(args.prompts, engine_dir, manifest, limits, is_chat=args.chat)
    except FaserError as error:
        raise SystemExit(f"error: {error}") from None
    if prompts.left_out:
        print(prompts.left_out, file=sys.stderr)
    return prompts


def measure_loads(
    place: Place,
    name: str,
    args: argparse.Namespace,
    prompts: list[Prompt],
    contestants: Callable[[int], list[str]],
) -> list[dict[str, Any]]:
    """Every temperature and number of clients that the command line names; prints a line per row.

    contestants: number of clients -> who takes part, the first being the reference.
    """
    rows = []
    for temperature in map(float, args.temperatures.split(",")):
        for num_clients in map(int, args.clients.split(",")):
            num_jobs = max(16, args.jobs_per_client * num_clients)
            jobs = jobs_of(prompts, num_jobs, args.max_tokens, temperature, args.seed)
            load = {"place": name, "temperature": temperature, "num_clients": num_clients, "num_jobs": len(jobs)}
            for row in measure_load(place, contestants(num_clients), jobs, num_clients, args.repeats):
                rows.append(load | row)
                print(one_line(rows[-1]), flush=True)
    return rows


def one_line(row: dict[str, Any]) -> str:
    return (
        f"{row['place']}, T={row['temperature']:g}, {row['num_clients']:>2} clients, {row['policy']:>8}: "
        f"{row['tokens_per_s']:6.0f} tokens/s ({row['speedup']:.2f}x), ttft {row['ttft_ms_p50']:.1f} ms, "
        f"itl {row['itl_ms_p50']:.2f} ms, accepted {row['mean_accepted']:.2f}, different {row['num_different']}"
    )


def markdown(title: str, meta: dict[str, Any], notes: list[str], rows: list[dict[str, Any]]) -> str:
    """Tables per place and temperature, under what a reader must know of the measurement."""
    lines = [f"# {title}", "", *environment.as_lines(meta), ""]
    lines += [
        f"Closed loop over {_asked(meta)}. "
        f"Medians of {meta['repeats']} interleaved repeats, with the lowest and highest throughput. Mean accepted: "
        "drafted tokens kept per verification. Answers that differ from those of the first line are counted.",
        *notes,
        "",
    ]
    for place, temperature in dict.fromkeys((row["place"], row["temperature"]) for row in rows):
        lines += [f"## {place[0].upper()}{place[1:]}, temperature {temperature:g}", ""]
        lines += ["| clients | policy | " + " | ".join(heading for heading, _, _ in COLUMNS) + " |"]
        lines += ["|" + "---|" * (2 + len(COLUMNS))]
        for row in rows:
            if (row["place"], row["temperature"]) == (place, temperature):
                cells = [form.format(row[key]) for _, key, form in COLUMNS]
                lines.append(f"| {row['num_clients']} | `{row['policy']}` | " + " | ".join(cells) + " |")
        lines += ["", *_category_table([r for r in rows if (r["place"], r["temperature"]) == (place, temperature)])]
    return "\n".join(lines)


def _asked(meta: dict[str, Any]) -> str:
    """Prompts and answers, in words."""
    prompts, max_tokens = meta["prompts"], meta["max_tokens"]
    if prompts["is_chat"]:
        return (
            f"answers to {prompts['name']} as messages under the engines' chat template, ended by the model or after "
            f"{max_tokens} tokens"
        )
    return f"{max_tokens}-token completions of {prompts['name']}, no end token"


def _category_table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of the table by category, none where the prompts have no categories."""
    if not any(row["categories"] for row in rows):
        return []
    lines = ["| clients | category | policy | " + " | ".join(heading for heading, _, _ in CATEGORY_COLUMNS) + " |"]
    lines += ["|" + "---|" * (3 + len(CATEGORY_COLUMNS))]
    for num_clients in dict.fromkeys(row["num_clients"] for row in rows):
        for row in category_rows([row for row in rows if row["num_clients"] == num_clients]):
            cells = [form.format(row[key]) for _, key, form in CATEGORY_COLUMNS]
            lines.append(f"| {num_clients} | {row['category']} | `{row['policy']}` | " + " | ".join(cells) + " |")
    return [*lines, ""]
