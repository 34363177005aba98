"""Confidence trimming: a draft token is drafted, and its row verified, only if its expected tokens exceed its time.

Row j emits one token if draft tokens 1..j survive, so its value is the chain's survival a_j, a product of calibrated
chances (TETRIS, DSpark 2607.05147). Survival falls along a chain, so the admitted rows are a prefix. `admit` takes the
best set of rows over the batch; that set depends on later draft tokens, which sample-and-match allows. Rejection
sampling must judge row j by draft tokens 1..j alone (pipeline/acceptance.py): `admit_by_price` compares each row with a
price that was set before drafting.
"""

from __future__ import annotations

import numpy as np

from faser_backend.core.decision import TrimRule
from faser_backend.core.frontier import Frontier
from faser_backend.policy.calibration import sigmoid


def chances(rule: TrimRule, margins: np.ndarray, slots: np.ndarray, sources: np.ndarray | None = None) -> np.ndarray:
    """Returns the chances of acceptance of draft tokens with margins [n] or [n, K], same shape, of requests in
    slots [n]. sources [n] of the chains, None for the engine's drafter."""
    offsets = _offsets(rule, slots)
    scores = np.interp(margins, rule.margin_knots, rule.main_logits)
    if sources is not None and rule.match_logits.ndim == 2:
        for source in np.unique(sources):
            rows = sources == source
            scores[rows] = np.interp(margins[rows], rule.margin_knots, rule.match_logits[source])
    return sigmoid(scores + (offsets if margins.ndim == 1 else offsets[:, None]))


def expected_gain(rule: TrimRule, survival: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Returns the tokens [A] that one more draft token is worth to each chain of survival [A], its row's time
    subtracted.

    The token's own chance is not known yet: averaged over the shares with which margins occurred.
    """
    worth = survival[:, None] * sigmoid(rule.main_logits + _offsets(rule, slots)[:, None]) - rule.row_price
    return np.maximum(worth, 0.0) @ rule.margin_shares


def continues(rule: TrimRule, survival: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Returns bool [A]: which chains of survival [A] to draft a further token for.

    The chains of largest gain, as many as maximise the total gain less the price of the draft call; maybe none.
    """
    gain = expected_gain(rule, survival, slots)
    if gain.size == 1:  # steps of a single request are short: every array operation counts
        return gain > rule.draft_price(1)
    order = np.argsort(-gain, kind="stable")
    net = np.cumsum(gain[order]) - _for_counts(rule.tokens_per_us * rule.draft_us, np.arange(1, gain.size + 1))
    best = int(net.argmax())
    goes_on = np.zeros(gain.size, np.bool_)
    if net[best] > 0.0:
        goes_on[order[: best + 1]] = True
    return goes_on


def admit_by_price(rule: TrimRule, frontier: Frontier, slots: np.ndarray) -> np.ndarray:
    """Returns the rows [B] of each chain to verify, anchor included: those that are worth the price of a row."""
    if frontier.drafted.shape[1] == 0 or frontier.margins is None:
        return frontier.num_rows
    survival = np.cumprod(chances(rule, frontier.margins, slots, frontier.sources), axis=1)  # [B, K]
    return np.minimum(1 + np.count_nonzero(survival >= rule.row_price, axis=1), frontier.num_rows)


def admit(rule: TrimRule, frontier: Frontier, slots: np.ndarray) -> np.ndarray:
    """Returns the rows [B] of each chain to verify, anchor included: the set of most predicted tokens per time.

    For sample-and-match alone: whether row 1 is in the best set may depend on draft token 2.
    For every longest chain allowed, rows are taken in descending survival; the best of all these sets wins.
    """
    size, width = frontier.drafted.shape
    if width == 0 or frontier.margins is None:
        return frontier.num_rows
    if size == 1:
        return _admit_alone(rule, frontier, slots)
    columns = np.arange(width)
    survival = np.cumprod(chances(rule, frontier.margins, slots, frontier.sources), axis=1)
    survival = np.where(columns < frontier.num_drafted[:, None], survival, 0)
    order = np.argsort(-survival, axis=None, kind="stable")  # along a chain survival never rises
    ranked, column = survival.reshape(-1)[order], np.tile(columns, size)[order]
    is_allowed = column <= columns[:, None]  # [K, B K]: rows 1..k + 1 of every chain
    tokens = size + np.cumsum(ranked * is_allowed, axis=1)
    num_extra = np.minimum(np.cumsum(is_allowed, axis=1), rule.verify_us.size - 1)
    num_called = frontier.num_drafted * frontier.is_main  # look-ups make no draft calls
    num_active = np.count_nonzero(columns[:, None] < num_called, axis=1)  # [K] in each draft call
    calls_us = np.where(num_active > 0, _for_counts(rule.draft_us, num_active), 0.0)
    spent_us = rule.draft_round_us * bool(num_called.any()) + float(calls_us.sum())
    round_us = rule.verify_us[num_extra] + spent_us
    best = np.unravel_index(int((tokens / round_us).argmax()), tokens.shape)
    if size / (rule.verify_us[0] + spent_us) >= tokens[best] / round_us[best]:
        return np.ones(size, np.int64)
    admitted = order[: best[1] + 1][is_allowed[best[0], : best[1] + 1]]
    admitted = admitted[survival.reshape(-1)[admitted] > 0]
    return 1 + np.bincount(admitted // width, minlength=size)


def _admit_alone(rule: TrimRule, frontier: Frontier, slots: np.ndarray) -> np.ndarray:
    """Does the same as `admit` for one chain, whose sets of rows are its prefixes."""
    assert frontier.margins is not None
    length = int(frontier.num_drafted[0])
    survival = np.cumprod(chances(rule, frontier.margins[:1, :length], slots, frontier.sources)[0])
    tokens = np.concatenate([[1.0], 1.0 + np.cumsum(survival)])  # [length + 1] of 1, 2, ... rows
    is_called = frontier.is_main[0]
    spent_us = is_called * (rule.draft_round_us + length * float(rule.draft_us[1]))
    verify_us = rule.verify_us[np.minimum(np.arange(length + 1), rule.verify_us.size - 1)]
    return np.array([1 + (tokens / (verify_us + spent_us)).argmax()])


def _offsets(rule: TrimRule, slots: np.ndarray) -> np.ndarray:
    return rule.offsets[slots] if rule.offsets.size > 1 else rule.offsets


def _for_counts(per_count: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns per_count[n] for each of `counts`, or its last entry past the end: when two cohorts form, all sequences
    of a batch draft at once."""
    return per_count[np.minimum(counts, per_count.size - 1)]
