"""Fits to recorded chains: an exit's weights, its threshold, and the shares that it ends and keeps."""

import numpy as np
import pytest

from faser_backend.policy.calibration import KINDS, MarginCounts, MatchCalibration
from faser_backend.policy.early_exit import logits, sigmoid
from faser_backend.profiling.calibration import RETENTION, Chains, fit, fit_logistic, threshold_for
from tests.policy.test_calibration import true_chance

K = 6
LAYER = 2


def synthetic(num_chains: int, seed: int, *, signal: float = 0.0) -> Chains:
    """Chains whose tokens are accepted with their true chance; exit margins tell `signal` of the outcome."""
    rng = np.random.default_rng(seed)
    margins = rng.exponential(2.0, (num_chains, K))
    is_right = rng.random((num_chains, K)) < true_chance(margins)
    num_drafted = rng.integers(1, K + 1, num_chains)
    leading = np.cumprod(is_right, axis=1).sum(axis=1)
    exit_margins = rng.normal(0.0, 1.0, (num_chains, K)) + signal * (2.0 * is_right - 1.0)
    group = np.arange(num_chains) // 10
    is_sampled = rng.random(num_chains) < 0.4
    return Chains(margins, {0: exit_margins}, num_drafted, np.minimum(leading, num_drafted), group, is_sampled)


def test_logistic_regression_finds_its_weights_again() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(0.0, 2.0, (40_000, 2))
    outcomes = rng.random(40_000) < sigmoid(0.4 + features @ np.array([0.9, -0.3]))
    assert fit_logistic(features, outcomes) == pytest.approx([0.4, 0.9, -0.3], abs=0.05)


def test_logistic_regression_stays_finite_where_outcomes_are_told_apart() -> None:
    features = np.linspace(-1, 1, 50)[:, None]
    weights = fit_logistic(features, features[:, 0] > 0)
    assert np.isfinite(weights).all() and weights[1] > 1


def test_a_threshold_keeps_what_was_asked_and_no_more_than_needed() -> None:
    survival = np.array([[0.9, 0.5], [0.8, 0.7], [0.3, 0.2]])
    useful = np.array([[True, True], [True, False], [True, False]])
    assert [threshold_for(survival, useful, n) for n in (1, 2, 3, 4, 9)] == [0.9, 0.8, 0.5, 0.3, 0.3]
    assert threshold_for(survival, useful, 0) == 1.0
    assert threshold_for(survival, np.zeros_like(useful), 3) == 1.0


def test_a_fit_reports_texts_that_it_never_saw() -> None:
    chains = synthetic(4000, 0, signal=1.5)
    held_out = chains.group % 2 == 1
    chains.margins[held_out], chains.exit_margins[0][held_out] = 0.0, 0.0  # nothing can be told there
    chains.is_sampled[held_out] = False
    found = fit(chains, {0: LAYER}, "synthetic")
    (calibration,) = found.exits
    assert set(calibration.pruned_shares) <= {0.0, 1.0}, "with equal margins, all rows of a place stay or all end"
    assert sum(counts.tested.sum() for counts in found.margins.values()) == found.num_fitted
    for counts in found.margins.values():
        assert counts.tested[0] < 0.5 * counts.tested.sum(), "the fitted half is as it was"
    assert calibration.margin_weight == pytest.approx(2 * 1.5, rel=0.15)  # of two normals 2 x 1.5 apart


def test_greedy_and_sampled_chains_are_counted_and_judged_apart() -> None:
    chains = synthetic(4000, 2, signal=1.0)
    chains.num_accepted[chains.is_sampled & (np.arange(4000) % 3 > 0)] = 0
    found = fit(chains, {0: LAYER}, "synthetic")
    is_held_out, chances = chains.group % 2 == 1, np.zeros_like(chains.margins)
    for index, kind in enumerate(KINDS):
        known = chains.take(~is_held_out & (chains.is_sampled == index))
        counts = MarginCounts.of(known.margins[known.is_tested], known.is_accepted[known.is_tested])
        assert found.margins[kind].tested.tolist() == counts.tested.tolist()
        assert found.margins[kind].accepted.tolist() == counts.accepted.tolist()
        is_kind = chains.is_sampled == index
        chances[is_kind] = MatchCalibration(counts).curve.chances(chains.margins[is_kind])
    means = [chances[chains.is_sampled == index].mean() for index in (0, 1)]
    assert means[0] > means[1] + 0.2, "else they need not be told apart"
    known = chains.is_tested & ~is_held_out[:, None]
    (calibration,) = found.exits
    features = np.stack([logits(chances), chains.exit_margins[0]], axis=-1)[known]
    weights = calibration.bias, calibration.chance_weight, calibration.margin_weight
    assert weights == pytest.approx(fit_logistic(features, chains.is_accepted[known]))


def test_a_fit_describes_what_is_pruned() -> None:
    calibration = fit(synthetic(20_000, 0, signal=1.0), {0: LAYER}, "synthetic").exits[0]
    assert calibration.retention == pytest.approx(RETENTION, abs=0.02)
    assert len(calibration.pruned_shares) == K and (np.diff(calibration.pruned_shares) > 0).all()
    assert 0 < calibration.trimmed_pruned_share < np.mean(calibration.pruned_shares)
    assert (calibration.segment, calibration.layer) == (0, 2)


def test_a_draft_that_is_always_right_leaves_nothing_to_fit() -> None:
    chains = synthetic(500, 0)
    chains.num_accepted[:] = chains.num_drafted
    found = fit(chains, {0: LAYER}, "synthetic")
    assert found.exits == () and set(found.margins) == set(KINDS)
    assert all((counts.accepted == counts.tested).all() and counts.tested.any() for counts in found.margins.values())
