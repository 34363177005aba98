"""A slot's grammar: which tokens may follow its committed tokens and a drafted path behind them.

The library's state is one walker: it goes along a drafted path and back again. Rows of a verification ask for the
paths that drafting asked for before, so masks are kept until tokens are committed.
"""

from __future__ import annotations

import threading

import numpy as np

from faser_backend.core.errors import FaserError
from faser_backend.core.grammar import Grammar


class GrammarRule:
    """The grammar of one slot. Thread-safe: drafting and verifying at the same time walk one after the other."""

    def __init__(self, grammar: Grammar, output: list[int]) -> None:
        """output: tokens that were committed before, as after a preemption."""
        self._state = grammar.start()
        self._lock = threading.Lock()
        self._path: list[int] = []  # where the walker stands, behind the committed tokens
        self._masks: dict[tuple[int, ...], np.ndarray | None] = {}
        self.append(output)

    def append(self, tokens: list[int]) -> None:
        """Commits tokens. Raises FaserError where the grammar forbids one, which it would not have let through."""
        with self._lock:
            self._masks.clear()
            if self._walk(tokens) < len(tokens):
                raise FaserError(f"token ids {tokens}: the grammar of this request forbids them")
            self._path = []

    def allowed(self, path: list[int]) -> np.ndarray | None:
        """[V] bool: what may follow the committed tokens and `path`; None where the path itself is forbidden, so that
        no token behind it will be kept. Raises FaserError as GrammarState.allowed."""
        key = tuple(path)
        with self._lock:
            if key not in self._masks:
                is_legal = self._walk(path) == len(path)
                self._masks[key] = self._state.allowed() if is_legal else None
            return self._masks[key]

    def forced(self) -> list[int]:
        """See GrammarState.forced, behind the committed tokens."""
        with self._lock:
            self._walk([])
            return self._state.forced()

    def _walk(self, path: list[int]) -> int:
        """Moves the walker along `path` as far as it is legal. Returns how far that is."""
        common = 0
        while common < min(len(path), len(self._path)) and path[common] == self._path[common]:
            common += 1
        self._state.rollback(len(self._path) - common)
        reached = common + self._state.advance(path[common:])
        self._path = path[:reached]
        return reached
