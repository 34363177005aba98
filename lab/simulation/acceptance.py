"""The acceptance process: which draft tokens the target would accept, and how sure the draft is of them.

Under sample-and-match the outcome at a position of a text is a property of that text alone: the draft, given the
true prefix, draws the target's token or does not. So the process yields one path per request, keyed by its seed,
and every policy meets the same outcomes. Two Gaussian latents follow the text, each a level of the request plus a
first-order autoregression: `ease` sets the margin, `luck` decides the match given the margin:

    ease_p = sqrt(s) U + sqrt(1 - s) X_p     X_p = rho X_{p-1} + sqrt(1 - rho^2) e_p      (luck_p alike)
    margin_p = quantile(ease_p)              match_p = luck_p < threshold(ease_p)
    exit margin_p = d (match_p - 1/2) + noise, d from the exit's separability: AUC = Phi(d / sqrt 2)

Fitted to traces of the demo pair; docs/simulation.md says how well. Where levels of
requests are planted (`with_levels`), they take the place of the fitted ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from itertools import accumulate
from statistics import NormalDist
from typing import Any

import numpy as np

from faser_backend.policy.calibration import KINDS, MarginCounts, MatchCalibration
from faser_backend.policy.cost_model import CostModel
from faser_backend.policy.early_exit import ExitCalibration
from faser_backend.policy.speculation import MAX_ADAPTIVE_TOKENS, Knowledge

CHAIN_SLACK = 64  # positions behind the last output token that chains may still be drafted at
VOCAB_SIZE = 1 << 20  # of simulated tokens: hashes, so that equal tokens mean equal texts
_NORMAL = NormalDist()
_SAMPLE_KEY = 0xFA5E  # of texts that serve adjusting and fitting
RETENTION = 0.95  # of tokens that would be accepted, at an exit
_NUM_TEXTS, _CHAINS_PER_TEXT = 200, 20
_LEVEL_TEXTS, _LEVEL_POSITIONS = 500, 256  # over which a level of acceptance is adjusted


@dataclass(frozen=True, slots=True)
class Latent:
    """A Gaussian latent along a text: share of its variance that is the request's, and memory of the rest."""

    request_share: float  # s in [0, 1)
    persistence: float  # rho in [0, 1)

    def draw(self, level: float, innovations: np.ndarray) -> np.ndarray:
        """[n] values of variance 1, from the request's level and innovations [n], all standard normal."""
        rho, fresh = self.persistence, float(np.sqrt(1.0 - self.persistence**2))
        steps = (fresh * innovations).tolist()
        if steps:
            steps[0] = float(innovations[0])  # starts in the stationary distribution
        chain = np.fromiter(accumulate(steps, lambda last, step: rho * last + step), np.float64, len(steps))
        return np.sqrt(self.request_share) * level + np.sqrt(1.0 - self.request_share) * chain


@dataclass(frozen=True, slots=True, eq=False)
class AcceptancePath:
    """Outcomes of one text, position by position from its first output token; [n] each."""

    tokens: np.ndarray  # int64, what the target draws
    drafted: np.ndarray  # int64, what the draft draws after the true prefix
    margins: np.ndarray  # float32, of the draft's token
    exit_margins: np.ndarray  # [num_exits, n] float32


@dataclass(frozen=True, eq=False)
class AcceptanceProcess:
    """ease_knots [m] ascending, with margins [m] in logits and chances [m] of a match.

    shifts: of acceptance; every text draws one.
    """

    ease: Latent
    luck: Latent
    ease_knots: np.ndarray
    margins: np.ndarray
    chances: np.ndarray
    shifts: tuple[float, ...] = (0.0,)
    exit_aucs: tuple[float, ...] = ()  # separability at each exit, given the draft's margin

    def path(self, key: tuple[int, ...], num_positions: int) -> AcceptancePath:
        """The outcomes of the text `key`. A longer path begins with the shorter one."""
        ease, gap = self._latents(key, num_positions)
        is_match = gap < self.shifts[int(np.random.default_rng([*key, 4]).integers(len(self.shifts)))]
        words = np.random.default_rng([*key, 2]).integers(0, VOCAB_SIZE, (num_positions, 2))
        tokens = words[:, 0]
        wrong = (tokens + 1 + words[:, 1] % (VOCAB_SIZE - 1)) % VOCAB_SIZE
        noise = np.random.default_rng([*key, 3]).standard_normal((num_positions, len(self.exit_aucs)))
        leads = np.outer(is_match - 0.5, [separation(auc) for auc in self.exit_aucs])
        return AcceptancePath(
            tokens,
            np.where(is_match, tokens, wrong),
            np.interp(ease, self.ease_knots, self.margins).astype(np.float32),
            (leads + noise).T.astype(np.float32),
        )

    def _latents(self, key: tuple[int, ...], num_positions: int) -> tuple[np.ndarray, np.ndarray]:
        """[n] ease, and [n] luck less its threshold: a match where that is below the shift."""
        levels = np.random.default_rng([*key, 0]).standard_normal(2)
        innovations = np.random.default_rng([*key, 1]).standard_normal((num_positions, 2))
        ease = self.ease.draw(levels[0], innovations[:, 0])
        luck = self.luck.draw(levels[1], innovations[:, 1])
        return ease, luck - np.interp(ease, self.ease_knots, self._thresholds)

    @cached_property
    def _thresholds(self) -> np.ndarray:
        return np.array([_NORMAL.inv_cdf(chance) for chance in self.chances])

    def with_exits(self, aucs: tuple[float, ...]) -> AcceptanceProcess:
        return replace(self, exit_aucs=aucs)

    def at_level(self, mean_acceptance: float) -> AcceptanceProcess:
        """The same process, but draft and target agree at this share of positions; margins stay as they are."""
        return replace(self, shifts=self._shifts([mean_acceptance]))

    def with_levels(self, levels: Sequence[float]) -> AcceptanceProcess:
        """The same process along a text, but every request agrees at one of these shares of positions, each as often:
        all that differs between requests is planted, so that an oracle may know it."""
        alike = replace(self, ease=replace(self.ease, request_share=0.0), luck=replace(self.luck, request_share=0.0))
        return replace(alike, shifts=alike._shifts(levels))

    def _shifts(self, levels: Sequence[float]) -> tuple[float, ...]:
        gaps = [self._latents((_SAMPLE_KEY, text), _LEVEL_POSITIONS)[1] for text in range(_LEVEL_TEXTS)]
        return tuple(np.quantile(np.array(gaps), levels).tolist())

    def sample(self, num_texts: int, num_positions: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Margins, matches [num_texts, num_positions] and exit margins [num_exits, num_texts, num_positions], of
        texts that no simulation uses."""
        paths = [self.path((_SAMPLE_KEY, text), num_positions) for text in range(num_texts)]
        return (
            np.stack([path.margins for path in paths]),
            np.stack([path.tokens == path.drafted for path in paths]),
            np.stack([path.exit_margins for path in paths], axis=1),
        )

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> AcceptanceProcess:
        knots, margins, chances = (np.array(fields[name], np.float64) for name in ("ease_knots", "margins", "chances"))
        return cls(Latent(*fields["ease"]), Latent(*fields["luck"]), knots, margins, chances)


class Outcomes:
    """The planted outcomes of the requests in max_num_seqs slots; a slot's row is overwritten by its next request.

    max_output_tokens: of any request.
    """

    def __init__(self, process: AcceptanceProcess, seed: int, max_num_seqs: int, max_output_tokens: int) -> None:
        self._process, self._seed = process, seed
        self._num_positions = max_output_tokens + CHAIN_SLACK
        shape = (max_num_seqs, self._num_positions)
        self._starts = np.zeros(max_num_seqs, np.int64)
        self._tokens, self._drafted = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._margins = np.zeros(shape, np.float32)
        self._exit_margins = np.zeros((len(process.exit_aucs), *shape), np.float32)

    def plant(self, slot: int, request_seed: int, num_prompt_tokens: int) -> None:
        path = self._process.path((self._seed, request_seed), self._num_positions)
        self._starts[slot] = num_prompt_tokens
        self._tokens[slot], self._drafted[slot], self._margins[slot] = path.tokens, path.drafted, path.margins
        self._exit_margins[:, slot] = path.exit_margins

    def target(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Draws of the target; arrays of one shape here and below."""
        return self._tokens[slots, self._offsets(slots, positions)]

    def draft(self, slots: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draws of the draft after the true prefix, and its margins."""
        offsets = self._offsets(slots, positions)
        return self._drafted[slots, offsets], self._margins[slots, offsets]

    def exit_margins(self, slots: np.ndarray, positions: np.ndarray, place: int = 0) -> np.ndarray:
        """place: of the exit among the exits."""
        return self._exit_margins[place, slots, self._offsets(slots, positions)]

    def num_accepted(self, slot: int, position: int) -> int:
        """Returns how many tokens drafted from this position on will be accepted."""
        offset = position - int(self._starts[slot])
        differs = self._tokens[slot, offset:] != self._drafted[slot, offset:]
        return int(differs.argmax()) if differs.any() else differs.size

    def _offsets(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return np.minimum(positions - self._starts[slots], self._num_positions - 1)


def separation(auc: float) -> float:
    """Distance d between two unit normals that a threshold separates with this area under the curve."""
    return float(np.sqrt(2.0)) * _NORMAL.inv_cdf(auc)


def fitted_fits() -> dict[str, Any]:
    """acceptance_demo.json: "greedy" and "sampled" (temperature 0.8), each with its process and what was measured."""
    return json.loads(resources.files("faser_backend.lab.simulation").joinpath("acceptance_demo.json").read_text())


def demo_process(kind: str) -> AcceptanceProcess:
    """The demo pair's process, "greedy" or "sampled"."""
    return AcceptanceProcess.from_dict(fitted_fits()[kind]["process"])


def knowledge_of(process: AcceptanceProcess, costs: CostModel, exits: tuple[tuple[int, int], ...]) -> Knowledge:
    """Knowledge that `faser profile` would have of a simulated pair: margins, and how to read its exits.

    The process is known, so nothing is fitted: with exit margins of N(+-d/2, 1) the logit of a chance grows by d times
    the margin. Thresholds are chosen for a retention, as the profiler chooses them. exits: (segment, layer) of each
    exit, in order of the process's exit_aucs.
    """
    assert len(exits) == len(process.exit_aucs)
    drawn = process.sample(_NUM_TEXTS, _CHAINS_PER_TEXT * MAX_ADAPTIVE_TOKENS)
    margins, is_match = (values.reshape(-1, MAX_ADAPTIVE_TOKENS) for values in drawn[:2])  # chains [C, K]
    is_accepted = np.cumprod(is_match, axis=1) > 0
    is_tested = np.concatenate([np.ones((len(margins), 1), np.bool_), is_accepted[:, :-1]], axis=1)
    counts = MarginCounts.of(margins[is_tested], is_accepted[is_tested])
    chances = MatchCalibration(counts).curve.chances(margins)
    calibrations = []
    for place, (segment, layer) in enumerate(exits):
        weight = separation(process.exit_aucs[place])
        exit_margins = drawn[2][place].reshape(margins.shape)
        calibrations.append(_calibrate((segment, layer), weight, chances, exit_margins, is_accepted))
    return Knowledge(costs, dict.fromkeys(KINDS, counts), tuple(calibrations))


def _calibrate(
    exit_: tuple[int, int], weight: float, chances: np.ndarray, exit_margins: np.ndarray, is_accepted: np.ndarray
) -> ExitCalibration:
    """Threshold and shares over chains; arrays are [C, K]."""

    def calibration(*shares: float, pruned: tuple[float, ...]) -> ExitCalibration:
        threshold, retention, trimmed_retention, trimmed_share = shares
        return ExitCalibration(*exit_, 0.0, 1.0, weight, threshold, retention, pruned, trimmed_retention, trimmed_share)

    at_exit = calibration(0.0, 1.0, 1.0, 0.0, pruned=(0.0,)).survival(chances, exit_margins)
    by_draft = np.cumprod(chances, axis=1)
    threshold, trim = (float(np.quantile(values[is_accepted], 1.0 - RETENTION)) for values in (at_exit, by_draft))
    stays, enters = at_exit >= threshold, by_draft >= trim
    return calibration(
        threshold,
        float(stays[is_accepted].mean()),
        float(stays[is_accepted & enters].mean()),
        float((~stays)[enters].mean()),
        pruned=tuple((~stays).mean(axis=0).tolist()),
    )
