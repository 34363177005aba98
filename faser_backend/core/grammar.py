"""Grammars, rules on the tokens of an answer: the port between a grammar library and the sampler.

A grammar is compiled once and shared; each request walks through it on a state of its own.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

GUIDE = "guided_decoding_guide"  # the field of a request that holds its grammar


class GrammarState(Protocol):
    """How far one answer has come in its grammar. Not thread-safe.

    Every call raises RequestError that names GUIDE where it exceeds the library's limits.
    """

    def advance(self, tokens: list[int]) -> int:
        """Takes tokens up to the first that the grammar forbids. Returns how many."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Gives back the last num_tokens that `advance` took."""
        ...

    def allowed(self) -> np.ndarray:
        """[V] bool: what may come next, end tokens where the answer may end; at least one is true."""
        ...

    def forced(self) -> list[int]:
        """The likely tokens of the text that has to come next, whatever is chosen; [] where there is a choice."""
        ...


class Grammar(Protocol):
    """A compiled grammar. Immutable and thread-safe."""

    def start(self) -> GrammarState: ...
