"""How wrong the cost model is here: measured over predicted time, of target calls and of draft calls by their rows.

The logarithm of a ratio is taken for the sum of two things: how slow the machine is at the moment, which changes fast
and changes every call alike, and how wrong the model is about calls of so many rows, which hardly changes. Only the
second one decides between plain and speculative decoding. What was learned of calls of one size stands for the sizes
about it until those are seen.
"""

from __future__ import annotations

import math

import numpy as np

from faser_backend.core.decision import WHOLE
from faser_backend.policy.cost_model import TARGET

_NUM_BUCKETS = 14  # powers of two of rows
_MOST_WEIGHT = 64.0  # steps that a bucket's error is the mean of
_PRIOR_WEIGHT = 0.05  # of what is known of other calls, in steps
_FADE = 0.999  # of every weight, per step
_MACHINE_SHARE = 0.25  # of a surprise about a well-known bucket that the machine's present speed takes
_FEW_STEPS = 2.5  # until so many were seen, a surprise is the model's error and not the machine's
_LOG_OUTLIER = math.log(2.0)  # a step that the machine lost to something else says little: it is cut there
_SMOOTH_EVERY = 8  # observations of well-known calls
_BUCKETS = np.arange(_NUM_BUCKETS)
_NEARNESS = 16.0 ** -np.abs(np.subtract.outer(_BUCKETS, _BUCKETS))  # [n, n]

Calls = tuple[str, str]  # (model, partition)


class TimeErrors:
    """Running estimates by model, partition and power of two of rows."""

    def __init__(self, optimism: float = 0.0) -> None:
        """optimism: what the log of the time of target calls is taken for less at sizes that were not seen: where costs
        are guesses, what is never tried is never known."""
        self._optimism = optimism
        self._known: dict[Calls, np.ndarray] = {}  # [2, n] error of the log and its weight
        self._log_machine = 0.0
        self._num_observed = 0
        self._logs: dict[Calls, np.ndarray] = {}  # [n] smoothed, for a few observations

    def ratios(self, model: str, partition: str, log2_rows: np.ndarray) -> np.ndarray:
        """Returns measured over predicted time of calls with these log2 of rows, the machine's present speed aside."""
        return np.exp(np.interp(log2_rows, _BUCKETS, self._smoothed_logs(model, partition)))

    def knows(self, model: str, partition: str) -> bool:
        """Tells whether calls of the model were seen there at all."""
        return (model, partition) in self._known

    def observe(self, model: str, partition: str, num_rows: float, predicted_us: float, measured_us: float) -> None:
        """Learns from one step's calls of a model."""
        if predicted_us <= 0.0:
            return
        logs = self._smoothed_logs(model, partition)
        bucket = _bucket(num_rows)
        expected = float(logs[bucket]) + self._log_machine
        surprise = math.log(max(measured_us, 1.0) / predicted_us) - expected
        known = self._known.setdefault((model, partition), np.zeros((2, _NUM_BUCKETS)))
        error, weight = known
        if weight[bucket] > _FEW_STEPS:
            surprise = min(max(surprise, -_LOG_OUTLIER), _LOG_OUTLIER)
        if weight[bucket] < 0.5:
            error[bucket] = logs[bucket]
        share = 1.0 / (weight[bucket] + 1.0)
        error[bucket] += share * surprise
        self._log_machine += (1.0 - share) * _MACHINE_SHARE * surprise
        weight *= _FADE
        weight[bucket] = min(weight[bucket] + 1.0, _MOST_WEIGHT)
        self._num_observed += 1
        if weight[bucket] < _FEW_STEPS + 2.0 or self._num_observed % _SMOOTH_EVERY == 0:
            self._logs.clear()

    def _smoothed_logs(self, model: str, partition: str) -> np.ndarray:
        """[n] as `_smoothed`, of a few observations ago."""
        logs = self._logs.get((model, partition))
        if logs is None:
            logs = self._logs[model, partition] = self._smoothed(model, partition)
        return logs

    def _smoothed(self, model: str, partition: str) -> np.ndarray:
        """[n] errors of the logs. Where nothing is known of a partition, calls on the whole device stand for them, and
        where nothing is known of a model, all calls do: a slow machine is slow with everything."""
        known = self._known.get((model, partition))
        prior: np.ndarray | float
        if partition != WHOLE:
            prior = self._smoothed(model, WHOLE)
        else:
            every = list(self._known.values())
            total = sum(float(weight.sum()) for _, weight in every)
            prior = sum(float(error @ weight) for error, weight in every) / total if total else 0.0
        if known is None:
            return np.full(_NUM_BUCKETS, prior)
        error, weight = known
        hope = self._optimism * (1.0 - _near(weight)) if model == TARGET else 0.0
        return -hope + (_NEARNESS @ (error * weight) + _PRIOR_WEIGHT * prior * _near(weight)) / (
            _NEARNESS @ weight + _PRIOR_WEIGHT * _near(weight)
        )


def _near(weight: np.ndarray) -> np.ndarray:
    """[n] 1 at the buckets that were seen, less far away from them, as much as their own evidence is."""
    return _NEARNESS.max(axis=1, where=weight > 0.0, initial=1e-9)


def _bucket(num_rows: float) -> int:
    return min(round(math.log2(max(num_rows, 1.0))), _NUM_BUCKETS - 1)
