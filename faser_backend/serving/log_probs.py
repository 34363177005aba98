"""Log-probabilities of the best tokens of a row of logits. Knows nothing of texts."""

from __future__ import annotations

import numpy as np


def best_log_probs(logits: np.ndarray, count: int) -> list[tuple[int, float]]:
    """(token id, log-probability) of the `count` best of logits [vocab_size], best first; of equals the lowest id."""
    count = min(count, logits.size)
    if count < 1:
        return []
    best = np.argpartition(-logits, count - 1)[:count]
    shifted = logits.astype(np.float64) - logits.max()
    norm = np.log(np.exp(shifted).sum())
    return [(int(one), float(shifted[one] - norm)) for one in best[np.lexsort((best, -logits[best]))]]
