"""Per-slot rules that change logits before the temperature: penalties, bias, min_tokens, bad words, a grammar.

Each rule reads a row's own prefix: the slot's committed tokens, then the row's drafted tokens. Token counts exist only
for slots with penalties. The order is penalties, logit bias, min_tokens, bad words, grammar. A row whose tokens are all
forbidden keeps its raw logits, except those that the grammar forbids.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from faser_backend.core.batch import SamplingRows
from faser_backend.core.errors import FaserError, blaming
from faser_backend.core.request import GUIDE, Grammar, Sampling
from faser_backend.cpu.logits import penalize


class GrammarRule:
    """The grammar of one slot, as masks over the tokens that may follow a path.

    The grammar's state is a single walker that moves along a drafted path and back. Masks are kept until tokens are
    committed, because verification asks for the paths that drafting asked for. Thread-safe. A limit of the grammar that
    a drafted path exceeds fails the slot only once that path is committed, as in plain decoding.
    """

    def __init__(self, grammar: Grammar, output: list[int]) -> None:
        """output: tokens committed before, for instance before a preemption."""
        self._grammar = grammar
        self._state = grammar.start()
        self._lock = threading.Lock()
        self._committed: list[int] = []
        self._path: list[int] = []  # the walker's position after the committed tokens
        self._masks: dict[tuple[int, ...], np.ndarray | None] = {}
        self._failed: dict[tuple[int, ...], FaserError] = {}  # drafted paths whose mask exceeded a limit
        self.append(output)

    def append(self, tokens: list[int]) -> None:
        """Commits tokens. Raises FaserError if the grammar forbids one or GrammarState exceeds a limit."""
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
        """Returns [V] bool, the tokens that may follow the committed tokens and `path`.

        Returns None if the path is forbidden, so that no token after it will be kept, or if its mask exceeds a limit.
        Raises FaserError for a limit if path is empty.
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
        """Returns GrammarState.forced after the committed tokens, or [] if it exceeds a limit."""
        with self._lock:
            self._walk([])
            try:
                return self._state.forced()
            except FaserError:
                self._restart()
                return []

    def _restart(self) -> None:
        """Replaces a state that has exceeded a limit, which cannot be used any more."""
        self._state, self._path = self._grammar.start(), []
        self._state.advance(self._committed)

    def _walk(self, path: list[int]) -> int:
        """Moves the walker along the legal part of `path` and returns that part's length."""
        common = 0
        while common < min(len(path), len(self._path)) and path[common] == self._path[common]:
            common += 1
        self._state.rollback(len(self._path) - common)
        reached = common + self._state.advance(path[common:])
        self._path = path[:reached]
        return reached


_MAX_BIAS = 1e30  # keeps biased logits finite in float32, after any temperature as well
_MIN_REPETITION = 1e-6
_PENALTIES = "repetition_penalty"  # the field to blame; presence and frequency belong to it


class _BadWords:
    """The bad words of one slot: a word's last token is forbidden after its other tokens.

    Arrays hold the tokens of all words, so that a row is compared with all words at once.
    """

    def __init__(self, words: tuple[tuple[int, ...], ...], committed: np.ndarray) -> None:
        """committed: [n] int64, tokens of the slot."""
        longer = [word for word in words if len(word) > 1]
        sizes = np.array([len(word) - 1 for word in longer], np.int64)
        self._single = np.unique(np.array([word[0] for word in words if len(word) == 1], np.int64))
        self._last = np.array([word[-1] for word in longer], np.int64)  # [num_longer]
        self._before = np.array([token for word in longer for token in word[:-1]], np.int64)  # [num_before]
        self._starts = np.cumsum(sizes) - sizes  # [num_longer], of a word in _before
        self.tail = np.full(sizes.max(initial=0), -1, np.int64)  # the last committed tokens, enough for every word
        # The index in a tail at which each token of _before must be found: a word ends where the tail ends.
        self._index = self.tail.size + np.arange(self._before.size) - np.repeat(self._starts + sizes, sizes)
        self.append(committed)

    def append(self, tokens: np.ndarray) -> None:
        if self.tail.size:
            self.tail = np.concatenate((self.tail, tokens))[-self.tail.size :]

    def forbid(self, logits: np.ndarray, where: np.ndarray, drafted: np.ndarray, num_drafted: np.ndarray) -> None:
        """Forbids tokens in place in rows `where` [n] of logits, after drafted [n, K][:, :num_drafted [n]]."""
        logits[where[:, None], self._single] = -np.inf
        if not self._last.size:
            return
        for row, path, num_tokens in zip(where, drafted, num_drafted, strict=True):
            tail = np.concatenate((self.tail, path[:num_tokens]))[num_tokens:]
            is_matched = np.logical_and.reduceat(tail.take(self._index) == self._before, self._starts)
            logits[row, self._last[is_matched]] = -np.inf


@dataclass(slots=True, eq=False)
class _SlotRules:
    """The bias and min_tokens of one slot."""

    bias_ids: np.ndarray  # [num_biased] int64
    bias_values: np.ndarray  # [num_biased] float32
    end_ids: np.ndarray  # [num_end_ids] int64, forbidden below min_position
    min_position: int


@dataclass(slots=True, eq=False)
class _Penalties:
    """Penalties of one slot and the token counts that they read."""

    repetition: float
    presence: float
    frequency: float
    in_prompt: np.ndarray  # [V] bool
    output_counts: np.ndarray  # [V] float32, committed output tokens

    def append(self, tokens: np.ndarray) -> None:
        np.add.at(self.output_counts, tokens, 1.0)


class LogitRules:
    """The rules of all slots; a slot's rules live from `add` to `remove`."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rules: dict[int, _SlotRules] = {}
        self._bad_words: dict[int, _BadWords] = {}
        self._penalties: dict[int, _Penalties] = {}
        self._grammars: dict[int, GrammarRule] = {}
        self._all: tuple[dict[int, Any], ...] = (self._rules, self._bad_words, self._penalties, self._grammars)

    def add(
        self, slot: int, sampling: Sampling, token_ids: np.ndarray, num_prompt_tokens: int, end_ids: tuple[int, ...]
    ) -> bool:
        """Starts a slot, with the arguments of core.ports.Sampler.add, and returns whether it has any rule.

        Like `append`, `forced` and `apply`, it raises FailedError with the field of the rule that failed.
        """
        output = token_ids[num_prompt_tokens:]
        blaming("logit_bias", self._add_bias, slot, sampling, num_prompt_tokens, end_ids)
        if sampling.bad_words:
            self._bad_words[slot] = blaming("bad_words", _BadWords, sampling.bad_words, token_ids)
        if sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty:
            blaming(_PENALTIES, self._add_penalties, slot, sampling, token_ids[:num_prompt_tokens], output)
        if sampling.grammar is not None:
            self._grammars[slot] = blaming(GUIDE, GrammarRule, sampling.grammar, output.tolist())
        return any(slot in rules for rules in self._all)

    def _add_bias(self, slot: int, sampling: Sampling, num_prompt_tokens: int, end_ids: tuple[int, ...]) -> None:
        forbids_end = sampling.min_tokens > 0 and bool(end_ids)
        if sampling.logit_bias or forbids_end:
            bias = sampling.logit_bias or {}
            values = np.fromiter(bias.values(), np.float64, len(bias))
            self._rules[slot] = _SlotRules(
                bias_ids=np.fromiter(bias, np.int64, len(bias)),
                bias_values=np.where(values == -np.inf, values, values.clip(-_MAX_BIAS, _MAX_BIAS)).astype(np.float32),
                end_ids=np.array(end_ids, np.int64),
                min_position=num_prompt_tokens + sampling.min_tokens if forbids_end else 0,
            )

    def _add_penalties(self, slot: int, sampling: Sampling, prompt: np.ndarray, output: np.ndarray) -> None:
        in_prompt = np.zeros(self._vocab_size, np.bool_)
        in_prompt[prompt] = True
        penalties = self._penalties[slot] = _Penalties(
            max(sampling.repetition_penalty, _MIN_REPETITION),
            sampling.presence_penalty,
            sampling.frequency_penalty,
            in_prompt,
            np.zeros(self._vocab_size, np.float32),
        )
        penalties.append(output)

    def remove(self, slot: int) -> None:
        for rules in self._all:
            rules.pop(slot, None)

    def append(self, slot: int, tokens: list[int]) -> None:
        if (bad_words := self._bad_words.get(slot)) is not None:
            blaming("bad_words", bad_words.append, np.array(tokens, np.int64))
        if (penalties := self._penalties.get(slot)) is not None:
            blaming(_PENALTIES, penalties.append, np.array(tokens, np.int64))
        if (grammar := self._grammars.get(slot)) is not None:
            blaming(GUIDE, grammar.append, tokens)

    def forced(self, slot: int) -> list[int]:
        grammar = self._grammars.get(slot)
        return [] if grammar is None else blaming(GUIDE, grammar.forced)

    def apply(self, logits: np.ndarray, rows: SamplingRows, index: np.ndarray) -> None:
        """Applies all rules in place to logits [n, V] of rows `index` [n] int64."""
        slots = rows.slots[index].tolist()
        forbidden = blaming(GUIDE, self._forbidden_by_grammars, rows, index, slots)
        raw = {row: logits[row].copy() for row in forbidden}
        blaming(_PENALTIES, self._penalize, logits, rows, index, slots)
        blaming("logit_bias", self._bias, logits, rows, index, slots)
        blaming("bad_words", self._forbid_words, logits, rows, index, slots)
        for row, mask in forbidden.items():
            logits[row, mask] = -np.inf
            if logits[row].max() == -np.inf:  # other rules forbid everything that the grammar allows
                logits[row] = np.where(mask, -np.inf, raw[row])

    def _forbidden_by_grammars(self, rows: SamplingRows, index: np.ndarray, slots: list[int]) -> dict[int, np.ndarray]:
        """Returns, by row with a grammar and a legal drafted prefix, its forbidden tokens [V] bool."""
        forbidden = {}
        for row, slot in enumerate(slots):
            if (grammar := self._grammars.get(slot)) is not None:
                source = index[row]
                path = rows.drafted[rows.sequence[source], : rows.num_drafted[source]].tolist()
                if (allowed := grammar.allowed(path)) is not None:
                    forbidden[row] = ~allowed
        return forbidden

    def _bias(self, logits: np.ndarray, rows: SamplingRows, index: np.ndarray, slots: list[int]) -> None:
        for row, slot in enumerate(slots):
            if (rules := self._rules.get(slot)) is None:
                continue
            line = logits[row]
            if rules.bias_ids.size:
                line[rules.bias_ids] += rules.bias_values
            if rows.positions[index[row]] < rules.min_position:
                line[rules.end_ids] = -np.inf

    def _forbid_words(self, logits: np.ndarray, rows: SamplingRows, index: np.ndarray, slots: list[int]) -> None:
        for slot in self._bad_words.keys() & set(slots):
            where = np.flatnonzero(rows.slots[index] == slot)
            source = index[where]
            drafted = rows.drafted[rows.sequence[source]]
            self._bad_words[slot].forbid(logits, where, drafted, rows.num_drafted[source])

    def check_integrity(self, active_slots: set[int]) -> None:
        for slots in self._all:
            assert slots.keys() <= active_slots
        for rules in self._rules.values():
            assert rules.bias_ids.shape == rules.bias_values.shape
        for penalties in self._penalties.values():
            assert penalties.in_prompt.shape == penalties.output_counts.shape == (self._vocab_size,)
            assert (penalties.output_counts >= 0).all()

    def _penalize(self, logits: np.ndarray, rows: SamplingRows, index: np.ndarray, slots: list[int]) -> None:
        where = [row for row, slot in enumerate(slots) if slot in self._penalties]
        if not where:
            return
        penalties = [self._penalties[slots[row]] for row in where]
        counts = np.stack([p.output_counts for p in penalties])
        source = index[where]
        drafted = rows.drafted[rows.sequence[source]]  # [n, K]
        in_prefix = np.arange(drafted.shape[1]) < rows.num_drafted[source, None]
        line, column = np.nonzero(in_prefix)
        np.add.at(counts, (line, drafted[line, column]), 1.0)
        factors = np.array([(p.repetition, p.presence, p.frequency) for p in penalties], np.float32)
        in_prompt = np.stack([p.in_prompt for p in penalties])
        is_whole = len(where) == logits.shape[0]
        lines = logits if is_whole else logits[where]
        penalize(lines, counts, in_prompt, factors.T)
        if not is_whole:
            logits[where] = lines
