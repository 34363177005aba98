"""Grammars, rules on the tokens of an answer: the port between a grammar library and the sampler.

A grammar is compiled once and shared; each request walks through it on a state of its own.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

GUIDE = "guided_decoding_guide"  # the field of a request that holds its grammar


class GrammarState(Protocol):
    """The state of one answer in its grammar. Not thread-safe.

    Every call raises RequestError naming GUIDE if it exceeds the library's limits.
    """

    def advance(self, tokens: list[int]) -> int:
        """Takes tokens up to the first that the grammar forbids. Returns how many."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undoes the last num_tokens that `advance` took."""

    def allowed(self) -> np.ndarray:
        """Returns bool [V]: the tokens that may come next, at least one; end tokens if the answer may end."""
        ...

    def forced(self) -> list[int]:
        """Returns the likely tokens of the only possible next text; [] if there is a choice."""
        ...


@runtime_checkable
class Grammar(Protocol):
    """A compiled grammar. Immutable and thread-safe."""

    def start(self) -> GrammarState: ...
