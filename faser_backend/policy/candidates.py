"""The candidates for the next steps, with predicted tokens and time of each; the early exit that pays most; and the
exploration of candidates that were not chosen.

A chain is extended, and its rows are verified, while its survival stays above a floor. The tokens of such chains follow
from the distribution of margins and the chance at each margin: the logarithm of survival is a sum, so its distribution
after each draft token is a convolution. docs/policies.md derives the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from faser_backend.core.decision import WHOLE, PipelineMode, Score
from faser_backend.core.record import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.calibration import Chances, MarginCurve, sigmoid
from faser_backend.policy.cost_model import TARGET, BatchTimes, CostModel
from faser_backend.policy.early_exit import ExitCalibration

# [F] of survival: below the first a chain is not drafted on, below the second a drafted token's row is not verified.
# Where a row costs as much as a draft call the two are alike, where it costs next to nothing every row is verified.
_USED = (0.1, 0.2, 0.3, 0.45, 0.6, 0.75)
FLOORS = np.array([0.0, *_USED, *_USED])  # 0: all chains are alike, nothing is trimmed
_ROW_FLOORS = np.array([0.0, *_USED, *(0.15 * floor for floor in _USED)])
_OFFSETS = np.linspace(-1.6, 1.6, 5)  # [G] of requests, between which the yield of chains is interpolated
_LOG_STEP, _NUM_STATES = 0.15, 28  # of -log survival: down to 0.015
_GOES_ON, _HAS_ROW = (
    np.arange(_NUM_STATES) * _LOG_STEP <= -np.log(np.maximum(floors, 1e-9))[:, None] for floors in (FLOORS, _ROW_FLOORS)
)  # bool [F, S]
MOST_TABLES = 8  # that are kept
_SURVIVAL = np.exp(-_LOG_STEP * np.arange(_NUM_STATES))  # [S]
_SHIFTS = np.subtract.outer(np.arange(_NUM_STATES), np.arange(_NUM_STATES)).T  # [S, S] states from one to another

EXPLORED_SHARE = 0.005  # of the time
EXPLORED_STEPS, COLD_STEPS = 6, 2  # steps of an exploration that count, after steps that find the caches cold
OWN_US, LEAST_SHARE = 1500.0, 0.1  # what weighing and learning cost an exploration; a step loses this share at least
EXPENSIVE = 0.5  # share of a step's time; an exploration that loses more has to be saved for
DRAFTING_PART = 8  # one request in so many drafts in an exploration among plain rounds


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


class ChainTable:
    """Means of chains under one curve, for requests of different offsets."""

    def __init__(self, curve: MarginCurve, max_draft_tokens: int) -> None:
        chances = sigmoid(curve.match_logits + _OFFSETS[:, None])  # [G, M]
        shifts = -np.log(chances) / _LOG_STEP
        lower = shifts.astype(np.int64)
        step = np.zeros((_OFFSETS.size, _NUM_STATES + 1))  # [G, S] how far one draft token moves -log survival
        for bins, share in ((lower, 1.0 - (shifts - lower)), (lower + 1, shifts - lower)):
            rows = np.broadcast_to(np.arange(_OFFSETS.size)[:, None], bins.shape)
            np.add.at(step, (rows, np.minimum(bins, _NUM_STATES)), share * curve.margin_shares)
        moves = np.where(_SHIFTS >= 0, step[:, np.maximum(_SHIFTS, 0)], 0.0)  # [G, S, S]
        state = np.zeros((_OFFSETS.size, FLOORS.size, _NUM_STATES))
        state[:, :, 0] = 1.0
        drafting, verified, kept = [], [], []
        for _ in range(max_draft_tokens):
            drafting.append(state.sum(axis=2))
            state = state @ moves
            shown = np.where(_HAS_ROW, state, 0.0)
            verified.append(shown.sum(axis=2))
            kept.append(shown @ _SURVIVAL)
            state = np.where(_GOES_ON, state, 0.0)
        self._shares = np.stack([np.stack(each, axis=2) for each in (drafting, verified, kept)])  # [3, G, F, K]
        mean = (chances @ curve.margin_shares)[:, None] ** np.arange(1, max_draft_tokens + 1)  # [G, K]
        self._shares[:2, :, 0] = 1.0  # without a floor nothing falls off the grid
        self._shares[2, :, 0] = mean

    def of(self, offsets: np.ndarray) -> ChainMeans:
        """Returns the means over requests of these offsets [B]."""
        place = np.clip((offsets - _OFFSETS[0]) / (_OFFSETS[1] - _OFFSETS[0]), 0.0, _OFFSETS.size - 1.001)
        lower = place.astype(np.int64)
        weights = np.bincount(lower, 1.0 - (place - lower), _OFFSETS.size)
        weights += np.bincount(lower + 1, place - lower, _OFFSETS.size)
        return ChainMeans(*np.tensordot(self._shares, weights / offsets.size, (1, 0)))


class ChainTables:
    """The tables of the latest curves."""

    def __init__(self, max_draft_tokens: int) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._tables: dict[tuple[int, int], ChainTable] = {}  # by source and version

    def means(self, chances: Chances) -> ChainMeans:
        """Returns the means of a batch's chains, of all sources."""
        parts = []
        for source, share in enumerate(chances.shares):
            if share:
                key = source, chances.versions[source]
                if key not in self._tables:
                    if len(self._tables) > MOST_TABLES:
                        self._tables.clear()
                    self._tables[key] = ChainTable(chances.curves[source], self._max_draft_tokens)
                parts.append((share, self._tables[key].of(chances.offsets)))
        return parts[0][1] if len(parts) == 1 else mixed(parts)


def mixed(parts: list[tuple[float, ChainMeans]]) -> ChainMeans:
    """Returns the means of a mix of chains, (share, chains) each, the engine's drafter's first: it alone takes draft
    calls."""
    drafting = parts[0][0] * parts[0][1].drafting
    verified, kept = (sum(share * chains[column] for share, chains in parts) for column in (1, 2))
    return ChainMeans(drafting, np.asarray(verified), np.asarray(kept))


def scores_of(
    times: dict[tuple[int, str], BatchTimes], size: int, chains: ChainMeans, chain_yield: ChainYield
) -> tuple[Score, ...]:
    """Returns the score of every candidate: plain and serial, then the overlapped ones of each split in `times`.

    times: by size and partition; of a split for the batch and, if it can be halved, for half of it.
    """
    whole, ratios = times[size, WHOLE], chain_yield.ratios
    scores = [plain_score(whole), round_score(PipelineMode.SERIAL, whole, chains, ratios)]
    for (num_sequences, partition), split in times.items():
        if partition != WHOLE:
            is_cohort = num_sequences < size
            scores.append(
                round_score(PipelineMode.PING_PONG, split, chains, ratios)
                if is_cohort
                else run_ahead_score(split, chains, ratios)
            )
    return tuple(scores)


def plain_score(times: BatchTimes) -> Score:
    """Returns the score of plain decoding: one token of every sequence per step."""
    return Score(None, times.partition, 0, 0.0, 0.0, 0.0, times.size, float(times.verify_us[0]))


def round_score(mode: PipelineMode, times: BatchTimes, chains: ChainMeans, ratios: tuple[float, float]) -> Score:
    """Returns the best round over floors and longest chains. Serial rounds draft, then verify; in ping-pong two
    cohorts of `times.size` alternate: one drafts while the other is verified, and nothing is discarded.

    ratios: see ChainYield.
    """
    size = times.size
    is_any = 1.0 - (1.0 - chains.drafting) ** size  # [F, K], as all that follows: that a draft call is made at all
    num_active = np.maximum(size * chains.drafting / np.maximum(is_any, 1e-9), 1.0)
    counts = np.arange(size + 1)
    call_us = np.interp(num_active, counts, times.draft_us)
    call_us[1:] += np.interp(num_active[1:], counts, times.trim_us)
    draft_us = times.draft_round_us + (is_any * call_us).cumsum(axis=1)
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


class VerifyBatch(NamedTuple):
    """The expected verification of a step, before exits."""

    num_sequences: int
    num_rows: int  # that enter it, anchors included
    context_tokens: int  # the longest
    num_accepted: float  # draft tokens that would be accepted, over the batch
    tokens_per_us: float  # the price: converts lost tokens to time
    is_trimmed: bool = False  # confidence trimming has already taken the least likely rows
    partition: str = WHOLE


def expected_batch(score: Score, size: int, context: int, price: float) -> VerifyBatch:
    """Returns the verification that a candidate predicts for `size` sequences."""
    num_rows, num_accepted = size + round(score.num_rows), max(score.num_tokens - size, 0.0)
    is_trimmed = score.floor > 0.0
    return VerifyBatch(size, num_rows, context, num_accepted, price, is_trimmed=is_trimmed, partition=score.partition)


def predicted_saving_us(costs: CostModel, calibration: ExitCalibration, batch: VerifyBatch) -> float:
    """Returns the microseconds that this exit saves a verification on average; negative if it costs time.

    The sum: deeper segments, sampling and acceptance of the pruned rows; less the time that the lost tokens are worth;
    less the exit's own scoring. The longest chain is assumed to stay.
    """
    num_draft_rows = batch.num_rows - batch.num_sequences
    if num_draft_rows <= 0:
        return 0.0
    share, retention = calibration.trimmed_pruned_share, calibration.trimmed_retention
    if not batch.is_trimmed:
        share, retention = calibration.pruned_share(num_draft_rows / batch.num_sequences), calibration.retention
    num_pruned = share * num_draft_rows
    before, after = costs.call_us(
        TARGET,
        batch.partition,
        np.array([batch.num_rows, batch.num_rows - num_pruned]),
        batch.num_sequences,
        batch.context_tokens,
        max_rows=math.ceil(batch.num_rows / batch.num_sequences),
        first_segment=calibration.segment + 1,
    )
    saved_us = float(before - after) + num_pruned * costs.overhead.step_row_us
    lost_us = (1.0 - retention) * batch.num_accepted / batch.tokens_per_us
    return saved_us - lost_us - float(costs.overhead.exit(batch.num_rows))


def best_exit(costs: CostModel, exits: tuple[ExitCalibration, ...], batch: VerifyBatch) -> ExitCalibration | None:
    """Returns the exit that saves most in such verifications; None if no exit pays."""
    savings = [predicted_saving_us(costs, calibration, batch) for calibration in exits]
    best = max(range(len(exits)), key=savings.__getitem__, default=None)
    return None if best is None or savings[best] <= 0.0 else exits[best]


# -- explorations ---------------------------------------------------------------------------------------------


class Exploration(NamedTuple):
    """Some steps of a candidate that was not chosen, so that the predictions about it stay true: while decoding plainly
    some requests draft, while speculating none does."""

    other: Score
    is_new: bool  # never run: explored at once, for fewer steps, if it is cheap
    extra_us: float  # time that a step of it loses against the chosen candidate, at equal tokens
    once_us: float = 0.0  # time before the first of its steps

    @property
    def cost_us(self) -> float:
        lost_us = max(self.extra_us, LEAST_SHARE * self.other.step_us)
        return (EXPLORED_STEPS + COLD_STEPS) * lost_us + self.once_us + OWN_US

    @property
    def is_free(self) -> bool:
        return self.is_new and self.extra_us < EXPENSIVE * self.other.step_us and self.once_us < float("inf")


class Explorer:
    """Saves time for explorations. At most one runs at a time."""

    def __init__(self) -> None:
        self.current: Score | None = None
        self._num_left = 0  # steps
        self._saved_us = 0.0

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

    def end_if_chosen(self, chosen: Score) -> None:
        """Ends an exploration whose mode has just been chosen."""
        if self.current is not None and (chosen.mode, chosen.partition) == (self.current.mode, self.current.partition):
            self.current = None

    def consider(self, exploration: Exploration) -> None:
        """Begins it if enough was saved, or at once if it is free."""
        if self._saved_us >= exploration.cost_us or exploration.is_free:
            self._saved_us = min(max(self._saved_us - exploration.cost_us, 0.0), exploration.cost_us)
            self.current = exploration.other
            self._num_left = COLD_STEPS + (1 if exploration.is_new else EXPLORED_STEPS)


def extra_us(times: BatchTimes, length: int, num_drafting: int) -> float:
    """Returns the time that chains of one length add to a plain step."""
    num_rows = min(length * num_drafting, times.verify_us.size - 1)
    draft_us = length * times.draft_us[num_drafting] + times.draft_round_us
    return float(times.verify_us[num_rows] - times.verify_us[0] + draft_us)


def some_drafting(sequences: Sequence[RunningSequence]) -> list[int]:
    """Returns the indices of the requests that draft in an exploration among plain rounds: the few whose draft lags
    least, because all requests could cost more than the exploration reveals."""
    able = [index for index, each in enumerate(sequences) if each.request.max_draft_tokens != 0]
    able.sort(key=lambda index: sequences[index].num_tokens - sequences[index].draft_len)
    return able[: max(len(sequences) // DRAFTING_PART, 1)]
