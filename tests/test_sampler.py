"""NumpySampler against a slow reference that processes one row at a time in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_backend.core.batch import SamplingRows
from faser_backend.core.errors import FaserError
from faser_backend.core.request import SamplingParams
from faser_backend.device.noise import GumbelNoise
from faser_backend.device.sampler import NumpySampler

VOCAB = 37  # odd, so that rows start at every alignment
NEG_INF = -math.inf


def allowed_logits(
    logits: np.ndarray, sampling: SamplingParams, prefix: list[int], num_prompt: int, end_ids: tuple[int, ...]
) -> list[float]:
    """Logits of one row after penalties, bias, min_tokens and bad words."""
    output = prefix[num_prompt:]
    row = [float(value) for value in logits]
    for token_id in range(len(row)):
        if token_id in prefix:
            factor = sampling.repetition_penalty
            row[token_id] = row[token_id] / factor if row[token_id] > 0 else row[token_id] * factor
        if token_id in output:
            row[token_id] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token_id)
        row[token_id] += (sampling.logit_bias or {}).get(token_id, 0.0)
        if token_id in end_ids and len(output) < sampling.min_tokens:
            row[token_id] = NEG_INF
        for *before, last in sampling.bad_words:
            if last == token_id and prefix[len(prefix) - len(before) :] == before:
                row[token_id] = NEG_INF
    return row if max(row) > NEG_INF else [float(value) for value in logits]


def filtered(row: list[float], sampling: SamplingParams) -> list[float]:
    """Scaled logits of one random row after top-k, top-p and min-p."""
    scaled = [value / sampling.temperature for value in row]
    if sampling.top_k:
        threshold = sorted(scaled, reverse=True)[min(sampling.top_k, len(scaled)) - 1]
        scaled = [value if value >= threshold else NEG_INF for value in scaled]
    if sampling.top_p < 1:
        total = sum(math.exp(value - max(scaled)) for value in scaled)
        before, threshold = 0.0, NEG_INF
        for value in sorted(scaled, reverse=True):
            if before < sampling.top_p:
                threshold = value
            before += math.exp(value - max(scaled)) / total
        scaled = [value if value >= threshold else NEG_INF for value in scaled]
    if sampling.min_p:
        scaled = [value if math.exp(value - max(scaled)) >= sampling.min_p else NEG_INF for value in scaled]
    return scaled


def random_sampling(rng: np.random.Generator) -> SamplingParams:
    """Every feature is on in about a third of the requests; a fifth decode greedily."""

    def maybe(value: float, off: float) -> float:
        return float(value) if rng.random() < 0.35 else off

    words = [tuple(rng.integers(0, VOCAB, rng.integers(1, 4)).tolist()) for _ in range(rng.integers(0, 6))]
    words += [tuple(rng.integers(0, 4, 2).tolist()) for _ in range(4)]  # likely to be completed
    bias = {int(t): float(b) for t, b in zip(rng.integers(0, VOCAB, 4), rng.normal(0, 3, 4), strict=True)}
    return SamplingParams(
        temperature=0.0 if rng.random() < 0.2 else float(rng.uniform(0.2, 2.0)),
        top_k=int(maybe(int(rng.integers(1, 2 * VOCAB)), 0)),
        top_p=maybe(rng.uniform(0.05, 1.0), 1.0),
        min_p=maybe(rng.uniform(0.0, 0.5), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2.0), 1.0),
        presence_penalty=maybe(rng.normal(), 0.0),
        frequency_penalty=maybe(rng.normal(), 0.0),
        min_tokens=int(maybe(int(rng.integers(1, 8)), 0)),
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        logit_bias={**bias, 5: NEG_INF} if rng.random() < 0.3 else None,
        bad_words=tuple(words) if rng.random() < 0.3 else (),
    )


class Scene:
    """A sampler with random slots, and a ragged batch of rows over them."""

    def __init__(self, seed: int, sampling: SamplingParams | None = None) -> None:
        rng = np.random.default_rng(seed)
        num_sequences = int(rng.integers(1, 7))
        self.sampler = NumpySampler(VOCAB, 8)
        self.slots = rng.permutation(8)[:num_sequences]
        self.sampling = [sampling or random_sampling(rng) for _ in range(num_sequences)]
        self.end_ids = [tuple(rng.integers(0, VOCAB, 2).tolist()) for _ in range(num_sequences)]
        self.num_prompt = rng.integers(1, 6, num_sequences)
        # A small alphabet makes repeated tokens and completed bad words common.
        self.committed = [rng.integers(0, 4, n + rng.integers(0, 6)).tolist() for n in self.num_prompt.tolist()]
        for b in range(num_sequences):
            self.add(b, self.num_prompt[b] + int(rng.integers(0, len(self.committed[b]) - self.num_prompt[b] + 1)))
        num_drafted = rng.integers(0, 4, num_sequences)
        self.drafted = rng.integers(0, 4, (num_sequences, int(num_drafted.max())))
        sequence = np.repeat(np.arange(num_sequences), num_drafted + 1)
        offsets = np.concatenate([np.arange(n + 1) for n in num_drafted])
        lengths = np.array([len(tokens) for tokens in self.committed])
        self.rows = SamplingRows(self.slots[sequence], lengths[sequence] + offsets, sequence, offsets, self.drafted)
        self.logits = rng.normal(0, 3, (sequence.size, VOCAB)).astype(np.float32)

    def add(self, b: int, num_at_start: int) -> None:
        """Starts slot b with some tokens and appends the rest in two steps."""
        tokens = self.committed[b]
        self.sampler.add(
            int(self.slots[b]),
            self.sampling[b],
            np.array(tokens[:num_at_start], np.int64),
            int(self.num_prompt[b]),
            self.end_ids[b],
        )
        rest = tokens[num_at_start:]
        self.sampler.append(int(self.slots[b]), rest[:1])
        self.sampler.append(int(self.slots[b]), rest[1:])

    def expected_scores(self, row: int) -> list[float]:
        b = int(self.rows.sequence[row])
        prefix = self.committed[b] + self.drafted[b, : self.rows.num_drafted[row]].tolist()
        assert len(prefix) == self.rows.positions[row]
        scores = allowed_logits(self.logits[row], self.sampling[b], prefix, int(self.num_prompt[b]), self.end_ids[b])
        return scores if self.sampling[b].is_greedy else filtered(scores, self.sampling[b])

    def single(self, row: int) -> SamplingRows:
        one = slice(row, row + 1)
        rows = self.rows
        return SamplingRows(
            rows.slots[one], rows.positions[one], rows.sequence[one], rows.num_drafted[one], rows.drafted
        )


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_probabilities_follow_the_reference(seed: int) -> None:
    scene = Scene(seed)
    probs = scene.sampler.probabilities(scene.logits, scene.rows)
    for row in range(probs.shape[0]):
        scores = np.array(scene.expected_scores(row))
        expected = np.exp(scores - scores.max())
        if scene.sampling[int(scene.rows.sequence[row])].is_greedy:
            expected = (np.arange(VOCAB) == scores.argmax()).astype(float)
        np.testing.assert_allclose(probs[row], expected / expected.sum(), atol=1e-5)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_tokens_follow_the_reference(seed: int) -> None:
    scene = Scene(seed)
    token_ids = scene.sampler.sample(scene.logits, scene.rows)
    source = GumbelNoise(VOCAB)
    for row, token_id in enumerate(token_ids.tolist()):
        scores = np.array(scene.expected_scores(row))
        sampling = scene.sampling[int(scene.rows.sequence[row])]
        if not sampling.is_greedy:
            scores += source.gumbel(np.array([sampling.seed], np.uint64), scene.rows.positions[row : row + 1])[0]
        assert scores[token_id] >= scores.max() - 1e-4  # float32 may turn a near-tie, nothing else


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_rows_do_not_depend_on_their_batch(seed: int) -> None:
    scene = Scene(seed)
    before = scene.logits.copy()
    token_ids = scene.sampler.sample(scene.logits, scene.rows)
    probs = scene.sampler.probabilities(scene.logits, scene.rows)
    log_probs = scene.sampler.log_probs(scene.logits, token_ids)
    for row in range(token_ids.size):
        single, logits = scene.single(row), scene.logits[row : row + 1]
        assert scene.sampler.sample(logits, single).tolist() == [token_ids[row]]
        assert np.array_equal(scene.sampler.probabilities(logits, single)[0], probs[row])
        assert scene.sampler.log_probs(logits, token_ids[row : row + 1]).tolist() == [log_probs[row]]
    assert np.array_equal(scene.logits, before)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_state_survives_preemption(seed: int) -> None:
    """A slot that is removed and added again with its tokens so far draws as before."""
    scene = Scene(seed)
    first = scene.sampler.sample(scene.logits, scene.rows)
    scene.sampler.check_integrity()
    for b in range(len(scene.committed)):
        scene.sampler.remove(int(scene.slots[b]))
        scene.sampler.check_integrity()
        scene.add(b, len(scene.committed[b]))
        scene.sampler.check_integrity()
    assert np.array_equal(scene.sampler.sample(scene.logits, scene.rows), first)


@pytest.mark.parametrize("vocab_size", [2048, 1001])
def test_wide_rows_do_not_depend_on_their_batch(vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    sampler = NumpySampler(vocab_size, 6)
    features = [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.2}, {"temperature": 0.0}]
    for slot, feature in enumerate(features):
        sampler.add(slot, SamplingParams(**{"temperature": 0.8, "seed": slot, **feature}), np.arange(9), 4, ())
    order = rng.permutation(np.repeat(np.arange(6), 7))
    rows = one_row_each(order, rng.integers(9, 500, order.size))
    logits = rng.normal(0, 2, (order.size, vocab_size)).astype(np.float32)
    together = sampler.sample(logits, rows)
    for row in range(order.size):
        alone = one_row_each(order[row : row + 1], rows.positions[row : row + 1])
        assert sampler.sample(logits[row : row + 1], alone).tolist() == [together[row]]


def one_row_each(slots: np.ndarray, positions: np.ndarray | None = None) -> SamplingRows:
    count = slots.size
    where = np.full(count, 3) if positions is None else positions
    return SamplingRows(slots, where, np.arange(count), np.zeros(count, np.int64), np.zeros((count, 0), np.int64))


def single_slot(sampling: SamplingParams, vocab_size: int = 4, end_ids: tuple[int, ...] = ()) -> NumpySampler:
    sampler = NumpySampler(vocab_size, 2)
    sampler.add(1, sampling, np.array([0, 1, 2]), 3, end_ids)
    return sampler


def draw_one(sampler: NumpySampler, *logits: float) -> int:
    return int(sampler.sample(np.array([logits], np.float32), one_row_each(np.array([1])))[0])


class TestEdges:
    def test_ties_go_to_the_lowest_id(self) -> None:
        assert draw_one(single_slot(SamplingParams()), 1.0, 5.0, 5.0, 5.0) == 1

    @pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-6])
    def test_tiny_temperatures_are_greedy(self, temperature: float) -> None:
        assert draw_one(single_slot(SamplingParams(temperature=temperature, seed=3)), 1.0, 1.1, 1.0, 1.0) == 1

    @pytest.mark.parametrize("extreme", [1e-4, 100.0])
    def test_extreme_values_stay_finite(self, extreme: float) -> None:
        sampling = SamplingParams(
            temperature=extreme, repetition_penalty=1e-300, logit_bias={0: 1e308, 1: -1e308}, frequency_penalty=-100.0
        )
        assert draw_one(single_slot(sampling), 1.0, 2.0, -3.0, 4.0) == 0

    @pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.7), SamplingParams(top_k=2)])
    def test_huge_and_forbidden_logits(self, sampling: SamplingParams) -> None:
        assert draw_one(single_slot(sampling), NEG_INF, 1e30, NEG_INF, -1e30) == 1

    def test_everything_forbidden_falls_back_to_the_raw_logits(self) -> None:
        sampling = SamplingParams(logit_bias={0: NEG_INF, 1: NEG_INF, 2: NEG_INF}, bad_words=((3,),))
        assert draw_one(single_slot(sampling), 1.0, 2.0, 9.0, 3.0) == 2

    @pytest.mark.parametrize(
        "sampling",
        [
            SamplingParams(),
            SamplingParams(temperature=0.7),
            SamplingParams(temperature=0.7, top_k=2),
            SamplingParams(temperature=0.7, top_p=0.5),
            SamplingParams(temperature=0.7, min_p=0.5),
            SamplingParams(repetition_penalty=1.5),
            SamplingParams(min_tokens=9),
        ],
    )
    @pytest.mark.parametrize(("value", "name"), [(math.nan, "NaN"), (math.inf, r"\+inf"), (NEG_INF, "only -inf")])
    def test_unusable_logits_are_an_error(self, sampling: SamplingParams, value: float, name: str) -> None:
        sampler = single_slot(sampling, end_ids=(0,))
        sampler.add(0, SamplingParams(temperature=0.5), np.array([1]), 1, ())
        logits = np.zeros((3, 4), np.float32)
        logits[2] = value if value == NEG_INF else [0.0, 9.0, value, 1.0]
        rows = one_row_each(np.array([0, 0, 1]))
        with pytest.raises(FaserError, match=rf"row 2 \(slot 1, position 3\) hold {name}"):
            sampler.sample(logits, rows)
        with pytest.raises(FaserError, match=rf"row 2 .* hold {name}"):
            sampler.probabilities(logits, rows)

    def test_no_rows(self) -> None:
        for sampling in (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.5)):
            sampler = single_slot(sampling)
            rows = one_row_each(np.zeros(0, np.int64))
            assert sampler.sample(np.zeros((0, 4), np.float32), rows).shape == (0,)
            assert sampler.probabilities(np.zeros((0, 4), np.float32), rows).shape == (0, 4)

    def test_slots_are_added_once_and_removed_once(self) -> None:
        sampler = single_slot(SamplingParams())
        with pytest.raises(ValueError, match="slot 1 is in use"):
            sampler.add(1, SamplingParams(), np.array([1]), 1, ())
        sampler.remove(1)
        with pytest.raises(ValueError, match="slot 1 is not in use"):
            sampler.remove(1)

    def test_min_tokens_counts_output_tokens(self) -> None:
        sampler = single_slot(SamplingParams(min_tokens=2), end_ids=(3,))
        logits = np.array([[0.0, 1.0, 2.0, 9.0]], np.float32)
        draws = [int(sampler.sample(logits, one_row_each(np.array([1]), np.array([p])))[0]) for p in (3, 4, 5)]
        assert draws == [2, 2, 3]


class TestNoise:
    def test_seeds_reproduce_and_differ(self) -> None:
        sampler = NumpySampler(64, 4)
        for slot, seed in enumerate((7, 7, 8, 2**64 - 1)):
            sampler.add(slot, SamplingParams(temperature=1.0, seed=seed), np.array([1]), 1, ())
        positions = np.arange(1, 200)
        draws = [
            sampler.sample(np.zeros((199, 64), np.float32), one_row_each(np.full(199, slot), positions))
            for slot in range(4)
        ]
        assert np.array_equal(draws[0], draws[1])
        assert (draws[0] == draws[2]).mean() < 0.1 and (draws[0] == draws[3]).mean() < 0.1
        assert np.unique(draws[0]).size > 50

    def test_uniforms_are_keyed_by_seed_position_purpose_and_round(self) -> None:
        sampler = NumpySampler(8, 2)
        sampler.add(0, SamplingParams(seed=1), np.array([1]), 1, ())
        sampler.add(1, SamplingParams(seed=2), np.array([1]), 1, ())
        rows = one_row_each(np.array([0, 0, 1]), np.array([4, 5, 4]))
        values = [sampler.uniforms(rows, purpose, np.full(3, r)) for purpose in (0, 1) for r in (0, 1)]
        assert np.unique(np.concatenate(values)).size == 12
        assert np.array_equal(values[0], sampler.uniforms(rows, 0, np.zeros(3, np.int64)))


def test_log_probs_are_those_of_the_raw_logits() -> None:
    sampler = single_slot(SamplingParams(temperature=3.0, logit_bias={0: 50.0}), vocab_size=100)
    logits = np.random.default_rng(3).normal(0, 30, (20, 100)).astype(np.float32)
    token_ids = np.arange(20)
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(sampler.log_probs(logits, token_ids), exact[token_ids, token_ids], rtol=1e-5, atol=1e-5)
