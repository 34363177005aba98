"""`gp-lcb`: FASER's adaptive drafter (2604.20503), a length per request by a bandit on time per token.

The time of a step belongs to all its requests, so the bandit weighs whole assignments of lengths, by
    log time per token = log cost(B, lengths) + f(B, mean length) - log tokens(rates, lengths).
cost is the cost model's prediction, f its error, a Gaussian process of prior mean 0, and tokens the sum of chain
survivals under each request's acceptance rate (Leviathan 2211.17192, eq. 1). Time does not depend on what is accepted,
nor acceptance on the load, so the two are learned apart. The lower confidence bound is that of Srinivas et al.
0912.3995. The partition is always the whole device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from faser_backend.core.decision import WHOLE, Decision
from faser_backend.core.plan import StepRecord
from faser_backend.core.sequence import Sequence as RunningSequence
from faser_backend.policy.calibration import AcceptanceModel, hats, sigmoid
from faser_backend.policy.cost_model import BatchTimesCache
from faser_backend.policy.speculation import MAX_ADAPTIVE_TOKENS, Knowledge


def smooth(points: np.ndarray, length_scale: float) -> np.ndarray:
    """Returns the squared-exponential correlation [n, n] of points [n]."""
    return np.exp(-0.5 * ((points[:, None] - points) / length_scale) ** 2)


# Candidates: each request drafts while its chain survives with more than this chance, up to a common cap.
SURVIVAL_FLOORS = np.array([0.0, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 1.0])  # [P], the last drafts nothing
DEPTHS = np.arange(1, MAX_ADAPTIVE_TOKENS + 1)  # [K]
LOG_BATCH_KNOTS = np.array([0.0, 2.0, 4.0, 6.0, 8.0])  # log2 of 1 to 256 requests
LENGTH_KNOTS = np.array([0.0, 1.0, 2.0, 4.0, MAX_ADAPTIVE_TOKENS])
BOUND_STDS = 1.0  # how many standard deviations below the mean the bound lies
STEP_NOISE = 0.15  # standard deviation of the log of a step's time
DRIFT = 0.003  # of f per step: half of the evidence is gone after 460 steps
COMMON_ERROR = 0.6  # prior standard deviation of the part of f that is the same everywhere
LOCAL_ERROR = {True: 0.3, False: 0.6}  # and of the part that differs, by whether costs were measured
OUTLIER_STDS = 3.0  # an observation that is further off than this counts as if it were not
OPTIMISM, MEMORY_STEPS = 0.1, 400.0  # added to the log odds of acceptance; and once more after so many plain steps
MAX_RATE = 0.98


class GridProcess:
    """A Gaussian process that forgets: the exact posterior of a function that is linear between G grid points.

    An observation changes mean and covariance of its values there by a rank-one step, and is not stored. Before each
    the function drifts, f' = sqrt(1 - e) f + sqrt(e) g with g a fresh draw of the prior (TV-GP-UCB, Bogunovic et al.
    1601.06650), so evidence of age t counts (1 - e)^(t/2).
    """

    def __init__(self, prior: np.ndarray, noise_std: float, drift: float) -> None:
        """prior: covariance [G, G] before the first observation. noise_std: of one observation. drift: e above."""
        self.mean = np.zeros(prior.shape[0])  # [G]
        self.covariance = prior.copy()  # [G, G]
        self._noise_variance, self._drift, self._renewed = noise_std**2, drift, drift * prior

    def observe(self, weights: np.ndarray, value: float) -> None:
        """Lets the function drift, then learns that weights [G] @ its values were measured as `value`."""
        self.mean *= (1.0 - self._drift) ** 0.5
        self.covariance *= 1.0 - self._drift
        self.covariance += self._renewed
        direction = self.covariance @ weights
        variance = float(weights @ direction) + self._noise_variance
        limit = OUTLIER_STDS * variance**0.5
        surprise = min(max(value - float(weights @ self.mean), -limit), limit)
        self.mean += direction * (surprise / variance)
        self.covariance -= direction[:, None] * (direction / variance)


class GpLcb:
    """Learns from every step: its time, and the tests that its requests passed."""

    is_drafting = True
    partitions = (WHOLE,)

    def __init__(self, knowledge: Knowledge) -> None:
        self._costs = costs = knowledge.costs
        self._times = BatchTimesCache(costs, MAX_ADAPTIVE_TOKENS)
        local = np.kron(smooth(LOG_BATCH_KNOTS, 2.0), smooth(np.arange(LENGTH_KNOTS.size), 1.0))
        prior = COMMON_ERROR**2 + LOCAL_ERROR[costs.is_measured] ** 2 * local
        self._process = GridProcess(prior, STEP_NOISE, DRIFT)
        self._acceptance = AcceptanceModel(knowledge.margins)
        self._num_plain = 0  # steps since something was drafted

    def decide(self, sequences: Sequence[RunningSequence], num_prefilling: int = 0) -> Decision:
        size = len(sequences)
        survival = self._rates(sequences)[:, None] ** DEPTHS  # [B, K]
        is_drafted = survival > SURVIVAL_FLOORS[:, None, None]  # [P, B, K]
        num_deep = np.count_nonzero(is_drafted, axis=1)  # [P, K] chains of that depth or more
        num_drafted = num_deep.cumsum(axis=1)  # [P, K] by cap
        tokens = size + (survival * is_drafted).sum(axis=1).cumsum(axis=1)
        times = self._times.of(size, self._costs.batch_context([each.num_tokens for each in sequences]), WHOLE)
        draft_us = (times.draft_us[num_deep] * (num_deep > 0)).cumsum(axis=1) + times.draft_round_us * (num_drafted > 0)
        round_us = draft_us + times.verify_us[num_drafted]
        weights = _weights(size, num_drafted.ravel() / size)  # [P K, G]
        variance = ((weights @ self._process.covariance) * weights).sum(axis=1)
        bound = np.log(round_us / tokens).ravel() + weights @ self._process.mean - BOUND_STDS * np.sqrt(variance)
        floor, cap = divmod(int(bound.argmin()), DEPTHS.size)
        return Decision(np.count_nonzero(is_drafted[floor, :, : cap + 1], axis=1).tolist())

    def observe(self, record: StepRecord) -> None:
        self._acceptance.observe(record)
        self._num_plain = 0 if record.frontier.num_drafted.any() else self._num_plain + 1
        if record.has_clients or record.plan.prefills:  # prompts are no matter of lengths
            return
        lengths = np.minimum(record.frontier.num_drafted, MAX_ADAPTIVE_TOKENS)
        size, num_drafted = lengths.size, int(lengths.sum())
        times = self._times.of(size, self._costs.batch_context(record.num_tokens.tolist()), WHOLE)
        round_us = times.chains_us(lengths) + float(times.verify_us[num_drafted])
        weights = _weights(size, lengths.mean(keepdims=True))[0]
        self._process.observe(weights, float(np.log(max(record.step_us, 1.0) / round_us)))

    def _rates(self, sequences: Sequence[RunningSequence]) -> np.ndarray:
        """Returns the chance [B] that a draft token of each request is accepted, seen with optimism: what was not
        tested for long is worth a new try."""
        curve = self._acceptance.curves[0]
        hope = OPTIMISM + self._num_plain / MEMORY_STEPS
        offsets = self._acceptance.offsets(sequences) + hope
        return np.minimum(sigmoid(curve.match_logits + offsets[:, None]) @ curve.margin_shares, MAX_RATE)


def _weights(size: int, mean_lengths: np.ndarray) -> np.ndarray:
    """Returns the weights [N, G] of the grid's points for a batch of `size` and mean lengths [N]."""
    return np.kron(hats(LOG_BATCH_KNOTS, np.log2([size])), hats(LENGTH_KNOTS, mean_lengths))
