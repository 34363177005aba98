"""Which nodes a tree of draft tokens is made of: the likeliest ones, as the draft sees it with the noise of the draws.

The target's draw is the best of its own scores, which carry the same noise as the draft's. By how much the two models
differ decides how far down the draft's order it lies: a token's chance is a softmax of the draft's scores, noise
included, at a temperature that stands for that difference. A node's chance is the product along its path.
"""

from __future__ import annotations

import math

import numpy as np

from faser_backend.core.decision import TreeRule

# Of the models' logits: greatest likelihood of the demo target's draws at temperature 0.8; and a head's.
DIFFERENCE, HEAD_DIFFERENCE = 0.7, 1.5
MOST_CHILDREN = 8  # of a node; the demo target draws one of so many 95 times in 100
BEST_CHILD = 0.8  # chance of the best child of a node that is worth the draft's row
UNPRICED = TreeRule(0.0, 0.5)  # of trees of one size, of which nobody knows what calls and rows take


def child_log_chances(scores: np.ndarray, difference: float) -> np.ndarray:
    """[n, C] of the C best tokens, of scores [n, C] in logits; -inf: forbidden. At least one of a row is not."""
    scores = scores / difference
    scores = scores - scores.max(axis=1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


def next_level(log_chances: list[float], is_run: list[bool], num_wanted: int, rule: TreeRule) -> list[int]:
    """The nodes that make the next level: whose children could be among the best num_wanted nodes of the tree.

    log_chances of the known nodes, falling; is_run: the draft has run it. A tree of n nodes has few of a chance below
    1/2n: where few nodes are known yet, that is the bar, or the rule's.
    """
    bar = math.log(max(0.5 / num_wanted, rule.min_chance))
    if len(log_chances) >= num_wanted:
        bar = max(bar, log_chances[num_wanted - 1])
    bar -= math.log(BEST_CHILD)
    level = [i for i, log_chance in enumerate(log_chances) if log_chance >= bar and not is_run[i]]
    return level if sum(math.exp(log_chances[i]) for i in level) >= rule.level_chance else []
