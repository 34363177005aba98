"""Processing of logits, vectorised over rows: penalties, top-k, top-p, min-p, softmax, log-softmax.

Functions documented as "in place" change their first argument. Every row is processed independently of its batch, bit
for bit.
"""

from __future__ import annotations

import numpy as np

_NEG_INF = np.float32(-np.inf)
_LOWEST = np.finfo(np.float32).min
_NUCLEUS_WIDTH = 128


def penalize(logits: np.ndarray, output_counts: np.ndarray, in_prompt: np.ndarray, penalties: np.ndarray) -> None:
    """Applies penalties in place to C-contiguous logits [n, V].

    output_counts [n, V]; in_prompt [n, V] bool; penalties [3, n] float32: repetition, presence, frequency. Repetition
    (Keskar et al. 2019) divides positive and multiplies other logits of every token of prompt or output. Presence is
    then subtracted once, and frequency per occurrence in the output.
    """
    # The arithmetic runs on seen tokens only, which are few.
    seen = np.flatnonzero(in_prompt | (output_counts > 0))
    line = seen // logits.shape[1]
    flat = logits.reshape(-1)
    values, counts, (repetition, presence, frequency) = flat[seen], output_counts.reshape(-1)[seen], penalties[:, line]
    values = np.where(values > 0, values / repetition, values * repetition)
    values -= presence * (counts > 0)
    values -= frequency * counts
    flat[seen] = values


def keep_top(logits: np.ndarray, top_k: np.ndarray, top_p: np.ndarray) -> None:
    """Applies top-k, then top-p, in place to logits [n, V]; top_k [n] in [1, V], top_p [n].

    Logits below a row's threshold become -inf. Top-p keeps the smallest set of largest tokens, of those that top-k
    kept, whose share is at least top_p: a token stays if those strictly before it in descending order hold less. Ties
    with the last one stay; so does the largest. One sort serves both; with AVX-512 it is cheaper than a partition.
    """
    descending = np.sort(logits, axis=1)[:, ::-1]
    thresholds = descending[np.arange(logits.shape[0]), top_k - 1]
    nucleus = np.flatnonzero(top_p < 1.0)
    if nucleus.size:
        limits = thresholds[nucleus]
        thresholds[nucleus] = np.maximum(limits, _nucleus_thresholds(descending[nucleus], limits, top_p[nucleus]))
    np.copyto(logits, _NEG_INF, where=logits < thresholds[:, None])


def _nucleus_thresholds(descending: np.ndarray, limits: np.ndarray, top_p: np.ndarray) -> np.ndarray:
    """Returns [n], the smallest logit of the top-p set of descending [n, V], counting only logits >= limits [n]."""
    weights = np.exp(descending - descending[:, :1])
    weights[descending < limits[:, None]] = 0.0
    targets = top_p * weights.sum(axis=1, dtype=np.float64)
    width = _NUCLEUS_WIDTH
    while True:  # a prefix sum over all of V would cost more than the sort, and top-p sets are small
        cumulative = np.cumsum(weights[:, :width], axis=1, dtype=np.float64)
        if width >= weights.shape[1] or (cumulative[:, -1] >= targets).all():
            break
        width *= 4
    num_before = np.count_nonzero(cumulative < targets[:, None], axis=1)
    return descending[np.arange(limits.size), np.minimum(num_before, weights.shape[1] - 1)]


def keep_min_p(logits: np.ndarray, min_p: np.ndarray) -> None:
    """Keeps, in place in [n, V], tokens with probability >= min_p [n] times the largest one; 0 keeps all."""
    with np.errstate(divide="ignore"):
        margins = np.log(min_p.astype(np.float32))
    np.copyto(logits, _NEG_INF, where=logits < logits.max(axis=1, keepdims=True) + margins[:, None])


def softmax(logits: np.ndarray) -> np.ndarray:
    """Returns the softmax of logits [n, V] float32; each row needs a finite maximum."""
    probs = logits - logits.max(axis=1, keepdims=True)
    np.exp(probs, out=probs)
    probs /= probs.sum(axis=1, keepdims=True)
    return probs


def log_softmax_at(logits: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """Returns log softmax(logits [R, V])[r, token_ids[r]], [R] float32."""
    maxima = logits.max(axis=1, keepdims=True)
    chosen = logits[np.arange(token_ids.shape[0]), token_ids] - maxima[:, 0]
    shifted = logits - maxima
    return chosen - np.log(np.exp(shifted, out=shifted).sum(axis=1))


def second_best(scores: np.ndarray, best_ids: np.ndarray) -> np.ndarray:
    """Returns [n], the largest of scores [n, V] except best_ids [n], or -inf if there is no other.

    It overwrites and restores entries of `scores`, which is cheaper than a copy.
    """
    index = np.arange(best_ids.size)
    best = scores[index, best_ids]
    scores[index, best_ids] = -np.inf
    second = scores.max(axis=1)
    scores[index, best_ids] = best
    return second


def rank(
    scores: np.ndarray, best_ids: np.ndarray, num_ranks: int, *, can_overwrite: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids [n, num_ranks] of the largest scores [n, V], best_ids [n] first, and the second largest score [n].

    num_ranks is in [2, V]. Ties go to the lowest id. -inf counts as the lowest number, so ids are distinct. For a few
    ranks, repeated argmax is ten times faster than numpy's argpartition.
    """
    rest = np.maximum(scores, _LOWEST, out=scores if can_overwrite else None)
    index = np.arange(best_ids.size)
    ids = np.empty((best_ids.size, num_ranks), np.int64)
    ids[:, 0] = best_ids
    rest[index, best_ids] = -np.inf
    ids[:, 1] = rest.argmax(axis=1)
    second = rest[index, ids[:, 1]]
    for column in range(2, num_ranks):
        rest[index, ids[:, column - 1]] = -np.inf
        ids[:, column] = rest.argmax(axis=1)
    return ids, second
