"""Which nodes a tree of draft tokens is made of: the likeliest ones, as the draft sees it with the noise of the draws.

The target's draw is the best of its own scores, which carry the same noise as the draft's. By how much the two models
differ decides how far down the draft's order it lies: a token's chance is a softmax of the draft's scores, noise
included, at a temperature that stands for that difference. A node's chance is the product along its path.
"""

from __future__ import annotations

import math

import numpy as np

from faser_backend.core.decision import TreeRule
from faser_backend.core.tree import TreeLaw

# Of the models' logits: greatest likelihood of the demo target's draws at temperature 0.8; and a head's.
DIFFERENCE, HEAD_DIFFERENCE = 0.7, 1.5
BEST_CHILD = 0.8  # chance of the best child of a node that is worth the draft's row
LEAD = -math.log(BEST_CHILD)
UNPRICED = TreeRule(0.0, 0.5)  # of trees of one size, of which nobody knows what calls and rows take


def node_bar(rule: TreeRule) -> float:
    """The log chance that a node exceeds, but for the best child of the anchor."""
    return math.log(max(rule.min_chance, 1e-9))


def run_bar(num_wanted: int, rule: TreeRule) -> float:
    """The log chance from which on the draft runs a node's best child while few of num_wanted nodes are known: a tree
    of n nodes has few of a chance below 1/2n."""
    return math.log(max(0.5 / num_wanted, rule.min_chance))


def tree_law(num_wanted: np.ndarray, rule: TreeRule, difference: float, num_children: int) -> TreeLaw:
    """What `child_log_chances` and `next_level` go by, for trees of num_wanted [A] >= 1 nodes."""
    run_bars = np.array([run_bar(count, rule) for count in num_wanted.tolist()])
    return TreeLaw(num_wanted, num_children, difference, node_bar(rule), run_bars, LEAD, rule.level_chance)


def child_log_chances(scores: np.ndarray, difference: float) -> np.ndarray:
    """[n, C] of the C best tokens, of scores [n, C] in logits; -inf: forbidden. At least one of a row is not."""
    scores = scores / difference
    scores = scores - scores.max(axis=1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


def next_level(log_chances: list[float], is_run: list[bool], num_wanted: int, rule: TreeRule) -> list[int]:
    """The nodes that make the next level: whose children could be among the best num_wanted nodes of the tree.

    log_chances of the known nodes, falling; is_run: the draft has run it.
    """
    bar = run_bar(num_wanted, rule)
    if len(log_chances) >= num_wanted:
        bar = max(bar, log_chances[num_wanted - 1])
    bar += LEAD
    level = [i for i, log_chance in enumerate(log_chances) if log_chance >= bar and not is_run[i]]
    return level if sum(math.exp(log_chances[i]) for i in level) >= rule.level_chance else []
