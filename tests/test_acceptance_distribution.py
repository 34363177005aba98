"""The distribution of accepted tokens, by exact enumeration. test_output_distribution.py draws from whole engines.

One round is run for every draft and coin, and each outcome is completed by exact decoding: integers are compared, and
the distance is exactly 0. Planted biases must show.
"""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from faser_backend.core.frontier import Frontier
from faser_backend.pipeline.acceptance import accept_by_rejection, draw

NUM_TOKENS, HORIZON = 3, 3
COINS = (np.arange(12) + 0.5) / 12  # ratios of quarters have denominators 1-4: 12 midpoints reproduce them exactly
Pruning = Callable[[np.ndarray, np.ndarray], np.ndarray]


def never(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.full(first.shape, 3)


def causal(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Row 1 dies because of x_1, row 2 because of x_2."""
    return np.where(first == 0, 1, np.where(second == 1, 2, 3))


def peeking(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Row 1 dies because of x_2, which is wrong."""
    return np.where(second == 1, 1, 3)


class TinyModels:
    """Target and draft distributions of three positions over three tokens, in quarters, for every prefix."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)

        def distribution(*prefix_shape: int) -> np.ndarray:
            return rng.multinomial(4, rng.dirichlet(np.ones(NUM_TOKENS)), prefix_shape or None)

        self.target = [distribution(), distribution(3), distribution(3, 3)]
        self.draft = [distribution(), distribution(3)]

    def exact_distribution(self) -> np.ndarray:
        """Returns [3, 3, 3] int64: 4^3 times the probability of each output."""
        p1, p2, p3 = self.target
        return p1[:, None, None] * p2[:, :, None] * p3


def enumerate_round(models: TinyModels, prune: Pruning, rule: str) -> np.ndarray:
    """Returns [3, 3, 3] int64: the distribution after one round and exact completion, times 4^2 * 12^3 * 4^3."""
    axes = np.meshgrid(np.arange(3), np.arange(3), *[np.arange(12)] * 3, indexing="ij")
    first, second, coin1, coin2, coin3 = (axis.ravel() for axis in axes)
    q1, q2 = models.draft
    p1, p2, p3 = models.target
    weight = q1[first] * q2[first, second]
    keep = weight > 0
    first, second, coin1, coin2, coin3, weight = (a[keep] for a in (first, second, coin1, coin2, coin3, weight))
    size = first.size
    draft_probs = np.stack([np.broadcast_to(q1, (size, 3)), q2[first]], axis=1) / 4
    target_probs = np.stack([np.broadcast_to(p1, (size, 3)), p2[first], p3[first, second]], axis=1) / 4
    frontier = Frontier(np.stack([first, second], axis=1), np.full(size, 2), draft_probs=draft_probs)
    accept_uniforms = np.stack([COINS[coin1], COINS[coin2], COINS[coin2]], axis=1).ravel()
    num_kept = prune(first, second)
    kept = np.flatnonzero(np.arange(3) < num_kept[:, None])
    result = accept_by_rejection(
        frontier,
        target_probs.reshape(-1, 3)[kept],
        np.concatenate([[0], np.cumsum(num_kept)]),
        accept_uniforms[kept],
        np.repeat(COINS[coin3], 3)[kept],
    )
    tokens, num_emitted = result.tokens, result.num_emitted.copy()
    reached = (num_kept < 3) & (result.num_accepted >= num_kept - 1)
    if rule != "tested":  # wrong rules for x_N where N is pruned and x_1..x_{N-1} were accepted
        n = num_kept[reached]
        p = target_probs[reached, n - 1]
        residual = np.maximum(p - draft_probs[reached, n - 1], 0)
        is_empty = ~residual.any(axis=1)
        residual[is_empty] = p[is_empty]
        tokens[reached, n - 1] = draw(p if rule == "sampled afresh" else residual, COINS[coin3[reached]])
        num_emitted[reached] = n
    distribution = np.zeros((3, 3, 3), np.int64)
    for output in itertools.product(range(3), repeat=HORIZON):
        completions = np.array([p1[output[0]], p2[output[0], output[1]], p3[output]])
        agrees = ((tokens == output) | (np.arange(3) >= num_emitted[:, None])).all(axis=1)
        factors = np.where(np.arange(3) < num_emitted[agrees, None], 4, completions)
        distribution[output] = (weight[agrees] * factors.prod(axis=1)).sum()
    return distribution


def distance(models: TinyModels, prune: Pruning, rule: str = "tested") -> float:
    """Returns the total variation between one round with completion and plain decoding."""
    exact = models.exact_distribution() * 4**2 * 12**3
    return float(np.abs(enumerate_round(models, prune, rule) - exact).sum() / 2 / exact.sum())


@pytest.mark.parametrize("prune", [never, causal])
def test_enumerated_distribution_is_exact(prune: Pruning) -> None:
    assert [distance(TinyModels(seed), prune) for seed in range(12)] == [0.0] * 12


@pytest.mark.parametrize(
    ("prune", "rule"), [(causal, "sampled afresh"), (causal, "taken as rejected"), (peeking, "tested")]
)
def test_enumeration_catches_wrong_pruning(prune: Pruning, rule: str) -> None:
    assert max(distance(TinyModels(seed), prune, rule) for seed in range(12)) > 0.05
