"""Contestants take turns over the same jobs; their figures become rows and a table.

Knows nothing of what a contestant is: a policy of ours, or a peer. `run` answers jobs, see `Place`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from faser_backend.serving.bench import environment
from faser_backend.serving.bench.turns import turn_orders
from faser_backend.serving.bench.workload import (
    Job,
    Trace,
    count_different,
    load_jobs,
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
    answers = {}
    for policy in policies:  # allocations and first calls of new shapes are not measured
        place.run(policy, jobs[: 2 * num_clients], num_clients)
    for order in turn_orders(policies, repeats):
        for policy in order:
            answers[policy], seconds = place.run(policy, jobs, num_clients)
            figures[policy].append(summarise(answers[policy], seconds))
    reference = None
    for policy in policies:
        row: dict[str, Any] = {"policy": policy, **merge_repeats(figures[policy])}
        reference = reference or row["tokens_per_s"]
        row["speedup"] = row["tokens_per_s"] / reference
        row["num_different"] = count_different(answers[policy], answers[policies[0]])
        yield row


def measure_loads(
    place: Place, name: str, args: argparse.Namespace, contestants: Callable[[int], list[str]]
) -> list[dict[str, Any]]:
    """Every temperature and number of clients that the command line names; prints a line per row.

    contestants: number of clients -> who takes part, the first being the reference.
    """
    rows = []
    for temperature in map(float, args.temperatures.split(",")):
        for num_clients in map(int, args.clients.split(",")):
            jobs = load_jobs(
                args.prompts,
                max(16, args.jobs_per_client * num_clients),
                max_tokens=args.max_tokens,
                temperature=temperature,
                seed=args.seed,
                max_prompt_chars=args.max_prompt_chars,
            )
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
    """A table per place and temperature, under what a reader must know of the measurement."""
    lines = [f"# {title}", "", *environment.as_lines(meta), ""]
    lines += [
        f"Closed loop over {meta['max_tokens']}-token completions of held-out prompts, no end token. "
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
        lines.append("")
    return "\n".join(lines)
