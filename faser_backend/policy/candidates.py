"""The ways to run the next steps, and what each is predicted to come to: tokens, time, tokens per time.

A chain is drafted on, and its rows are verified, while its survival stays above a floor. What chains of that kind come
to is worked out from how often margins occur and what chances they mean: the logarithm of survival is a sum, so its
distribution after each draft token is a convolution. docs/policies.md derives the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from faser_backend.core.decision import PipelineMode, Score
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.batch_times import BatchTimes
from faser_backend.policy.calibration import MarginCurve, sigmoid

# [F] of survival: below the first a chain is not drafted on, below the second a drafted token's row is not verified.
# Where a row costs as much as a draft call the two are alike, where it costs next to nothing every row is verified.
_USED = (0.1, 0.2, 0.3, 0.45, 0.6, 0.75)
FLOORS = np.array([0.0, *_USED, *_USED])  # 0: all chains are alike, nothing is trimmed
_ROW_FLOORS = np.array([0.0, *_USED, *(0.15 * floor for floor in _USED)])
_OFFSETS = np.linspace(-1.6, 1.6, 5)  # [G] of requests, between which what chains come to is interpolated
_LOG_STEP, _NUM_STATES = 0.15, 28  # of -log survival: down to 0.015
_GOES_ON, _HAS_ROW = (
    np.arange(_NUM_STATES) * _LOG_STEP <= -np.log(np.maximum(floors, 1e-9))[:, None] for floors in (FLOORS, _ROW_FLOORS)
)  # bool [F, S]
_SURVIVAL = np.exp(-_LOG_STEP * np.arange(_NUM_STATES))  # [S]
_SHIFTS = np.subtract.outer(np.arange(_NUM_STATES), np.arange(_NUM_STATES)).T  # [S, S] states from one to another
_LOOK_PART = 8  # one request in so many drafts in a look among plain rounds


class Chains(NamedTuple):
    """Means over a batch's chains, [F, K] by floor and draft token j = 1..K."""

    drafting: np.ndarray  # share of the chains that draft token j
    verified: np.ndarray  # share whose row j is verified
    kept: np.ndarray  # chance that tokens 1..j are accepted and row j is there, so that it emits a token


def mixed(parts: list[tuple[float, Chains]]) -> Chains:
    """Returns what a mix of chains comes to, (share, chains) each, the engine's drafter's first: it alone takes draft
    calls."""
    drafting = parts[0][0] * parts[0][1].drafting
    verified, kept = (sum(share * chains[column] for share, chains in parts) for column in (1, 2))
    return Chains(drafting, np.asarray(verified), np.asarray(kept))


class Yield(Protocol):
    """What chains came to over what was predicted of them."""

    @property
    def tokens(self) -> float:
        """Kept ones."""
        ...

    @property
    def rows(self) -> float:
        """Verified ones, anchors aside."""
        ...


class ChainTable:
    """What chains come to under one curve, for requests of different offsets."""

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

    def of(self, offsets: np.ndarray) -> Chains:
        """Returns the means over requests of these offsets [B]."""
        place = np.clip((offsets - _OFFSETS[0]) / (_OFFSETS[1] - _OFFSETS[0]), 0.0, _OFFSETS.size - 1.001)
        lower = place.astype(np.int64)
        weights = np.bincount(lower, 1.0 - (place - lower), _OFFSETS.size)
        weights += np.bincount(lower + 1, place - lower, _OFFSETS.size)
        return Chains(*np.tensordot(self._shares, weights / offsets.size, (1, 0)))


def plain_score(times: BatchTimes) -> Score:
    """Plain decoding: a token of every sequence per step."""
    return Score(None, times.partition, 0, 0.0, 0.0, 0.0, times.size, float(times.verify_us[0]))


def serial_score(times: BatchTimes, chains: Chains, ratios: Yield) -> Score:
    """The best rounds in which all draft first and are verified then."""
    rounds = _rounds(times, chains, ratios)
    step_us = rounds.verify_us + rounds.draft_us
    return _best(PipelineMode.SERIAL, times, ratios.tokens * rounds.num_accepted, rounds, step_us)


def ping_pong_score(times: BatchTimes, chains: Chains, ratios: Yield) -> Score:
    """Two cohorts of `times.size` take turns: one drafts while the other is verified, and nothing is discarded."""
    rounds = _rounds(times, chains, ratios)
    step_us = np.maximum(rounds.verify_us, rounds.draft_us) + times.lanes_us
    return _best(PipelineMode.PING_PONG, times, ratios.tokens * rounds.num_accepted, rounds, step_us)


def run_ahead_score(times: BatchTimes, chains: Chains, ratios: Yield) -> Score:
    """Frontiers of one length, drafted while the ones before them are verified.

    With w the chance that a whole frontier is accepted, a verification yields its accepted tokens and, unless all
    were, the recovered one; then the chain ahead is discarded and one step goes by in which the sequence only
    drafts. Alone, that step costs the drafting; in a batch the others are verified meanwhile. A frontier has no
    bonus row, so it has a row less than a serial round of its length.
    """
    size, kept = times.size, np.minimum(chains.kept[0] * ratios.tokens, 1.0)
    lengths = np.arange(1, kept.size + 1)
    share = 1.0 / (2.0 - kept) if size > 1 else np.ones_like(kept)  # of the sequences, verified in a step
    num_extra = ((lengths - 1) * size * share).astype(np.int64)
    draft_us = times.draft_round_us + lengths * times.draft_us[size]
    step_us = np.maximum(times.verify_us[num_extra] + (lengths - 1) * times.column_us, draft_us) + times.lanes_us
    if size == 1:
        step_us = step_us + (1.0 - kept) * draft_us
    tokens = size * share * (kept.cumsum() + (1.0 - kept))
    best = int((tokens / step_us).argmax())
    accepted = size * float(share[best] * kept[: best + 1].sum())
    return Score(
        PipelineMode.RUN_AHEAD,
        times.partition,
        best + 1,
        0.0,
        float(num_extra[best]),
        accepted,
        float(tokens[best]),
        float(step_us[best]),
    )


class _Rounds(NamedTuple):
    """Rounds of at most 1..K draft tokens, [F, K]."""

    verify_us: np.ndarray
    draft_us: np.ndarray
    num_rows: np.ndarray  # beside the anchors
    num_accepted: np.ndarray


def _rounds(times: BatchTimes, chains: Chains, ratios: Yield) -> _Rounds:
    size = times.size
    is_any = 1.0 - (1.0 - chains.drafting) ** size  # that a draft call is made at all
    num_active = np.maximum(size * chains.drafting / np.maximum(is_any, 1e-9), 1.0)
    counts = np.arange(size + 1)
    call_us = np.interp(num_active, counts, times.draft_us)
    call_us[1:] += np.interp(num_active[1:], counts, times.trim_us)
    draft_us = times.draft_round_us + (is_any * call_us).cumsum(axis=1)
    num_rows = size * chains.verified.cumsum(axis=1)
    verify_us = np.interp(num_rows * ratios.rows, np.arange(times.verify_us.size), times.verify_us)
    if times.column_us:
        verify_us = verify_us + times.column_us * (1.0 - (1.0 - chains.verified) ** size).cumsum(axis=1)
    return _Rounds(verify_us, draft_us, num_rows, size * chains.kept.cumsum(axis=1))


def _best(
    mode: PipelineMode, times: BatchTimes, num_accepted: np.ndarray, rounds: _Rounds, step_us: np.ndarray
) -> Score:
    """Returns the floor and the longest chain of most tokens per time; arrays are [F, K]."""
    tokens = times.size + num_accepted
    where = np.unravel_index(int((tokens / step_us).argmax()), tokens.shape)
    return Score(
        mode,
        times.partition,
        num_draft_tokens=int(where[1]) + 1,
        floor=float(FLOORS[where[0]]),
        num_rows=float(rounds.num_rows[where]),
        num_accepted=float(rounds.num_accepted[where]),
        num_tokens=float(tokens[where]),
        step_us=float(step_us[where]),
    )


def longer(score: Score, times: BatchTimes, most: int) -> tuple[Score, float]:
    """Returns the same with whole chains of twice the length, up to `most`, and the microseconds of a step."""
    length = min(2 * score.num_draft_tokens, most)
    lengths = np.full(times.size, length)
    us = times.step_us(int(lengths.sum()), length) + times.chains_us(lengths, is_trimmed=False)
    return score._replace(num_draft_tokens=length, floor=0.0), us


def look_lengths(sequences: Sequence[RunningSequence], num_draft_tokens: int) -> list[int]:
    """Returns the draft tokens [B] of a look among plain rounds: a few requests draft, those whose draft has the least
    to catch up with, for a look at all of them could cost more than it tells."""
    able = [index for index, each in enumerate(sequences) if each.request.max_draft_tokens != 0]
    able.sort(key=lambda index: sequences[index].num_tokens - sequences[index].draft_len)
    lengths = [0] * len(sequences)
    for index in able[: max(len(sequences) // _LOOK_PART, 1)]:
        lengths[index] = num_draft_tokens
    return lengths
