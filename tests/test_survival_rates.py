"""How far chains survive, and which lengths keep what they promise: what the controller learns beside the profile."""

from __future__ import annotations

import numpy as np
import pytest
from faser_backend.policy.corrections import ALIKE, LengthTimes
from faser_backend.policy.survival_rates import MEMORY_TESTS, REFRESH_TESTS, SurvivalRates

LEVEL = 3


def observe(rates: SurvivalRates, num_accepted: np.ndarray, length: int, chance: float, **options: bool) -> None:
    """A step in which every sequence drafted `length` tokens."""
    rates.observe(num_accepted.tolist(), [length] * num_accepted.size, chance, **options)


def chains(rng: np.random.Generator, rates: list[float], num: int) -> np.ndarray:
    """[num] accepted tokens of chains whose place i survives with rates[i]."""
    passes = rng.random((num, len(rates))) < rates
    return np.where(passes.all(axis=1), len(rates), passes.argmin(axis=1))


def test_rates_by_place_are_found_and_a_place_that_nobody_tried_leans_on_the_one_before():
    rng, truth = np.random.default_rng(0), [0.6, 0.7, 0.85]
    rates = SurvivalRates(5, 0.5)
    for _ in range(400):
        observe(rates, chains(rng, truth, 16), 3, 0.5)
    expected = np.cumprod([*truth, 0.85, 0.85])
    np.testing.assert_allclose(rates.survival, expected, atol=0.03)
    one_rate = np.cumprod(np.full(3, np.mean(truth)))
    assert np.abs(one_rate - expected[:3]).max() > 0.05, "else places would not matter"


def test_what_was_learned_of_late_places_stays_while_only_early_ones_are_tested():
    rng = np.random.default_rng(1)
    rates = SurvivalRates(4, 0.5)
    for _ in range(100):
        observe(rates, chains(rng, [0.6, 0.6, 0.9, 0.9], 64), 4, 0.5)
    before = rates.survival[3] / rates.survival[1]
    assert before == pytest.approx(0.81, abs=0.05)
    for _ in range(int(2 * MEMORY_TESTS / 64)):
        observe(rates, chains(rng, [0.6], 64), 1, 0.5)
    assert rates.survival[3] / rates.survival[1] == pytest.approx(before, abs=1e-3)


def test_of_trimmed_chains_the_first_token_counts_alone():
    """Later ones were drafted because they looked good."""
    rng, rates = np.random.default_rng(3), SurvivalRates(3, 0.5)
    for _ in range(200):
        observe(rates, chains(rng, [0.8, 1.0, 1.0], 16), 3, 0.5, is_trimmed=True)
    np.testing.assert_allclose(rates.survival, [0.8, 0.64, 0.512], atol=0.05)


def test_rates_follow_the_traffic_and_are_worked_out_again_when_that_is_worth_it():
    rates = SurvivalRates(2, 0.9)
    np.testing.assert_allclose(rates.survival, [0.9, 0.81])
    version = rates.version
    observe(rates, np.zeros(REFRESH_TESTS - 1, np.int64), 2, 0.9)
    assert rates.version == version and rates.survival[0] == pytest.approx(0.9)
    observe(rates, np.zeros(1, np.int64), 2, 0.9)
    assert rates.version > version and rates.survival[0] < 0.4


def test_of_lengths_that_promise_alike_each_is_tried_and_the_one_that_keeps_its_promise_is_taken():
    """The model says 2 is best, by a little; in truth rounds of 2 take 6 % longer than it says."""
    rng = np.random.default_rng(2)
    times, promised = LengthTimes(4), np.array([0.8, 1.0, 0.99, 0.7])
    tried = []
    for _ in range(400):
        length = times.choose(LEVEL, promised)
        tried.append(length)
        us = 1000.0 * (1.06 if length == 2 else 1.0) * float(np.exp(0.05 * rng.standard_normal()))
        times.observe(LEVEL, length, 1000.0, us)
    assert set(tried[:10]) == {2, 3} and set(tried) == {2, 3}
    assert tried[-100:].count(3) > 95
    slowdowns = times.slowdowns(LEVEL)
    assert slowdowns[1] / slowdowns[2] > 1 + ALIKE and slowdowns[0] == slowdowns[3] == 1.0
    assert (times.slowdowns(LEVEL + 1) == 1.0).all() and times.choose(LEVEL + 1, promised) == 2, "another level's"


def test_a_machine_that_is_slow_with_every_length_changes_no_choice():
    times, promised = LengthTimes(2), np.array([1.0, 0.5])
    for _ in range(50):
        times.observe(LEVEL, 1, 100.0, 300.0)
    np.testing.assert_allclose(times.slowdowns(LEVEL), [1.0, 1.0])
    assert times.choose(LEVEL, promised) == 1
    times.observe(LEVEL, 1, 100.0, 1e9)  # one step that the machine lost
    assert times.slowdowns(LEVEL)[0] < 1.05
