"""`NumpySampler`: turns logits into tokens on the CPU, with sampling parameters per slot in persistent arrays.

There are three classes of rows, so that none pays for another: greedy (argmax), random (temperature only: scaled logits
plus noise) and special (rules or filters: processed in one vectorised sub-batch). A row's token is the same, bit for
bit, in every batch. Ties go to the lowest id.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from faser_backend.core.batch import SamplingRows
from faser_backend.core.errors import Failure, blamed
from faser_backend.core.ports import NO_TOKEN, DraftTokens
from faser_backend.core.request import Sampling
from faser_backend.cpu import noise
from faser_backend.cpu.logit_rules import LogitRules
from faser_backend.cpu.logits import keep_min_p, keep_top, log_softmax_at, rank, second_best, softmax
from faser_backend.cpu.noise import seed_keys

MIN_TEMPERATURE = 1e-5  # below this a row decodes greedily: scaled logits would overflow float32


class SlotParameters:
    """The sampling parameters of max_num_seqs slots, as arrays by slot that all samplers read.

    It alone decides which slots are greedy and which filters are on. Free slots have greedy parameters.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int) -> None:
        self._vocab_size = vocab_size
        self.is_active = np.zeros(max_num_seqs, np.bool_)
        self.is_random = np.zeros(max_num_seqs, np.bool_)
        self.has_rules = np.zeros(max_num_seqs, np.bool_)  # see logit_rules.py
        self.has_filters = np.zeros(max_num_seqs, np.bool_)  # top-k, top-p or min-p; random slots only
        self.keys = np.zeros(max_num_seqs, np.uint64)
        self.inverse_temperature = np.ones(max_num_seqs, np.float32)  # 1 where greedy
        self.top_k = np.full(max_num_seqs, vocab_size, np.int64)  # V = off
        self.top_p = np.ones(max_num_seqs, np.float64)  # 1 = off
        self.min_p = np.zeros(max_num_seqs, np.float64)  # 0 = off

    def add(self, slot: int, sampling: Sampling, *, has_rules: bool) -> None:
        """Starts a free slot. The parameters are valid (Sampling.validate)."""
        is_random = sampling.temperature >= MIN_TEMPERATURE and sampling.top_k != 1
        top_k = min(sampling.top_k or self._vocab_size, self._vocab_size)
        has_filter = top_k < self._vocab_size or sampling.top_p < 1.0 or sampling.min_p > 0.0
        self.is_active[slot] = True
        self.is_random[slot] = is_random
        self.has_rules[slot] = has_rules
        # Filters keep the largest logit, so a greedy row needs none of them.
        self.has_filters[slot] = is_random and has_filter
        self.keys[slot] = seed_keys(np.array([sampling.seed], np.uint64))[0]
        self.inverse_temperature[slot] = 1.0 / sampling.temperature if is_random else 1.0
        self.top_k[slot] = top_k if is_random else self._vocab_size
        self.top_p[slot] = sampling.top_p if is_random else 1.0
        self.min_p[slot] = sampling.min_p if is_random else 0.0

    def remove(self, slot: int) -> None:
        for flags in (self.is_active, self.is_random, self.has_rules, self.has_filters):
            flags[slot] = False

    def check_integrity(self) -> None:
        for flags in (self.is_random, self.has_rules, self.has_filters):
            assert not (flags & ~self.is_active).any(), "a free slot keeps state"
        assert not (self.has_filters & ~self.is_random).any(), "a greedy slot has filters"


MAX_MARGIN = 1e4  # margin of a token without rivals
Result = TypeVar("Result")


class NumpySampler:
    """The CPU's core.ports.Sampler, for up to max_num_seqs slots.

    Threads that draft and verify at once may call `sample_draft`, `candidate_margins`, `probabilities` and `uniforms`
    concurrently: these write only their results and failures. `add`, `remove` and `append` must run alone.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int) -> None:
        self._vocab_size = vocab_size
        self._noise = noise.GumbelNoise(vocab_size)
        self._rules = LogitRules(vocab_size)
        self.failures: dict[int, Failure] = {}  # by slot; lanes may add one at the same time
        self.parameters = SlotParameters(vocab_size, max_num_seqs)  # read-only for others

    def add(
        self, slot: int, sampling: Sampling, token_ids: np.ndarray, num_prompt_tokens: int, end_ids: tuple[int, ...]
    ) -> None:
        """See core.ports.Sampler. The parameters are valid (Sampling.validate)."""
        if self.parameters.is_active[slot]:
            raise ValueError(f"slot {slot} is in use; remove it first")
        rules = (slot, sampling, token_ids, num_prompt_tokens, end_ids)
        has_rules = self._noting_failure(slot, False, self._rules.add, *rules)
        self.parameters.add(slot, sampling, has_rules=has_rules)

    def remove(self, slot: int) -> None:
        if not self.parameters.is_active[slot]:
            raise ValueError(f"slot {slot} is not in use")
        self._rules.remove(slot)
        self.failures.pop(slot, None)
        self.parameters.remove(slot)

    def append(self, slot: int, tokens: list[int]) -> None:
        if self.parameters.has_rules[slot]:
            self._noting_failure(slot, None, self._rules.append, slot, tokens)

    def has_rules(self, slots: np.ndarray) -> bool:
        return bool(self.parameters.has_rules[slots].any())

    def forced(self, slot: int) -> list[int]:
        return self._noting_failure(slot, [], self._rules.forced, slot) if self.parameters.has_rules[slot] else []

    def sample(self, logits: np.ndarray, rows: SamplingRows) -> np.ndarray:
        """Draws token ids [R] int64 from logits [R, V] float32, which stay unchanged."""
        scores = self._scores(logits, rows)
        token_ids = scores.argmax(axis=1)
        # argmax stops at the first NaN, so checking the chosen score checks the row.
        return np.where(np.isfinite(scores[np.arange(token_ids.size), token_ids]), token_ids, NO_TOKEN)

    def sample_draft(self, logits: np.ndarray, rows: SamplingRows, num_candidates: int) -> DraftTokens:
        """See core.ports.Sampler; num_candidates in [0, vocab_size].

        Draws the tokens of `sample`. Margins are at most MAX_MARGIN. If fewer than num_candidates tokens are allowed,
        forbidden ones of low id follow.
        """
        scores = self._scores(logits, rows)
        token_ids = scores.argmax(axis=1)
        best = scores[np.arange(token_ids.size), token_ids]
        if num_candidates < 2:
            second = second_best(scores, token_ids)
            candidates = token_ids[:, None] if num_candidates else None
        else:
            candidates, second = rank(scores, token_ids, num_candidates, can_overwrite=scores is not logits)
        with np.errstate(over="ignore", invalid="ignore"):
            margins = np.minimum((best - second) / self.parameters.inverse_temperature[rows.slots], MAX_MARGIN)
        margins[~np.isfinite(best)] = 0
        return DraftTokens(token_ids, margins, candidates)

    def candidate_margins(
        self, scores: np.ndarray, candidates: np.ndarray, rows: SamplingRows, *, with_noise: bool
    ) -> np.ndarray:
        """See core.ports.Sampler; at least two candidates per row.

        It ignores rules and filters, because it predicts a token and draws none, and reads only what `add` wrote.
        """
        slots, known = rows.slots, self.parameters
        if with_noise and known.is_random[slots].any():
            temperature = np.where(known.is_random[slots], 1.0 / known.inverse_temperature[slots], np.float32(0.0))
            log_exponentials = self._noise.log_exponentials_at(known.keys[slots], rows.positions, candidates)
            scores = scores - temperature[:, None] * log_exponentials
        return scores[:, 0] - scores[:, 1:].max(axis=1)

    def probabilities(self, logits: np.ndarray, rows: SamplingRows) -> np.ndarray:
        """Returns the probabilities [R, V] float32 that tokens are drawn with; one-hot rows where greedy."""
        scores = self._processed(logits, rows, np.arange(rows.slots.size))
        unusable = np.isnan(scores).all(axis=1)
        scores[unusable] = 0.0
        probs = softmax(scores)
        greedy = np.flatnonzero(~self.parameters.is_random[rows.slots])
        if greedy.size:
            probs[greedy] = 0.0
            probs[greedy, scores[greedy].argmax(axis=1)] = 1.0
        probs[unusable] = 0.0
        return probs

    def uniforms(self, rows: SamplingRows, purpose: int, num_steps: np.ndarray) -> np.ndarray:
        """See core.ports.Sampler; float64 [R]."""
        return noise.uniforms(self.parameters.keys[rows.slots], rows.positions, purpose, num_steps)

    def log_probs(self, logits: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """See core.ports.Sampler; float32 [R]."""
        return log_softmax_at(logits, token_ids)

    def to_host(self, logits: np.ndarray) -> np.ndarray:
        """See core.ports.Sampler. Copies, because the runner's next call may overwrite logits."""
        return logits.astype(np.float32)

    def check_integrity(self) -> None:
        self.parameters.check_integrity()
        self._rules.check_integrity(set(np.flatnonzero(self.parameters.is_active).tolist()))

    def _scores(self, logits: np.ndarray, rows: SamplingRows) -> np.ndarray:
        """Returns scores [R, V] whose argmax is each row's token: `logits` itself if all rows are greedy and plain."""
        slots, positions = rows.slots, rows.positions
        is_special = self.parameters.has_rules[slots] | self.parameters.has_filters[slots]
        special = np.flatnonzero(is_special)
        if special.size == 0:
            return self._perturbed(logits, slots, positions)
        processed = self._processed(logits, rows, special)
        random = np.flatnonzero(self.parameters.is_random[slots[special]])
        self._subtract_noise(processed, random, slots[special], positions[special])
        if special.size == slots.size:
            return processed
        plain = np.flatnonzero(~is_special)
        scores = np.empty_like(logits)
        scores[special] = processed
        scores[plain] = self._perturbed(logits[plain], slots[plain], positions[plain])
        return scores

    def _perturbed(self, logits: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Returns the scores [R, V] of plain rows: `logits` itself if all are greedy."""
        random = np.flatnonzero(self.parameters.is_random[slots])
        if random.size == 0:
            return logits
        scores = logits * self.parameters.inverse_temperature[slots, None]
        self._subtract_noise(scores, random, slots, positions)
        return scores

    def _subtract_noise(self, scores: np.ndarray, random: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> None:
        """Subtracts noise in place from scores [n, V] of slots [n], in rows `random`."""
        if random.size == slots.size:
            scores -= self._noise.log_exponentials(self.parameters.keys[slots], positions)
        elif random.size:
            scores[random] -= self._noise.log_exponentials(self.parameters.keys[slots[random]], positions[random])

    def _processed(self, logits: np.ndarray, rows: SamplingRows, index: np.ndarray) -> np.ndarray:
        """Returns the logits [n, V] of rows `index` after rules, temperature, top-k, top-p, min-p, in this order.

        Those of unusable rows are NaN.
        """
        scores = logits.take(index, axis=0)
        slots = rows.slots[index]
        known, highest = self.parameters, scores.max(axis=1)  # before rules, which may hide what is unusable
        if known.has_rules[slots].any():
            try:
                self._rules.apply(scores, rows, index)
            except Exception:
                self._apply_by_slot(logits, scores, rows, index)
            all_forbidden = np.flatnonzero(scores.max(axis=1) == -np.inf)
            scores[all_forbidden] = logits[index[all_forbidden]]
        unusable = ~np.isfinite(highest + scores.max(axis=1))
        scores[unusable] = 0.0  # filters need finite numbers
        scores *= known.inverse_temperature[slots, None]
        top_k, top_p, min_p = known.top_k[slots], known.top_p[slots], known.min_p[slots]
        _apply(keep_top, scores, (top_k < self._vocab_size) | (top_p < 1.0), top_k, top_p)
        _apply(keep_min_p, scores, min_p > 0.0, min_p)
        scores[unusable] = np.nan
        return scores

    def _apply_by_slot(self, logits: np.ndarray, scores: np.ndarray, rows: SamplingRows, index: np.ndarray) -> None:
        """Applies the rules again slot by slot, to find the slots that fail; other rows keep their scores."""
        slots = rows.slots[index]
        for slot in np.unique(slots).tolist():
            where = np.flatnonzero(slots == slot)
            lines = logits.take(index[where], axis=0)
            has_failed = self._noting_failure(slot, True, self._rules.apply, lines, rows, index[where])
            scores[where] = logits[index[where]] if has_failed else lines

    def _noting_failure(self, slot: int, otherwise: Result, rule: Callable[..., Any], *arguments: Any) -> Result:
        """Returns the result of a slot's rule; if it fails, records the slot's failure and returns `otherwise`."""
        try:
            return rule(*arguments)
        except Exception as error:
            self.failures.setdefault(slot, blamed("sampling", error))
            return otherwise


def _apply(keep: Callable[..., None], scores: np.ndarray, is_on: np.ndarray, *parameters: np.ndarray) -> None:
    """Runs a filter in place on the rows of scores [n, V] with is_on [n]; each parameter is [n]."""
    on = np.flatnonzero(is_on)
    if on.size == 0:
        return
    if on.size == scores.shape[0]:
        keep(scores, *parameters)
        return
    kept = scores[on]
    keep(kept, *(parameter[on] for parameter in parameters))
    scores[on] = kept
