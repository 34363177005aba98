"""Jobs of a benchmark, their answers, and the figures of a run, in all and by category.

Engines in this process, simulated engines and servers all give these answers.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from faser_backend.text.prompts import Prompt

UNNAMED = "(none)"  # answers to prompts without a category, where others have one
FIGURES = ("mean_accepted", "mean_emitted", "acceptance_rate", "ttft_ms_p50", "tpot_ms_p50", "e2e_ms_p50")

PAIRED_FIGURES = ("tokens_per_s", "e2e_ms_p50")  # each repeat's value is kept, for ratios within a repeat
Categories = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Job:
    """One completion, or one answer in a conversation.

    A completion has exactly max_tokens tokens; no end token ends it. A chat answer ends where the model ends it, after
    at most max_tokens.
    """

    prompt: str  # a chat's user message
    max_tokens: int
    temperature: float
    seed: int
    category: str = ""
    prompt_ids: tuple[int, ...] = ()  # tokens that the engines read; (): those of the text
    is_chat: bool = False


@dataclass(slots=True)
class Answer:
    """One answer. Times are in seconds of the client's clock; a response may carry several tokens."""

    start_s: float
    response_s: list[float]
    num_tokens: int
    num_drafted: int
    num_accepted: int  # drafted tokens that the answer holds
    digest: str  # of the answer's text or ids; equal answers have equal digests
    token_ids: list[int] = field(default_factory=list)  # () where they are unknown
    num_steps: int = 0  # verifications, the first token's included; 0 where only the other counts are known

    @property
    def num_verifications(self) -> int:
        """Verifications of other programs emit one token beyond those that they accept; ours may emit none."""
        return self.num_steps or self.num_tokens - self.num_accepted


def jobs_of(prompts: Sequence[Prompt], num_jobs: int, max_tokens: int, temperature: float, seed: int) -> list[Job]:
    """Returns num_jobs jobs that cycle through the prompts in order. Job i draws with seed + i."""
    jobs = []
    for index in range(num_jobs):
        asked = prompts[index % len(prompts)]
        rest = (asked.category, asked.token_ids, asked.is_chat)
        jobs.append(Job(asked.text, max_tokens, temperature, seed + index, *rest))
    return jobs


def summarise(answers: Sequence[Answer], seconds: float) -> dict[str, float]:
    """Returns the figures of one run. Times in ms: first token, gap between responses, time per further token, whole
    answer."""
    tokens, accepted, drafted, verifications = (
        sum(getattr(answer, f"num_{name}") for answer in answers)
        for name in ("tokens", "accepted", "drafted", "verifications")
    )
    times = {
        "ttft_ms": [answer.response_s[0] - answer.start_s for answer in answers],
        "itl_ms": np.concatenate([np.diff(answer.response_s) for answer in answers]),
        "tpot_ms": [(a.response_s[-1] - a.response_s[0]) / (a.num_tokens - 1) for a in answers if a.num_tokens > 1],
        "e2e_ms": [answer.response_s[-1] - answer.start_s for answer in answers],
    }
    found = {"tokens_per_s": tokens / seconds}
    for name, values in times.items():
        p50, p99 = np.percentile(values, (50, 99)) * 1e3 if len(values) else (0.0, 0.0)
        found |= {f"{name}_p50": float(p50), f"{name}_p99": float(p99)}
    return found | {
        "e2e_ms_mean": float(np.mean(times["e2e_ms"])) * 1e3,
        "mean_accepted": accepted / max(verifications, 1),
        "mean_emitted": tokens / max(verifications, 1),
        "acceptance_rate": accepted / drafted if drafted else 0.0,
    }


def merge_repeats(repeats: Sequence[dict[str, Any]], kept: Sequence[str] = PAIRED_FIGURES) -> dict[str, Any]:
    """Returns the median of each figure (of counts the lower median), and every repeat's values of the kept figures."""
    merged: dict[str, Any] = {}
    for key, first in repeats[0].items():
        median = statistics.median_low if isinstance(first, int) else statistics.median
        merged[key] = median(repeat[key] for repeat in repeats)
    return merged | {f"{key}_repeats": [repeat[key] for repeat in repeats] for key in kept}


def count_different(answers: list[Answer], reference: list[Answer]) -> int:
    """Returns the number of answers that differ from the reference policy's answer to the same job."""
    return sum(a.digest != b.digest for a, b in zip(answers, reference, strict=True))


def summarise_categories(jobs: Sequence[Job], answers: Sequence[Answer]) -> Categories:
    """Returns the figures of one run by category, or {} if no job has one.

    request_tokens_per_s: tokens of the answers over the time during which their requests were in flight.
    """
    groups: dict[str, list[Answer]] = {}
    for job, answer in zip(jobs, answers, strict=True):
        groups.setdefault(job.category or UNNAMED, []).append(answer)
    if set(groups) <= {UNNAMED}:
        return {}
    found: Categories = {}
    for category, group in groups.items():
        flight_s = sum(answer.response_s[-1] - answer.start_s for answer in group)
        figures = summarise(group, flight_s)
        found[category] = {
            "num_answers": len(group),
            "num_tokens": sum(answer.num_tokens for answer in group),
            "request_tokens_per_s": figures["tokens_per_s"],
            **{name: figures[name] for name in FIGURES},
        }
    return found


def merge_categories(repeats: Sequence[Categories]) -> Categories:
    """Applies merge_repeats to each category."""
    kept = ("request_tokens_per_s",)
    return {category: merge_repeats([repeat[category] for repeat in repeats], kept) for category in repeats[0]}


def add_category_speedups(categories: Categories, reference: Categories) -> None:
    """Adds each category's speedup over the reference: the median of the repeats' ratios."""
    for category, found in categories.items():
        pairs = zip(
            found["request_tokens_per_s_repeats"], reference[category]["request_tokens_per_s_repeats"], strict=True
        )
        found["speedup"] = statistics.median(mine / others for mine, others in pairs)


def category_rows(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields table rows of one load, one per category and contestant, sorted by category."""
    for category in rows[0]["categories"] if rows else ():
        for row in rows:
            yield {"category": category, "policy": row["policy"], **row["categories"][category]}
