"""Figures of the answers to each category of prompts, in a load that mixes the categories.

All categories share one run, so the throughput of one of them says how often it was asked. What can be compared is
the speed of its requests while they are in flight, which with one client is the throughput.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from lab.bench.workload import Job, Trace, summarise

UNNAMED = "(none)"  # answers to prompts without a category, where others have one
FIGURES = ("mean_accepted", "acceptance_rate", "ttft_ms_p50", "tpot_ms_p50", "e2e_ms_p50")

Categories = dict[str, dict[str, Any]]


def summarise_categories(jobs: Sequence[Job], traces: Sequence[Trace]) -> Categories:
    """Figures of one run by category, {} where no job has one.

    request_tokens_per_s: tokens of the answers over the time for which their requests were in flight. mean_emitted:
    tokens per verification, the recovered or bonus token included.
    """
    groups: dict[str, list[Trace]] = {}
    for job, trace in zip(jobs, traces, strict=True):
        groups.setdefault(job.category or UNNAMED, []).append(trace)
    if set(groups) <= {UNNAMED}:
        return {}
    found: Categories = {}
    for category, group in groups.items():
        flight_s = sum(trace.response_s[-1] - trace.start_s for trace in group)
        figures = summarise(group, flight_s)
        found[category] = {
            "num_answers": len(group),
            "num_tokens": sum(trace.num_tokens for trace in group),
            "request_tokens_per_s": figures["tokens_per_s"],
            "mean_emitted": figures["mean_accepted"] + 1,
            **{name: figures[name] for name in FIGURES},
        }
    return found


def merge_categories(repeats: Sequence[Categories]) -> Categories:
    """The median of each figure (of counts the lower one), and each repeat's speed, for ratios within a repeat."""
    merged: Categories = {}
    for category, first in repeats[0].items():
        found = merged[category] = {}
        for key, value in first.items():
            median = statistics.median_low if isinstance(value, int) else statistics.median
            found[key] = median(repeat[category][key] for repeat in repeats)
        found["request_tokens_per_s_repeats"] = [repeat[category]["request_tokens_per_s"] for repeat in repeats]
    return merged


def add_category_speedups(categories: Categories, reference: Categories) -> None:
    """Writes into each category its speed over the reference's: the median of the repeats' ratios."""
    for category, found in categories.items():
        pairs = zip(
            found["request_tokens_per_s_repeats"], reference[category]["request_tokens_per_s_repeats"], strict=True
        )
        found["speedup"] = statistics.median(mine / others for mine, others in pairs)


def category_rows(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """For tables: a row per category and contestant of one load, the contestants of a category side by side."""
    for category in rows[0]["categories"] if rows else ():
        for row in rows:
            yield {"category": category, "policy": row["policy"], **row["categories"][category]}
