"""Request traces: lengths and arrivals from files of the Azure LLM inference trace, or from distributions.

A file has the columns TIMESTAMP, ContextTokens, GeneratedTokens. Everything is seeded; a trace's description lists all
changes for the report.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np

from faser_backend.core.errors import ConfigError

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
# Synthetic lengths are log-normal, on the scale of a small model's context.
MEDIAN_PROMPT_TOKENS, MEDIAN_OUTPUT_TOKENS, LENGTH_SIGMA = 90, 48, 0.7
_GRID = 20_000  # points at which a rate curve is integrated


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """N requests in order of arrival."""

    arrivals_s: np.ndarray  # [N] float64, from 0
    num_prompt_tokens: np.ndarray  # [N] int64 >= 1
    num_output_tokens: np.ndarray  # [N] int64 >= 1
    description: str

    def __len__(self) -> int:
        return self.arrivals_s.size

    @property
    def rate(self) -> float:
        """Returns the mean requests per second."""
        span = float(self.arrivals_s[-1])
        return (len(self) - 1) / span if span > 0 else float("inf")

    @property
    def longest(self) -> int:
        """Returns the largest number of tokens of a request, prompt and output together."""
        return int((self.num_prompt_tokens + self.num_output_tokens).max())


def read_trace(path: Path, num_requests: int | None = None, *, may_be_shorter: bool = False) -> Trace:
    """Reads the first num_requests requests of a file (default: all). Raises ConfigError with line and column."""
    times, prompts, outputs = [], [], []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or [])]
            if missing:
                raise ConfigError(f"{path}: column {missing[0]} is missing; a trace has {', '.join(COLUMNS)}")
            for row in reader:
                if num_requests is not None and len(times) == num_requests:
                    break
                where = f"{path}, line {reader.line_num}"
                times.append(_seconds(row["TIMESTAMP"], where))
                prompts.append(_count(row, "ContextTokens", where))
                outputs.append(_count(row, "GeneratedTokens", where))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not readable as a trace ({error})") from None
    if not times:
        raise ConfigError(f"{path}: has no requests")
    if num_requests is not None and len(times) < num_requests and not may_be_shorter:
        raise ConfigError(f"requests = {num_requests}: {path} has only {len(times)}")
    arrivals = np.array(times)
    if (np.diff(arrivals) < 0).any():
        line = int(np.argmax(np.diff(arrivals) < 0)) + 3
        raise ConfigError(f"{path}, line {line}: TIMESTAMP is earlier than the line before")
    return Trace(arrivals - arrivals[0], np.array(prompts), np.array(outputs), f"arrivals of {path.name}")


def scaled(trace: Trace, rate: float) -> Trace:
    """Scales the trace's gaps to a mean rate in requests per second. Raises ConfigError if there are no gaps."""
    if len(trace) == 1:
        return trace
    if trace.arrivals_s[-1] == 0.0:
        raise ConfigError(f"{trace.description}: all requests come at once, which no rate can change")
    _check_rate(rate)
    factor = trace.rate / rate
    words = f"{trace.description}, gaps scaled by {factor:.4g} to {rate:g} requests/s"
    return replace(trace, arrivals_s=trace.arrivals_s * factor, description=words)


def with_rate_curve(trace: Trace, rate: float, peak_trough: float, seed: int) -> Trace:
    """Returns Poisson arrivals whose rate swings once from trough to peak and back, sinusoidally in its logarithm.

    rate is the mean over the run; peak_trough is the ratio of highest to lowest rate, 1 = constant.
    """
    _check_rate(rate)
    if not 1.0 <= peak_trough <= 1000.0:
        raise ConfigError(f"peak-trough = {peak_trough:g}: must lie in [1, 1000]")
    phase = np.linspace(0.0, 1.0, _GRID + 1)
    swing = np.exp(-0.5 * np.log(peak_trough) * np.cos(2 * np.pi * phase))
    counted = np.concatenate([[0.0], np.cumsum((swing[1:] + swing[:-1]) / 2)])
    counted /= counted[-1]  # share of the arrivals up to each phase
    gaps = np.random.default_rng([seed, 0xA441]).exponential(size=len(trace) + 1)
    shares = np.cumsum(gaps)[:-1] / gaps.sum()
    arrivals = np.interp(shares, counted, phase) * len(trace) / rate
    swings = "one swing from trough to peak and back, sinusoidal in the rate's logarithm, peak/trough"
    course = "constant rate" if peak_trough == 1.0 else f"{swings} {peak_trough:g}"
    words = f"Poisson arrivals, {rate:g} requests/s on average, {course}, seed {seed}"
    return replace(trace, arrivals_s=arrivals - arrivals[0], description=words)


def with_mean_lengths(trace: Trace, mean_prompt: float, mean_output: float) -> Trace:
    """Scales prompts and outputs to these means by one factor each, which keeps the trace's spread."""
    if not (1 <= mean_prompt <= 1e6 and 1 <= mean_output <= 1e6):
        raise ConfigError(f"lengths = {mean_prompt:g}/{mean_output:g}: both must lie in [1, 1e6] tokens")
    prompts, outputs = (
        np.maximum(np.round(lengths * (mean / lengths.mean())), 1).astype(np.int64)
        for lengths, mean in ((trace.num_prompt_tokens, mean_prompt), (trace.num_output_tokens, mean_output))
    )
    words = f"{trace.description}; lengths scaled to means of {mean_prompt:g} and {mean_output:g} tokens"
    return Trace(trace.arrivals_s, prompts, outputs, words)


def fitted_to(trace: Trace, max_context: int) -> Trace:
    """Scales lengths by one factor so that 95 of 100 requests fit max_context, and cuts the rest."""
    total = trace.num_prompt_tokens + trace.num_output_tokens
    factor = min(1.0, max_context / float(np.percentile(total, 95)))
    prompts, outputs = (
        np.maximum((lengths * factor).astype(np.int64), 1)
        for lengths in (trace.num_prompt_tokens, trace.num_output_tokens)
    )
    num_cut = int((prompts + outputs > max_context).sum())
    outputs = np.minimum(outputs, max_context // 2)
    prompts = np.minimum(prompts, max_context - outputs)
    words = trace.description
    if factor < 1.0 or num_cut:
        words += f"; lengths scaled by {factor:.3g}, {num_cut} of them cut, to fit {max_context} tokens"
    return Trace(trace.arrivals_s, prompts, outputs, words)


def make_lengths(count: int, rng: np.random.Generator) -> Trace:
    """Returns a trace of synthetic lengths; all requests arrive at once."""
    prompts, outputs = (
        np.clip(rng.lognormal(math.log(median), LENGTH_SIGMA, count), 4, 4 * median).astype(np.int64)
        for median in (MEDIAN_PROMPT_TOKENS, MEDIAN_OUTPUT_TOKENS)
    )
    return Trace(np.zeros(count), prompts, outputs, "synthetic lengths")


def picked(lengths: Trace, count: int, rng: np.random.Generator) -> Trace:
    """Returns `count` requests in random order, with repetition if the trace is shorter; all arrive at once."""
    index = rng.permutation(np.resize(np.arange(len(lengths)), max(count, len(lengths))))[:count]
    return Trace(
        np.zeros(count), lengths.num_prompt_tokens[index], lengths.num_output_tokens[index], lengths.description
    )


def _check_rate(rate: float) -> None:
    if not 0.0 < rate < 1e6:
        raise ConfigError(f"rate = {rate:g}: must be a positive number of requests per second")


def _seconds(text: str | None, where: str) -> float:
    try:
        # Seconds carry seven digits, of which datetime keeps six.
        head, _, fraction = (text or "").partition(".")
        return datetime.fromisoformat(head).timestamp() + float(f"0.{fraction or 0}")
    except ValueError:
        raise ConfigError(f"{where}: TIMESTAMP = {text!r}: must look like 2023-11-16 18:15:46.6805900") from None


def _count(row: dict[str, str | None], column: str, where: str) -> int:
    text = row[column]
    if text is None or not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{where}: {column} = {text!r}: must be a positive integer")
    return int(text)
