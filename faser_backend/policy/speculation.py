"""Speculation policies: what to draft in the next step, for which request, and how to verify it.

A policy sees sequences and answers with a `Decision`; it learns from `StepRecord`s. It knows nothing of
models, clocks or threads. To add one: write a class with `decide` and `observe` in a file of its own, and
name it in policy/registry.py; benchmarks and `faser bench` take it by that name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from faser_backend.core.decision import WHOLE, Decision
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence

MAX_DRAFT_TOKENS = 32
MAX_ADAPTIVE_TOKENS = 8  # longest length that an adaptive policy weighs


class SpeculationPolicy(Protocol):
    """is_drafting: False means that no draft model is needed at all."""

    is_drafting: bool

    @property
    def partitions(self) -> tuple[str, ...]:
        """All that it may ask for."""
        ...

    def decide(self, sequences: Sequence[RunningSequence], num_coming: int = 0) -> Decision:
        """For the sequences that are ready to decode, at least one.

        num_coming: further ones whose prompts will soon have been read. The batch is about to grow by them, and what
        is begun now should suit it then.
        """
        ...

    def observe(self, record: StepRecord) -> None:
        """Called after every step that verified something."""
        ...


class NoSpeculation:
    """Plain autoregressive decoding."""

    is_drafting = False
    partitions = (WHOLE,)

    def decide(self, sequences: Sequence[RunningSequence], num_coming: int = 0) -> Decision:
        return Decision([0] * len(sequences))

    def observe(self, record: StepRecord) -> None:
        """Nothing to learn."""


class FixedLength:
    """The same length for every request in every step (vLLM's num_speculative_tokens)."""

    is_drafting = True
    partitions = (WHOLE,)

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens

    def decide(self, sequences: Sequence[RunningSequence], num_coming: int = 0) -> Decision:
        return Decision([self.num_draft_tokens] * len(sequences))

    def observe(self, record: StepRecord) -> None:
        """Nothing to learn."""
