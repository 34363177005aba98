"""Request traces: lengths and arrival times, read from a file or made up, and prompts of given lengths.

The file format is that of the Azure LLM inference traces: TIMESTAMP,ContextTokens,GeneratedTokens.
Every change made to a trace (time scale, length scale, clipping) is a number that reports show.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from faser_backend.core.errors import ConfigError

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
# Made-up lengths: log-normal, near the shape of the Azure conversation trace's (half below the median,
# one in ten above three times that) on the scale of a small model's context.
MEDIAN_PROMPT_TOKENS, MEDIAN_OUTPUT_TOKENS, LENGTH_SIGMA = 90, 48, 0.7


@dataclass(frozen=True, slots=True, eq=False)
class RequestTrace:
    """N requests in order of arrival."""

    arrivals_s: np.ndarray  # [N] float64 since the first
    prompt_tokens: np.ndarray  # [N] int64 >= 1
    output_tokens: np.ndarray  # [N] int64 >= 1
    source: str  # for people: a file's name, or how it was made up

    def __len__(self) -> int:
        return self.arrivals_s.size

    def first(self, count: int) -> RequestTrace:
        return replace(
            self,
            arrivals_s=self.arrivals_s[:count],
            prompt_tokens=self.prompt_tokens[:count],
            output_tokens=self.output_tokens[:count],
        )

    def sped_up(self, factor: float) -> RequestTrace:
        return replace(self, arrivals_s=self.arrivals_s / factor)

    @property
    def mean_rate(self) -> float:
        """Requests per second."""
        return (len(self) - 1) / float(self.arrivals_s[-1]) if len(self) > 1 and self.arrivals_s[-1] > 0 else math.inf


def read_trace(path: Path) -> RequestTrace:
    """Reads a CSV file. Raises ConfigError with the line that cannot be read."""
    times, prompts, outputs = [], [], []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (rows.fieldnames or [])]
            if missing:
                raise ConfigError(f"trace {path}: column {', '.join(missing)} missing; needed are {', '.join(COLUMNS)}")
            for row in rows:
                try:
                    times.append(_seconds(row["TIMESTAMP"]))
                    prompts.append(int(row["ContextTokens"]))
                    outputs.append(int(row["GeneratedTokens"]))
                except (TypeError, ValueError) as error:
                    raise ConfigError(f"trace {path}, line {rows.line_num}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {path}: cannot be read ({error})") from None
    if not times:
        raise ConfigError(f"trace {path}: no requests in it")
    order = np.argsort(times, kind="stable")
    arrivals = np.array(times)[order]
    lengths = (np.maximum(np.array(column, np.int64)[order], 1) for column in (prompts, outputs))
    return RequestTrace(arrivals - arrivals[0], *lengths, source=path.name)


def _seconds(text: str) -> float:
    """The traces carry seven digits of a second; datetime reads six."""
    whole, _, digits = text.strip().partition(".")
    return datetime.fromisoformat(whole).timestamp() + (float(f"0.{digits.rstrip('Z')}") if digits else 0.0)


@dataclass(frozen=True, slots=True)
class LengthFit:
    """What made lengths fit a context."""

    scale: float  # both lengths of every request were multiplied by it
    num_clipped: int  # requests cut further, to the context


def fit_lengths(trace: RequestTrace, max_context: int) -> tuple[RequestTrace, LengthFit]:
    """Scales all lengths by one factor so that 95 of 100 requests fit max_context; cuts the rest."""
    total = trace.prompt_tokens + trace.output_tokens
    scale = min(1.0, max_context / float(np.percentile(total, 95)))
    prompts, outputs = (
        np.maximum((column * scale).astype(np.int64), 1) for column in (trace.prompt_tokens, trace.output_tokens)
    )
    is_clipped = prompts + outputs > max_context
    outputs = np.minimum(outputs, max_context // 2)
    prompts = np.minimum(prompts, max_context - outputs)
    return replace(trace, prompt_tokens=prompts, output_tokens=outputs), LengthFit(scale, int(is_clipped.sum()))


def make_lengths(count: int, rng: np.random.Generator) -> RequestTrace:
    """Made-up lengths; all arrive at once."""
    prompts, outputs = (
        np.clip(rng.lognormal(math.log(median), LENGTH_SIGMA, count), 4, 4 * median).astype(np.int64)
        for median in (MEDIAN_PROMPT_TOKENS, MEDIAN_OUTPUT_TOKENS)
    )
    return RequestTrace(np.zeros(count), prompts, outputs, "synthetic log-normal lengths")


def bursty_arrivals(
    mean_rate: float, duration_s: float, peak_to_trough: float, num_periods: int, rng: np.random.Generator
) -> np.ndarray:
    """Arrival times [N] in [0, duration_s): Poisson, its rate moving between trough and peak like a cosine of its
    logarithm, num_periods times, starting at the trough. The mean over the duration is mean_rate."""
    grid = np.linspace(0.0, duration_s, 2001)
    shape = peak_to_trough ** (0.5 - 0.5 * np.cos(2 * np.pi * num_periods * grid / duration_s))
    cumulated = np.concatenate([[0.0], np.cumsum((shape[1:] + shape[:-1]) / 2)])
    count = max(1, round(mean_rate * duration_s))  # the number is fixed, its times are drawn from the curve
    return np.interp(np.sort(rng.uniform(0.0, cumulated[-1], count)), cumulated, grid)


class PromptMaker:
    """Prompts of wanted lengths: windows of a text's tokens, turned back into text.

    Tokenised again, a window may differ from its length by a few tokens.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._ids = np.array(tokenizer.encode("\n".join(texts), add_special_tokens=False).ids, np.int64)
        if not self._ids.size:
            raise ConfigError("prompts: no text to cut prompts from")

    def prompt(self, num_tokens: int, index: int) -> str:
        """Window number `index`; windows start a fixed odd stride apart and wrap around."""
        start = index * 977
        return self._tokenizer.decode(self._ids.take(range(start, start + num_tokens), mode="wrap").tolist())


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file of JSON lines {"prompt": ...}. Raises ConfigError."""
    try:
        return [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"prompts {path}: not readable as JSON lines with a prompt each ({error!r})") from None
