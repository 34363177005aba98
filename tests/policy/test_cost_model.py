"""The cost model: what it promises whatever the coefficients are, and that the fit finds them again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_backend.policy.cost_model import DRAFT, TARGET, WHOLE, CallCost, CostModel, Curve, OverheadCost
from faser_backend.profiling.cost_fit import (
    CallShapes,
    fit_call_cost,
    fit_non_negative,
    fit_overhead,
    non_negative_least_squares,
)
from faser_backend.serving.profile_store import ModelSize, default_cost_model

NO_OVERHEAD = OverheadCost(0.0, 0.0, 0.0, 0.0, 0.0)
TARGET_SIZE = ModelSize((4, 2), 800_000, 500_000)
DRAFT_SIZE = ModelSize((2,), 200_000, 260_000)

amounts = st.floats(0.0, 1e3)


def mean_absolute_percentage_error(predicted: np.ndarray, measured: np.ndarray) -> float:
    return float(np.abs(predicted / measured - 1.0).mean() * 100.0)


@st.composite
def costs(draw: st.DrawFn) -> CallCost:
    """Any cost that fitting or simulation could come up with."""
    curves = [
        Curve.from_slopes(
            np.array(knots, np.float64), draw(amounts), np.array([draw(amounts) for _ in knots], np.float64)
        )
        for knots in ((1, 2, 8, 64), (0, 1024))
    ]
    return CallCost(*curves, *(draw(amounts) for _ in range(4)))


def model_of(*segments: CallCost, key_columns: np.ndarray | None = None) -> CostModel:
    widths = np.zeros(1) if key_columns is None else key_columns
    return CostModel({(TARGET, WHOLE): segments, (DRAFT, WHOLE): segments[:1]}, NO_OVERHEAD, widths, is_measured=True)


def random_shapes(num_calls: int, seed: int) -> CallShapes:
    """Verifications and prompt chunks; letters vary independently, as a grid makes them."""
    rng = np.random.default_rng(seed)
    sequences = rng.integers(1, 33, num_calls)
    longest = rng.integers(1, 9, num_calls)
    rows = np.array([b + rng.integers(0, b * (q - 1) + 1) for b, q in zip(sequences, longest, strict=True)])
    logit_rows = np.where(rng.random(num_calls) < 0.3, 0, rows)
    return CallShapes(
        *(a.astype(np.float64) for a in (rows, sequences, longest, rng.integers(16, 513, num_calls), logit_rows))
    )


@given(cost=costs(), rows=st.integers(1, 400), sequences=st.integers(1, 64), context=st.integers(0, 4000))
def test_more_rows_or_context_never_look_cheaper(cost: CallCost, rows: int, sequences: int, context: int) -> None:
    widths = np.array([-(-n // 32) * 32 for n in range(513)], np.float64)
    model = model_of(cost, key_columns=widths)
    more_rows = model.call_us(TARGET, WHOLE, np.arange(rows, rows + 40) + sequences, sequences, context)
    more_context = model.call_us(TARGET, WHOLE, rows + sequences, sequences, np.arange(context, context + 40))
    for predicted in (more_rows, more_context):
        assert np.isfinite(predicted).all() and (predicted >= 0).all()
        assert (np.diff(predicted) >= -1e-9 * predicted[1:]).all()


@given(cost=costs())
def test_far_outside_the_measured_range_the_last_slope_goes_on(cost: CallCost) -> None:
    model = model_of(cost)
    near, far, further = model.call_us(TARGET, WHOLE, np.array([10_000, 20_000, 40_000]), 1, 0, max_rows=1)
    assert further - far == pytest.approx(2 * (far - near), rel=1e-6, abs=1e-3)
    assert far - near == pytest.approx(
        10_000 * (cost.rows(np.array([65.0])) - cost.rows(np.array([64.0])) + cost.logit_row_us), abs=1e-3
    )


@given(parts=st.lists(costs(), min_size=3, max_size=3), rows=st.integers(1, 200))
def test_a_range_of_segments_costs_what_its_segments_cost(parts: list[CallCost], rows: int) -> None:
    model = model_of(*parts)
    alone = [model.call_us(TARGET, WHOLE, rows, 1, 64, first_segment=i, last_segment=i + 1) for i in range(3)]
    assert model.call_us(TARGET, WHOLE, rows, 1, 64) == pytest.approx(sum(alone))
    assert model.call_us(TARGET, WHOLE, rows, 1, 64, first_segment=1) == pytest.approx(alone[1] + alone[2])


def test_ragged_calls_pay_for_their_longest_sequence_and_logits_for_themselves() -> None:
    flat = Curve(np.array([0.0, 1.0]), np.array([10.0, 10.0]))
    model = model_of(CallCost(flat, flat, sequence_us=1.0, cell_us=2.0, cell_key_us=0.5, logit_row_us=3.0))
    predicted = model.call_us(TARGET, WHOLE, 6, 2, 4, max_rows=5, num_logit_rows=1)
    assert predicted == pytest.approx(10 + 10 + 2 * 1 + 10 * (2 + 0.5 * 9) + 3)
    uniform = model.call_us(TARGET, WHOLE, np.array([6, 6]), np.array([2, 2]), 4)
    np.testing.assert_allclose(uniform, 20 + 2 * 1 + 6 * (2 + 0.5 * 7) + 18)


def test_candidates_are_predicted_as_they_are_alone() -> None:
    model = default_cost_model(TARGET_SIZE, DRAFT_SIZE)
    rows, sequences = np.arange(8, 72), np.full(64, 8)
    together = model.call_us(TARGET, WHOLE, rows, sequences, 200)
    alone = [float(model.call_us(TARGET, WHOLE, int(n), 8, 200)) for n in rows]
    np.testing.assert_allclose(together, alone)


def test_the_default_is_cautious_and_knows_no_splits() -> None:
    model = default_cost_model(TARGET_SIZE, DRAFT_SIZE)
    assert not model.is_measured and model.partitions == (WHOLE,) and len(model.segments[TARGET, WHOLE]) == 2
    one, many = model.call_us(TARGET, WHOLE, np.array([8, 40]), 8, 128)
    assert many > 2 * one, "five rows a sequence must not look nearly free"
    assert model.call_us(DRAFT, WHOLE, 1, 1, 128) < model.call_us(TARGET, WHOLE, 1, 1, 128) / 2
    assert model.overhead.step(8, 40) > model.overhead.step(1, 1) > 0 and model.overhead.draft_call(1) > 0


def test_what_is_not_there_is_named() -> None:
    model = default_cost_model(TARGET_SIZE, DRAFT_SIZE)
    with pytest.raises(ValueError, match="on '1/1': unknown"):
        model.call_us(TARGET, "1/1", 1, 1, 1)
    with pytest.raises(ValueError, match="segment 2 of 'target'"):
        model.call_us(TARGET, WHOLE, 1, 1, 1, first_segment=2)


def hidden_cost(shapes: CallShapes) -> np.ndarray:
    """A machine: a fixed cost, cheap first rows, tiles of 8, gathering that leaves the cache, attention, a head."""
    keys = shapes.num_sequences * shapes.columns
    cells = shapes.num_sequences * shapes.max_rows
    return (
        700
        + 40 * shapes.num_rows
        + 300 * (shapes.num_rows > 8)
        + 60 * np.maximum(shapes.num_rows - 16, 0)
        + 0.2 * keys
        + 0.5 * np.maximum(keys - 4096, 0)
        + 0.05 * cells * shapes.columns
        + 12 * shapes.num_logit_rows
    )


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_fit_predicts_calls_that_it_never_saw(noise: float) -> None:
    shapes, held_out = random_shapes(80, 1), random_shapes(40, 2)
    measured = hidden_cost(shapes) * np.random.default_rng(3).lognormal(0.0, noise, 80)
    model = model_of(fit_call_cost(shapes, measured))
    predicted = predict(model, held_out)
    assert mean_absolute_percentage_error(predicted, hidden_cost(held_out)) < (0.5 if noise == 0.0 else 5.0)


def test_disturbed_measurements_do_not_pull_the_fit_away() -> None:
    shapes, held_out = random_shapes(80, 1), random_shapes(40, 2)
    measured = hidden_cost(shapes)
    measured[::10] *= 4.0
    predicted = predict(model_of(fit_call_cost(shapes, measured)), held_out)
    assert mean_absolute_percentage_error(predicted, hidden_cost(held_out)) < 5.0


def test_one_measured_call_is_enough_for_a_fit_of_one_number() -> None:
    cost = fit_call_cost(random_shapes(1, 0), np.array([500.0]))
    assert predict(model_of(cost), random_shapes(1, 0)) == pytest.approx([500.0])


def test_overhead_is_found_again() -> None:
    sequences, lengths = np.array([1.0, 8, 32] * 3), np.repeat([1.0, 3, 6], 3)
    step_us = 150 + 6 * sequences + 4 * sequences * (lengths + 1)
    calls_us = lengths * (100 + 10 * sequences)
    draft_us = calls_us + lengths * (40 + 5 * sequences) + 90 + 3 * sequences
    found = fit_overhead(sequences, lengths, step_us, draft_us, calls_us)
    assert found.step(8, 40) == pytest.approx(150 + 48 + 160, rel=1e-3)
    assert found.draft_call(16) == pytest.approx(120, rel=1e-3)
    assert found.draft_round(16) == pytest.approx(138, rel=1e-3)
    overrated = fit_overhead(sequences, lengths, step_us, draft_us, 2 * draft_us)
    assert overrated.draft_call(16) == overrated.draft_round(16) == 0.0, "never below nothing"


@given(seed=st.integers(0, 10_000), num_rows=st.integers(1, 30), num_features=st.integers(1, 12))
def test_least_squares_meets_the_conditions_of_an_optimum(seed: int, num_rows: int, num_features: int) -> None:
    rng = np.random.default_rng(seed)
    matrix, goal = rng.standard_normal((num_rows, num_features)), rng.standard_normal(num_rows)
    x = non_negative_least_squares(matrix, goal)
    gradient = matrix.T @ (goal - matrix @ x)
    assert (x >= 0).all()
    assert (gradient <= 1e-6).all(), "no weight that grows would bring the goal nearer"
    assert np.abs(gradient[x > 0]).max(initial=0.0) <= 1e-6, "nor would one that shrinks"


def test_features_that_never_occur_get_no_weight() -> None:
    features = np.array([[1.0, 0.0], [2.0, 0.0]])
    np.testing.assert_allclose(fit_non_negative(features, np.array([3.0, 6.0])), [3.0, 0.0])


def predict(model: CostModel, shapes: CallShapes) -> np.ndarray:
    return model.call_us(
        TARGET,
        WHOLE,
        shapes.num_rows,
        shapes.num_sequences,
        shapes.columns - shapes.max_rows,
        max_rows=shapes.max_rows,
        num_logit_rows=shapes.num_logit_rows,
    )
