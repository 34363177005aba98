"""Speculative length: how many tokens the draft proposes for each running request.

A policy sees sequences and answers with numbers; it knows nothing of models or time. To add one:
write a class with `choose` in a file of its own, and name it in `_POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from faser_backend.core.errors import ConfigError
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.cost_model import CostModel
from faser_backend.policy.goodput import Goodput
from faser_backend.policy.schedule import parse_schedule

MAX_DRAFT_TOKENS = 32
MAX_ADAPTIVE_TOKENS = 8  # longest length that an adaptive policy weighs


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


def parse_policy(spec: str, load_costs: Callable[[], CostModel]) -> SpeculativeLength:
    """Builds the policy that `spec` names. Raises ConfigError.

    load_costs is called only by policies that weigh time: a missing or stale profile matters to no other.
    """
    name, _, argument = spec.partition(":")
    if name not in _POLICIES:
        known = ", ".join(usage for usage, _ in _POLICIES.values())
        raise ConfigError(f"policy = {spec!r}: unknown; known are {known}")
    _, parse = _POLICIES[name]
    return parse(spec, argument, load_costs)


def _parse_none(spec: str, argument: str, _: Callable[[], CostModel]) -> SpeculativeLength:
    _refuse_argument(spec, argument)
    return NoSpeculation()


def _parse_fixed(spec: str, argument: str, _: Callable[[], CostModel]) -> SpeculativeLength:
    if not argument.isascii() or not argument.isdigit() or not 1 <= int(argument) <= MAX_DRAFT_TOKENS:
        raise ConfigError(f"policy = {spec!r}: fixed:K needs an integer K in [1, {MAX_DRAFT_TOKENS}]")
    return FixedLength(int(argument))


def _parse_schedule(spec: str, argument: str, _: Callable[[], CostModel]) -> SpeculativeLength:
    return parse_schedule(spec, argument, MAX_DRAFT_TOKENS)


def _parse_goodput(spec: str, argument: str, load_costs: Callable[[], CostModel]) -> SpeculativeLength:
    _refuse_argument(spec, argument)
    return Goodput(load_costs(), MAX_ADAPTIVE_TOKENS)


def _refuse_argument(spec: str, argument: str) -> None:
    if argument:
        raise ConfigError(f"policy = {spec!r}: takes no argument")


_POLICIES: dict[str, tuple[str, Callable[[str, str, Callable[[], CostModel]], SpeculativeLength]]] = {
    "none": ("none", _parse_none),
    "fixed": ("fixed:K", _parse_fixed),
    "schedule": ("schedule:BATCH:LENGTH,...", _parse_schedule),
    "goodput": ("goodput", _parse_goodput),
}
