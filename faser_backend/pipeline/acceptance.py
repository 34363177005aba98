"""Acceptance: which drafted tokens survive the target's verification, and which token follows them.

Two rules: sample-and-match (a drafted token survives iff the target draws the same token), and rejection
sampling (Leviathan et al. 2211.17192, Chen et al. 2302.01318). Both follow "prune rows, never tests": row j
processes drafted token x_j and yields the distribution of position j + 1, so when rows N and later were pruned,
x_1..x_N are still tested, and where all of these survive they are emitted without a bonus token.
Pure and vectorised over ragged batches; randomness is an argument.
"""

from __future__ import annotations

import numpy as np

from faser_backend.core.frontier import Acceptance, Frontier
from faser_backend.core.ports import NO_TOKEN, DraftTokens

# What each draw of rejection sampling is for: its uniforms are keyed by (seed, position, purpose, round), never by
# position alone, since a rejected position is drawn again in the next round.
PURPOSE_DRAFT, PURPOSE_ACCEPT, PURPOSE_RECOVER = 1, 2, 3


def accept_matches(frontier: Frontier, sampled: np.ndarray, cu_rows: np.ndarray) -> Acceptance:
    """Sample-and-match. sampled [R] are the target's draws; row j of sequence b is cu_rows[b] + j.

    cu_rows [B + 1] of the rows that went through the whole target, 1 to num_drafted + 1 of each sequence. The emitted
    tokens are the target's own draws, so they do not depend on what was drafted or pruned.
    """
    num_columns, num_kept = frontier.drafted.shape[1], cu_rows[1:] - cu_rows[:-1]
    if not num_columns:  # plain decoding
        return Acceptance(sampled[:, None], np.zeros_like(num_kept), num_kept)
    tokens = sampled[_padded_rows(cu_rows, num_kept, num_columns + 1)]  # [B, K + 1]
    num_tested = np.minimum(frontier.num_drafted, num_kept)
    num_accepted = _leading(tokens[:, :-1] == frontier.drafted, num_tested)
    num_emitted = np.minimum(num_accepted + 1, num_kept)
    return Acceptance(tokens, num_accepted, num_emitted)


def accept_by_rejection(
    frontier: Frontier,
    target_probs: np.ndarray,
    cu_rows: np.ndarray,
    accept_uniforms: np.ndarray,
    sample_uniforms: np.ndarray,
) -> Acceptance:
    """Rejection sampling. target_probs [R, V] and frontier.draft_probs [B, K', V] are processed probabilities.

    Drafted token j + 1 was drawn from draft_probs[b, j] with randomness of its own; one of a client or of n-grams was
    not drawn, and its distribution puts everything on it. It is tested by row j: accepted iff
    accept_uniforms[row] * q < p. The token after the accepted ones is drawn with sample_uniforms[row] from the residual
    max(p - q, 0), or from p as the bonus. Both uniforms are [R] in (0, 1). cu_rows as in accept_matches.
    """
    num_sequences, num_columns = frontier.drafted.shape
    draft_probs = frontier.draft_probs
    assert draft_probs is not None, "rejection sampling needs the draft's probabilities"
    num_kept = cu_rows[1:] - cu_rows[:-1]
    rows = _padded_rows(cu_rows, num_kept, num_columns + 1)
    p = target_probs[rows[:, :-1], frontier.drafted]  # [B, K]
    q = _drafted_probs(frontier, draft_probs)
    num_tested = np.minimum(frontier.num_drafted, num_kept)
    num_accepted = _leading(accept_uniforms[rows[:, :-1]] * q < p, num_tested)
    num_emitted = np.minimum(num_accepted + 1, num_kept)

    tokens = np.concatenate([frontier.drafted, np.zeros((num_sequences, 1), np.int64)], axis=1)
    drawing = np.flatnonzero(num_emitted > num_accepted)  # rejected, or all accepted and nothing pruned
    column = num_accepted[drawing]
    last_rows = rows[drawing, column]
    weights = target_probs[last_rows].astype(np.float64)
    rejected = np.flatnonzero(column < num_tested[drawing])
    weights[rejected] = _residual(
        weights[rejected], _drawn_from(frontier, draft_probs, drawing[rejected], column[rejected])
    )
    tokens[drawing, column] = np.where(weights.any(axis=1), draw(weights, sample_uniforms[last_rows]), NO_TOKEN)
    return Acceptance(tokens, num_accepted, num_emitted)


def draw(weights: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Draws ids [n] int64 from weights [n, V] >= 0, not all 0: the inverse distribution at uniforms [n] in (0, 1)."""
    cumulative = np.cumsum(weights, axis=1, dtype=np.float64)
    totals = cumulative[:, -1]
    # Strictly below the total, or rounding could run past the last token of positive weight.
    targets = np.minimum(uniforms * totals, np.nextafter(totals, 0.0))
    return np.count_nonzero(cumulative <= targets[:, None], axis=1)


def rank_drawn(probs: np.ndarray, tokens: np.ndarray, num_candidates: int) -> DraftTokens:
    """Ranks tokens [n] that were drawn from probs [n, V], with their confidence: the lead in log probability over the
    best other token (negative where that one was likelier), and the best candidates after the drawn one."""
    rows = np.arange(tokens.size)
    others = probs.copy()
    others[rows, tokens] = 0.0
    tiny = np.finfo(np.float32).tiny
    margins = np.log(np.maximum(probs[rows, tokens], tiny)) - np.log(np.maximum(others.max(axis=1), tiny))
    candidates = None
    if num_candidates:
        best = np.argpartition(-others, num_candidates - 1, axis=1)[:, : num_candidates - 1]
        candidates = np.concatenate([tokens[:, None], best], axis=1)
    return DraftTokens(tokens, margins.astype(np.float32), candidates)


def _drafted_probs(frontier: Frontier, draft_probs: np.ndarray) -> np.ndarray:
    """Returns the probability [B, K] of each draft token under its own distribution; 1 where it was not drawn."""
    width = draft_probs.shape[1]
    q = draft_probs[np.arange(len(draft_probs))[:, None], np.arange(width), frontier.drafted[:, :width]]
    padded = np.ones(frontier.drafted.shape, np.float32)
    padded[frontier.is_main, :width] = q[frontier.is_main]
    return padded


def _drawn_from(frontier: Frontier, draft_probs: np.ndarray, sequences: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Returns the distributions [n, V] of the draft tokens at (sequences [n], columns [n])."""
    distributions = np.zeros((sequences.size, draft_probs.shape[2]), np.float32)
    is_drawn = frontier.is_main[sequences]
    given, drawn = np.flatnonzero(~is_drawn), np.flatnonzero(is_drawn)
    distributions[given, frontier.drafted[sequences[given], columns[given]]] = 1.0
    distributions[drawn] = draft_probs[sequences[drawn], columns[drawn]]
    return distributions


def _residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Returns max(p - q, 0) [n, V], unnormalised; p itself if p = q up to rounding."""
    residual = np.maximum(p - q, 0.0)
    is_empty = ~residual.any(axis=1)
    residual[is_empty] = p[is_empty]
    return residual


def _padded_rows(cu_rows: np.ndarray, num_kept: np.ndarray, width: int) -> np.ndarray:
    """Returns the row [B, width] of each (sequence, j); past the kept rows it repeats the last one."""
    return cu_rows[:-1, None] + np.minimum(np.arange(width), num_kept[:, None] - 1)


def _leading(passes: np.ndarray, num_tested: np.ndarray) -> np.ndarray:
    """Returns [B]: the length of the leading run of True in passes [B, K], at most num_tested [B]."""
    is_leading = passes & (np.arange(passes.shape[1]) < num_tested[:, None])
    return np.logical_and.accumulate(is_leading, axis=1).sum(axis=1)
