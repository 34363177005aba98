"""The distribution of accepted tokens: by exact enumeration, and by chi-square on tiny random models.

The enumeration runs one round for every draft and coin, completes each outcome by exact decoding and compares integers:
the distance is exactly 0. Every test must also detect planted biases.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from faser_backend.core.batch import SamplingRows
from faser_backend.core.frontier import Acceptance, Frontier
from faser_backend.core.request import Sampling
from faser_backend.cpu import noise
from faser_backend.cpu.sampler import NumpySampler
from faser_backend.pipeline import acceptance
from faser_backend.pipeline.acceptance import accept_by_rejection, accept_matches, draw

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
    frontier = Frontier.whole(np.stack([first, second], axis=1), np.full(size, 2), draft_probs)
    accept_uniforms = np.stack([COINS[coin1], COINS[coin2], COINS[coin2]], axis=1).ravel()
    num_kept = prune(first, second)
    result = accept_by_rejection(
        frontier,
        target_probs.reshape(-1, 3),
        np.arange(size + 1) * 3,
        accept_uniforms,
        np.repeat(COINS[coin3], 3),
        num_kept=num_kept,
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


SIZE, LENGTH, NUM_RUNS, ALPHA = 8, 3, 40_000, 1e-3


class MarkovPair:
    """A target and a draft whose next-token logits depend on position and last token: float32 [LENGTH, V, V]."""

    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        self.target = rng.normal(0, 1.2, (LENGTH, SIZE, SIZE)).astype(np.float32)
        self.draft = self.target + rng.normal(0, 0.8, self.target.shape).astype(np.float32)

    def joint_p_value(self, outputs: np.ndarray) -> float:
        """Returns the p-value of a joint chi-square of all positions; outputs [NUM_RUNS, LENGTH], token 0 precedes
        them."""
        p = np.exp(self.target.astype(np.float64))
        p /= p.sum(axis=2, keepdims=True)
        joint = (p[0, 0][:, None, None] * p[1][:, :, None] * p[2][None]).ravel()
        cells = np.bincount(outputs @ np.array([SIZE * SIZE, SIZE, 1]), minlength=joint.size)
        expected = joint * outputs.shape[0]
        is_large = expected >= 5
        observed = np.append(cells[is_large], cells[~is_large].sum())
        return float(stats.chisquare(observed, np.append(expected[is_large], expected[~is_large].sum())).pvalue)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits)
    return weights / weights.sum(axis=-1, keepdims=True)


def columns_of(drafted: list[np.ndarray], num_sequences: int) -> np.ndarray:
    return np.stack(drafted, axis=1) if drafted else np.zeros((num_sequences, 0), np.int64)


def decode(propose_and_accept: Callable[..., Acceptance]) -> np.ndarray:
    """Runs rounds until every run has LENGTH tokens; returns [NUM_RUNS, LENGTH]."""
    outputs = np.zeros((NUM_RUNS, LENGTH + 1), np.int64)  # column 0: the prompt's only token
    lengths = np.zeros(NUM_RUNS, np.int64)
    num_steps = 0
    while (lengths < LENGTH).any():
        for length in range(LENGTH):
            runs = np.flatnonzero(lengths == length)
            if runs.size == 0:
                continue
            result = propose_and_accept(runs, outputs[runs, length], length, min(2, LENGTH - 1 - length), num_steps)
            for column in range(result.tokens.shape[1]):
                has_one = result.num_emitted > column
                outputs[runs[has_one], length + column + 1] = result.tokens[has_one, column]
            lengths[runs] += result.num_emitted
        num_steps += 1
    return outputs[:, 1:]


def run_rejection(pair: MarkovPair, boost: float = 1.0, reused: str = "") -> np.ndarray:
    keys = noise.seed_keys(np.arange(NUM_RUNS, dtype=np.uint64))

    def one_round(runs: np.ndarray, last: np.ndarray, start: int, num_drafts: int, num_steps: int) -> Acceptance:
        def coins(position: int, purpose: int) -> np.ndarray:
            return noise.uniforms(keys[runs], np.full(runs.size, position), purpose, np.full(runs.size, num_steps))

        prefix, drafted, draft_probs = last, [], []
        target_probs = [softmax(pair.target[start, last])]
        for j in range(num_drafts):
            draft_probs.append(softmax(pair.draft[start + j, prefix]))
            prefix = draw(draft_probs[-1], coins(start + j, 0))
            drafted.append(prefix)
            target_probs.append(softmax(pair.target[start + j + 1, prefix]))
        positions = range(start, start + num_drafts + 1)
        accept_uniforms = np.stack([coins(t, 0 if reused == "proposal" else 1) for t in positions], axis=1).ravel()
        sample_uniforms = np.stack([coins(t, 1 if reused == "test" else 2) for t in positions], axis=1).ravel()
        frontier = Frontier.whole(
            columns_of(drafted, runs.size),
            np.full(runs.size, num_drafts),
            np.stack(draft_probs, axis=1) if drafted else None,
        )
        rows = np.stack(target_probs, axis=1).reshape(-1, SIZE)
        cu_rows = np.arange(runs.size + 1) * (num_drafts + 1)
        return accept_by_rejection(frontier, rows, cu_rows, accept_uniforms / boost, sample_uniforms)

    return decode(one_round)


def run_matching(pair: MarkovPair, *, is_position_keyed: bool = True) -> np.ndarray:
    sampler = NumpySampler(SIZE, NUM_RUNS)
    for run in range(NUM_RUNS):
        sampler.add(run, Sampling(temperature=1.0, seed=run), np.zeros(1, np.int64), 1, ())

    def one_round(runs: np.ndarray, last: np.ndarray, start: int, num_drafts: int, num_steps: int) -> Acceptance:
        def sample(logits: np.ndarray, offset: int, drafted: list[np.ndarray]) -> np.ndarray:
            position = start + offset + 1 if is_position_keyed else 1
            rows = SamplingRows(
                slots=runs,
                positions=np.full(runs.size, position),
                sequence=np.arange(runs.size),
                num_drafted=np.full(runs.size, offset),
                drafted=columns_of(drafted, runs.size),
            )
            return sampler.sample(logits, rows)

        drafted: list[np.ndarray] = []
        sampled = [sample(pair.target[start, last], 0, drafted)]
        for j in range(num_drafts):
            prefix = drafted[-1] if drafted else last
            drafted.append(sample(pair.draft[start + j, prefix], j, drafted))
            sampled.append(sample(pair.target[start + j + 1, drafted[-1]], j + 1, drafted))
        frontier = Frontier.whole(columns_of(drafted, runs.size), np.full(runs.size, num_drafts))
        return accept_matches(frontier, np.stack(sampled, axis=1).ravel(), np.arange(runs.size + 1) * (num_drafts + 1))

    return decode(one_round)


@pytest.fixture(scope="module")
def pair() -> MarkovPair:
    return MarkovPair()


def test_rejection_has_the_targets_distribution(pair: MarkovPair) -> None:
    assert pair.joint_p_value(run_rejection(pair)) > ALPHA


@pytest.mark.parametrize(
    "bias", [{"boost": 1.1}, {"reused": "test"}, {"reused": "proposal"}], ids=["boosted", "reused-test", "reused-draft"]
)
def test_chi_square_catches_biased_rejection(pair: MarkovPair, bias: dict) -> None:
    assert pair.joint_p_value(run_rejection(pair, **bias)) < ALPHA


def test_chi_square_catches_recovery_from_the_wrong_distribution(
    pair: MarkovPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "_residual", lambda p, q: p)
    assert pair.joint_p_value(run_rejection(pair)) < ALPHA


def test_matching_has_the_targets_distribution(pair: MarkovPair) -> None:
    assert pair.joint_p_value(run_matching(pair)) > ALPHA


def test_chi_square_catches_noise_that_ignores_the_position(pair: MarkovPair) -> None:
    assert pair.joint_p_value(run_matching(pair, is_position_keyed=False)) < ALPHA
