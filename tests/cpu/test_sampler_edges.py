"""NumpySampler at its edges: ties, extreme values, unusable logits, empty batches, seeds, wide rows."""

from __future__ import annotations

import math

import numpy as np
import pytest

from faser_backend.core.batch import SamplingRows
from faser_backend.core.errors import FaserError
from faser_backend.core.request import Sampling
from faser_backend.cpu.sampler import NumpySampler

NEG_INF = -math.inf


def one_row_each(slots: np.ndarray, positions: np.ndarray | None = None) -> SamplingRows:
    count = slots.size
    where = np.full(count, 3) if positions is None else positions
    return SamplingRows(slots, where, np.arange(count), np.zeros(count, np.int64), np.zeros((count, 0), np.int64))


def single_slot(sampling: Sampling, vocab_size: int = 4, end_ids: tuple[int, ...] = ()) -> NumpySampler:
    sampler = NumpySampler(vocab_size, 2)
    sampler.add(1, sampling, np.array([0, 1, 2]), 3, end_ids)
    return sampler


def draw_one(sampler: NumpySampler, *logits: float) -> int:
    return int(sampler.sample(np.array([logits], np.float32), one_row_each(np.array([1])))[0])


class TestEdges:
    def test_ties_go_to_the_lowest_id(self) -> None:
        assert draw_one(single_slot(Sampling()), 1.0, 5.0, 5.0, 5.0) == 1

    @pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-6])
    def test_tiny_temperatures_are_greedy(self, temperature: float) -> None:
        assert draw_one(single_slot(Sampling(temperature=temperature, seed=3)), 1.0, 1.1, 1.0, 1.0) == 1

    def test_top_k_of_one_is_greedy_even_on_ties(self) -> None:
        sampler = single_slot(Sampling(temperature=1.0, top_k=1, seed=3))
        assert draw_one(sampler, 1.0, 5.0, 5.0, 5.0) == 1
        probs = sampler.probabilities(np.array([[1, 5, 5, 5]], np.float32), one_row_each(np.array([1])))
        assert probs.tolist() == [[0, 1, 0, 0]]

    @pytest.mark.parametrize(
        ("feature", "expected"),
        [({"top_k": 2}, [0, 0.25, 0.25, 0.5]), ({"top_p": 0.6}, [0, 0.25, 0.25, 0.5]), ({"min_p": 1.0}, [0, 0, 0, 1])],
    )
    def test_ties_with_the_last_kept_token_stay(self, feature: dict, expected: list[float]) -> None:
        sampler = single_slot(Sampling(temperature=1.0, **feature))
        logits = np.log(np.array([[0.1, 1.0, 1.0, 2.0]])).astype(np.float32)
        probs = sampler.probabilities(logits, one_row_each(np.array([1])))
        np.testing.assert_allclose(probs, [expected], atol=1e-6)

    def test_wide_nuclei(self) -> None:
        """A flat distribution keeps ceil(p V) tokens, far more than a nucleus usually holds."""
        sampler = single_slot(Sampling(temperature=1.0, top_p=0.8), vocab_size=1000)
        logits = np.linspace(0.0, 1e-3, 1000, dtype=np.float32)[None]
        probs = sampler.probabilities(logits, one_row_each(np.array([1])))
        assert abs(np.count_nonzero(probs) - 800) <= 1
        assert not probs[0, :199].any()

    @pytest.mark.parametrize("extreme", [1e-4, 100.0])
    def test_extreme_values_stay_finite(self, extreme: float) -> None:
        sampling = Sampling(
            temperature=extreme, repetition_penalty=1e-300, logit_bias={0: 1e308, 1: -1e308}, frequency_penalty=-100.0
        )
        assert draw_one(single_slot(sampling), 1.0, 2.0, -3.0, 4.0) == 0

    @pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7), Sampling(top_k=2)])
    def test_huge_and_forbidden_logits(self, sampling: Sampling) -> None:
        assert draw_one(single_slot(sampling), NEG_INF, 1e30, NEG_INF, -1e30) == 1

    def test_everything_forbidden_falls_back_to_the_raw_logits(self) -> None:
        sampling = Sampling(logit_bias={0: NEG_INF, 1: NEG_INF, 2: NEG_INF}, bad_words=((3,),))
        assert draw_one(single_slot(sampling), 1.0, 2.0, 9.0, 3.0) == 2

    @pytest.mark.parametrize(
        "sampling",
        [
            Sampling(),
            Sampling(temperature=0.7),
            Sampling(temperature=0.7, top_k=2),
            Sampling(temperature=0.7, top_p=0.5),
            Sampling(temperature=0.7, min_p=0.5),
            Sampling(repetition_penalty=1.5),
            Sampling(min_tokens=9),
        ],
    )
    @pytest.mark.parametrize(("value", "name"), [(math.nan, "NaN"), (math.inf, r"\+inf"), (NEG_INF, "only -inf")])
    def test_unusable_logits_are_an_error(self, sampling: Sampling, value: float, name: str) -> None:
        sampler = single_slot(sampling, end_ids=(0,))
        sampler.add(0, Sampling(temperature=0.5), np.array([1]), 1, ())
        logits = np.zeros((3, 4), np.float32)
        logits[2] = value if value == NEG_INF else [0.0, 9.0, value, 1.0]
        rows = one_row_each(np.array([0, 0, 1]))
        with pytest.raises(FaserError, match=rf"row 2 \(slot 1, position 3\) hold {name}"):
            sampler.sample(logits, rows)
        with pytest.raises(FaserError, match=rf"row 2 .* hold {name}"):
            sampler.probabilities(logits, rows)

    def test_no_rows(self) -> None:
        for sampling in (Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.5)):
            sampler = single_slot(sampling)
            rows = one_row_each(np.zeros(0, np.int64))
            assert sampler.sample(np.zeros((0, 4), np.float32), rows).shape == (0,)
            assert sampler.probabilities(np.zeros((0, 4), np.float32), rows).shape == (0, 4)

    def test_slots_are_added_once_and_removed_once(self) -> None:
        sampler = single_slot(Sampling())
        with pytest.raises(ValueError, match="slot 1 is in use"):
            sampler.add(1, Sampling(), np.array([1]), 1, ())
        sampler.remove(1)
        with pytest.raises(ValueError, match="slot 1 is not in use"):
            sampler.remove(1)

    def test_min_tokens_counts_output_tokens(self) -> None:
        sampler = single_slot(Sampling(min_tokens=2), end_ids=(3,))
        logits = np.array([[0.0, 1.0, 2.0, 9.0]], np.float32)
        draws = [int(sampler.sample(logits, one_row_each(np.array([1]), np.array([p])))[0]) for p in (3, 4, 5)]
        assert draws == [2, 2, 3]


def test_log_probs_are_those_of_the_raw_logits() -> None:
    sampler = single_slot(Sampling(temperature=3.0, logit_bias={0: 50.0}), vocab_size=100)
    logits = np.random.default_rng(3).normal(0, 30, (20, 100)).astype(np.float32)
    token_ids = np.arange(20)
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(sampler.log_probs(logits, token_ids), exact[token_ids, token_ids], rtol=1e-5, atol=1e-5)


def test_wide_rows_do_not_depend_on_their_batch() -> None:
    vocab_size = 1001
    rng = np.random.default_rng(0)
    sampler = NumpySampler(vocab_size, 6)
    features = [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.2}, {"temperature": 0.0}]
    for slot, feature in enumerate(features):
        sampler.add(slot, Sampling(**{"temperature": 0.8, "seed": slot, **feature}), np.arange(9), 4, ())
    order = rng.permutation(np.repeat(np.arange(6), 7))
    rows = one_row_each(order, rng.integers(9, 500, order.size))
    logits = rng.normal(0, 2, (order.size, vocab_size)).astype(np.float32)
    together = sampler.sample(logits, rows)
    for row in range(order.size):
        alone = one_row_each(order[row : row + 1], rows.positions[row : row + 1])
        assert sampler.sample(logits[row : row + 1], alone).tolist() == [together[row]]
