"""The law of what leaves the engine: a joint chi-square over the first tokens, against exact probabilities.

Requests run through the real scheduler, pipeline, sampler and acceptance on a tiny random model. The
same test must fail for planted biases, or it would prove nothing.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.stats import chisquare

from faser_backend.core.request import SamplingParams
from faser_backend.pipeline import verify
from tests.fakes import HashRunner
from tests.harness import BLOCK, fake_engine, request

VOCAB, LENGTH, COUNT = 5, 3, 4000
PROMPT = [1, 3, 2]


def exact_law(temperature: float) -> np.ndarray:
    """[V ** LENGTH] probabilities of the first LENGTH tokens."""
    model = HashRunner(8, BLOCK, VOCAB)
    law = []
    for tokens in itertools.product(range(VOCAB), repeat=LENGTH):
        probability = 1.0
        for position in range(LENGTH):
            logits = model.logits_after(np.array(PROMPT + list(tokens[:position]))).astype(np.float64) / temperature
            weights = np.exp(logits - logits.max())
            probability *= weights[tokens[position]] / weights.sum()
        law.append(probability)
    return np.array(law)


def observed(policy: str, temperature: float, *, uses_rejection: bool) -> np.ndarray:
    """[V ** LENGTH] counts over COUNT requests with different seeds, decoded in batches of 8."""
    engine, _ = fake_engine(policy, uses_rejection=uses_rejection, vocab_size=VOCAB, draft_noise=4.0)
    tokens: dict[str, list[int]] = {}
    pending = [
        request(str(seed), PROMPT, LENGTH, sampling=SamplingParams(temperature=temperature, seed=seed))
        for seed in range(COUNT)
    ]
    while pending or engine.has_work:
        while pending and engine.num_waiting < 8:
            engine.submit(pending.pop())
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    index = [int(np.ravel_multi_index(drawn, (VOCAB,) * LENGTH)) for drawn in tokens.values()]
    return np.bincount(index, minlength=VOCAB**LENGTH)


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Chi-square; cells that expect fewer than 5 are pooled."""
    expected = law * counts.sum()
    rare = expected < 5
    pooled_counts = np.append(counts[~rare], counts[rare].sum())
    pooled_expected = np.append(expected[~rare], expected[rare].sum())
    return float(chisquare(pooled_counts, pooled_expected).pvalue)


@pytest.mark.parametrize(("policy", "uses_rejection"), [("none", False), ("fixed:2", False), ("fixed:2", True)])
def test_joint_law_is_the_targets(policy: str, uses_rejection: bool):
    temperature = 4.0
    assert p_value(observed(policy, temperature, uses_rejection=uses_rejection), exact_law(temperature)) > 1e-3


def _accepts_too_often(frontier, target_probs, cu_rows, accept_uniforms, sample_uniforms, *, num_kept):
    return _REAL(frontier, target_probs, cu_rows, accept_uniforms * 0.5, sample_uniforms, num_kept=num_kept)


def _shares_noise_between_rounds(frontier, target_probs, cu_rows, accept_uniforms, sample_uniforms, *, num_kept):
    return _REAL(frontier, target_probs, cu_rows, accept_uniforms, accept_uniforms, num_kept=num_kept)


_REAL = verify.accept_by_rejection


@pytest.mark.parametrize("biased", [_accepts_too_often, _shares_noise_between_rounds])
def test_planted_biases_fail_the_same_test(monkeypatch: pytest.MonkeyPatch, biased):
    monkeypatch.setattr(verify, "accept_by_rejection", biased)
    assert p_value(observed("fixed:2", 4.0, uses_rejection=True), exact_law(4.0)) < 1e-6
