"""NumpySampler against a slow reference that processes one row at a time in plain Python."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_backend.core.batch import SamplingRows
from faser_backend.core.request import Sampling
from faser_backend.cpu.noise import GumbelNoise
from faser_backend.cpu.sampler import NumpySampler

VOCAB = 37  # odd, so that rows start at every alignment
NEG_INF = -math.inf


def allowed_logits(
    logits: np.ndarray, sampling: Sampling, prefix: list[int], num_prompt: int, end_ids: tuple[int, ...]
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


def filtered(row: list[float], sampling: Sampling) -> list[float]:
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


def random_sampling(rng: np.random.Generator) -> Sampling:
    """Every feature is on in about a third of the requests; a fifth decode greedily."""

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
