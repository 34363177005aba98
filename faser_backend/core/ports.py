"""The ports that pipeline and simulation share: what a step needs from a device.

`device` implements them on real hardware, `simulation` in virtual time.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from faser_backend.core.batch import RowBatch, SamplingRows
from faser_backend.core.request import SamplingParams


class ModelRunner(Protocol):
    """A compiled decoder with its paged KV pool. Calls are serial per runner."""

    num_segments: int
    vocab_size: int

    def run_segment(self, segment: int, rows: RowBatch, hidden: np.ndarray | None) -> np.ndarray:
        """Runs layers of one segment and writes the rows' K/V into the pool.

        hidden: [T, hidden_size] from the segment before, None for segment 0.
        Returns hidden [T, hidden_size], or logits [R, V] float32 from the last segment. The
        array may be reused by the next call of the same shape: copy what must live longer.
        """
        ...


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
