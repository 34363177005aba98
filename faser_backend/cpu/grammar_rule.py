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
    """The grammar of one slot. Thread-safe: drafting and verifying at the same time walk one after the other.

    A limit of the grammar that is reached on a drafted path counts once the path is committed, as in plain decoding:
    what was guessed fails nobody.
    """

    def __init__(self, grammar: Grammar, output: list[int]) -> None:
        """output: tokens that were committed before, as after a preemption."""
        self._grammar = grammar
        self._state = grammar.start()
        self._lock = threading.Lock()
        self._committed: list[int] = []
        self._path: list[int] = []  # where the walker stands, behind the committed tokens
        self._masks: dict[tuple[int, ...], np.ndarray | None] = {}
        self._failed: dict[tuple[int, ...], FaserError] = {}  # drafted paths behind which no mask could be made
        self.append(output)

    def append(self, tokens: list[int]) -> None:
        """Commits tokens. Raises FaserError where the grammar forbids one, which it would not have let through, and as
        GrammarState."""
        with self._lock:
            for path, error in self._failed.items():
                if len(path) < len(tokens) and tuple(tokens[: len(path)]) == path:
                    raise error
            self._failed.clear()
            self._masks.clear()
            if self._walk(tokens) < len(tokens):
                raise FaserError(f"token ids {tokens}: the grammar of this request forbids them")
            self._committed += tokens
            self._path = []

    def allowed(self, path: list[int]) -> np.ndarray | None:
        """[V] bool: what may follow the committed tokens and `path`; None where the path itself is forbidden, so that
        no token behind it will be kept, or where the mask exceeds a limit. Raises as GrammarState where path is empty.
        """
        key = tuple(path)
        with self._lock:
            if key not in self._masks:
                try:
                    is_legal = self._walk(path) == len(path)
                    self._masks[key] = self._state.allowed() if is_legal else None
                except FaserError as error:
                    self._restart()
                    if not path:
                        raise
                    self._failed[key], self._masks[key] = error, None
            return self._masks[key]

    def forced(self) -> list[int]:
        """See GrammarState.forced, behind the committed tokens; [] where working it out exceeds a limit."""
        with self._lock:
            self._walk([])
            try:
                return self._state.forced()
            except FaserError:
                self._restart()
                return []

    def _restart(self) -> None:
        """A state that has met a limit is of no more use: another one walks to where it was."""
        self._state, self._path = self._grammar.start(), []
        self._state.advance(self._committed)

    def _walk(self, path: list[int]) -> int:
        """Moves the walker along `path` as far as it is legal. Returns how far that is."""
        common = 0
        while common < min(len(path), len(self._path)) and path[common] == self._path[common]:
            common += 1
        self._state.rollback(len(self._path) - common)
        reached = common + self._state.advance(path[common:])
        self._path = path[:reached]
        return reached
