"""Confidence trimming: a row of a drafted chain is run only while it promises more tokens than its time costs.

A row j emits one token if the draft tokens before it all survive, so it is worth its chain's survival a_j, the
product of calibrated chances (TETRIS, DSpark 2607.05147). Rows are admitted over the whole batch in descending
survival as long as predicted tokens per time rise; survival falls along a chain, so what is admitted of a chain
is a prefix, and row j is judged by draft tokens 1..j alone: exactness holds (policy/acceptance.py).
"""

from __future__ import annotations

import numpy as np

from faser_backend.core.decision import TrimRule
from faser_backend.core.frontier import Frontier


def chances(rule: TrimRule, margins: np.ndarray) -> np.ndarray:
    """The calibrated chance of acceptance of draft tokens with these margins, same shape."""
    return np.interp(margins, rule.margin_knots, rule.match_probs)


def expected_gain(rule: TrimRule, survival: np.ndarray) -> np.ndarray:
    """[A] tokens that one more draft token is worth to each chain of survival [A], net of its row's time.

    The token's own chance is not known yet: averaged over the shares with which margins occurred.
    """
    worth = survival[:, None] * rule.match_probs - rule.row_price
    return np.maximum(worth, 0.0) @ rule.margin_shares


def continues(rule: TrimRule, survival: np.ndarray) -> np.ndarray:
    """bool [A]: which of the chains to draft a further token for; all False where a call does not pay."""
    gain = expected_gain(rule, survival)
    goes_on = gain > 0.0
    if gain.sum() <= rule.draft_price:
        goes_on[:] = False
    return goes_on


def admit(rule: TrimRule, frontier: Frontier) -> np.ndarray:
    """[B] rows of each chain to verify, the anchor's included: the set of most predicted tokens per time."""
    size, width = frontier.drafted.shape
    if width == 0 or frontier.margins is None:
        return frontier.num_rows
    is_drafted = np.arange(width) < frontier.num_drafted[:, None]
    survival = np.where(is_drafted, np.cumprod(chances(rule, frontier.margins), axis=1), -1.0)  # [B, K]
    ranked = np.sort(survival[is_drafted])[::-1]
    tokens = size + np.concatenate([[0.0], np.cumsum(ranked)])
    num_extra = np.minimum(np.arange(tokens.size), rule.verify_us.size - 1)
    speed = tokens / (rule.verify_us[num_extra] + width * rule.draft_us)
    num_admitted = int(speed.argmax())
    if num_admitted == 0:
        return np.ones(size, np.int64)
    return 1 + np.count_nonzero(survival >= ranked[num_admitted - 1], axis=1)
