"""The forgetting Gaussian process on a grid: its posterior against a textbook one, and what long use does to it."""

from __future__ import annotations

import numpy as np
import pytest

from faser_backend.policy.gp_lcb import GridProcess, hats, smooth


def test_the_posterior_is_that_of_a_gaussian_process_over_all_observations():
    """Against the textbook's formula with the kernel of TV-GP-UCB, k(x, x') (1 - e)^(|t - t'| / 2)."""
    knots, noise, drift = np.array([0.0, 1.0, 2.0, 4.0, 8.0]), 0.3, 0.02
    prior = 0.7**2 * smooth(knots, 2.0)
    rng = np.random.default_rng(5)
    weights = hats(knots, rng.uniform(0.0, 8.0, 60))  # [60, 5]
    values = rng.normal(0.0, 0.2, 60)
    process = GridProcess(prior, noise, drift)
    for row, value in zip(weights, values, strict=True):
        process.observe(row, float(value))
    times = np.arange(60)
    seen = weights @ prior @ weights.T * (1 - drift) ** (np.abs(times[:, None] - times) / 2) + noise**2 * np.eye(60)
    across = prior @ weights.T * (1 - drift) ** ((times[-1] - times) / 2)  # [5, 60]
    assert process.mean == pytest.approx(across @ np.linalg.solve(seen, values), abs=1e-9)
    assert process.covariance == pytest.approx(prior - across @ np.linalg.solve(seen, across.T), abs=1e-9)


def test_the_posterior_stays_sound_over_many_steps():
    rng = np.random.default_rng(0)
    process = GridProcess(smooth(np.arange(9.0), 2.0), 0.1, 0.003)
    for _ in range(5000):
        process.observe(hats(np.arange(9.0), rng.uniform(2.0, 3.0, 1))[0], float(rng.normal()))
    assert np.linalg.eigvalsh(process.covariance).min() > -1e-12
    assert process.covariance[8, 8] > 0.9
    assert process.covariance[2, 2] < 0.1


def test_one_wild_measurement_moves_little():
    calm, hit = (GridProcess(np.eye(1), 0.1, 0.0) for _ in range(2))
    for value in [0.0] * 10:
        calm.observe(np.ones(1), value)
        hit.observe(np.ones(1), value)
    hit.observe(np.ones(1), 50.0)
    assert abs(hit.mean[0] - calm.mean[0]) < 0.1
