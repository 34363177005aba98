"""The distribution of what leaves an engine: joint counts of the first tokens against exact probabilities.

Requests run through the real scheduler, pipeline, sampler and acceptance on a tiny random model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from scipy.stats import chisquare

from faser_backend.core.request import Sampling
from faser_backend.pipeline.engine import Engine
from tests.support.fakes import HashRunner
from tests.support.harness import BLOCK, request

PROMPT = [1, 3, 2]
TEMPERATURE = 4.0  # flattens the fakes' logits to a standard deviation of about 1


@lru_cache
def exact_distribution(vocab_size: int, length: int) -> np.ndarray:
    """[V ** length] probabilities of the first `length` tokens."""
    model = HashRunner(8, BLOCK, vocab_size)
    distribution = []
    for tokens in itertools.product(range(vocab_size), repeat=length):
        probability = 1.0
        for position in range(length):
            logits = model.logits_after(np.array(PROMPT + list(tokens[:position]))).astype(np.float64) / TEMPERATURE
            weights = np.exp(logits - logits.max())
            probability *= weights[tokens[position]] / weights.sum()
        distribution.append(probability)
    return np.array(distribution)


def observed(
    engine: Engine,
    vocab_size: int,
    length: int,
    count: int,
    *,
    num_at_once: int = 8,
    draft_of: Callable[[int], tuple[int, ...]] = lambda _: (),
) -> np.ndarray:
    """[V ** length] counts over `count` requests with different seeds, decoded in batches of num_at_once.

    draft_of: what the client of the request with this seed guesses.
    """
    tokens: dict[str, list[int]] = {}
    pending = [
        request(
            str(seed),
            PROMPT,
            length,
            sampling=Sampling(temperature=TEMPERATURE, seed=seed),
            draft_ids=draft_of(seed),
        )
        for seed in range(count)
    ]
    while pending or engine.has_work:
        while pending and engine.num_waiting < num_at_once:
            engine.submit(pending.pop())
        for output in engine.step():
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    index = [int(np.ravel_multi_index(drawn, (vocab_size,) * length)) for drawn in tokens.values()]
    return np.bincount(index, minlength=vocab_size**length)


def p_value(counts: np.ndarray, distribution: np.ndarray) -> float:
    """Chi-square; cells that expect fewer than 5 are pooled."""
    expected = distribution * counts.sum()
    rare = expected < 5
    pooled_counts = np.append(counts[~rare], counts[rare].sum())
    pooled_expected = np.append(expected[~rare], expected[rare].sum())
    return float(chisquare(pooled_counts, pooled_expected).pvalue)
