"""Speculative length: how many tokens the draft proposes for each running request.

A policy sees sequences and answers with numbers; it knows nothing of models or time. To add one:
write a class with `choose`, and name it in `_POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from faser_backend.core.errors import ConfigError
from faser_backend.core.sequence import Sequence as RunningSequence

MAX_DRAFT_TOKENS = 32


class SpeculativeLength(Protocol):
    """Chooses num_draft_tokens; `is_drafting` False means that no draft model is needed at all."""

    is_drafting: bool

    def choose(self, sequences: Sequence[RunningSequence]) -> list[int]:
        """One length >= 0 per sequence; the scheduler clips it to what the request can still use."""
        ...


class NoSpeculation:
    """Plain autoregressive decoding."""

    is_drafting = False

    def choose(self, sequences: Sequence[RunningSequence]) -> list[int]:
        return [0] * len(sequences)


class FixedLength:
    """The same length for every request in every step (vLLM's num_speculative_tokens)."""

    is_drafting = True

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens

    def choose(self, sequences: Sequence[RunningSequence]) -> list[int]:
        return [self.num_draft_tokens] * len(sequences)


def parse_policy(spec: str) -> SpeculativeLength:
    """Builds the policy that `spec` names: "none" or "fixed:K". Raises ConfigError."""
    name, _, argument = spec.partition(":")
    if name not in _POLICIES:
        known = ", ".join(usage for usage, _ in _POLICIES.values())
        raise ConfigError(f"policy = {spec!r}: unknown; known are {known}")
    _, parse = _POLICIES[name]
    return parse(spec, argument)


def _parse_none(spec: str, argument: str) -> SpeculativeLength:
    if argument:
        raise ConfigError(f"policy = {spec!r}: 'none' takes no argument")
    return NoSpeculation()


def _parse_fixed(spec: str, argument: str) -> SpeculativeLength:
    if not argument.isascii() or not argument.isdigit() or not 1 <= int(argument) <= MAX_DRAFT_TOKENS:
        raise ConfigError(f"policy = {spec!r}: fixed:K needs an integer K in [1, {MAX_DRAFT_TOKENS}]")
    return FixedLength(int(argument))


_POLICIES: dict[str, tuple[str, Callable[[str, str], SpeculativeLength]]] = {
    "none": ("none", _parse_none),
    "fixed": ("fixed:K", _parse_fixed),
}
