"""The distribution of what leaves the engine: a joint chi-square over the first tokens, against exact probabilities.

The same test must fail for planted biases, or it would prove nothing. Pruned and trimmed chains, and other modes
than the serial one: test_pruning.py.
"""

from __future__ import annotations

import pytest

from faser_backend.pipeline import verify
from tests.support.distribution import exact_distribution, observed, p_value
from tests.support.harness import fake_engine

VOCAB, LENGTH, COUNT = 5, 3, 4000


def p_value_of(policy: str, *, uses_rejection: bool) -> float:
    engine, _ = fake_engine(policy, uses_rejection=uses_rejection, vocab_size=VOCAB, draft_noise=4.0)
    return p_value(observed(engine, VOCAB, LENGTH, COUNT), exact_distribution(VOCAB, LENGTH))


@pytest.mark.parametrize(("policy", "uses_rejection"), [("none", False), ("fixed:2", False), ("fixed:2", True)])
def test_joint_distribution_is_the_targets(policy: str, uses_rejection: bool):
    assert p_value_of(policy, uses_rejection=uses_rejection) > 1e-3


def _accepts_too_often(frontier, target_probs, cu_rows, accept_uniforms, sample_uniforms, *, num_kept):
    return _REAL(frontier, target_probs, cu_rows, accept_uniforms * 0.5, sample_uniforms, num_kept=num_kept)


def _shares_noise_between_rounds(frontier, target_probs, cu_rows, accept_uniforms, sample_uniforms, *, num_kept):
    return _REAL(frontier, target_probs, cu_rows, accept_uniforms, accept_uniforms, num_kept=num_kept)


_REAL = verify.accept_by_rejection


@pytest.mark.parametrize("biased", [_accepts_too_often, _shares_noise_between_rounds])
def test_planted_biases_fail_the_same_test(monkeypatch: pytest.MonkeyPatch, biased):
    monkeypatch.setattr(verify, "accept_by_rejection", biased)
    assert p_value_of("fixed:2", uses_rejection=True) < 1e-6
