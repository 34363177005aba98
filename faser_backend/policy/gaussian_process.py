"""A Gaussian process on a grid that forgets: exact posterior, bounded memory, one small update per observation.

The function is linear between G grid points, so its values there, jointly normal, are all there is to know: an
observation changes their mean and covariance by a rank-one step, and is never stored. Between observations the
function drifts, f' = sqrt(1 - e) f + sqrt(e) g with g a fresh draw of the prior (TV-GP-UCB, Bogunovic et al.
1601.06650): evidence of age t counts (1 - e)^(t/2), which is what a window that drops the oldest only imitates.
Knows nothing of what is modelled.
"""

from __future__ import annotations

import numpy as np

OUTLIER_STDS = 3.0  # an observation that is further off than this counts as if it were not


def smooth(points: np.ndarray, length_scale: float) -> np.ndarray:
    """[n, n] squared-exponential correlation of points [n]."""
    return np.exp(-0.5 * ((points[:, None] - points) / length_scale) ** 2)


def hats(knots: np.ndarray, x: np.ndarray) -> np.ndarray:
    """[n, k] weights of linear interpolation between ascending knots [k] at x [n]; constant beyond the ends."""
    return np.stack([np.interp(x, knots, unit) for unit in np.eye(knots.size)], axis=1)


class GridProcess:
    """Normal with mean 0 and covariance prior [G, G] before the first observation.

    noise_std: of one observation. drift: e above, per observation.
    """

    def __init__(self, prior: np.ndarray, noise_std: float, drift: float) -> None:
        self.mean = np.zeros(prior.shape[0])  # [G]
        self.covariance = prior.copy()  # [G, G]
        self._noise_variance = noise_std**2
        self._kept_mean = (1.0 - drift) ** 0.5
        self._kept_covariance = 1.0 - drift
        self._renewed = drift * prior

    def observe(self, weights: np.ndarray, value: float) -> None:
        """The function drifts, then weights [G] @ its values were measured as `value`."""
        self.mean *= self._kept_mean
        self.covariance *= self._kept_covariance
        self.covariance += self._renewed
        direction = self.covariance @ weights
        variance = float(weights @ direction) + self._noise_variance
        limit = OUTLIER_STDS * variance**0.5
        surprise = min(max(value - float(weights @ self.mean), -limit), limit)
        self.mean += direction * (surprise / variance)
        direction /= variance**0.5
        self.covariance -= direction[:, None] * direction
