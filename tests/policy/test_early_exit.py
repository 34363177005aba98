"""Early exit: its fit, what is pruned, that tokens stay the same whatever comes later, and when it pays."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from faser_backend.core.decision import WHOLE, ExitView, PipelineMode, Pruner, Score
from faser_backend.core.frontier import Frontier
from faser_backend.policy.calibration import KINDS, MarginCounts, MarginCurve, MatchCalibration
from faser_backend.policy.cost_model import DRAFT, TARGET, CallCost, CostModel, Curve, OverheadCost
from faser_backend.policy.early_exit import EarlyExit, ExitCalibration, best_exit, logits, predicted_saving_us, sigmoid
from faser_backend.profiling.calibration import RETENTION, Chains, fit, fit_logistic, threshold_for
from tests.policy.test_calibration import true_chance

CURVE = MatchCalibration(None).curve


def calibration(**changes: Any) -> ExitCalibration:
    shares = {"pruned_shares": (0.1, 0.4, 0.6), "trimmed_retention": 0.99, "trimmed_pruned_share": 0.05}
    fields: dict[str, Any] = {"bias": -0.2, "chance_weight": 0.9, "margin_weight": 0.3, "threshold": 0.3, **shares}
    return ExitCalibration(**{"segment": 0, "layer": 2, "retention": 0.95, **fields, **changes})


def random_view(seed: int, size: int = 40, width: int = 6) -> ExitView:
    rng = np.random.default_rng(seed)
    num_drafted = rng.integers(0, width + 1, size)
    frontier = Frontier(
        rng.integers(0, 50, (size, width)),
        num_drafted,
        rng.integers(1, num_drafted + 2),
        margins=rng.exponential(3.0, (size, width)).astype(np.float32),
    )
    exit_margins = rng.normal(1.0, 3.0, (size, width)).astype(np.float32)
    return ExitView(
        0, exit_margins, frontier, rng.integers(1, frontier.num_rows + 1), np.arange(len(frontier.num_rows))
    )


def kept_by_the_book(view: ExitView, exit_: ExitCalibration, curve: MarginCurve) -> list[int]:
    """The rule, token after token."""
    assert view.frontier.margins is not None
    kept = []
    for b, num_rows in enumerate(view.num_rows.tolist()):
        survival, row = 1.0, 1
        while row < num_rows:
            chance = float(curve.chances(view.frontier.margins[b, row - 1]))
            score = exit_.bias + exit_.chance_weight * math.log(chance / (1 - chance))
            score += exit_.margin_weight * float(view.exit_margins[b, row - 1])
            survival /= 1.0 + math.exp(-score)
            if survival < exit_.threshold:
                break
            row += 1
        kept.append(row)
    return kept


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.4, 0.9])
def test_rows_are_kept_while_the_survival_reaches_the_threshold(seed: int, threshold: float) -> None:
    view, exit_ = random_view(seed), calibration(threshold=threshold)
    kept = EarlyExit((exit_,), CURVE).keep(view)
    assert kept.tolist() == kept_by_the_book(view, exit_, CURVE)
    assert (kept >= 1).all() and (kept <= view.num_rows).all()
    assert threshold > 0 or (kept == view.num_rows).all()
    assert threshold < 0.5 or (kept < view.num_rows).any(), "the case prunes nothing"


class LooksAhead:
    """A pruner that breaks the rule: row j judged by draft token j + 1, which it does not process."""

    num_candidates = 8
    exits = frozenset([0])

    def keep(self, view: ExitView) -> np.ndarray:
        ahead = np.roll(view.exit_margins, -1, axis=1)
        frontier = replace(view.frontier, margins=np.roll(view.frontier.margins, -1, axis=1))
        return EarlyExit((calibration(),), CURVE).keep(replace(view, exit_margins=ahead, frontier=frontier))


def is_a_stopping_time(pruner: Pruner, seed: int) -> bool:
    """Whether rows 0..first stay as they were when everything from entry `first` on is another."""
    view = random_view(seed)
    before = pruner.keep(view)
    rng = np.random.default_rng(seed + 100)
    width = view.exit_margins.shape[1]
    for first in range(width):
        order = np.append(np.arange(first), first + rng.permutation(width - first))
        for poison in (None, np.nan, np.inf, -1e30):
            exit_margins, margins = view.exit_margins[:, order].copy(), view.frontier.margins[:, order].copy()
            if poison is not None:
                exit_margins[:, first:] = poison
                margins[:, first:] = poison
            frontier = replace(view.frontier, margins=margins, drafted=view.frontier.drafted[:, order])
            with np.errstate(invalid="ignore"):
                after = pruner.keep(replace(view, exit_margins=exit_margins, frontier=frontier))
            if (np.minimum(before, first + 1) != np.minimum(after, first + 1)).any():
                return False
    return True


@pytest.mark.parametrize("seed", range(3))
def test_later_entries_have_no_say(seed: int) -> None:
    assert is_a_stopping_time(EarlyExit((calibration(),), CURVE), seed)
    assert not is_a_stopping_time(LooksAhead(), seed)


def test_each_exit_has_weights_of_its_own() -> None:
    lenient, strict = calibration(segment=0, threshold=0.0), calibration(segment=1, threshold=1.0)
    pruner = EarlyExit((lenient, strict), CURVE)
    view = random_view(0)
    assert pruner.exits == {0, 1}
    assert (pruner.keep(view) == view.num_rows).all()
    assert (pruner.keep(replace(view, segment=1)) == 1).all()


def test_an_empty_frontier_keeps_its_anchors() -> None:
    frontier = replace(Frontier.empty(3), margins=np.zeros((3, 0), np.float32))
    view = ExitView(0, np.zeros((3, 0), np.float32), frontier, frontier.num_rows, np.arange(3))
    assert EarlyExit((calibration(),), CURVE).keep(view).tolist() == [1, 1, 1]


# -- when it pays -----------------------------------------------------------------------------------------


def costs_of(row_us: float, *, exit_us: float = 0.0, exit_row_us: float = 0.0, step_row_us: float = 0.0) -> CostModel:
    """Three segments that cost row_us a row each, and nothing else."""
    flat = Curve.from_slopes(np.zeros(1), 0.0, np.zeros(1))
    segment = CallCost(Curve.from_slopes(np.zeros(1), 0.0, np.array([row_us])), flat)
    overhead = OverheadCost(0.0, 0.0, step_row_us, 0.0, 0.0, exit_us, exit_row_us)
    segments = {(TARGET, WHOLE): (segment,) * 3, (DRAFT, WHOLE): (segment,)}
    return CostModel(segments, overhead, np.zeros(1), is_measured=True)


SCORE = Score(PipelineMode.SERIAL, WHOLE, 3, 0.0, num_rows=24, num_accepted=12.0, num_tokens=20.0, step_us=2000.0)
BATCH = 8, 50  # sequences and their context


def test_the_saving_is_what_deeper_layers_cost_less_what_is_lost_and_paid() -> None:
    exit_ = calibration()
    num_pruned = (0.1 + 0.4 + 0.6) / 3 * 24
    costs = costs_of(10.0, exit_us=70.0, exit_row_us=2.0, step_row_us=3.0)
    lost_us = 0.05 * 12.0 / 0.01
    expected = num_pruned * (2 * 10.0 + 3.0) - lost_us - (70.0 + 2.0 * 32)
    assert predicted_saving_us(costs, exit_, SCORE, *BATCH) == pytest.approx(expected)
    deeper = calibration(segment=1)
    assert predicted_saving_us(costs, deeper, SCORE, *BATCH) == pytest.approx(expected - num_pruned * 10.0)
    trimmed = 0.05 * 24 * 23.0 - 0.01 * 12.0 / 0.01 - (70.0 + 2.0 * 32)
    assert predicted_saving_us(costs, exit_, SCORE._replace(floor=0.1), *BATCH) == pytest.approx(trimmed)


def test_an_exit_without_rows_to_prune_saves_nothing_and_costs_nothing() -> None:
    assert predicted_saving_us(costs_of(10.0, exit_us=70.0), calibration(), SCORE._replace(num_rows=0), *BATCH) == 0.0


def test_the_best_exit_is_the_one_that_saves_most_and_none_where_none_does() -> None:
    shallow, deep = calibration(), calibration(segment=1, layer=4)
    blind = calibration(segment=0, pruned_shares=(0.0,))
    costs = costs_of(10.0, exit_us=5.0)
    assert best_exit(costs, (deep, shallow), SCORE, *BATCH) is shallow
    assert best_exit(costs, (blind, deep), SCORE, *BATCH) is deep
    assert best_exit(costs, (blind,), SCORE, *BATCH) is None
    assert best_exit(costs, (), SCORE, *BATCH) is None
    assert best_exit(costs_of(10.0, exit_us=1e4), (shallow, deep), SCORE, *BATCH) is None


@pytest.mark.parametrize(
    ("num_rows", "share"), [(0.5, 0.1), (1.0, 0.1), (2.0, 0.25), (2.5, (0.1 + 0.4 + 0.3) / 2.5), (5.0, 2.3 / 5)]
)
def test_the_share_of_pruned_rows_follows_the_length_of_chains(num_rows: float, share: float) -> None:
    assert calibration().pruned_share(num_rows) == pytest.approx(share)


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
