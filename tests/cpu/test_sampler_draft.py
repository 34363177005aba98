"""The draft's side of NumpySampler: `sample` with confidence, and leads among candidates, against references."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_backend.core.errors import FaserError
from faser_backend.core.request import Sampling
from faser_backend.cpu.noise import GumbelNoise
from faser_backend.cpu.sampler import MAX_MARGIN, NumpySampler
from tests.cpu.test_sampler import VOCAB, Scene
from tests.cpu.test_sampler_edges import one_row_each, single_slot


def scene_of(seed: int) -> Scene:
    """Requests with top_k = 1 are told to the reference as greedy ones, which they are."""
    scene = Scene(seed)
    scene.sampling = [replace(s, temperature=0.0) if s.top_k == 1 else s for s in scene.sampling]
    return scene


def temperature_of(scene: Scene, row: int) -> float:
    sampling = scene.sampling[int(scene.rows.sequence[row])]
    return 1.0 if sampling.is_greedy else sampling.temperature


def gumbel_row(scene: Scene, row: int) -> np.ndarray:
    """[VOCAB] noise that the row's token is drawn with; zero where greedy."""
    sampling = scene.sampling[int(scene.rows.sequence[row])]
    if sampling.is_greedy:
        return np.zeros(VOCAB)
    seeds = np.array([sampling.seed], np.uint64)
    return GumbelNoise(VOCAB).gumbel(seeds, scene.rows.positions[row : row + 1])[0].astype(np.float64)


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


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_rows_do_not_depend_on_their_batch(seed: int) -> None:
    scene = Scene(seed)
    together = scene.sampler.sample_draft(scene.logits, scene.rows, 4)
    assert together.candidates is not None
    for row in range(together.tokens.size):
        alone = scene.sampler.sample_draft(scene.logits[row : row + 1], scene.single(row), 4)
        assert alone.candidates is not None
        assert alone.margins[0] == together.margins[row] and alone.tokens[0] == together.tokens[row]
        assert np.array_equal(alone.candidates[0], together.candidates[row])


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 6))
def test_candidate_margins_follow_the_reference(seed: int, num_candidates: int) -> None:
    """Scores are raw logits: the noise is weighed with the temperature, and nothing else is applied."""
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


def test_a_lead_over_the_drafts_own_candidates_is_its_margin() -> None:
    sampler = NumpySampler(64, 3)
    for slot, temperature in enumerate((0.0, 0.7, 1.6)):
        sampler.add(slot, Sampling(temperature=temperature, seed=slot), np.array([1]), 1, ())
    rng = np.random.default_rng(4)
    rows = one_row_each(rng.integers(0, 3, 40), rng.integers(1, 90, 40))
    logits = rng.normal(0, 2, (40, 64)).astype(np.float32)
    drawn = sampler.sample_draft(logits, rows, 4)
    assert drawn.candidates is not None
    scores = np.take_along_axis(logits, drawn.candidates, axis=1)
    leads = sampler.candidate_margins(scores, drawn.candidates, rows, with_noise=True)
    np.testing.assert_allclose(leads, drawn.margins, atol=1e-4)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7), Sampling(temperature=0.7, top_k=2)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("num_candidates", [0, 3])
def test_unusable_logits_are_an_error_and_stay_as_they_were(
    sampling: Sampling, value: float, num_candidates: int
) -> None:
    sampler = single_slot(sampling)
    logits = np.full((2, 4), value, np.float32)
    logits[0] = 1.0, 2.0, 3.0, 4.0
    before = logits.tobytes()
    with pytest.raises(FaserError, match="row 1"):
        sampler.sample_draft(logits, one_row_each(np.array([1, 1])), num_candidates)
    assert logits.tobytes() == before


def test_a_token_without_rivals() -> None:
    """Distinct candidates even where all but one token are forbidden, and a margin that is a number."""
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


@pytest.mark.parametrize("num_candidates", [-1, 5])
def test_numbers_of_candidates_out_of_range_are_refused(num_candidates: int) -> None:
    with pytest.raises(ValueError, match=rf"num_candidates = {num_candidates}: must be in \[0, 4\]"):
        single_slot(Sampling()).sample_draft(np.zeros((1, 4), np.float32), one_row_each(np.array([1])), num_candidates)


def test_drafting_and_scoring_at_the_same_time_change_nothing() -> None:
    """As in an overlapped step: one lane draws while the other asks for leads."""
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


@pytest.mark.parametrize("num_candidates", [0, 1, 2, 4])
def test_logits_of_plain_greedy_rows_stay_as_they_were(num_candidates: int) -> None:
    """The only rows whose scores are the caller's own array."""
    sampler = NumpySampler(50, 2)
    sampler.add(0, Sampling(), np.array([1]), 1, ())
    logits = np.random.default_rng(5).normal(0, 3, (9, 50)).astype(np.float32)
    before = logits.copy()
    drawn = sampler.sample_draft(logits, one_row_each(np.zeros(9, np.int64)), num_candidates)
    assert np.array_equal(logits, before)
    assert np.array_equal(drawn.margins, -np.diff(np.sort(before)[:, -1:-3:-1])[:, 0])
