"""The ports that pipeline and simulation share: what a step needs from a device.

`device` implements them on real hardware, `simulation` in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from faser_backend.core.batch import RowBatch, SamplingRows
from faser_backend.core.request import SamplingParams

Verified = TypeVar("Verified")
Proposed = TypeVar("Proposed")


class ModelRunner(Protocol):
    """A compiled decoder with its paged KV pool. Calls are serial per runner."""

    num_segments: int
    num_layers: tuple[int, ...]  # of each segment
    exits: frozenset[int]  # segments that end at an exit layer
    vocab_size: int

    def run_segment(self, segment: int, rows: RowBatch, hidden: np.ndarray | None) -> np.ndarray:
        """Runs layers of one segment and writes the rows' K/V into the pool.

        hidden: [T, hidden_size] from the segment before, None for segment 0.
        Returns hidden [T, hidden_size], or logits [R, V] float32 from the last segment. The
        array may be reused by the next call of the same shape: copy what must live longer.
        """
        ...

    def run_segment_with_scores(
        self, segment: int, rows: RowBatch, hidden: np.ndarray | None, exit_candidates: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """As run_segment, for a segment of `exits`. Returns (hidden, scores [T, C]): the logits that the
        head would give exit_candidates [T, C] if the model ended here."""
        ...


class DraftTokens(NamedTuple):
    """One draft token per row, and how sure the draft was."""

    tokens: np.ndarray  # [R] int64
    margins: np.ndarray  # [R] float32 >= 0: lead over the second best, noise included, in logits (times temperature)
    candidates: np.ndarray | None  # [R, C] int64: the best tokens, the chosen one first; None if not asked for


class Sampler(Protocol):
    """Turns logits into tokens; keeps sampling parameters and token counts per slot."""

    def add(
        self,
        slot: int,
        sampling: SamplingParams,
        token_ids: np.ndarray,
        num_prompt_tokens: int,
        end_ids: tuple[int, ...],
    ) -> None:
        """Starts a slot. token_ids [num_tokens]: prompt and, after a preemption, output so far."""
        ...

    def remove(self, slot: int) -> None: ...

    def append(self, slot: int, tokens: list[int]) -> None:
        """Commits emitted tokens to the slot's penalties."""
        ...

    def sample(self, logits: np.ndarray, rows: SamplingRows) -> np.ndarray:
        """logits [R, V] -> token ids [R]: argmax of processed logits + position-keyed Gumbel noise."""
        ...

    def sample_draft(self, logits: np.ndarray, rows: SamplingRows, num_candidates: int) -> DraftTokens:
        """As `sample`, with the confidence in each token. num_candidates 0: none are wanted."""
        ...

    def candidate_margins(self, scores: np.ndarray, candidates: np.ndarray, rows: SamplingRows) -> np.ndarray:
        """scores [R, C] of token ids candidates [R, C] -> [R]: by how much the first candidate leads the best
        of the others when the row's noise is added; negative where it trails. In logits, as DraftTokens.margins."""
        ...

    def probabilities(self, logits: np.ndarray, rows: SamplingRows) -> np.ndarray:
        """logits [R, V] -> processed probabilities [R, V] (one-hot where greedy)."""
        ...

    def uniforms(self, rows: SamplingRows, purpose: int, num_steps: np.ndarray) -> np.ndarray:
        """[R] in (0, 1), keyed by (seed, position, purpose, num_steps [R] = the round)."""
        ...

    def log_probs(self, logits: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """Log-probabilities [R] of token_ids [R] under softmax(logits [R, V]), before processing."""
        ...


class Clock(Protocol):
    """Nanoseconds; real or virtual."""

    def now_ns(self) -> int: ...


class Lanes(Protocol):
    """Where two phases run at once, each on its own share of the device."""

    def run_both(self, verify: Callable[[], Verified], propose: Callable[[], Proposed]) -> tuple[Verified, Proposed]:
        """Returns both results when both have ended; then raises the first error if there was one."""
        ...
