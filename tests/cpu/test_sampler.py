"""NumpySampler against a slow reference in plain Python, at edge cases, and while drafting."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_backend.core.batch import SamplingRows
from faser_backend.core.ports import NO_TOKEN
from faser_backend.core.request import Sampling
from faser_backend.cpu.logit_rules import LogitRules
from faser_backend.cpu.noise import GumbelNoise, seed_keys
from faser_backend.cpu.sampler import MAX_MARGIN, NumpySampler

VOCAB = 37  # odd, so that rows start at every alignment
NEG_INF = -math.inf


def allowed_logits(
    logits: np.ndarray, sampling: Sampling, prefix: list[int], num_prompt: int, end_ids: tuple[int, ...]
) -> list[float]:
    """Returns one row's logits after penalties, bias, min_tokens and bad words."""
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


def filtered(row: list[float], sampling: Sampling) -> list[float]:
    """Returns scaled logits of one random row after top-k, top-p and min-p."""
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


def random_sampling(rng: np.random.Generator) -> Sampling:
    """Draws a request: every feature is on in about a third of them; a fifth decode greedily."""

    def maybe(value: float, off: float) -> float:
        return float(value) if rng.random() < 0.35 else off

    words = [tuple(rng.integers(0, VOCAB, rng.integers(1, 4)).tolist()) for _ in range(rng.integers(0, 6))]
    words += [tuple(rng.integers(0, 4, 2).tolist()) for _ in range(4)]  # likely to be completed
    bias = {int(t): float(b) for t, b in zip(rng.integers(0, VOCAB, 4), rng.normal(0, 3, 4), strict=True)}
    return Sampling(
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

    def __init__(self, seed: int, sampling: Sampling | None = None) -> None:
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


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_rows_do_not_depend_on_their_batch(seed: int) -> None:
    scene = Scene(seed)
    before = scene.logits.copy()
    token_ids = scene.sampler.sample(scene.logits, scene.rows)
    probs = scene.sampler.probabilities(scene.logits, scene.rows)
    log_probs = scene.sampler.log_probs(scene.logits, token_ids)
    drawn = scene.sampler.sample_draft(scene.logits, scene.rows, 4)
    for row in range(token_ids.size):
        single, logits = scene.single(row), scene.logits[row : row + 1]
        assert scene.sampler.sample(logits, single).tolist() == [token_ids[row]]
        assert np.array_equal(scene.sampler.probabilities(logits, single)[0], probs[row])
        assert scene.sampler.log_probs(logits, token_ids[row : row + 1]).tolist() == [log_probs[row]]
        alone = scene.sampler.sample_draft(logits, single, 4)
        assert alone.margins[0] == drawn.margins[row] and alone.tokens[0] == drawn.tokens[row]
        assert np.array_equal(np.array(alone.candidates)[0], np.array(drawn.candidates)[row])
    assert np.array_equal(scene.logits, before)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_state_survives_preemption(seed: int) -> None:
    """A slot that is removed and added again with its tokens draws as before."""
    scene = Scene(seed)
    first = scene.sampler.sample(scene.logits, scene.rows)
    scene.sampler.check_integrity()
    for b in range(len(scene.committed)):
        scene.sampler.remove(int(scene.slots[b]))
        scene.sampler.check_integrity()
        scene.add(b, len(scene.committed[b]))
        scene.sampler.check_integrity()
    assert np.array_equal(scene.sampler.sample(scene.logits, scene.rows), first)


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
        """A flat distribution keeps ceil(p V) tokens, far more than usual."""
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

    def test_a_bias_of_a_whole_vocabulary_takes_little_of_a_steps_thread(self) -> None:
        rules, sampling = LogitRules(150_000), Sampling(logit_bias=dict.fromkeys(range(150_000), 0.5))
        begin_s = time.thread_time()
        rules.add(0, sampling, np.array([0, 1, 2]), 3, ())
        assert time.thread_time() - begin_s < 0.15

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
    @pytest.mark.parametrize("value", [math.nan, math.inf, NEG_INF])
    def test_unusable_logits_give_no_token_in_their_row_alone(self, sampling: Sampling, value: float) -> None:
        sampler = single_slot(sampling, end_ids=(2,))
        sampler.add(0, Sampling(temperature=0.5), np.array([1]), 1, ())
        logits = np.zeros((3, 4), np.float32)
        rows = one_row_each(np.array([0, 1, 1]))
        tokens, probs = sampler.sample(logits, rows), sampler.probabilities(logits, rows)
        logits[2] = value if value == NEG_INF else [0.0, 9.0, value, 1.0]
        assert sampler.sample(logits, rows).tolist() == [*tokens[:2], NO_TOKEN]
        assert np.array_equal(sampler.probabilities(logits, rows), [*probs[:2], [0, 0, 0, 0]])

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


def test_log_probs_are_those_of_the_raw_logits() -> None:
    sampler = single_slot(Sampling(temperature=3.0, logit_bias={0: 50.0}), vocab_size=100)
    logits = np.random.default_rng(3).normal(0, 30, (20, 100)).astype(np.float32)
    token_ids = np.arange(20)
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(sampler.log_probs(logits, token_ids), exact[token_ids, token_ids], rtol=1e-5, atol=1e-5)


def scene_of(seed: int) -> Scene:
    """Returns a scene in which the reference gets requests with top_k = 1 as greedy ones."""
    scene = Scene(seed)
    scene.sampling = [replace(s, temperature=0.0) if s.top_k == 1 else s for s in scene.sampling]
    return scene


def temperature_of(scene: Scene, row: int) -> float:
    sampling = scene.sampling[int(scene.rows.sequence[row])]
    return 1.0 if sampling.is_greedy else sampling.temperature


def gumbel_row(scene: Scene, row: int) -> np.ndarray:
    """Returns the row's noise [VOCAB], zero where greedy."""
    sampling = scene.sampling[int(scene.rows.sequence[row])]
    if sampling.is_greedy:
        return np.zeros(VOCAB)
    keys = seed_keys(np.array([sampling.seed], np.uint64))
    return -GumbelNoise(VOCAB).log_exponentials(keys, scene.rows.positions[row : row + 1])[0].astype(np.float64)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, VOCAB))
def test_tokens_margins_and_candidates_follow_the_reference(seed: int, num_candidates: int) -> None:
    scene = scene_of(seed)
    before = scene.logits.tobytes()
    drawn = scene.sampler.sample_draft(scene.logits, scene.rows, num_candidates)
    assert scene.logits.tobytes() == before
    assert np.array_equal(drawn.tokens, scene.sampler.sample(scene.logits, scene.rows))
    assert drawn.margins.dtype == np.float32 and (drawn.margins >= 0).all()
    for row, token in enumerate(drawn.tokens.tolist()):
        scores = np.array(scene.expected_scores(row)) + gumbel_row(scene, row)
        best, second = np.sort(scores)[:-3:-1]
        expected = MAX_MARGIN if second == -math.inf else temperature_of(scene, row) * (best - second)
        assert drawn.margins[row] == pytest.approx(expected, abs=1e-3)
        if drawn.candidates is None:
            assert num_candidates == 0
            continue
        named = drawn.candidates[row]
        assert named.shape == (num_candidates,) and named[0] == token and np.unique(named).size == named.size
        np.testing.assert_allclose(scores[named], np.sort(scores)[::-1][:num_candidates], atol=1e-3)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 6))
def test_candidate_margins_follow_the_reference(seed: int, num_candidates: int) -> None:
    """Scores are raw logits: only the noise is weighed with the temperature."""
    scene = scene_of(seed)
    rng = np.random.default_rng(seed)
    num_rows = scene.rows.slots.size
    candidates = np.array([rng.permutation(VOCAB)[:num_candidates] for _ in range(num_rows)])
    scores = np.take_along_axis(scene.logits, candidates, axis=1)
    before = scores.tobytes()
    leads = scene.sampler.candidate_margins(scores, candidates, scene.rows, with_noise=True)
    assert scores.tobytes() == before and leads.dtype == np.float32
    for row in range(num_rows):
        temperature = temperature_of(scene, row)
        noisy = [
            float(scores[row, column]) + temperature * gumbel_row(scene, row)[token]
            for column, token in enumerate(candidates[row].tolist())
        ]
        assert leads[row] == pytest.approx(noisy[0] - max(noisy[1:]), abs=1e-4)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7), Sampling(temperature=0.7, top_k=2)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("num_candidates", [0, 3])
def test_unusable_logits_give_a_draft_without_margin_and_stay_as_they_were(
    sampling: Sampling, value: float, num_candidates: int
) -> None:
    sampler = single_slot(sampling)
    logits = np.full((2, 4), value, np.float32)
    logits[0] = 1.0, 2.0, 3.0, 4.0
    before = logits.tobytes()
    drawn = sampler.sample_draft(logits, one_row_each(np.array([1, 1])), num_candidates)
    assert logits.tobytes() == before and 0 <= drawn.tokens[1] < 4 and drawn.margins[0] > drawn.margins[1] == 0


def test_a_token_without_rivals() -> None:
    """Candidates are distinct and margins finite even if all but one token are forbidden."""
    logits = np.array([[-np.inf, 3.0, -np.inf, -np.inf], [1e30, -1e30, -np.inf, 1e38]], np.float32)
    for sampling in (Sampling(), Sampling(temperature=0.5, seed=2)):
        drawn = single_slot(sampling).sample_draft(logits, one_row_each(np.array([1, 1])), 4)
        assert drawn.candidates is not None
        assert drawn.candidates.tolist() == [[1, 0, 2, 3], [3, 0, 1, 2]]
        assert drawn.margins.tolist() == [MAX_MARGIN, MAX_MARGIN]


def test_ties_have_no_margin_and_go_to_the_lowest_ids() -> None:
    drawn = single_slot(Sampling()).sample_draft(np.zeros((1, 4), np.float32), one_row_each(np.array([1])), 3)
    assert drawn.candidates is not None
    assert drawn.candidates.tolist() == [[0, 1, 2]] and drawn.margins.tolist() == [0.0]


def test_drafting_and_scoring_at_the_same_time_change_nothing() -> None:
    """As in an overlapped step: one lane draws while the other computes margins."""
    scenes = [Scene(seed) for seed in range(12)]
    rng = np.random.default_rng(0)
    asked = [rng.integers(0, VOCAB, (scene.rows.slots.size, 4)) for scene in scenes]

    def draft() -> list:
        return [scene.sampler.sample_draft(scene.logits.copy(), scene.rows, 3) for _ in range(30) for scene in scenes]

    def score() -> list:
        return [
            scene.sampler.candidate_margins(
                np.take_along_axis(scene.logits, ids, axis=1), ids, scene.rows, with_noise=True
            )
            for _ in range(30)
            for scene, ids in zip(scenes, asked, strict=True)
        ]

    drafted, scored = draft(), score()
    with ThreadPoolExecutor(2) as lanes:
        drafting, scoring = lanes.submit(draft), lanes.submit(score)
        for one, other in zip(drafting.result(), drafted, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
        assert all(np.array_equal(a, b) for a, b in zip(scoring.result(), scored, strict=True))
    for scene in scenes:
        scene.sampler.check_integrity()
