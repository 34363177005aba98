"""Planted acceptance for models whose weights mean nothing: every result that uses it is synthetic.

Draft and target run whole, their logits are sampled by the real sampler, and what it draws is then replaced by tokens
of an acceptance process: a pure function of (request seed, position). So acceptance is set by a parameter while every
kernel, copy and wait of a step stays. The process is the one fitted to the demo pair (simulation/acceptance.py),
shifted to the wanted rate: chances vary by request and position, and the draft's margin tells some of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from faser_backend.core.batch import RowBatch, SamplingRows
from faser_backend.core.ports import DeviceArray, DraftLoop, DraftTokens, Sampler
from faser_backend.core.request import SamplingParams
from lab.simulation.acceptance import AcceptanceProcess, demo_process

ACCEPTANCE = 0.75  # of draft tokens whose prefix was accepted
EXIT_AUC = 0.80  # with which a planted exit score tells a doomed token, beyond the draft's margin
CHAIN_SLACK = 64  # positions behind the last output token that chains may still be drafted at


def planted_process(acceptance: float = ACCEPTANCE, exit_auc: float | None = EXIT_AUC) -> AcceptanceProcess:
    """The demo pair's process at temperature 0.8, at another mean acceptance and with one exit of a stated quality."""
    process = demo_process("sampled").at_level(acceptance)
    return process if exit_auc is None else process.with_exits((exit_auc,))


class Outcomes:
    """The planted outcomes of the requests in max_num_seqs slots; a slot's row is overwritten by its next request."""

    def __init__(
        self, process: AcceptanceProcess, vocab_size: int, max_num_seqs: int, max_output_tokens: int, seed: int
    ) -> None:
        self._process, self._vocab_size, self._seed = process, vocab_size, seed
        self._num_positions = max_output_tokens + CHAIN_SLACK
        shape = (max_num_seqs, self._num_positions)
        self._starts = np.zeros(max_num_seqs, np.int64)
        self._tokens, self._drafted = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._margins, self._exit_margins = np.zeros(shape, np.float32), np.zeros(shape, np.float32)

    def plant(self, slot: int, request_seed: int, num_prompt_tokens: int) -> None:
        path = self._process.path((self._seed, request_seed), self._num_positions)
        size = self._vocab_size
        tokens = path.tokens % size
        other = (tokens + 1 + path.drafted % (size - 1)) % size
        self._starts[slot] = num_prompt_tokens
        self._tokens[slot], self._margins[slot] = tokens, path.margins
        self._drafted[slot] = np.where(path.tokens == path.drafted, tokens, other)
        if len(path.exit_margins):
            self._exit_margins[slot] = path.exit_margins[0]

    def target(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """What the target draws; arrays of one shape here and below."""
        return self._tokens[slots, self._offsets(slots, positions)]

    def draft(self, slots: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What the draft draws after the true prefix, and its margins."""
        offsets = self._offsets(slots, positions)
        return self._drafted[slots, offsets], self._margins[slots, offsets]

    def exit_margins(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return self._exit_margins[slots, self._offsets(slots, positions)]

    def _offsets(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return np.minimum(positions - self._starts[slots], self._num_positions - 1)


class PlantedSampler:
    """core.ports.Sampler: the real one does all of its work, then its tokens give way to planted ones."""

    def __init__(self, real: Sampler, outcomes: Outcomes) -> None:
        self._real, self._outcomes = real, outcomes

    def add(
        self,
        slot: int,
        sampling: SamplingParams,
        token_ids: np.ndarray,
        num_prompt_tokens: int,
        end_ids: tuple[int, ...],
    ) -> None:
        self._real.add(slot, sampling, token_ids, num_prompt_tokens, end_ids)
        self._outcomes.plant(slot, sampling.seed, num_prompt_tokens)

    def remove(self, slot: int) -> None:
        self._real.remove(slot)

    def append(self, slot: int, tokens: list[int]) -> None:
        self._real.append(slot, tokens)

    def sample(self, logits: DeviceArray, rows: SamplingRows) -> np.ndarray:
        self._real.sample(logits, rows)
        return self._outcomes.target(rows.slots, rows.positions)

    def sample_draft(self, logits: DeviceArray, rows: SamplingRows, num_candidates: int) -> DraftTokens:
        drawn = self._real.sample_draft(logits, rows, num_candidates)
        return planted_draft(drawn, *self._outcomes.draft(rows.slots, rows.positions))

    def candidate_margins(
        self, scores: DeviceArray, candidates: np.ndarray, rows: SamplingRows, *, with_noise: bool
    ) -> np.ndarray:
        self._real.candidate_margins(scores, candidates, rows, with_noise=with_noise)
        return self._outcomes.exit_margins(rows.slots, rows.positions)

    def probabilities(self, logits: DeviceArray, rows: SamplingRows) -> np.ndarray:
        return self._real.probabilities(logits, rows)

    def uniforms(self, rows: SamplingRows, purpose: int, num_steps: np.ndarray) -> np.ndarray:
        return self._real.uniforms(rows, purpose, num_steps)

    def log_probs(self, logits: DeviceArray, token_ids: np.ndarray) -> np.ndarray:
        return self._real.log_probs(logits, token_ids)

    def to_host(self, logits: DeviceArray) -> np.ndarray:
        return self._real.to_host(logits)


class PlantedDraftLoop:
    """core.ports.DraftLoop: the device drafts with tokens of its own, and planted ones are handed on."""

    def __init__(self, real: DraftLoop, outcomes: Outcomes) -> None:
        self._real, self._outcomes = real, outcomes

    def can_draft(self, slots: np.ndarray) -> bool:
        return self._real.can_draft(slots)

    def draft(
        self, rows: RowBatch, slots: np.ndarray, num_draft_tokens: np.ndarray, num_candidates: int
    ) -> DraftTokens:
        drawn = self._real.draft(rows, slots, num_draft_tokens, num_candidates)
        first = rows.context_lens + rows.rows_per_sequence  # [A] positions of the first new tokens
        positions = first[:, None] + np.arange(drawn.tokens.shape[1])
        return planted_draft(drawn, *self._outcomes.draft(slots[:, None], positions))


def planted_draft(drawn: DraftTokens, tokens: np.ndarray, margins: np.ndarray) -> DraftTokens:
    """What was drawn, with planted tokens and margins; the other candidates stay."""
    candidates = drawn.candidates
    if candidates is not None:
        candidates = np.concatenate([tokens[..., None], candidates[..., 1:]], axis=-1)
    return DraftTokens(tokens, margins, candidates)


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Chance that a true one of labels [n] has a higher score [n] than a false one; ties count half."""
    values, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    del values
    ranks = np.cumsum(counts) - (counts - 1) / 2.0  # the mean rank of each value
    num_true = int(labels.sum())
    num_false = labels.size - num_true
    return float((ranks[inverse][labels].sum() - num_true * (num_true + 1) / 2) / (num_true * num_false))


def process_in_words(process: AcceptanceProcess, lengths: Sequence[int] = (2, 4, 8)) -> dict[str, float]:
    """What a reader must know of a process: rate, accepted tokens per chain, and how much margins tell."""
    margins, matches, exit_margins = process.sample(200, 128)
    found = {"acceptance": float(matches.mean()), "margin_auc": auc(margins.ravel(), matches.ravel())}
    for length in lengths:
        windows = np.lib.stride_tricks.sliding_window_view(matches, length, axis=1)
        found[f"mean_accepted_{length}"] = float(np.cumprod(windows, axis=-1).sum(axis=-1).mean())
    if len(exit_margins):
        found["exit_auc"] = auc(exit_margins[0].ravel(), matches.ravel())
    return found
