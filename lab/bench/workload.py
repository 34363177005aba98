"""What a serving benchmark asks for and what it learns: jobs, traces of their answers, and summaries.

Knows nothing of who answers: the engine in this process and a Triton server give the same traces.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench.prompt_files import Prompt, interleaved, read_prompts


@dataclass(frozen=True, slots=True)
class Job:
    """One completion, or one answer in a conversation.

    A completion has exactly max_tokens tokens: no end token ends it. An answer to a chat ends where the model ends it,
    at max_tokens at the latest.
    """

    prompt: str  # of a chat: the user's message
    max_tokens: int
    temperature: float
    seed: int
    category: str = ""
    prompt_ids: tuple[int, ...] = ()  # what the engines read; (): the tokens of the text
    is_chat: bool = False


@dataclass(slots=True)
class Trace:
    """One answer. Times in seconds of the client's clock; a response may carry several tokens."""

    start_s: float
    response_s: list[float]
    num_tokens: int
    num_drafted: int
    num_accepted: int  # of these, what is in the answer
    digest: str  # of the answer's text or ids: equal answers, equal digests

    def cut_accepted(self) -> None:
        """Leaves out what an engine of ours accepted behind the token that ended the answer.

        Every response is of one verification at least, which emits one token more than it accepts.
        """
        self.num_accepted = min(self.num_accepted, self.num_tokens - len(self.response_s))


def load_jobs(
    prompts: Path, num_jobs: int, *, max_tokens: int, temperature: float, seed: int, max_prompt_chars: int
) -> list[Job]:
    """num_jobs completions of the prompts of a file, every category in turn. Job i draws with seed + i."""
    kept = [prompt for prompt in read_prompts(prompts) if len(prompt.text) <= max_prompt_chars]
    return jobs_of(interleaved(kept), num_jobs, max_tokens, temperature, seed)


def jobs_of(prompts: Sequence[Prompt], num_jobs: int, max_tokens: int, temperature: float, seed: int) -> list[Job]:
    """num_jobs jobs over prompts in order, from the start again after the last. Job i draws with seed + i."""
    jobs = []
    for index in range(num_jobs):
        asked = prompts[index % len(prompts)]
        rest = (asked.category, asked.token_ids, asked.is_chat)
        jobs.append(Job(asked.text, max_tokens, temperature, seed + index, *rest))
    return jobs


def summarise(traces: list[Trace], seconds: float) -> dict[str, float]:
    """Figures of one run. A verification emits one token beyond those that it accepts, so
    num_tokens - num_accepted of them made an answer (the first token of an answer included)."""
    tokens = sum(trace.num_tokens for trace in traces)
    accepted = sum(trace.num_accepted for trace in traces)
    drafted = sum(trace.num_drafted for trace in traces)
    first_ms = [(trace.response_s[0] - trace.start_s) * 1e3 for trace in traces]
    gaps_ms = np.concatenate([np.diff(trace.response_s) for trace in traces]) * 1e3
    per_token_ms = [
        (trace.response_s[-1] - trace.response_s[0]) * 1e3 / max(trace.num_tokens - 1, 1) for trace in traces
    ]
    whole_ms = [(trace.response_s[-1] - trace.start_s) * 1e3 for trace in traces]
    return {
        "tokens_per_s": tokens / seconds,
        "ttft_ms_p50": float(np.percentile(first_ms, 50)),
        "ttft_ms_p99": float(np.percentile(first_ms, 99)),
        "itl_ms_p50": float(np.percentile(gaps_ms, 50)) if gaps_ms.size else 0.0,
        "itl_ms_p99": float(np.percentile(gaps_ms, 99)) if gaps_ms.size else 0.0,
        "tpot_ms_p50": float(np.percentile(per_token_ms, 50)),
        "tpot_ms_p99": float(np.percentile(per_token_ms, 99)),
        "e2e_ms_p50": float(np.percentile(whole_ms, 50)),
        "e2e_ms_p99": float(np.percentile(whole_ms, 99)),
        "mean_accepted": accepted / max(tokens - accepted, 1),
        "acceptance_rate": accepted / drafted if drafted else 0.0,
    }


PAIRED_FIGURES = ("tokens_per_s", "e2e_ms_p50")


def merge_repeats(repeats: list[dict[str, float]]) -> dict[str, Any]:
    """The median of each figure (of counts the lower one), the lowest and highest throughput, and, for ratios within
    a repeat, each repeat's throughput and median time of an answer."""
    merged: dict[str, Any] = {}
    for key, first in repeats[0].items():
        median = statistics.median_low if isinstance(first, int) else statistics.median
        merged[key] = median(repeat[key] for repeat in repeats)
    throughput = [r["tokens_per_s"] for r in repeats]
    return merged | {
        "tokens_per_s_min": min(throughput),
        "tokens_per_s_max": max(throughput),
        "repeats": len(repeats),
        **{f"{key}_repeats": [r[key] for r in repeats] for key in PAIRED_FIGURES},
    }


def count_different(traces: list[Trace], reference: list[Trace]) -> int:
    """Answers that differ from the reference policy's to the same job."""
    return sum(a.digest != b.digest for a, b in zip(traces, reference, strict=True))
