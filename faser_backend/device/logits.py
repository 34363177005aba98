"""Processing of logits, vectorised over rows: penalties, top-k, top-p, min-p, softmax, log-softmax.

Pure functions of arrays. Those that say "in place" change their first argument. Every row is processed
independently of its batch, bit for bit. Knows nothing of requests or slots.
"""

from __future__ import annotations

import numpy as np

_NEG_INF = np.float32(-np.inf)


def penalize(
    logits: np.ndarray,
    *,
    output_counts: np.ndarray,
    in_prompt: np.ndarray,
    repetition: np.ndarray,
    presence: np.ndarray,
    frequency: np.ndarray,
) -> None:
    """Penalties in place on logits [n, V]; output_counts [n, V], in_prompt [n, V] bool, the rest [n, 1] float32.

    Repetition (Keskar et al. 2019) divides positive and multiplies other logits of every token of prompt
    or output; presence and frequency are then subtracted once and per occurrence in the output.
    """
    in_output = output_counts > 0
    repeated = np.where(logits > 0, logits / repetition, logits * repetition)
    np.copyto(logits, repeated, where=in_output | in_prompt)
    logits -= presence * in_output
    logits -= frequency * output_counts


def keep_top_k(logits: np.ndarray, top_k: np.ndarray) -> None:
    """In place on [n, V]: -inf below the k-th largest logit of its row; top_k [n] int64 >= 1. Ties with it stay."""
    vocab_size = logits.shape[1]
    top_k = np.minimum(top_k, vocab_size)
    # One partition serves all rows: the largest k sorts a tail that holds every smaller k's threshold.
    widest = int(top_k.max())
    tail = np.partition(logits, vocab_size - widest, axis=1)[:, vocab_size - widest :]
    tail.sort(axis=1)
    thresholds = np.take_along_axis(tail, (widest - top_k)[:, None], 1)
    np.copyto(logits, _NEG_INF, where=logits < thresholds)


def keep_top_p(logits: np.ndarray, top_p: np.ndarray) -> None:
    """In place on [n, V]: keeps the smallest set of largest logits with probability >= top_p [n].

    A token stays if the tokens strictly before it in descending order sum to less than top_p; ties with
    the last one stay. The largest logit always stays.
    """
    descending = -np.sort(-logits, axis=1)
    weights = np.exp(descending - descending[:, :1]).astype(np.float64)
    cumulative = np.cumsum(weights, axis=1)
    num_kept = 1 + np.count_nonzero(cumulative[:, :-1] < top_p[:, None] * cumulative[:, -1:], axis=1)
    thresholds = np.take_along_axis(descending, num_kept[:, None] - 1, 1)
    np.copyto(logits, _NEG_INF, where=logits < thresholds)


def keep_min_p(logits: np.ndarray, min_p: np.ndarray) -> None:
    """In place on [n, V]: keeps tokens with probability >= min_p [n] times the largest one; 0 keeps all."""
    with np.errstate(divide="ignore"):
        margins = np.log(min_p.astype(np.float32))
    np.copyto(logits, _NEG_INF, where=logits < logits.max(axis=1, keepdims=True) + margins[:, None])


def softmax(logits: np.ndarray) -> np.ndarray:
    """[n, V] float32 -> [n, V] float32; each row needs a finite maximum."""
    probs = logits - logits.max(axis=1, keepdims=True)
    np.exp(probs, out=probs)
    probs /= probs.sum(axis=1, keepdims=True)
    return probs


def log_softmax_at(logits: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """log softmax(logits [R, V])[r, token_ids[r]] -> [R] float32, without the other entries."""
    maxima = logits.max(axis=1, keepdims=True)
    chosen = logits[np.arange(token_ids.shape[0]), token_ids] - maxima[:, 0]
    shifted = logits - maxima
    return chosen - np.log(np.exp(shifted, out=shifted).sum(axis=1))
