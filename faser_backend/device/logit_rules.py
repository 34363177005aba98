"""Per-slot rules that change logits before the temperature: penalties, bias, min_tokens, bad words, a grammar.

All act on a row's own prefix: the slot's committed tokens followed by the row's drafted tokens. Token
counts exist only for slots with penalties; other slots cost nothing. Order: penalties, logit bias,
min_tokens, bad words, grammar; a row that ends up with every token forbidden keeps its raw logits, of
which the grammar alone still forbids some.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from faser_backend.core.batch import SamplingRows
from faser_backend.core.request import SamplingParams
from faser_backend.device.grammar_rule import GrammarRule
from faser_backend.device.logits import penalize

_MAX_BIAS = 1e30  # keeps biased logits finite in float32, after any temperature as well
_MIN_REPETITION = 1e-6


@dataclass(slots=True, eq=False)
class _SlotRules:
    """Rules of one slot. `tail` holds the last committed tokens, as many as a bad word can need."""

    bias_ids: np.ndarray  # [num_biased] int64
    bias_values: np.ndarray  # [num_biased] float32
    end_ids: np.ndarray  # [num_end_ids] int64, forbidden below min_position
    min_position: int
    bad_words: tuple[tuple[int, ...], ...]
    tail: list[int]

    @property
    def tail_size(self) -> int:
        return max((len(word) for word in self.bad_words), default=1) - 1


@dataclass(slots=True, eq=False)
class _Penalties:
    """Penalties of one slot and the counts that they act on."""

    repetition: float
    presence: float
    frequency: float
    in_prompt: np.ndarray  # [V] bool
    output_counts: np.ndarray  # [V] float32, committed output tokens

    def append(self, tokens: np.ndarray) -> None:
        np.add.at(self.output_counts, tokens, 1.0)


class LogitRules:
    """Owns the rules of all slots. Rules of a slot live from `add` to `remove`."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rules: dict[int, _SlotRules] = {}
        self._penalties: dict[int, _Penalties] = {}
        self._grammars: dict[int, GrammarRule] = {}

    def add(
        self,
        slot: int,
        sampling: SamplingParams,
        token_ids: np.ndarray,
        num_prompt_tokens: int,
        end_ids: tuple[int, ...],
    ) -> bool:
        """Starts a slot; arguments as in core.ports.Sampler.add. Returns whether it has any rule."""
        forbids_end = sampling.min_tokens > 0 and bool(end_ids)
        if sampling.logit_bias or sampling.bad_words or forbids_end:
            bias = sampling.logit_bias or {}
            rules = _SlotRules(
                bias_ids=np.array(list(bias), np.int64),
                bias_values=np.array([_bounded_bias(value) for value in bias.values()], np.float32),
                end_ids=np.array(end_ids, np.int64),
                min_position=num_prompt_tokens + sampling.min_tokens if forbids_end else 0,
                bad_words=sampling.bad_words,
                tail=[],
            )
            self._rules[slot] = rules
            _extend_tail(rules, token_ids[max(token_ids.size - rules.tail_size, 0) :].tolist())
        if sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty:
            in_prompt = np.zeros(self._vocab_size, np.bool_)
            in_prompt[token_ids[:num_prompt_tokens]] = True
            penalties = _Penalties(
                max(sampling.repetition_penalty, _MIN_REPETITION),
                sampling.presence_penalty,
                sampling.frequency_penalty,
                in_prompt,
                np.zeros(self._vocab_size, np.float32),
            )
            penalties.append(token_ids[num_prompt_tokens:])
            self._penalties[slot] = penalties
        if sampling.grammar is not None:
            self._grammars[slot] = GrammarRule(sampling.grammar, token_ids[num_prompt_tokens:].tolist())
        return slot in self._rules or slot in self._penalties or slot in self._grammars

    def remove(self, slot: int) -> None:
        self._rules.pop(slot, None)
        self._penalties.pop(slot, None)
        self._grammars.pop(slot, None)

    def append(self, slot: int, tokens: list[int]) -> None:
        if (rules := self._rules.get(slot)) is not None:
            _extend_tail(rules, tokens)
        if (penalties := self._penalties.get(slot)) is not None:
            penalties.append(np.array(tokens, np.int64))
        if (grammar := self._grammars.get(slot)) is not None:
            grammar.append(tokens)

    def forced(self, slot: int) -> list[int]:
        """See core.ports.Sampler."""
        grammar = self._grammars.get(slot)
        return [] if grammar is None else grammar.forced()

    def apply(self, logits: np.ndarray, rows: SamplingRows, index: np.ndarray) -> None:
        """In place on logits [n, V], the logits of rows.slots[index]; index [n] int64."""
        slots = rows.slots[index].tolist()
        forbidden = self._forbidden_by_grammars(rows, index, slots)
        raw = {row: logits[row].copy() for row in forbidden}
        self._penalize(logits, rows, index, slots)
        for row, slot in enumerate(slots):
            if (rules := self._rules.get(slot)) is None:
                continue
            line = logits[row]
            if rules.bias_ids.size:
                line[rules.bias_ids] += rules.bias_values
            if rows.positions[index[row]] < rules.min_position:
                line[rules.end_ids] = -np.inf
            if rules.bad_words:
                r = index[row]
                prefix = rules.tail + rows.drafted[rows.sequence[r], : rows.num_drafted[r]].tolist()
                _forbid_bad_words(line, rules.bad_words, prefix)
        for row, mask in forbidden.items():
            logits[row, mask] = -np.inf
            if logits[row].max() == -np.inf:  # the other rules leave nothing of what is legal
                logits[row] = np.where(mask, -np.inf, raw[row])

    def _forbidden_by_grammars(self, rows: SamplingRows, index: np.ndarray, slots: list[int]) -> dict[int, np.ndarray]:
        """[V] bool of each row whose slot has a grammar and whose drafted prefix is legal."""
        forbidden = {}
        for row, slot in enumerate(slots):
            if (grammar := self._grammars.get(slot)) is not None:
                source = index[row]
                path = rows.drafted[rows.sequence[source], : rows.num_drafted[source]].tolist()
                if (allowed := grammar.allowed(path)) is not None:
                    forbidden[row] = ~allowed
        return forbidden

    def check_integrity(self, active_slots: set[int]) -> None:
        for slots in (self._rules, self._penalties, self._grammars):
            assert slots.keys() <= active_slots
        for rules in self._rules.values():
            assert len(rules.tail) <= rules.tail_size
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
        penalize(
            lines,
            output_counts=counts,
            in_prompt=in_prompt,
            repetition=factors[:, 0],
            presence=factors[:, 1],
            frequency=factors[:, 2],
        )
        if not is_whole:
            logits[where] = lines


def _bounded_bias(value: float) -> float:
    return value if value == -np.inf else min(max(value, -_MAX_BIAS), _MAX_BIAS)


def _extend_tail(rules: _SlotRules, tokens: list[int]) -> None:
    tail = rules.tail + tokens
    rules.tail = tail[max(len(tail) - rules.tail_size, 0) :]


def _forbid_bad_words(line: np.ndarray, bad_words: tuple[tuple[int, ...], ...], prefix: list[int]) -> None:
    """The last token of a word is forbidden where the prefix ends with the tokens before it."""
    for word in bad_words:
        num_before = len(word) - 1
        if num_before <= len(prefix) and tuple(prefix[len(prefix) - num_before :]) == word[:-1]:
            line[word[-1]] = -np.inf
