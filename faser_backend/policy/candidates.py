"""The candidates for the next steps, with predicted tokens and time of each, and the exploration of others.

A chain is extended, and its rows are verified, while its survival stays above a floor. How many tokens such chains
draft and emit is read off a sample of chains, whose margins follow the curve of the traffic. docs/policies.md derives
the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from faser_backend.core.decision import PipelineMode, Score
from faser_backend.core.plan import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.calibration import AcceptanceModel, MarginCurve, hats, sigmoid
from faser_backend.policy.cost_model import BatchTimes
from faser_backend.policy.speculation import MAX_ADAPTIVE_TOKENS

# [F] of survival: below the first a chain is not drafted on, below the second a drafted token's row is not verified.
# Where a row costs as much as a draft call the two are alike, where it costs next to nothing every row is verified.
_USED = (0.1, 0.2, 0.3, 0.45, 0.6, 0.75)
FLOORS = np.array([0.0, *_USED, *_USED])  # 0: all chains are alike, nothing is trimmed
_ROW_FLOORS = np.array([0.0, *_USED, *(0.15 * floor for floor in _USED)])
_OFFSETS = np.linspace(-1.6, 1.6, 5)  # [G] of requests, between which the yield of chains is interpolated
_NUM_CHAINS = 256
# [K, N] the rank of each draft token's margin, in (0, 1): every row holds every rank, in an order of its own.
_RANKS = np.random.default_rng(0).permuted(
    np.tile((np.arange(_NUM_CHAINS) + 0.5) / _NUM_CHAINS, (MAX_ADAPTIVE_TOKENS, 1)), axis=1
)

EXPLORED_SHARE = 0.005  # of the time
EXPLORED_STEPS, COLD_STEPS = 6, 2  # steps of an exploration that count, after steps that find the caches cold
OWN_US, LEAST_SHARE = 1500.0, 0.1  # what weighing and learning cost an exploration; a step loses this share at least
EXPENSIVE = 0.5  # share of a step's time; an exploration that loses more has to be saved for
DRAFTING_PART, SMALL = 8, 4  # one request in so many drafts in an exploration among plain rounds; all of a small batch


class ChainMeans(NamedTuple):
    """Means over a batch's chains, [F, K] by floor and draft token j = 1..K."""

    drafting: np.ndarray  # share of the chains that draft token j
    verified: np.ndarray  # share whose row j is verified
    kept: np.ndarray  # chance that tokens 1..j are accepted and row j is there, so that it emits a token


class ChainYield:
    """The ratio of measured to predicted chains, from faded sums of accepted tokens and of verified rows."""

    _PRIOR, _FADE = 32.0, 0.995  # tokens that a prediction weighs; per sequence and step
    _REST = 0.8  # per weighing while nothing is drafted

    def __init__(self) -> None:
        self._seen = self._predicted = np.zeros(2)

    @property
    def ratios(self) -> tuple[float, float]:
        """Measured over predicted: accepted tokens; verified rows, anchors aside."""
        tokens, rows = ((self._seen + self._PRIOR) / (self._predicted + self._PRIOR)).tolist()
        return tokens, rows

    def fade(self) -> None:
        """Forgets a part. While nothing is drafted, the ratios return to 1, so that they cannot forbid it for ever."""
        self._seen, self._predicted = self._REST * self._seen, self._REST * self._predicted

    def observe(self, record: StepRecord, score: Score) -> None:
        """Counts a step. score: its prediction."""
        size = record.num_tokens.size
        totals = record.acceptance.num_emitted.sum(), record.frontier.num_rows.sum()
        fade = self._FADE**size
        self._seen = fade * self._seen + (np.array(totals) - size)
        self._predicted = fade * self._predicted + (score.num_accepted, score.num_rows)


@lru_cache(8)
def _shares(curve: MarginCurve) -> np.ndarray:
    """Returns ChainMeans of the sampled chains as an array [3, G, F, K], for requests of each of _OFFSETS."""
    bins = np.searchsorted(np.cumsum(curve.margin_shares[:-1]), _RANKS)  # [K, N]
    survival = np.cumprod(sigmoid(curve.match_logits + _OFFSETS[:, None])[:, None, bins], axis=2)  # [G, 1, K, N]
    before = np.insert(survival[:, :, :-1], 0, 1.0, axis=2)
    is_drafted = before >= FLOORS[:, None, None]  # [G, F, K, N]
    has_row = is_drafted & (survival >= _ROW_FLOORS[:, None, None])
    counts = np.count_nonzero(is_drafted, axis=3), np.count_nonzero(has_row, axis=3)
    return np.stack([*counts, (survival * has_row).sum(axis=3)]) / _NUM_CHAINS


def means_of(curve: MarginCurve, offsets: np.ndarray) -> ChainMeans:
    """Returns the means over requests of these offsets [B], whose chains have one source."""
    weights = hats(_OFFSETS, offsets).mean(axis=0)
    return ChainMeans(*np.tensordot(_shares(curve), weights, (1, 0)))


def batch_means(acceptance: AcceptanceModel, offsets: np.ndarray) -> ChainMeans:
    """Returns the means over a batch's chains, of all sources, for requests of offsets [B]. The engine's drafter, the
    first source, alone takes draft calls."""
    sources = zip(acceptance.shares, acceptance.curves, strict=False)
    parts = [share * np.array(means_of(curve, offsets)) for share, curve in sources]
    _, verified, kept = np.sum(parts, axis=0)
    return ChainMeans(parts[0][0], verified, kept)


def scores_of(
    whole: BatchTimes, splits: list[BatchTimes], chains: ChainMeans, ratios: tuple[float, float]
) -> tuple[Score, ...]:
    """Returns the score of every candidate: plain and serial, then the overlapped ones.

    splits: times of other partitions, for the whole batch (run-ahead) or for half of it (ping-pong). ratios: see
    ChainYield.
    """
    plain = Score(None, whole.partition, 0, 0.0, 0.0, 0.0, whole.size, float(whole.verify_us[0]))
    scores = [plain, round_score(PipelineMode.SERIAL, whole, chains, ratios)]
    for split in splits:
        if split.size < whole.size:
            scores.append(round_score(PipelineMode.PING_PONG, split, chains, ratios))
        else:
            scores.append(run_ahead_score(split, chains, ratios))
    return tuple(scores)


def round_score(mode: PipelineMode, times: BatchTimes, chains: ChainMeans, ratios: tuple[float, float]) -> Score:
    """Returns the best round over floors and longest chains. Serial rounds draft, then verify; in ping-pong two
    cohorts of `times.size` alternate: one drafts while the other is verified, and nothing is discarded."""
    size = times.size
    drafting = chains.drafting[:1] if times.drafts_at_once else chains.drafting  # floor 0: no chain ends early
    is_any = 1.0 - (1.0 - drafting) ** size  # [F, K], as all that follows: that a draft call is made at all
    num_active = np.maximum(size * drafting / np.maximum(is_any, 1e-9), 1.0)
    counts = np.arange(size + 1)
    call_us = np.interp(num_active, counts, times.draft_us)
    call_us[1:] += np.interp(num_active[1:], counts, times.trim_us)
    draft_us = times.draft_round_us + (is_any * call_us).cumsum(axis=1)
    draft_us[1:] += times.trim_us[size]  # which rows are verified
    num_rows = size * chains.verified.cumsum(axis=1)  # beside the anchors
    verify_us = np.interp(num_rows * ratios[1], np.arange(times.verify_us.size), times.verify_us)
    at_once_us = np.maximum(verify_us, draft_us) + times.lanes_us
    step_us = verify_us + draft_us if mode is PipelineMode.SERIAL else at_once_us
    num_accepted = size * chains.kept.cumsum(axis=1)
    tokens = size + ratios[0] * num_accepted
    best = np.unravel_index(int((tokens / step_us).argmax()), tokens.shape)
    found = (float(each[best]) for each in (num_rows, num_accepted, tokens, step_us))
    return Score(mode, times.partition, int(best[1]) + 1, float(FLOORS[best[0]]), *found)


def run_ahead_score(times: BatchTimes, chains: ChainMeans, ratios: tuple[float, float]) -> Score:
    """Returns the score of run-ahead: frontiers of one length, drafted while their predecessors are verified.

    With w the chance that a whole frontier is accepted, a verification yields its accepted tokens and, unless all
    were, the recovered one; then the chain ahead is discarded and one step goes by in which the sequence only
    drafts. Alone, that step costs the drafting; in a batch the others are verified meanwhile. A frontier has no
    bonus row, so it has a row less than a serial round of its length.
    """
    size, kept = times.size, np.minimum(chains.kept[0] * ratios[0], 1.0)
    lengths = np.arange(1, kept.size + 1)
    share = 1.0 / (2.0 - kept) if size > 1 else np.ones_like(kept)  # of the sequences, verified in a step
    num_extra = ((lengths - 1) * size * share).astype(np.int64)
    draft_us = times.draft_round_us + lengths * times.draft_us[size]
    step_us = np.maximum(times.verify_us[num_extra], draft_us) + times.lanes_us
    if size == 1:
        step_us = step_us + (1.0 - kept) * draft_us
    tokens = size * share * (kept.cumsum() + (1.0 - kept))
    best = int((tokens / step_us).argmax())
    accepted = size * float(share[best] * kept[: best + 1].sum())
    found = float(num_extra[best]), accepted, float(tokens[best]), float(step_us[best])
    return Score(PipelineMode.RUN_AHEAD, times.partition, best + 1, 0.0, *found)


# -- explorations ---------------------------------------------------------------------------------------------


class Explorer:
    """Runs some steps of a candidate that was not chosen, so that the predictions about it stay true, and saves time
    for them. While decoding plainly some requests draft, while speculating none does."""

    def __init__(self) -> None:
        self.current: Score | None = None
        self._num_left, self._saved_us = 0, 0.0  # steps of it; for the next one

    def observe(self, record: StepRecord, *, has_drafted: bool) -> None:
        """Counts a step of the exploration, or saves for the next one. A step in which the draft only catches up does
        not count."""
        if self.current is None:
            self._saved_us += EXPLORED_SHARE * record.step_us
        elif has_drafted or not record.plan.draft_prefills:
            self._num_left -= 1

    def end_if_done(self) -> bool:
        """Returns True if an exploration has just ended, whose result is to be weighed at once."""
        if self.current is None or self._num_left > 0:
            return False
        self.current = None
        return True

    def consider(self, other: Score, *, is_new: bool, lost_us: float, once_us: float = 0.0) -> None:
        """Begins an exploration of `other` if enough time was saved. If it never ran and is cheap it begins at once,
        for fewer steps.

        lost_us: time that a step of it loses against the chosen candidate, at equal tokens. once_us: before its first
        step.
        """
        each_us = max(lost_us, LEAST_SHARE * other.step_us)
        cost_us = (EXPLORED_STEPS + COLD_STEPS) * each_us + once_us + OWN_US
        if self._saved_us >= cost_us or (is_new and lost_us < EXPENSIVE * other.step_us and once_us < math.inf):
            self._saved_us = min(max(self._saved_us - cost_us, 0.0), cost_us)
            self.current, self._num_left = other, COLD_STEPS + (1 if is_new else EXPLORED_STEPS)


def some_drafting(sequences: Sequence[RunningSequence], size: int) -> list[int]:
    """Returns the indices of the requests that draft in an exploration among plain rounds. size: of the batch with
    those whose prompts are read. Of a larger batch it is the few whose draft lags least, because all requests could
    cost more than the exploration reveals."""
    able = [index for index, each in enumerate(sequences) if each.request.max_draft_tokens != 0]
    able.sort(key=lambda index: sequences[index].num_tokens - sequences[index].draft_len)
    return able[: max(size // DRAFTING_PART, 1)] if size > SMALL else able
