"""Which nodes a tree of draft tokens is made of: the likeliest ones, as the draft sees it with the noise of the draws.

The target's draw is the best of its own scores, which carry the same noise as the draft's. By how much the two models
differ decides how far down the draft's order it lies: a token's chance is a softmax of the draft's scores, noise
included, at a temperature that stands for that difference. A node's chance is the product along its path.
"""

from __future__ import annotations

import numpy as np

DIFFERENCE = 0.7  # of the models' logits; greatest likelihood of the demo target's draws at temperature 0.8
MOST_CHILDREN = 8  # of a node; the demo target draws one of so many 95 times in 100
BEST_CHILD = 0.8  # chance of the best child of a node that is worth the draft's row


def child_log_chances(scores: np.ndarray) -> np.ndarray:
    """[n, C] of the C best tokens, of scores [n, C] in logits; -inf: forbidden. At least one of a row is not."""
    scores = scores / DIFFERENCE
    scores = scores - scores.max(axis=1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


def worth_running(log_chances: np.ndarray, is_run: np.ndarray, num_wanted: np.ndarray) -> np.ndarray:
    """Whether a child of a node could be among the best num_wanted [A] nodes. log_chances [A, M] fall, -inf where there
    is no node; is_run [A, M]: the draft has run it. A tree of n nodes has few of a chance below 1/2n: where few nodes
    are known yet, that is the bar."""
    last = np.minimum(num_wanted, log_chances.shape[1]) - 1
    is_full = num_wanted <= log_chances.shape[1]
    bar = np.where(is_full, log_chances[np.arange(last.size), last], -np.inf)
    bar = np.maximum(bar, -np.log(2.0 * num_wanted))
    is_wanted = np.arange(log_chances.shape[1]) < num_wanted[:, None]
    return is_wanted & ~is_run & (log_chances + np.log(BEST_CHILD) >= bar[:, None])
